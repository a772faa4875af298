from dataclasses import replace
from typing import Any

import pytest

from research.results import ResultRow, average_rows, published_tables, to_json

ROW = ResultRow(
    name="catalogue_task0",
    dataset="catalogue",
    task="text -> image",
    task_id=0,
    pool="global",
    method="exact-fused",
    queries=500,
    pool_size=12_000,
    headline="R@5",
    measures={"recall@5": 0.5, "R@10": 0.9, "R@5": 0.8, "R@1": 0.6, "MRR": 0.7},
    bytes_per_item=3072.0,
    num_ranked=12_000.0,
)
GENERATIVE = replace(
    ROW,
    method="generative",
    measures={"R@1": 0.3, "R@5": 0.6, "R@10": 0.7},
    bytes_per_item=12.25,
    num_ranked=61.0,
)


def other_task(row: ResultRow, headline: float) -> ResultRow:
    return replace(
        row,
        name="catalogue_task3",
        task="image -> text",
        task_id=3,
        measures={**row.measures, "R@5": headline},
    )


def cirr(**changes: Any) -> ResultRow:
    cirr_values = {
        "name": "cirr_task7",
        "dataset": "cirr",
        "task_id": 7,
        "pool": "local",
        "method": "exact-raw",
        "queries": 4_170,
        "pool_size": 21_551,
    }
    return replace(ROW, **{**cirr_values, **changes})


def test_published_numbers_are_compared_with_ours():
    (table,) = published_tables([cirr(measures={"R@5": 0.45}), ROW])
    assert table.cells() == [
        ["cirr_task7 R@5, local", "exact-raw", "CLIP_SF, released", "45.0", "45.3", "-0.3"],
        ["cirr_task7 R@5, local", "exact-raw", "CLIP_SF, paper", "45.0", "44.6", "0.4"],
    ]
    assert published_tables([ROW]) == []


def test_averages_weigh_every_task_the_same():
    rows = [ROW, GENERATIVE, replace(other_task(ROW, 0.4), queries=5), other_task(GENERATIVE, 0.3)]
    exact, generative = average_rows(rows)
    assert (exact.method, exact.dataset, exact.score) == (
        "exact-fused",
        "2 tasks",
        pytest.approx(0.6),
    )
    assert generative.measures["R@5"] == pytest.approx(0.45)
    assert generative.bytes_per_item == 12.25
    assert [row["of_exact"] for row in to_json(rows)["averages"]] == [1.0, pytest.approx(0.75)]
