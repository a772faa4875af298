import numpy as np

from genius_search.lab.report.analysis import Item, group_by_code, project
from genius_search.lab.report.figures import Cloud, clouds_figure, codes_figure
from genius_search.lab.report.report import Report, write
from genius_search.lab.report.tables import codes_table
from genius_search.lab.table import Table

CODES = np.array(
    [
        [0, 5, 1],
        [0, 5, 1],
        [0, 5, 2],
        [0, 4, 2],
        [0, 4, 3],
        [1, 9, 9],
        [1, 9, 8],
        [1, 9, 9],
        [1, 9, 9],
        [1, 7, 7],
        [1, 7, 7],
    ]
)
PICTURES = np.array([True] * 5 + [False] * 6)


def test_behind_the_modality_the_fullest_codes_with_pictures_are_followed():
    groups = group_by_code(CODES, PICTURES, first=1)
    assert [(group.level, group.prefix, group.size) for group in groups] == [
        (0, (1,), 6),
        (0, (0,), 5),
        (1, (0, 5), 3),
        (1, (0, 4), 2),
        (2, (0, 5, 1), 2),  # 0.5.2 has one item only
    ]
    assert list(groups[-1].rows) == [0, 1]


def test_without_pictures_and_modality_the_fullest_codes_are_followed():
    groups = group_by_code(CODES[:, 1:], np.zeros(11, dtype=bool), first=0)
    assert [group.prefix for group in groups] == [(9,), (5,), (4,), (9, 9)]


def test_items_are_shown_by_picture_or_by_words(tmp_path):
    groups = group_by_code(CODES, PICTURES, first=1)
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    items = [
        [Item(image=picture if PICTURES[row] else None, text="a red kite") for row in group.rows]
        for group in groups
    ]
    items[0][0] = Item(image=None, text="a $50% off^ $ deal")  # prices, not a formula
    table = codes_table(groups, items)
    assert table.cells()[2] == ["1", "0.5", "a red kite; a red kite; a red kite", "3"]
    figure = codes_figure(groups, items, title="Codes")
    files = write(tmp_path / "report", Report(title="Report", about=("Toys.",), parts=(table, figure)))
    text = files[0].read_text()
    assert text.startswith("# Report\n\nToys.\n\n## Codes by level\n")
    assert "](figures/codes.png)\n\n*Codes.*\n" in text
    assert sorted(path.name for path in files) == [
        "codes-by-level.csv", "codes-by-level.tex", "codes.png", "codes.svg", "report.md",
    ]  # fmt: skip
    assert files[0].parent / "figures" / "codes.png" in files


def test_two_tables_of_one_name_have_files_of_their_own(tmp_path):
    tables = tuple(
        Table(name="speed", title=title, headings=("a",), lines=[(title,)]) for title in ("first", "second")
    )
    files = write(tmp_path, Report(title="Report", about=(), parts=tables))
    assert len(set(files)) == len(files) == 5
    assert "first" in (tmp_path / "tables" / "speed.csv").read_text()
    assert "second" in (tmp_path / "tables" / "speed-2.csv").read_text()


def test_the_principal_components_hold_what_varies_most():
    random = np.random.default_rng(1)
    vectors = np.zeros((50, 5), dtype=np.float32)
    vectors[:, 3] = 10 * random.standard_normal(50)
    vectors[:, 1] = random.standard_normal(50)
    found = project(vectors)
    assert found.kept > 0.999
    assert np.abs(np.corrcoef(found.places[:, 0], vectors[:, 3])[0, 1]) > 0.999
    assert found.distinct == 50


def test_collapsed_ids_are_one_point_and_said_to_be():
    found = project(np.ones((20, 4), dtype=np.float32))
    assert (found.distinct, found.kept) == (1, 0.0)
    cloud = Cloud("without L_cl", np.ones((20, 4), dtype=np.float32), np.zeros(20, dtype=np.int8))
    figure = clouds_figure([cloud]).figure
    assert "1 different IDs of 20 items" in figure.axes[0].get_xlabel()
