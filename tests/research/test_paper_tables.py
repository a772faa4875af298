import itertools
from dataclasses import replace

import pytest

from genius_search.data.mbeir import PAPER_ROWS
from genius_search.records import task_name
from research.published.numbers import COMPARABLE, SIZES, UNION_SIZE, references
from research.results import ResultRow, applies_to, paper_tables
from research.settings import METHODS
from research.table import Table


def row(name: str, method: str, pool: str = "local", score: float = 0.5) -> ResultRow:
    dataset, _, task = name.rpartition("_task")
    k = 10 if dataset in {"fashion200k", "fashioniq"} else 5
    return ResultRow(
        name=name,
        dataset=dataset,
        task=task_name(int(task)),
        task_id=int(task),
        pool=pool,
        method=method,
        queries=SIZES[name].queries,
        pool_size=SIZES[name].pool if pool == "local" else UNION_SIZE,
        headline_k=k,
        measures={"R@1": 0.1, f"R@{k}": score},
        bytes_per_item=1536.0,
        candidates_touched=UNION_SIZE * 1.0,
    )


def everything(pool: str, off: float = 0.0) -> list[ResultRow]:
    """Every row and method; where there is a published number, ours is that and so much more."""
    rows = []
    for name in PAPER_ROWS:
        for method in METHODS:
            published = references(name, pool, method)
            rows.append(row(name, method, pool, published[0].value / 100 + off if published else 0.5))
    return rows


def lines(table: Table, label: str) -> list[dict[str, str]]:
    """Our line of a row, and the lines of published numbers below it."""
    found = [dict(zip(table.headings, line, strict=True)) for line in table.lines]
    start = next(place for place, line in enumerate(found) if line["row"] == label)
    published = itertools.takewhile(lambda line: line["row"] in ("released", "paper"), found[start + 1 :])
    return [found[start], *published]


def cell(rows: list[ResultRow], label: str, method: str, line: str, pool: str = "local") -> str:
    """A method's cell in a row's line of ours, of the released weights, or of the paper."""
    (table,) = [table for table in paper_tables(rows) if table.title == f"{pool} pool"]
    wanted = label if line == "ours" else line
    return next((found[method] for found in lines(table, label) if found["row"] == wanted), "")


def test_the_layout_is_for_m_beirs_rows_only():
    rows = [row("cirr_task7", "exact-raw")]
    assert applies_to(rows)
    assert not applies_to([*rows, replace(rows[0], name="catalogue_task0")])


@pytest.mark.parametrize("pool", ["local", "global"])
def test_80_columns_hold_all_rows_and_what_is_published(pool):
    (table,) = paper_tables(everything(pool, -0.123))
    narrow, wide = (table.text(width).split(table.note)[0] for width in (80, 240))
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(method in narrow for method in COMPARABLE)
    assert all(method in wide for method in METHODS)
    assert narrow.count("R@10") == 3
    assert narrow.count("R@5") == 13


def test_ours_stands_above_the_released_weights_and_the_paper():
    rows = [row("nights_task4", "exact-raw", score=0.3184)]
    assert cell(rows, "nights_task4 R@5", "exact-raw", "ours") == "31.8"
    assert cell(rows, "nights_task4 R@5", "exact-raw", "released") == "31.8 +0.1"
    assert cell(rows, "nights_task4 R@5", "exact-raw", "paper") == "32.0 -0.2"


def test_a_misprint_is_corrected_starred_and_told_below():
    rows = [row("fashioniq_task7", "generative", "global", 0.131)]
    assert cell(rows, "fashioniq_task7 R@10", "generative", "paper", "global") == "13.1* +0.0"
    assert cell(rows, "fashioniq_task7 R@10", "generative", "released", "global") == "13.1 +0.0"
    (table,) = paper_tables(rows)
    assert "18.9" in table.note


def test_the_average_is_beside_the_published_average():
    assert cell(everything("local"), "average of 16 rows", "exact-raw", "ours") == "50.2"
    assert cell(everything("local"), "average of 16 rows", "exact-raw", "paper") == "50.6 -0.4"
    assert cell(everything("local"), "average of 16 rows", "generative+raw", "paper") == "40.1 +0.0"
    assert cell(everything("global"), "average of 16 rows", "generative", "paper", "global") == "28.4 +0.1"


def test_the_average_of_some_rows_is_beside_the_mean_of_the_same_rows():
    rows = [row(name, "exact-raw") for name in ("nights_task4", "cirr_task7")]
    assert cell(rows, "average of 2 rows", "exact-raw", "released") == "38.5 +11.5"


def test_a_subset_has_no_published_numbers():
    rows = [replace(row("cirr_task7", method), queries=12) for method in METHODS]
    (table,) = paper_tables(rows)
    assert len(lines(table, "cirr_task7 R@5")) == 1
