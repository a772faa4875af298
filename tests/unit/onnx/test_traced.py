"""CLIP through PyTorch's exporter. Tracing one tower takes ten seconds."""

# ruff: noqa: PLC0415  transformers is imported where it is needed

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from genius_search.artifact import ArtifactWriter
from genius_search.encoders.base import ImageInput, ItemKey, TextInput
from genius_search.encoders.pretrained import ClipEncoder
from genius_search.errors import MissingExtra, UsageError
from genius_search.onnx import export as traced
from genius_search.onnx.export import copy_reader, write_towers
from genius_search.onnx.run import KIND, READER, OnnxQueryEncoder

KEY = ItemKey("query", "1:1")


@pytest.fixture(scope="module")
def clip_encoder(tmp_path_factory) -> ClipEncoder:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    numbers = {"bos_token_id": 2, "eos_token_id": 6, "pad_token_id": 0, "vocab_size": 7}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**layers, **numbers, "max_position_embeddings": 12},
        vision_config={**layers, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size).save_pretrained(folder)
    words = ["<pad>", "<unk>", "<s>", "a", "red", "anchor", "</s>"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106  no password
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 6)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**special, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 12})
    )
    return ClipEncoder(str(folder))


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
