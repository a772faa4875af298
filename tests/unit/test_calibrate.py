"""Scores become probabilities by queries whose answers are known."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from genius_search.calibrate import CalibrateConfig, Cases, calibrate, common_words, fit, shorten
from genius_search.cli import main
from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.index.settings import hit_features
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.tune import ValidationConfig, validation_queries


def drawn_cases(*, queries: int, contrast: float, seed: int = 0) -> Cases:
    """Hits that are right as often as a known regression says."""
    random = np.random.default_rng(seed)
    found = []
    for query in range(queries):
        own = hit_features(np.sort(random.normal(0, 0.3, 10))[::-1].astype(np.float32), (0.0, 0.0))
        said = -1 + 3 * own[:, 0] + 4 * own[:, 1] + 2 * own[:, 2] + contrast * own[:, 3]
        right = random.random(10) < 1 / (1 + np.exp(-said))
        found.append(Cases(own, right, np.arange(10) == 0, np.full(10, query % 3 == 0), np.full(10, query)))
    return Cases(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def test_the_regression_that_drew_the_answers_is_found_again():
    fitted = fit(drawn_cases(queries=1200, contrast=0.0), absent=0.5)
    assert fitted.intercept == pytest.approx(-1, abs=0.3)
    assert fitted.weights.array == pytest.approx((3, 4, 2, 0), abs=1)


def test_the_contrast_is_used_where_it_earns_its_place():
    assert fit(drawn_cases(queries=600, contrast=0.0), absent=0.5).weights.contrast == 0
    assert fit(drawn_cases(queries=600, contrast=9.0), absent=0.5).weights.contrast > 3


def test_where_high_scores_are_worse_the_score_says_nothing():
    cases = drawn_cases(queries=300, contrast=0.0)
    upside_down = cases._replace(is_right=~cases.is_right)
    weights = fit(upside_down, absent=0.5).weights
    assert weights.score + weights.ahead + weights.contrast >= -1e-9
    assert weights.score + weights.behind + weights.contrast >= -1e-9


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Path:
    """An index of the test pool, that no test changes."""
    (pool,) = MBeir(trained.data).global_pool("test")
    folder = tmp_path_factory.mktemp("calibrated") / "index"
    Index.create(folder, model=Genius.open(trained.model), pool=pool)
    return folder


@pytest.fixture
def index(whole, trained, tmp_path) -> Index:
    """A copy to change."""
    return Index.open(shutil.copytree(whole, tmp_path / "index"), model=trained.model)


def found(index, trained, **settings):
    config = CalibrateConfig(split="test", precision=0.05, **settings)
    return calibrate(index, MBeir(trained.data), config, progress=Silent())


def test_hits_have_probabilities_once_an_index_is_calibrated(index, trained):
    (before,) = index.search("a red square", k=1)
    assert before.probability is None
    assert index.good_match([before]) is None
    result = found(index, trained)
    assert index.calibration is None
    index.keep_calibration(result.calibration)
    again = Index.open(index.folder, model=trained.model)
    assert again.calibration == result.calibration
    hits = again.search("a red square", k=12)
    few = again.search("a red square", k=3)
    assert [hit.id for hit in few] == [hit.id for hit in hits[:3]]
    assert [hit.probability for hit in few] == [hit.probability for hit in hits[:3]]
    assert all(0 < hit.probability < 1 for hit in hits)
    assert all(a.probability >= b.probability - 1e-9 for a, b in pairwise(hits))
    assert again.good_match([]) in {None, False}
    (other,) = again.search("a red square", k=1, config=SearchConfig(rerank="none"))
    assert other.probability is None
    assert again.good_match([other]) is None


def test_a_calibration_stays_while_items_come_and_go(index, trained):
    result = found(index, trained, queries=8)
    index.keep_calibration(result.calibration)
    (hit,) = index.search("a red square", k=1)
    index.delete([hit.id])
    index.compact()
    assert index.calibration == result.calibration
    (after,) = index.search("a red square", k=1)
    assert after.id != hit.id
    assert after.probability is not None


def test_what_was_measured_fits_together(index, trained):
    result = found(index, trained, absent=0.5)
    told = result.calibration
    assert told.queries + told.held_out.queries == 96
    assert sum(one.queries for one in told.held_out.bins) == pytest.approx(told.held_out.queries)
    assert told.items == index.info().items
    assert 0 <= told.held_out.error <= 1
    assert told.threshold is None or told.threshold >= 0.5


def test_a_dry_run_prints_and_changes_nothing(index, trained, capsys):
    words = ["calibrate", index.folder, "--data", trained.data, "--split", "test", "--queries", "5"]
    assert main([str(word) for word in (*words, "--model", trained.model, "--dry-run")]) == 0
    assert "Nothing was changed." in " ".join(capsys.readouterr().out.split())
    assert index.calibration is None


def test_too_few_queries_are_refused(index, trained):
    with pytest.raises(BadData, match="at least 40"):
        found(index, trained, queries=2)


@pytest.mark.parametrize("odd", [{"absent": 0.0}, {"absent": 1.0}, {"precision": 1.0}])
def test_impossible_shares_are_refused(odd):
    with pytest.raises(UsageError):
        checked(CalibrateConfig(**odd))


def test_the_command_keeps_it(index, trained, capsys):
    words = ["calibrate", index.folder, "--data", trained.data, "--split", "test", "--queries", "6"]
    assert main([str(word) for word in (*words, "--model", trained.model, "--json")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kept"] is True
    assert index.calibration is not None
    assert said["weights"] == dataclasses.asdict(index.calibration.weights)


def test_each_kind_of_query_and_each_length_has_its_own_scale(index, trained, monkeypatch):
    monkeypatch.setattr("genius_search.calibrate.FEWEST_QUERIES", 4)
    calibration = found(index, trained).calibration
    kinds = {(one.query, one.item, one.words) for one in calibration.kinds}
    assert {("text", "image", words) for words in (1, 2, 3)} <= kinds
    assert any(words == 4 for _, _, words in kinds)
    assert "a" in calibration.common_words
    index.keep_calibration(calibration)
    again = Index.open(index.folder, model=trained.model)
    assert again.calibration == calibration
    for text, words in (("a square", 1), ("a red square", 2), ("a red dotted square", 3)):
        (hit,) = again.search(text, modality="image", k=1)
        (scale,) = (
            one for one in calibration.kinds if (one.query, one.item, one.words) == ("text", "image", words)
        )
        hits = again.search(text, modality="image", k=10)
        scores = np.array([one.score for one in hits], dtype=np.float32)
        assert scale.probabilities(scores)[0] == pytest.approx(hit.probability)
        assert (hit.relevance >= 0.5) is (hit.probability >= scale.threshold)


def test_short_queries_are_right_where_all_their_words_are(index, trained):
    data, snapshot = MBeir(trained.data), index.snapshot
    queries = validation_queries(
        index, data, ValidationConfig(split="test"), rerank="codes", progress=Silent()
    )
    common = common_words(query.text for query in queries.queries if query.text)
    short = shorten(index.model, snapshot, queries, common, index.settings, seed=0, progress=Silent())
    kinds = {one.kind for one in short}
    assert {(kind.item, kind.words) for kind in kinds} >= {("text", 1), ("text", 2), ("image", 1)}
    assert all(kind.query == "text" and kind.words < 4 for kind in kinds)
    assert all(one.right for one in short)
    for one in short:
        if one.among is not None:
            assert one.kind.item == "image"
            assert one.right <= one.among < {(0, row) for row in range(snapshot.num_alive)}


def test_queries_are_measured_with_the_instruction_that_a_search_uses(index, trained):
    def embeddings():
        config = ValidationConfig(split="test", queries=1)
        return validation_queries(
            index, MBeir(trained.data), config, rerank="codes", progress=Silent()
        ).fused.numpy()

    with_instructions = embeddings()
    index.model.instructions = ()
    assert not np.allclose(embeddings(), with_instructions)
