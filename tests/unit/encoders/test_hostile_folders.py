"""Folders of others: whatever their settings say, opening them neither runs code nor fills the memory."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch

from genius_search.config import FusionConfig, GeneratorConfig, QuantizerConfig, SmallEncoderConfig, to_json
from genius_search.encoders import small
from genius_search.encoders.base import ItemKey, TextInput, load_encoder
from genius_search.encoders.texts import CHARACTERS_PER_TOKEN, check_tokenizer, cut_texts
from genius_search.errors import ArtifactMismatch
from genius_search.nn.generator import Generator, load_generator, write_generator
from genius_search.nn.quantizer import Quantizer, load_quantizer, write_quantizer
from genius_search.writing import ArtifactWriter

KERNEL = {"attn_implementation": "somebody/kernel"}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PIECES = [{"Sequence": {"id": "A", "type_id": 0}}]


def edit(file: Path, **changes) -> None:
    """Change entries of a JSON file; a name with dots leads to an inner one."""
    body = json.loads(file.read_text())
    for name, value in changes.items():
        *above, last = name.split("__")
        inner = body
        for key in above:
            inner = inner[key]
        inner[last] = value
    file.write_text(json.dumps(body))


@pytest.fixture
def clip(clip_folder, tmp_path) -> Path:
    return Path(shutil.copytree(clip_folder, tmp_path / "clip"))


@pytest.mark.parametrize(
    ("name", "changes", "fact"),
    [
        ("config.json", {"text_config__hidden_size": 60_000}, "describe a network"),
        ("config.json", {"text_config__vocab_size": 10**9}, "describe a network"),
        ("config.json", {"vision_config__image_size": 10**6}, "describe a network"),
        ("config.json", {"text_config__num_hidden_layers": 10**6}, "num_hidden_layers 1000000"),
        ("config.json", {"text_config__hidden_size": -4}, "does not hold"),
        ("config.json", {"vision_config": KERNEL}, "attn_implementation"),
        ("config.json", KERNEL, "attn_implementation"),
        ("preprocessor_config.json", {"crop_size__height": 10**6}, "height 1000000"),
        ("preprocessor_config.json", {"size__shortest_edge": 10**6}, "shortest_edge 1000000"),
        ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 60}}, "60 rules"),
    ],
)
def test_a_clip_folder_that_would_fill_the_memory_or_run_code_is_refused(clip, name, changes, fact):
    edit(clip / name, **changes)
    with pytest.raises(ArtifactMismatch, match=fact):
        load_encoder(f"clip:{clip}")


def test_a_folder_that_points_to_another_model_is_refused(clip):
    (clip / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(ArtifactMismatch, match="adapter_config"):
        load_encoder(f"clip:{clip}")


@pytest.mark.parametrize(
    "modules",
    [
        3,
        [3],
        [{}],
        {"type": "x"},
        [{"type": "a.Pooling", "path": "../other"}],
        [{"type": "b", "path": "/etc"}],
    ],
    ids=str,
)
def test_modules_of_another_shape_or_place_are_refused(sentence_folder, tmp_path, modules):
    folder = Path(shutil.copytree(sentence_folder, tmp_path / "text"))
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactMismatch, match=r"modules\.json"):
        load_encoder(f"text:{folder}")


def test_weights_outside_the_folder_are_refused(clip):
    (clip / "model.safetensors").rename(clip.parent / "model.safetensors")
    (clip / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ArtifactMismatch, match="outside its folder"):
        load_encoder(f"clip:{clip}")


@pytest.mark.parametrize(
    ("part", "value", "is_refused"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, False),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, False),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, False),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaa"}, True),
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 999}, True),
        ("normalizer", {"type": "Replace", "pattern": {}, "content": 3}, True),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": (b"ab\0", b"x" * 33 + b"\0")}, False),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": (b"ab\0", b"x" * 999 + b"\0")}, True),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 2}, False),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 60}, True),
        ("post_processor", {"type": "TemplateProcessing", "single": PIECES, "pair": PIECES * 2}, False),
        ("post_processor", {"type": "TemplateProcessing", "single": PIECES * 9, "pair": PIECES}, True),
    ],
)
def test_rules_that_lengthen_texts_are_counted_before_a_library_reads_them(tmp_path, part, value, is_refused):
    if isinstance(charsmap := value.get("precompiled_charsmap"), tuple):
        trie, written = charsmap
        data = len(trie).to_bytes(4, "little") + trie + written
        value = {**value, "precompiled_charsmap": base64.b64encode(data).decode()}
    if value["type"] == "TemplateProcessing":
        value = {**value, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({part: value}))
    if is_refused:
        with pytest.raises(ArtifactMismatch, match=r"tokenizer\.json"):
            check_tokenizer(tmp_path / "tokenizer.json")
    else:
        check_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"max_tokens": 2 * 10**9}, "max_tokens = 2000000000"),
        ({"max_tokens": 1e9}, "max_tokens"),
        ({"dim": 10**9}, "dim = "),
        ({"text_width": 10**6, "image_width": 10**6}, "does not hold"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_small_encoder_that_would_fill_the_memory_is_refused(tmp_path, changes, fact):
    config = SmallEncoderConfig(dim=4, text_width=4, image_width=4, pair_buckets=4, vocabulary=257)
    small.create_small(config, ["a red kite"], seed=0).save(tmp_path)
    assert load_encoder(f"small:{tmp_path}").dim == 4
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ArtifactMismatch, match=fact):
        load_encoder(f"small:{tmp_path}")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"facts__dim": 10**9}, "dim 1000000000"),
        ({"facts__dim": "4"}, "dim 4"),
        ({"facts__dim": 60_000}, "describe a network"),
        ({"config__levels": 10**6}, "levels"),
        ({"config__codebook_size": 10**7}, "codebook_size"),
        ({"config__fusion__hidden": 10**6}, "describe a network"),
        ({"config__codebook_size": 5}, "does not hold"),
    ],
)
def test_a_quantizer_that_would_fill_the_memory_is_refused(tmp_path, changes, fact):
    config = QuantizerConfig(levels=2, codebook_size=4, fusion=FusionConfig(hidden=4))
    writer = ArtifactWriter(tmp_path / "q", kind="quantizer", config=to_json(config), inputs={})
    write_quantizer(writer, Quantizer(4, config), None)
    assert load_quantizer(tmp_path / "q").quantizer.sizes == (3, 4, 4)
    edit(tmp_path / "q" / "manifest.json", **changes)
    with pytest.raises(ArtifactMismatch, match=fact):
        load_quantizer(tmp_path / "q")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"facts__sizes": [3, 10**7]}, "sizes 10000000"),
        ({"facts__sizes": [1] * 10**6}, "no sizes"),
        ({"facts__sizes": 3}, "no sizes"),
        ({"config__layers": 10**6}, "layers"),
        ({"config__width": 10**6}, "describe a network"),
        ({"config__prefixes": 10**9}, "describe a network|does not hold"),
        ({"facts__sizes": [3, 5]}, "does not hold"),
    ],
)
def test_a_generator_that_would_fill_the_memory_is_refused(tmp_path, changes, fact):
    config = GeneratorConfig(layers=1, width=4, feedforward=4, heads=1, head_width=4, prefixes=1)
    writer = ArtifactWriter(tmp_path / "g", kind="generator", config=to_json(config), inputs={})
    write_generator(writer, Generator(4, (3, 4), config), dim=4)
    assert load_generator(tmp_path / "g").generator.sizes == (3, 4)
    edit(tmp_path / "g" / "manifest.json", **changes)
    with pytest.raises(ArtifactMismatch, match=fact):
        load_generator(tmp_path / "g")


def test_weights_that_are_none_are_refused(tmp_path):
    config = QuantizerConfig(levels=1, codebook_size=4, fusion=FusionConfig(hidden=4))
    writer = ArtifactWriter(tmp_path / "q", kind="quantizer", config=to_json(config), inputs={})
    write_quantizer(writer, Quantizer(4, config), None)
    weights = tmp_path / "q" / "quantizer.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    with pytest.raises(ArtifactMismatch, match=r"quantizer\.safetensors"):
        load_quantizer(tmp_path / "q")


def test_a_long_text_is_cut_before_it_is_tokenized():
    assert cut_texts(["a kite"], max_tokens=2) == ["a kite"]
    assert cut_texts([" " * 10_000 + "kite" * 10_000], max_tokens=2) == [("kite" * 100)[: 2 * 64]]
    config = SmallEncoderConfig(dim=4, vocabulary=257, max_tokens=3)
    encoder = small.create_small(config, ["a red kite"], seed=0)
    far = "a" + " " * 3 * CHARACTERS_PER_TOKEN + "kite"
    assert torch.equal(*encoder.prepare_texts([far, "a"]))


@pytest.mark.parametrize("kind", ["clip", "text"])
def test_a_pretrained_encoder_reads_the_beginning_of_a_long_text(kind, request, monkeypatch):
    folder = request.getfixturevalue("clip_folder" if kind == "clip" else "sentence_folder")
    encoder = load_encoder(f"{kind}:{folder}")
    reader, name = (encoder, "_tokenizer") if kind == "clip" else (encoder._model, "encode_query")
    read, own = [], getattr(reader, name)

    def spy(texts, **settings):
        read.extend(map(len, texts))
        return own(texts, **settings)

    monkeypatch.setattr(reader, name, spy)
    key = ItemKey("query", "1")
    long, short = "a red kite " * 1_000, "a red kite " * 100
    found = encoder.text_features([TextInput(long, key), TextInput(short, key)])
    assert max(read) < len(long)
    assert torch.equal(found[0], found[1])
