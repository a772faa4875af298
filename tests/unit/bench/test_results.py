from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from genius_search.errors import UsageError
from genius_search.lab.bench.results import Figure, Result, Table, draw, shown, write
from genius_search.lab.bench.timing import about
from genius_search.lab.figure import Line


@dataclass(frozen=True)
class Row:
    name: str
    cpu_ms: float
    speedup: float | None = None


def result(*rows: Row) -> Result:
    table = Table(
        name="things",
        title="Things <fast>",
        note="Less is better.",
        columns=(("name", "name"), ("cpu_ms", "ms")),
        rows=rows,
    )
    lines = [
        Line("ours", ((10.0, 1.0), (100.0, 1.5)), ()),
        Line("theirs", ((10.0, 1.0),), ((100.0, 10.0),)),
    ]
    figure = Figure(title="Time", alt="ours and theirs", image=draw(lines, x="items", y="ms"))
    return Result(
        title="Speed", about=about("genius bench things", seed=7), tables=(table,), figures=(figure,)
    )


def test_every_row_says_what_it_was_measured_on(tmp_path):
    write(tmp_path / "out", result(Row("a", 1.0), Row("b", 2.0, 0.5)))
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in found["things"]] == ["a", "b"]
    for row in found["things"]:
        assert row["command"] == "genius bench things"
        assert row["seed"] == 7
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert "torch 2" in row["machine"]
        assert "threads used" in row["machine"]


def test_the_page_holds_tables_and_drawings_and_fetches_nothing(tmp_path):
    write(tmp_path, result(Row("a<b", 1.0)))
    page = (tmp_path / "index.html").read_text()
    assert "Things &lt;fast&gt;" in page
    assert "a&lt;b" in page
    assert page.count("<img") == 1
    assert "data:image/png;base64," in page
    assert not re.search(r"https?:", page)


def test_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cpu_ms is not a number"):
        write(tmp_path, result(Row("a", float("nan"))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (True, "yes"), (1_234_567, "1,234,567"), (0.12345, "0.123"), (0.0, "0"), (12.3456, "12.3"), (999.7, "1,000"), (45678.9, "45,700"), (0.00001, "0.0000")],
)  # fmt: skip
def test_figures_have_the_digits_worth_reading(value, text):
    assert shown(value) == text


def test_a_terminal_gets_the_columns_that_matter_and_the_page_all():
    rows = [Row("a", 1.0, 2.0)]
    columns = (("name", "name"), ("cpu_ms", "ms"), ("speedup", "times"))
    table = Table(name="t", title="T", note="", columns=columns, rows=rows, brief=columns[:2])
    assert table.in_brief().lines() == [["a", "1.00"]]
    assert table.lines() == [["a", "1.00", "2.00"]]
