from __future__ import annotations

from genius_search.lab.report.table import best_points


def test_a_line_holds_the_settings_that_nothing_cheaper_reaches():
    points = [(3.0, 0.5), (1.0, 0.2), (2.0, 0.5), (4.0, 0.6), (2.5, 0.4), (1.0, 0.3)]
    assert best_points(points) == ((1.0, 0.3), (2.0, 0.5), (4.0, 0.6))
    assert best_points([]) == ()
