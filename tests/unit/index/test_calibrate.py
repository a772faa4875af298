"""Scores become probabilities by queries whose answers are known."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.cli import main
from genius_search.config import DEFAULT_SEARCH, SearchConfig
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.index.calibrate import (
    Calibration,
    calibrate,
    choose_density_weight,
    choose_threshold,
    density_weights_around,
    fit_logistic_regression,
    min_words_by_query_kind,
    read_pairs,
)
from genius_search.index.hits import Hits
from genius_search.index.index import Index
from genius_search.index.request import SearchPart, SearchRequest
from genius_search.index.score import hit_features, probabilities_of
from genius_search.model import Genius
from genius_search.progress import Silent

LONG = "a striped red square on a white background, drawn in the middle of a round frame"
CALIBRATION = Calibration(
    intercept=-4.0,
    weights=(20.0, 6.0, 12.0),
    threshold=0.5,
    search=DEFAULT_SEARCH,
    queries=40,
    promised=0.7,
    right=0.72,
    good=0.6,
    good_and_right=0.85,
    refused=0.6,
    fewest_words={"text": 2},
)


def drawn_cases(queries: int, weights: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of hits, and whether they are right: as often as a known regression says."""
    random = np.random.default_rng(0)
    scores = -np.sort(-random.normal(0, 0.3, (queries, 10)), axis=1)
    numbers = np.concatenate([hit_features(own.astype(np.float32)) for own in scores])
    return numbers, random.random(len(numbers)) < 1 / (1 + np.exp(1 - numbers @ weights))


def test_the_regression_that_drew_the_answers_is_found_again():
    numbers, is_right = drawn_cases(1200, (3, 4, 2))
    intercept, weights = fit_logistic_regression(numbers, is_right, np.ones(len(numbers)))
    assert intercept == pytest.approx(-1, abs=0.3)
    assert weights == pytest.approx((3, 4, 2), abs=1)


def test_where_high_scores_are_worse_the_score_says_nothing():
    numbers, is_right = drawn_cases(300, (3, 4, 2))
    _, weights = fit_logistic_regression(numbers, ~is_right, np.ones(len(numbers)))
    assert weights == pytest.approx((0, 0, 0), abs=1e-9)


def test_the_threshold_accepts_as_much_as_it_may():
    def threshold(probability, is_right, precision):
        return choose_threshold(
            probability, is_right, np.ones(len(probability)), precision=precision
        )

    many, right = np.repeat([0.9, 0.6, 0.3], 30), np.repeat([True, True, False], 30)
    assert threshold(many, right, 0.9) == 0.6
    assert threshold(many, right, 0.6) == 0.6
    few = np.array([0.9] * 5 + [0.3] * 40)
    assert threshold(few, few > 0.5, 0.9) is None


USUAL_WEIGHT = 0.3


def found_with(shares: dict[float, float], queries: int = 1000):
    """Return which queries are answered with each weight: half of them where ``shares`` does not say."""
    weights = sorted({*density_weights_around(USUAL_WEIGHT), *shares})
    return {weight: np.arange(queries) < shares.get(weight, 0.5) * queries for weight in weights}


def test_no_density_and_half_to_twice_the_default_are_compared():
    assert density_weights_around(USUAL_WEIGHT) == pytest.approx([0.3, 0.0, 0.15, 0.45, 0.6])


@pytest.mark.parametrize(
    ("shares", "weight"),
    [
        ({}, 0.3),
        ({0.45: 0.55, 0.6: 0.53}, 0.45),
        ({0.45: 0.5005}, 0.3),
        ({0.0: 0.6, 0.6: 0.2}, 0.0),
    ],
)
def test_the_weight_of_densities_changes_only_where_that_finds_more_by_over_a_standard_error(
    shares, weight
):
    assert choose_density_weight(found_with(shares), USUAL_WEIGHT) == pytest.approx(weight)


@given(scores=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=15))
def test_probabilities_are_bounded_and_never_rise_down_the_list(scores):
    found = probabilities_of(
        CALIBRATION, hit_features(np.array(sorted(scores, reverse=True), dtype=np.float32))
    )
    assert ((found > 0) & (found < 1)).all()
    assert (np.diff(found) <= 1e-9).all()


@pytest.mark.parametrize(
    ("changed", "applies"),
    [
        ({"beam": 200, "candidates": 50}, True),
        ({"scores": "vocabulary"}, True),
        ({"rerank": "embeddings"}, False),
        ({"rerank": "none"}, False),
        ({"density_weight": 0.0}, False),
    ],
)
def test_it_applies_to_hits_that_are_ordered_alike(changed, applies):
    assert CALIBRATION.applies_to(dataclasses.replace(CALIBRATION.search, **changed)) is applies


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Path:
    """An index of the test pool, that no test changes."""
    (pool,) = MBeir(trained.data).global_pool("test")
    folder = tmp_path_factory.mktemp("calibrated") / "index"
    Index.create(folder, pool, model=Genius.open(trained.model))
    return folder


@pytest.fixture
def index(whole, trained, tmp_path) -> Index:
    """A copy to change."""
    return Index.open(shutil.copytree(whole, tmp_path / "index"), model=trained.model)


def calibrate_with_test_split(index: Index, data: Path, precision: float = 0.8) -> Calibration:
    pairs = read_pairs(index.folder, data, split="test")
    return calibrate(
        *index._current_state(), index.settings, pairs, precision=precision, progress=Silent()
    )


def test_hits_have_probabilities_once_an_index_is_calibrated(index, trained):
    (before,) = index.search("a red square", k=1)
    assert (before.probability, Hits([before]).good_match) == (None, None)
    found = calibrate_with_test_split(index, trained.data, precision=0.05)
    assert index.calibration is None
    assert found.queries == 48
    assert found.promised == pytest.approx(found.right, abs=0.15)
    index._keep_calibration(found)
    again = Index.open(index.folder, model=trained.model)
    assert again.calibration == found
    assert again.settings.density_weight == found.search.density_weight
    hits = again.search(LONG, modality="image", k=12)
    few = again.search(LONG, modality="image", k=1)
    assert few == hits[:1]
    assert all(0 < hit.probability < 1 for hit in hits)
    assert all(a.probability >= b.probability - 1e-9 for a, b in pairwise(hits))
    for threshold, is_good in ((hits[0].probability, True), (0.999, False), (None, None)):
        index._keep_calibration(dataclasses.replace(found, threshold=threshold))
        assert index.search(LONG, modality="image").good_match is is_good
    assert Hits().good_match is False
    (other,) = again.search(LONG, k=1, config=SearchConfig(rerank="none"))
    assert (other.probability, Hits([other]).good_match) == (None, None)


@pytest.mark.parametrize(
    "asked",
    [
        {"query": "square"},  # fewer words than the queries that were measured
        {"query": "a red square", "where": ["id!=nothing"]},
        {"query": "a red square", "match": "red"},
        {"parts": [SearchPart(text="a red square"), SearchPart(text="a kite", weight=0.5)]},
    ],
)
def test_queries_unlike_those_that_were_measured_have_no_probability(index, asked):
    index._keep_calibration(CALIBRATION)
    hits = index.search(**asked, k=3)
    assert hits
    assert [hit.probability for hit in hits] == [None] * len(hits)
    assert hits.good_match is None
    assert index.search("a red square", k=1)[0].probability is not None


def test_a_calibration_stays_while_items_come_and_go(index):
    index._keep_calibration(CALIBRATION)
    (hit,) = index.search("a red square", k=1)
    index.delete([hit.id])
    index.compact(min_deleted=0)
    assert index.calibration == CALIBRATION


def test_an_item_that_was_chosen_is_probable_and_comes_first_among_all_modalities(index):
    index._keep_calibration(CALIBRATION)
    before = {hit.id: hit.probability for hit in index.search("a red square", k=10)}
    last = [*before][-1]
    index.learn(last, "a red square")
    hit, *others = index.search("a red square", k=10)
    assert (hit.id, hit.probability > before[last]) == (last, True)
    assert {one.id: one.probability for one in others} == {
        name: pytest.approx(own) for name, own in before.items() if name != last
    }


def test_the_measured_queries_are_known_by_their_kind_and_number_of_words():
    texts = [SearchRequest(text="a b c")] + [SearchRequest(text="a b c d e")] * 99
    vectors = [SearchRequest(vector=np.ones(3))] * 20
    few = [SearchRequest(text="a", image="a.png")] * 19
    assert min_words_by_query_kind([*texts, *vectors, *few]) == {"text": 5, "vector": 0}


def test_what_cannot_be_calibrated_is_refused(index, trained, monkeypatch):
    with pytest.raises(UsageError, match="between 0 and 1"):
        calibrate_with_test_split(index, trained.data, precision=1.0)
    monkeypatch.setattr("genius_search.index.calibrate.MIN_CALIBRATION_QUERIES", 1000)
    with pytest.raises(BadData, match="at least 1000"):
        calibrate_with_test_split(index, trained.data)


def test_what_was_learned_calibrates(index, monkeypatch, capsys):
    monkeypatch.setattr("genius_search.index.calibrate.MIN_CALIBRATION_QUERIES", 5)
    words = ["calibrate", str(index.folder), "--model", str(index.model.folder), "--json"]
    assert main(words) == 6
    assert "0 queries of learned choices" in capsys.readouterr().err
    texts = [f"a {colour} square" for colour in ("red", "green", "blue", "white", "black", "grey")]
    items = [index.search(text, modality="image", k=1)[0].id for text in texts]
    index.learn_many(
        [{"text": text, "chosen": item} for text, item in zip(texts, items, strict=True)]
    )
    index.learn(items[0], vector=np.ones(index.model.dim))
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["queries"] > 0
    assert index.calibration.queries == 3


def test_the_command_keeps_it(index, trained, capsys):
    words = [
        "calibrate",
        index.folder,
        "--data",
        trained.data,
        "--split",
        "test",
        "--model",
        trained.model,
    ]
    assert main([str(word) for word in (*words, "--json")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["weights"] == list(index.calibration.weights)
    assert main([str(word) for word in words]) == 0
    assert "good matches that are right" in capsys.readouterr().out
