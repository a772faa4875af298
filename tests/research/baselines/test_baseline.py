"""Rivals from end to end: fitted, indexed, searched, measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from research.baselines.generative import (
    BaselineConfig,
    evaluate_baseline,
    fit_baseline,
    generator_config,
    main,
    pool_items,
)
from research.runs import read_run
from research.settings import EvaluationConfig

SEEN = ("grace-numeric", "grace-semantic", "genius")
UNSEEN = ("grace-structured", "irgen")


class Place(NamedTuple):
    """Data, model, and a folder for the features of the pools."""

    data: MBeir
    model: Genius
    evaluation: Path

    def fit(self, kind, **settings):
        config = BaselineConfig(kind=kind, epochs=0.1, batch_size=32, **settings)
        return fit_baseline(self.data, self.model, config, evaluation=self.evaluation, progress=Silent())

    def items(self, kind):
        with_codes = kind == "genius"
        return pool_items(
            self.data, self.model, "test", self.evaluation, with_codes=with_codes, progress=Silent()
        )


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    return Place(MBeir(trained.data), Genius.open(trained.model), folder / "evaluation")


@pytest.fixture(scope="module")
def fitted(place):
    """Some kinds with indexing, others without."""
    return {kind: place.fit(kind, indexing="yes" if kind in SEEN else "no") for kind in (*SEEN, *UNSEEN)}


@pytest.mark.parametrize("kind", [*SEEN, *UNSEEN])
def test_search_finds_items_of_the_pool_each_once_best_first(place, fitted, kind):
    rival, items = fitted[kind], place.items(kind)
    index = rival.index(items)
    assert index.num_items == len(items.numbers)
    for found in rival.search(index, items.embeddings[:3], beam=10, k=7):
        assert len(found.items) == len(set(found.items.tolist())) == 7
        assert (np.diff(found.scores) <= 0).all()
        assert found.touched >= 7


def test_without_indexing_the_pool_gets_its_ids_afterwards(place, fitted):
    assert fitted["irgen"].config.method == "irgen-unindexed"
    assert fitted["genius"].config.method == "genius"
    with pytest.raises(UsageError, match="grace-string"):
        place.fit("grace-string", indexing="no")


def test_runs_and_results_are_those_of_an_evaluation(place, fitted, tmp_path):
    config = EvaluationConfig(rows=("catalogue_task0",), beam=5)
    evaluate_baseline(
        place.data,
        place.model,
        fitted["grace-numeric"],
        config,
        tmp_path,
        evaluation=place.evaluation,
        progress=Silent(),
    )
    written = json.loads((tmp_path / "results.json").read_text())
    assert {row["pool"] for row in written["rows"]} == {"local", "global"}
    assert {row["method"] for row in written["rows"]} == {"grace-numeric"}
    assert written["config"]["beam"] == 5
    run = read_run(tmp_path / "runs" / "catalogue_task0_test.local.grace-numeric.trec")
    assert max(map(len, run.values())) == 5  # beams; every ID stands for one item


@pytest.mark.parametrize("kind", ["grace-string", "nci"])
def test_the_program_trains_and_measures(place, tmp_path, capsys, kind):
    words = [str(place.data.root), "--model", str(place.model.folder), "--kind", kind, "--epochs", "0.1"]
    words += ["--out", str(tmp_path), "--evaluation", str(place.evaluation), "--json"]
    assert main([*words, "--options.pools", "global", "--options.max-queries", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in found["rows"]} == {kind}
    assert len(found["rows"]) == 8


def test_the_decoder_is_the_models_but_for_guide_dropout_and_the_kinds_head(place, fitted):
    own, rival = place.model.generator.config, fitted["irgen"].generator.config
    changed = {"guide": own.guide, "dropout": own.dropout, "softmax": own.softmax, "training": own.training}
    assert dataclasses.replace(rival, **changed) == own
    assert generator_config(place.model, BaselineConfig(kind="nci")).head == "per-level"
