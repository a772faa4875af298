"""CLIP through PyTorch's exporter. Tracing one tower takes ten seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.encoders.base import ImageInput, ItemKey, TextInput
from genius_search.encoders.pretrained import ClipEncoder
from genius_search.errors import MissingExtra, UsageError
from genius_search.lab.onnx import export as traced
from genius_search.lab.onnx.export import copy_reader, write_towers
from genius_search.lab.onnx.run import KIND, READER, OnnxQueryEncoder
from genius_search.writing import ArtifactWriter

KEY = ItemKey("query", "1:1")


@pytest.fixture(scope="module")
def clip_encoder(clip_folder) -> ClipEncoder:
    return ClipEncoder(clip_folder)


@pytest.mark.slow
def test_a_traced_clip_gives_the_features_of_the_traced(clip_encoder, tmp_path):
    writer = ArtifactWriter(tmp_path / "model.onnx", kind=KIND, config={}, inputs={})
    (writer.path / "fp32").mkdir()
    write_towers(clip_encoder, writer.path / "fp32")
    copy_reader(clip_encoder, writer.path / READER)
    facts = {"decoder": {"dim": 12}, "encoder": {"kind": "clip", "why_not": None}}
    writer.finish(facts=facts)
    encoder = OnnxQueryEncoder(tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    images = [
        ImageInput(Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)), KEY)
        for size in [(20, 30, 3), (41, 17, 3), (16, 16, 3)]
    ]
    texts = [TextInput(text, KEY) for text in ("a red anchor", "anchor", "red " * 30, "")]
    for several in (images, images[:1]):
        torch.testing.assert_close(
            encoder.image_features(several), clip_encoder.image_features(several), atol=1e-4, rtol=1e-4
        )
    for some in (texts, texts[1:2]):
        torch.testing.assert_close(
            encoder.text_features(some), clip_encoder.text_features(some), atol=1e-4, rtol=1e-4
        )


def test_a_reader_is_everything_but_the_weights(clip_encoder, tmp_path):
    copy_reader(clip_encoder, tmp_path / "reader")
    names = {path.name for path in (tmp_path / "reader").iterdir()}
    assert {"config.json", "preprocessor_config.json", "tokenizer.json"} <= names
    assert not any("safetensors" in name for name in names)


def test_towers_too_large_for_one_file_are_refused(clip_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(traced, "MAX_BYTES", 100)
    with pytest.raises(UsageError, match="image tower"):
        write_towers(clip_encoder, tmp_path)


def test_without_onnxscript_the_extra_is_named(clip_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"genius-search\[onnx\]"):
        write_towers(clip_encoder, tmp_path)
