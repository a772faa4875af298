"""``python -m research.learning``: a log helps queries like the logged ones, and no others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genius_search.index.learned import SHARE_TEMPERATURE
from genius_search.nn.codebooks import normalize
from research.bench.data import BenchData
from research.learning import Log, draw_trial, main, shares_of_items

ITEMS = 60
TARGETS = 20
DIM = 16


@pytest.fixture(scope="module")
def vectors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return items, queries and answers; 20 items have four queries each, far from the item."""
    random = np.random.default_rng(0)
    items = normalize(random.standard_normal((ITEMS, DIM)).astype(np.float32))
    centres = random.standard_normal((TARGETS, 1, DIM)) + items[:TARGETS, None]
    queries = centres + 0.1 * random.standard_normal((TARGETS, 4, DIM))
    return (
        items,
        normalize(queries.reshape(-1, DIM).astype(np.float32)),
        np.repeat(np.arange(TARGETS), 4),
    )


def test_the_share_of_an_item_depends_only_on_its_nearest_logged_query():
    log = Log(np.eye(4, dtype=np.float32)[[0, 0, 1]], np.array([2, 2, 3]))
    shares = shares_of_items(np.eye(4, dtype=np.float32)[:1], log, 4)
    assert shares[0].tolist() == pytest.approx([0, 0, 1, np.exp(-1 / SHARE_TEMPERATURE)])


def test_queries_of_a_trial_do_not_depend_on_the_logged_share(vectors):
    items, queries, answers = vectors
    data = BenchData(items, np.zeros(ITEMS, np.int8), queries, [{int(row)} for row in answers])
    small, large = (draw_trial(data, share, 0.0, 0) for share in (0.1, 0.5))
    assert small.queries.tolist() == large.queries.tolist()
    assert small.answers == large.answers
    assert len(small.log.chosen) == 8
    assert len(large.log.chosen) == 40


def test_the_nearest_logged_queries_raise_what_was_chosen(vectors, tmp_path, capsys):
    for name, array in zip(("items", "queries", "answers"), vectors, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: str(tmp_path / f"{name}.npy") for name in ("items", "queries", "answers")}
    flags = ["--query-vectors", files["queries"], "--answers", files["answers"], "--shares", "0.5"]
    flags += ["--work", str(tmp_path), "--generator", "--figure", str(tmp_path / "figure.svg")]
    assert main([files["items"], *flags, "--wrong", "0", "--seeds", "0", "--json"]) == 0
    rows = {row["ranked by"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    first = {name: float(row["once"].split(" / ")[0]) for name, row in rows.items()}
    assert first["nearest logged queries"] > first["exact search"] + 0.2
    assert first["index that learned the log"] > first["index"] + 0.2
    assert first["nearest logged queries and generator"] >= first["generator"]
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_what_choices_cost(vectors, tmp_path, capsys):
    for name, array in zip(("items", "queries", "answers"), vectors, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    flags = [
        "--query-vectors",
        str(tmp_path / "queries.npy"),
        "--answers",
        str(tmp_path / "answers.npy"),
    ]
    flags += ["--work", str(tmp_path), "--choices", "200"]
    assert main([str(tmp_path / "items.npy"), *flags]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["bytes of a choice"] > 100
    assert cost["with new choices"] > 0
