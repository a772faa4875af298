"""Rivals from end to end: fitted, indexed, searched, measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from genius_search.data.mbeir import MBeir
from genius_search.model import Genius
from genius_search.progress import Silent
from research.baselines.generative import (
    BaselineConfig,
    fit_baseline,
    generator_config,
    main,
)

KINDS = ("grace-numeric", "grace-semantic", "genius", "grace-structured", "irgen")


class Place(NamedTuple):
    """Data, model, and a folder for the features of the pools."""

    data: MBeir
    model: Genius
    evaluation: Path

    def config(self, kind):
        return BaselineConfig(kind=kind, epochs=0.1, batch_size=32)


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    return Place(MBeir(trained.data), Genius.open(trained.model), folder / "evaluation")


@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_items_of_the_pool_each_once_best_first(place, kind):
    rival = fit_baseline(
        place.data, place.model, place.config(kind), evaluation=place.evaluation, progress=Silent()
    )
    index = rival.index(rival.numbers[-50:])
    assert index.num_items == 50
    for found in rival.search(index, torch.randn(3, place.model.dim), beam=10, k=7):
        assert len(found.items) == len(set(found.items.tolist())) == 7
        assert (np.diff(found.scores) <= 0).all()
        assert found.touched >= 7


@pytest.mark.parametrize("kind", ["grace-string", "nci"])
def test_the_program_trains_and_measures(place, tmp_path, capsys, kind):
    words = [
        str(place.data.root),
        "--model",
        str(place.model.folder),
        "--kind",
        kind,
        "--epochs",
        "0.1",
    ]
    words += ["--out", str(tmp_path), "--evaluation", str(place.evaluation), "--json"]
    assert main([*words, "--options.pools", "global", "--options.max-queries", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in found["rows"]} == {kind}
    assert len(found["rows"]) == 8


def test_the_decoder_is_the_models_but_for_guide_dropout_and_the_kinds_head(place):
    own, rival = place.model.generator.config, generator_config(place.model, place.config("irgen"))
    changed = {
        "guide": own.guide,
        "dropout": own.dropout,
        "softmax": own.softmax,
        "training": own.training,
    }
    assert dataclasses.replace(rival, **changed) == own
    assert generator_config(place.model, BaselineConfig(kind="nci")).head == "per-level"
