"""Folders of others: whatever their settings say, opening them does not fill the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from genius_search.artifact import fingerprint_of, open_artifact
from genius_search.config import FusionConfig, SmallEncoderConfig, to_json
from genius_search.encoders import small
from genius_search.encoders.base import CHARACTERS_PER_TOKEN, cut_texts
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMismatch
from genius_search.nn.codebooks import StoredQuantizer
from genius_search.nn.generator import Generator, load_generator, write_generator
from genius_search.nn.packed import read_packed
from genius_search.nn.quantizer import Quantizer
from genius_search.recipe import GeneratorConfig, QuantizerConfig
from genius_search.training.codebooks import write_quantizer
from genius_search.writing import ArtifactWriter


def edit(file: Path, **changes) -> None:
    """Change entries of a JSON file; a name with dots leads to an inner one."""
    body = json.loads(file.read_text())
    for name, value in changes.items():
        *above, last = name.split("__")
        inner = body
        for key in above:
            inner = inner[key]
        inner[last] = value
    if body.pop("fingerprint", None) is not None:
        body["fingerprint"] = fingerprint_of(body)
    file.write_text(json.dumps(body))


def make_small(folder):
    config = SmallEncoderConfig(dim=4, text_width=4, image_width=4, pair_buckets=4, vocabulary=257)
    small.create_small(config, ["a red kite"], seed=0).save(folder)
    return folder / "config.json", lambda: load_encoder(f"small:{folder}")


def make_quantizer(folder):
    config = QuantizerConfig(levels=2, codebook_size=4, fusion=FusionConfig(hidden=4))
    writer = ArtifactWriter(folder / "q", kind="quantizer", config=to_json(config), inputs={})
    write_quantizer(writer, Quantizer(4, config).to_codebooks())
    return folder / "q" / "manifest.json", lambda: StoredQuantizer(folder / "q")


def make_generator(folder):
    config = GeneratorConfig(layers=1, width=4, feedforward=4, heads=1, head_width=4, prefixes=1)
    writer = ArtifactWriter(folder / "g", kind="generator", config=to_json(config), inputs={})
    write_generator(writer, Generator(4, (3, 4), config), dim=4)
    return folder / "g" / "manifest.json", lambda: load_generator(folder / "g")


def make_packed(folder):
    file, _ = make_generator(folder)
    return file, lambda: read_packed(open_artifact(folder / "g", kind="generator"))


GENERATOR = [
    ({"facts__sizes": [3, 200]}, "does not match"),
    ({"facts__sizes": 3}, "does not match"),
    ({"config__width": 10**6}, "does not match"),
    ({"facts__sizes": [3, 5]}, "does not match"),
]


@pytest.mark.parametrize(
    ("make", "changes", "fact"),
    [
        (make_small, {"max_tokens": 2 * 10**9}, "max_tokens = 2000000000"),
        (make_small, {"dim": 10**9}, "dim = "),
        (make_small, {"text_width": 10**6, "image_width": 10**6}, "does not match"),
        (make_small, {"unheard_of": 1}, "unheard_of"),
        (make_quantizer, {"facts__dim": 10**9}, "does not match"),
        (make_quantizer, {"facts__dim": 60_000}, "does not match"),
        (make_quantizer, {"config__codebook_size": 5}, "does not match"),
        *((make, *hostile) for make in (make_generator, make_packed) for hostile in GENERATOR),
    ],
)
def test_a_folder_that_would_fill_the_memory_is_refused(tmp_path, make, changes, fact):
    file, load = make(tmp_path)
    load()
    edit(file, **changes)
    with pytest.raises(ArtifactMismatch, match=fact):
        load()


def test_a_long_text_is_cut_before_it_is_tokenized():
    assert cut_texts(["a kite"], max_tokens=2) == ["a kite"]
    assert cut_texts([" " * 10_000 + "kite" * 10_000], max_tokens=2) == [("kite" * 100)[: 2 * 64]]
    config = SmallEncoderConfig(dim=4, vocabulary=257, max_tokens=3)
    encoder = small.create_small(config, ["a red kite"], seed=0)
    far = "a" + " " * 3 * CHARACTERS_PER_TOKEN + "kite"
    assert torch.equal(*encoder.prepare_texts([far, "a"]))
