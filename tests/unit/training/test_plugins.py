"""An encoder, a quantizer, a generator and an ID scheme from another package, from training to search."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
import torch

from genius_search import registry
from genius_search.config import preset
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.nn.ids import IdScheme
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Silent
from genius_search.search.decoder import T5Decoder
from genius_search.training.fit import fit

DIM = 12


class LetterEncoder:
    """Counts letters in texts and measures mean colours of images."""

    needs_pixels = True
    dim = DIM

    def __init__(self, place, *, download, device):
        self.spec = f"letters:{place}"
        self.fingerprint = f"letters {place}"

    def image_features(self, images):
        colours = [np.asarray(item.image).mean(axis=(0, 1)) / 255 for item in images]
        return torch.tensor(np.pad(colours, ((0, 0), (0, DIM - 3))), dtype=torch.float32)

    def text_features(self, texts):
        return torch.tensor([[item.text.count(chr(97 + n)) / 9 for n in range(DIM)] for item in texts])


class RoundedQuantizer(Quantizer):
    """Chooses the codes of items greedily, whatever the settings say."""

    def _encode(self, embeddings, modalities):
        return self.quantize(embeddings, modalities).codes


class SharpGenerator(Generator):
    """Doubles the logits, and says so to the search."""

    def logits(self, hidden, rows):
        return 2 * super().logits(hidden, rows)

    def decoding(self):
        decoder = T5Decoder(self)
        plain = decoder.logits
        decoder.logits = lambda hidden, level: 2 * plain(hidden, level)
        return decoder


class SignIds:
    """IDs that spell the signs of the first coordinates of an embedding, over one alphabet: 0, 1 and the end."""

    LEVELS = 6
    sizes = (3,) * LEVELS
    shares_codes = True
    has_modality_level = False

    def __init__(self, threshold):
        self.threshold = threshold

    @classmethod
    def fit(cls, data):
        assert len(data.candidates.texts) == len(data.candidates.embeddings) == len(data.candidates.numbers)
        assert data.query_texts.keys() <= set(data.query_numbers.tolist())
        return cls(float(data.candidates.embeddings.median()))

    @classmethod
    def load(cls, folder, quantizer):
        return cls(json.loads((folder / "threshold.json").read_text()))

    def save(self, folder):
        (folder / "threshold.json").write_text(json.dumps(self.threshold))

    def assign(self, candidates):
        signs = (candidates.embeddings[:, : self.LEVELS] > self.threshold).short().numpy()
        short = candidates.codes[:, 0] == 1
        signs[short, -2:] = 2  # texts have shorter IDs, filled up with the end code
        return signs

    def tables(self):
        return None


class SignIdsWithVectors(SignIds):
    """The same with a vector for each code."""

    def tables(self):
        tables = torch.zeros(self.LEVELS, 3, DIM)
        for level in range(self.LEVELS):
            tables[level, :2, level] = torch.tensor([-0.3, 0.3])
        return list(tables)


@pytest.fixture
def plugged_in(monkeypatch):
    parts = {
        "encoders": {"letters": LetterEncoder},
        "quantizers": {"rounded": RoundedQuantizer},
        "generators": {"sharp": SharpGenerator},
        "id_schemes": {"signs": SignIds, "sign-vectors": SignIdsWithVectors},
    }
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{part.__name__}", f"genius_search.{group}")
        for group, named in parts.items()
        for name, part in named.items()
    )
    by_value = {f"{__name__}:{part.__name__}": part for named in parts.values() for part in named.values()}
    monkeypatch.setattr(registry, "entry_points", points.select)
    monkeypatch.setattr(EntryPoint, "load", lambda point: by_value[point.value])


def settings(ids):
    tiny = preset("tiny")
    quick = replace(tiny.quantizer.training, max_steps=3, batch_size=16)
    return replace(
        tiny,
        ids=ids,
        quantizer=replace(tiny.quantizer, kind="rounded", encoding_beam=4, training=quick),
        generator=replace(tiny.generator, kind="sharp", guide="geometry", training=quick),
    )


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("ids", ["signs", "sign-vectors", "residual"])
def test_parts_of_another_package_are_trained_indexed_and_searched(trained, tmp_path, ids):
    data = MBeir(trained.data)
    fitted = fit(data, "letters:x", tmp_path / "model", settings(ids), progress=Silent())
    model = Genius.open(tmp_path / "model")
    check_parts = [model.encoder, model.quantizer, model.generator]
    assert [type(part) for part in check_parts] == [LetterEncoder, RoundedQuantizer, SharpGenerator]
    assert model.fingerprint == fitted.fingerprint
    assert model.ids.name == ids
    assert isinstance(model.ids.scheme, IdScheme)
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    index, _ = Index.create(tmp_path / "index", model=tmp_path / "model", pool=pool)
    hits = index.search(text="a red bag", k=5)
    assert len(hits) == 5
    assert all(len(hit.codes) == len(model.sizes) for hit in hits)
    if ids == "signs":
        assert index.settings.rerank == "none"
        with pytest.raises(UsageError, match="'signs' have no code vectors"):
            index.search(text="a red bag", config=replace(index.settings, rerank="codes"))
    else:
        assert index.settings.rerank == "codes"
    again = fit(data, "letters:x", tmp_path / "model", settings(ids), progress=Silent())
    assert again.fingerprint == fitted.fingerprint
    saved = fitted.save_pretrained(tmp_path / "saved")
    assert Genius.open(saved).fingerprint == fitted.fingerprint


@pytest.mark.usefixtures("plugged_in")
def test_a_scheme_that_changed_or_is_not_installed_is_refused(trained, tmp_path, monkeypatch):
    fit(MBeir(trained.data), "letters:x", tmp_path / "model", settings("signs"), progress=Silent())
    monkeypatch.setattr(SignIds, "sizes", (3,) * 5)
    with pytest.raises(ArtifactMismatch, match="signs"):
        Genius.open(tmp_path / "model")
    monkeypatch.setattr(registry, "entry_points", lambda **_: [])
    with pytest.raises(UsageError, match="letters"):
        Genius.open(tmp_path / "model")


def test_an_unknown_scheme_is_refused_before_anything_is_written(trained, tmp_path):
    with pytest.raises(UsageError, match=r"'dsy'.*residual"):
        fit(
            MBeir(trained.data),
            "small",
            tmp_path / "model",
            replace(preset("tiny"), ids="dsy"),
            progress=Silent(),
        )
    assert not (tmp_path / "model").exists()
