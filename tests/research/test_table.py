import csv
import io

from research.table import Estimate, Table

TABLE = Table(
    name="recall",
    title="Recall, 50 % of it",
    note="Mean ± sd.",
    headings=("system", "R@5", "n"),
    lines=[("a|b_c", Estimate(86.25, 0.5), 1200), ("exact", Estimate(99.0), None)],
)


def test_csv_has_full_numbers_and_a_column_for_standard_deviations():
    rows = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert rows[0] == {
        "system": "a|b_c", "R@5": "86.25", "R@5 sd": "0.5", "n": "1200",
    }  # fmt: skip
    assert rows[1]["R@5 sd"] == rows[1]["n"] == ""
