"""Which files of the hub each suggested encoder takes, by recorded listings of the repositories.

`listings.json` says where the listings come from; nothing is downloaded.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest

from genius_search.cli.encoders import PICTURE_ENCODERS
from genius_search.encoders.onnx import GRAPHS
from genius_search.encoders.open import hub_files

LISTINGS = json.loads(Path(__file__).with_name("listings.json").read_text())


@pytest.mark.parametrize("encoder", PICTURE_ENCODERS, ids=lambda encoder: encoder.spec)
def test_a_suggested_encoder_takes_one_pair_of_graphs_and_its_settings(encoder):
    scheme, _, name = encoder.spec.partition(":")
    sizes = LISTINGS[name]["files"]
    taken = {
        file for pattern in hub_files(scheme) for file in sizes if fnmatch.fnmatch(file, pattern)
    }
    suffix = "_quantized" if scheme == "onnx-quantized" else ""
    graphs = {f"onnx/{graph}{suffix}.onnx" for graph in GRAPHS}
    assert {file for file in taken if file.endswith(".onnx")} == graphs
    settings = {"config.json", "preprocessor_config.json", "tokenizer.json"}
    assert settings <= taken
    if all(sizes[graph] for graph in graphs):
        megabytes = sum(sizes[file] or 0 for file in taken) / 1e6
        assert megabytes == pytest.approx(encoder.megabytes, rel=0.03)


def test_suggested_encoders_differ_in_size_from_small_to_large():
    sizes = [encoder.megabytes for encoder in PICTURE_ENCODERS]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) < 160
