"""Rivals from end to end: fitted, indexed, searched, measured."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.lab.baselines.generative import (
    check_model,
    draw_items,
    evaluate_baseline,
    fit_baseline,
    generator_config,
    join,
    load_baseline,
    pool_items,
    share_written,
)
from genius_search.lab.baselines.ids import find_rows, select
from genius_search.lab.runs import read_run
from genius_search.lab.settings import BaselineConfig, EvaluationConfig
from genius_search.model import Genius
from genius_search.progress import Silent

SEEN = ("grace-numeric", "grace-semantic", "genius")
UNSEEN = ("grace-structured", "irgen")


class Place(NamedTuple):
    """Data, model, a folder for the features of the pools, and one for rivals."""

    data: MBeir
    model: Genius
    evaluation: Path
    rivals: Path

    def fit(self, kind, *, folder=None, **settings):
        config = BaselineConfig(kind=kind, epochs=0.4, batch_size=32, **settings)
        folder = folder or self.rivals / kind
        return fit_baseline(
            self.data, self.model, folder, config, evaluation=self.evaluation, progress=Silent()
        )

    def items(self, kind):
        return pool_items(
            self.data,
            self.model,
            "test",
            self.evaluation,
            with_codes=kind == "genius",
            progress=Silent(),
        )


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    return Place(MBeir(trained.data), Genius.open(trained.model), folder / "evaluation", folder)


@pytest.fixture(scope="module")
def fitted(place):
    """Some kinds with indexing, others without."""
    return {kind: place.fit(kind, indexing="yes" if kind in SEEN else "no") for kind in (*SEEN, *UNSEEN)}


@pytest.mark.parametrize("kind", [*SEEN, *UNSEEN])
def test_search_finds_items_of_the_pool_each_once_best_first(place, fitted, kind):
    rival, items = fitted[kind], place.items(kind)
    index = rival.index(items)
    assert len(index.items) == index.table.num_items == len(items.numbers)
    for found in rival.search(index, items.embeddings[:3], beam=10, k=7):
        assert len(found.items) == len(set(found.items.tolist())) == 7
        assert (np.diff(found.scores) <= 0).all()
        assert found.touched >= 7


@pytest.mark.parametrize("kind", UNSEEN)
def test_without_indexing_the_pool_gets_its_ids_afterwards(place, fitted, kind):
    assert fitted[kind].name("test") == f"{kind}-unindexed"
    assert fitted[kind].memorization.items is None
    if kind == "grace-structured":
        assert not fitted[kind].scheme.knows(place.items(kind)).any()


def test_items_whose_number_was_never_learned_cannot_be_found(place, fitted):
    items = place.items("grace-numeric")
    strange = items._replace(numbers=np.where(np.arange(len(items.numbers)) < 4, -1, items.numbers))
    index = fitted["grace-numeric"].index(strange)
    assert index.items.tolist() == list(range(4, len(items.numbers)))
    with pytest.raises(UsageError, match="grace-string"):
        place.fit("grace-string", indexing="no")


def test_pools_of_another_split_were_not_indexed(fitted):
    assert fitted["genius"].name("test") == "genius"
    assert fitted["genius"].name("val") == "genius-unindexed"
    with pytest.raises(UsageError, match="'test'"):
        fitted["grace-numeric"].name("val")


def test_the_seed_decides_and_what_is_done_is_opened(place, tmp_path):
    first, again = (place.fit("dsi", folder=tmp_path / name) for name in "ab")
    weights, others = (one.generator.state_dict().values() for one in (first, again))
    assert all(torch.equal(one, two) for one, two in zip(weights, others, strict=True))
    items = place.items("dsi")
    np.testing.assert_array_equal(first.scheme.assign(items), again.scheme.assign(items))
    opened = place.fit("dsi", folder=tmp_path / "a")
    assert opened.manifest == first.manifest
    loaded = load_baseline(tmp_path / "a", place.model.quantizer)
    np.testing.assert_array_equal(loaded.scheme.assign(items), first.scheme.assign(items))


def test_it_learns(fitted, read_losses):
    for baseline in fitted.values():
        losses = read_losses(baseline.manifest.folder)
        assert losses[-1] < losses[0]


def test_an_id_is_known_when_every_code_of_it_comes_out_first(place, fitted):
    generator = fitted["genius"].generator
    some = place.items("genius").embeddings[:20]
    written = torch.zeros(20, len(generator.sizes), dtype=torch.int64)
    for level in range(len(generator.sizes)):
        said = generator.level_logits(generator(some, written)[:, level], level)
        written[:, level] = said.argmax(dim=1)
    assert share_written(generator, some, written) == 1
    written[:5, -1] = (written[:5, -1] + 1) % generator.sizes[-1]
    assert share_written(generator, some, written) == 0.75


def test_runs_and_results_are_those_of_an_evaluation(place, fitted, tmp_path):
    baseline = fitted["grace-numeric"]
    config = EvaluationConfig(rows=("catalogue_task0",), beam=5)
    result = evaluate_baseline(
        place.data,
        place.model,
        baseline,
        config,
        tmp_path,
        evaluation=place.evaluation,
        progress=Silent(),
    )
    written = json.loads((tmp_path / "results.json").read_text())
    assert {row["pool"] for row in written["rows"]} == {"local", "global"}
    assert {row["method"] for row in written["rows"]} == {"grace-numeric"}
    assert written["config"]["beam"] == 5
    assert written["ids"] == result.ids._asdict()
    assert result.ids.distinct_ids == result.ids.candidates
    run = read_run(tmp_path / "runs" / "catalogue_task0_test.local.grace-numeric.trec")
    assert max(map(len, run.hits.values())) == 5  # beams; every ID stands for one item
    assert (tmp_path / "runs" / "catalogue_task0_test.local.qrels").exists()


def test_a_rival_of_another_model_is_refused(place, fitted):
    other = copy.copy(place.model)
    other.fingerprint = "f" * 64
    with pytest.raises(ArtifactMismatch, match="fit again"):
        check_model(fitted["irgen"], other)


def test_the_decoder_is_the_models_but_for_guide_dropout_and_the_kinds_head(place, fitted):
    own, rival = place.model.generator.config, fitted["irgen"].generator.config
    changed = {"guide": own.guide, "dropout": own.dropout, "softmax": own.softmax, "training": own.training}
    assert dataclasses.replace(rival, **changed) == own
    assert generator_config(place.model, BaselineConfig(kind="nci")).head == "per-level"


def test_every_item_is_drawn_once_a_pass():
    rows = np.concatenate([draw_items(10, 4, step, seed=1) for step in range(5)])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()


def test_items_of_two_pools_are_taken_once(place):
    items = place.items("genius")
    both = join(select(items, np.arange(10)), items)
    assert both.numbers.tolist() == items.numbers.tolist()
    assert both.texts == items.texts
    np.testing.assert_array_equal(both.codes, items.codes)
    assert find_rows(np.array([items.numbers[3], -5]), items.numbers).tolist() == [3, -1]
    assert find_rows(np.array([1]), items.numbers[:0]).tolist() == [-1]
