from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.config import SearchConfig
from genius_search.data.features import FeatureBatch, Features
from genius_search.encoders.base import Encoder, ImageInput, ItemKey, TextInput
from genius_search.errors import MissingExtra, UsageError
from genius_search.lab.onnx.export import export_onnx
from genius_search.lab.onnx.run import (
    FUSION,
    OnnxDecoder,
    OnnxQueryEncoder,
    Session,
    compare_decoders,
    random_trial,
    real_trial,
)
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.search.decoder import T5Decoder

KEY = ItemKey("query", "1:1")


class Exported(NamedTuple):
    model: Genius
    folder: Path


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Exported:
    model = Genius.open(trained.model)
    folder = tmp_path_factory.mktemp("export") / "model.onnx"
    export_onnx(model, folder, int8=True, progress=Silent())
    return Exported(model, folder)


@pytest.fixture(scope="module")
def texts() -> list[TextInput]:
    words = ["a red anchor", "find me a picture of the green kite on a blue ground", "kite", ""]
    return [TextInput(text, KEY) for text in words]


@pytest.fixture(scope="module")
def images() -> list[ImageInput]:
    random = np.random.default_rng(0)
    sizes = [(20, 30, 3), (41, 17, 3), (64, 64, 3)]
    return [ImageInput(Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)), KEY) for size in sizes]


def test_the_exported_encoder_is_an_encoder_with_the_features_of_the_model_s_own(exported, texts, images):
    own = exported.model.encoder
    encoder = OnnxQueryEncoder(str(exported.folder))
    assert isinstance(encoder, Encoder)
    assert (encoder.dim, encoder.needs_pixels) == (own.dim, True)
    for batch in (images, images[:1]):
        torch.testing.assert_close(
            encoder.image_features(batch), own.image_features(batch), atol=1e-4, rtol=1e-4
        )
    for batch in (texts, texts[:1]):
        np.testing.assert_allclose(
            encoder.text_features(batch), own.text_features(batch), atol=1e-4, rtol=1e-4
        )
    assert encoder.image_features([]).shape == encoder.text_features([]).shape == (0, own.dim)


def test_8_bit_features_lie_close_and_have_a_fingerprint_of_their_own(exported, texts):
    exact, rough = OnnxQueryEncoder(exported.folder), OnnxQueryEncoder(exported.folder, precision="int8")
    assert exact.fingerprint != rough.fingerprint
    cosines = torch.cosine_similarity(exact.text_features(texts), rough.text_features(texts))
    assert cosines.min() > 0.99
    assert (exact.text_features(texts) != rough.text_features(texts)).any()


@pytest.mark.parametrize("given", ["both", "image", "text", "nothing"])
def test_the_exported_fusion_embeds_like_the_model(exported, given):
    model = exported.model
    torch.manual_seed(0)
    image, text = torch.randn(4, model.dim), torch.randn(4, model.dim)
    has_image, has_text = given in ("both", "image"), given in ("both", "text")
    batch = FeatureBatch(
        image * has_image, text * has_text, torch.full((4,), has_image), torch.full((4,), has_text)
    )
    fusion = Session(exported.folder / "fp32" / FUSION)
    found = fusion(image=batch.image, text=batch.text)
    torch.testing.assert_close(found, model.embed(batch), atol=1e-4, rtol=1e-4)


def test_decoders_are_measured_by_what_pytorch_finds(exported, trained):
    model = exported.model
    features = trained.model / "features"
    trial = real_trial(
        model, Features.open(features / "queries"), Features.open(features / "candidates"), num_queries=20
    )
    decoders = {"PyTorch": T5Decoder(model.generator)}
    for precision in ("fp32", "int8"):
        decoders[precision] = OnnxDecoder.open(exported.folder, precision=precision)
    standard, fp32, int8 = compare_decoders(decoders, *trial, SearchConfig(beam=10))
    assert standard[1:4] == (1.0, 1.0, 1.0)
    assert fp32.overlap_10 > 0.99
    assert 0.5 < int8.overlap_10 <= 1
    assert min(row.cpu_ms for row in (standard, fp32, int8)) > 0


def test_a_decoder_that_finds_other_ids_is_found_out(exported):
    model = exported.model
    other = Genius.open(model.folder).generator
    with torch.no_grad():
        other.embedding.weight[:] = other.embedding.weight.flip(0)
    trial = random_trial(model.generator.sizes, model.dim, num_queries=8)
    decoders = {"right": T5Decoder(model.generator), "wrong": T5Decoder(other)}
    right, wrong = compare_decoders(decoders, *trial, SearchConfig(beam=10))
    assert right.overlap_50 == 1
    assert max(wrong.top1, wrong.overlap_10, wrong.overlap_50) < 0.5


def test_no_queries_are_refused(exported):
    model = exported.model
    trial = random_trial(model.generator.sizes, model.dim, num_queries=0)
    with pytest.raises(UsageError, match="no queries"):
        compare_decoders({"PyTorch": T5Decoder(model.generator)}, *trial, SearchConfig())


def test_a_finished_export_is_not_written_again(exported):
    before = (exported.folder / "fp32" / "step.onnx").stat().st_mtime_ns
    export_onnx(exported.model, exported.folder, int8=True, progress=Silent())
    assert (exported.folder / "fp32" / "step.onnx").stat().st_mtime_ns == before


def test_what_a_killed_export_left_does_not_get_in_the_way(exported, tmp_path):
    (tmp_path / ".again.partial" / "fp32").mkdir(parents=True)
    (tmp_path / ".again.partial" / "fp32" / "step.onnx").write_bytes(b"half")
    (tmp_path / ".again.partial" / "reader").mkdir()
    manifest = export_onnx(exported.model, tmp_path / "again", progress=Silent())
    assert sorted(path.name for path in manifest.folder.iterdir()) == ["fp32", "manifest.json", "reader"]
    OnnxDecoder.open(str(manifest.folder))


class Stored:
    """An encoder that looks features up."""

    spec = "precomputed:features"
    dim = 48
    fingerprint = "stored"
    needs_pixels = False

    def image_features(self, images):
        raise NotImplementedError

    def text_features(self, texts):
        raise NotImplementedError


def test_an_encoder_without_a_network_is_left_out_with_the_reason(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(exported.model, "encoder", Stored())
    export_onnx(exported.model, tmp_path / "model.onnx", progress=Silent())
    OnnxDecoder.open(tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="looks features up"):
        OnnxQueryEncoder(tmp_path / "model.onnx")


def test_without_the_libraries_the_extra_is_named(exported, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"onnx and onnxruntime.*genius-search\[onnx\]"):
        export_onnx(exported.model, tmp_path / "model.onnx", progress=Silent())
