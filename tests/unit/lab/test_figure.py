from genius_search.lab.report.figures import draw_lines, format_tick
from genius_search.lab.table import pareto_front


def test_a_front_holds_the_settings_that_nothing_cheaper_reaches():
    points = [(3.0, 0.5), (1.0, 0.2), (2.0, 0.5), (4.0, 0.6), (2.5, 0.4), (1.0, 0.3)]
    assert pareto_front(points) == ((1.0, 0.3), (2.0, 0.5), (4.0, 0.6))
    assert pareto_front([]) == ()


def test_numbers_on_an_axis_are_plain():
    ticks = [format_tick(value) for value in (0.01, 0.5, 6.0, 2000.0, 1e8)]
    assert ticks == ["0.01", "0.5", "6", "2,000", "100M"]


def test_the_highest_line_comes_first():
    lines = {"ours": [(10.0, 1.0), (100.0, 1.5)], "theirs": [(100.0, 10.0), (10.0, 1.0)]}
    (legend,) = draw_lines(lines, x="items", y="ms").legends
    assert [text.get_text() for text in legend.get_texts()] == ["theirs", "ours"]
