"""A benchmark as a document."""

from __future__ import annotations

from dataclasses import dataclass

from genius_search.lab.bench.results import Result, Table, markdown
from genius_search.lab.bench.timing import About


@dataclass(frozen=True)
class Row:
    """A row."""

    name: str
    value: float


def table(name: str, *, is_long: bool = False) -> Table:
    """A small table."""
    columns = (("name", "name"), ("value", "value"))
    rows = [Row("a|b", 0.5)]
    return Table(name=name, title=f"All {name}", note="So.", columns=columns, rows=rows, is_long=is_long)


ABOUT = About(machine="a machine", date="2026-01-01", command="genius bench x", seed=3)


def test_tables_become_text_and_long_ones_are_left_out():
    text = markdown(Result(title="Quality", about=ABOUT, tables=(table("cats"), table("dogs", is_long=True))))
    assert text.startswith("# Quality\n\n## All cats\n\nSo.\n\n| name   |   value |\n|:-------|--------:|\n")
    assert r"| a\|b   |   0.500 |" in text
    assert "dogs" not in text
    assert text.endswith("a machine; 2026-01-01; `genius bench x`; seed 3\n")


def test_rows_of_tables_of_one_name_stand_together_in_the_json():
    found = Result(title="Quality", about=ABOUT, tables=(table("cats"), table("cats"))).to_json()
    assert len(found["cats"]) == 2
