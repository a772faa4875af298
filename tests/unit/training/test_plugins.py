"""The package of docs/extending.md, a generator and one more ID scheme: installed, trained and searched."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from genius_search import registry
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.nn.ids import IdScheme
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.training.fit import fit

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def blocks(language):
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


MORE = """
from genius_search.nn.generator import Generator
from genius_search.search.decoder import T5Decoder


class SharpGenerator(Generator):
    def logits(self, hidden, rows):
        return 2 * super().logits(hidden, rows)

    def decoding(self):
        decoder = T5Decoder(self)
        plain = decoder.logits
        decoder.logits = lambda hidden, level: 2 * plain(hidden, level)
        return decoder


class SignIdsWithVectors(SignIds):
    def tables(self):
        tables = torch.zeros(6, 3, LetterEncoder.dim)
        for level in range(6):
            tables[level, :2, level] = torch.tensor([-0.3, 0.3])
        return list(tables)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Install the package of docs/extending.md and two more parts; return its module."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "my_parts.py").write_text(blocks("python") + MORE)
    info = folder / "my_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1\n")
    groups = tomllib.loads(blocks("toml"))["project"]["entry-points"]
    groups["genius_search.id_schemes"]["sign-vectors"] = "my_parts:SignIdsWithVectors"
    groups["genius_search.generators"] = {"sharp": "my_parts:SharpGenerator"}
    lines = [
        line for group, named in groups.items() for line in (f"[{group}]", *map(" = ".join, named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("my_parts")
    del sys.modules["my_parts"]


def settings(ids):
    tiny = preset("tiny")
    quick = replace(tiny.quantizer.training, max_steps=3, batch_size=16)
    return replace(
        tiny,
        ids=ids,
        quantizer=replace(tiny.quantizer, kind="greedy", encoding_beam=4, training=quick),
        generator=replace(tiny.generator, kind="sharp", guide="geometry", training=quick),
    )


@pytest.mark.parametrize("ids", ["signs", "sign-vectors", "residual"])
def test_parts_of_another_package_are_trained_indexed_and_searched(parts, trained, tmp_path, ids):
    data = MBeir(trained.data)
    fitted = fit(data, "letters:x", tmp_path / "model", settings(ids), progress=Silent())
    model = Genius.open(tmp_path / "model")
    used = [type(part) for part in (model.encoder, model.quantizer, model.generator)]
    assert used == [parts.LetterEncoder, parts.GreedyQuantizer, parts.SharpGenerator]
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


def test_a_scheme_that_changed_or_is_not_installed_is_refused(parts, trained, tmp_path, monkeypatch):
    fit(MBeir(trained.data), "letters:x", tmp_path / "model", settings("signs"), progress=Silent())
    monkeypatch.setattr(parts.SignIds, "sizes", (3,) * 5)
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
