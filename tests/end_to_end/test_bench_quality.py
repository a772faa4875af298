"""``genius bench quality`` on a tiny world: every way beside every other, on the same queries."""

from __future__ import annotations

import json
import math

import pytest

from genius_search.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def found(trained, tmp_path_factory):
    """What the command leaves: its JSON, and its folder."""
    out = tmp_path_factory.mktemp("quality")
    words = ["bench", "quality", trained.data, "--model", trained.model, "--out", out, "--queries", "6"]
    words += [
        "--row",
        "catalogue_task0,catalogue_task3",
        "--candidates",
        "60",
        "--beam",
        "8",
    ]
    words += [
        "--budgets",
        "5,1e9",
        "--grid-beams",
        "2,20",
        "--grid-candidates",
        "0,60",
        "--grid-queries",
        "3",
    ]
    assert main([str(word) for word in words]) == 0
    return json.loads((out / "results.json").read_text()), out


def by_task(rows, task):
    """Rows of one task, by method."""
    return {row["method"]: row for row in rows if row["task"] == task}


def test_every_way_is_measured_on_every_task_and_on_their_mean(found):
    rows, _ = found
    tasks = list(dict.fromkeys(row["task"] for row in rows["methods"]))
    assert tasks[0] == "mean"
    assert len(tasks) == 3
    for task in tasks:
        ways = by_task(rows["methods"], task)
        assert {
            "exact-raw", "exact-fused", "exact-fused+hubness", "exact-codes",
            "generator, beam 50, all levels alone",
            "generator, beam 8, 60 leaves + codes",
            "generator, beam 8, 60 leaves + embeddings",
            "geometry, beam 8, 60 leaves + codes",
            "geometry, beam 8, 60 leaves + embeddings",
        } <= set(ways)  # fmt: skip
        faiss = {row["line"] for name, row in ways.items() if name.startswith("faiss")}
        assert faiss == {"IVF-PQ", "residual codes", "HNSW"}
        for row in ways.values():
            assert 0 <= row["recall_1"] <= row["recall_5"] <= row["recall_10"] <= 1
            assert row["line"] in faiss or 0 < row["touched"] <= row["pool_size"]
            assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert ways["exact-fused"]["of_exact_5"] in (1, None)
        assert ways["exact-codes"]["touched"] == ways["exact-codes"]["pool_size"]
        assert (
            ways["generator, beam 8, 60 leaves + codes"]["touched"] <= 90
        )  # items; some share one of the 60 IDs
    one, other = (by_task(rows["methods"], task) for task in tasks[1:])
    for name, mean in by_task(rows["methods"], "mean").items():
        assert mean["recall_5"] == pytest.approx((one[name]["recall_5"] + other[name]["recall_5"]) / 2)
        assert mean["queries"] == 12


def test_a_budget_for_everything_makes_routers_equal(found):
    rows, _ = found
    whole = [row for row in rows["leaves"] if row["leaves"] == 10**9]
    assert whole
    for row in whole:
        assert row["generator_inside"] == row["geometry_inside"] == row["codes_inside"] == 1
        assert row["generator_5"] == row["geometry_5"]
    codes = {row["task"]: row for row in rows["methods"] if row["method"] == "exact-codes"}
    assert all(row["generator_5"] == pytest.approx(codes[row["task"]]["recall_5"]) for row in whole)


def test_curves_and_documents_are_left_behind(found):
    rows, out = found
    curves = by_task(rows["curves"], "mean")
    assert "generator, beam 2, all levels alone" in curves
    assert "geometry, beam 20, 60 leaves + embeddings" in curves
    assert "exact-fused" in curves
    text = (out / "results.md").read_text()
    assert "| generator, beam 8, 60 leaves + codes " in text
    assert "beam 20" not in text


def test_numbers_that_are_none_are_refused(trained, tmp_path, capsys):
    words = ["bench", "quality", trained.data, "--model", trained.model, "--out", tmp_path]
    assert main([*map(str, words), "--budgets", "few"]) == 2
    assert "--budgets 'few'" in capsys.readouterr().err
