"""Words with digits, which encoders hardly tell apart: items that contain them come first."""

from __future__ import annotations

import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.errors import UsageError
from genius_search.index.index import Index

NUMBERS = range(100, 140)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts that differ in a number alone, half of them with a second number, and pictures without texts."""
    place = tmp_path_factory.mktemp("numbers")
    for number in NUMBERS:
        (place / f"note {number}.txt").write_text(f"a red anchor, part AX-{number}4 of {number % 2 + 2020}")
    for number in range(4):
        Image.new("RGB", (20, 20), (60 * number, 0, 0)).save(place / f"IMG_203{number}.png")
    return place


@pytest.fixture(scope="module")
def index(folder, clip_folder, tmp_path_factory):
    index, _ = Index.create(tmp_path_factory.mktemp("i") / "i", pool=folder, encoder=f"clip:{clip_folder}")
    return index


def ids(hits):
    return [hit.id for hit in hits]


@pytest.mark.parametrize("number", [103, 117, 138])
def test_a_number_is_found_where_the_encoder_does_not_see_it(index, number):
    hits = index.search(f"red anchor ax-{number}4", k=5)
    assert hits[0].id == f"note {number}.txt"
    assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
    assert len(set(ids(hits))) == 5
    assert len({index.search(f"red anchor AX-{other}4", hybrid="off")[0].id for other in NUMBERS}) < 10


@pytest.mark.parametrize("name", ["IMG_2032", "img_2032", "IMG_2032.png", "holiday/IMG_2032.png"])
def test_a_file_is_found_by_its_name(index, name):
    best, *_ = index.search(name)
    assert (best.id, best.probability) == ("IMG_2032.png", None)


def test_what_many_items_contain_changes_nothing(index):
    for text in ("red anchor 2021", "red anchor 77777", "red anchor", "red"):
        assert index.search(text, k=8) == index.search(text, k=8, hybrid="off")


def test_filters_deleted_items_and_segments_count(folder, clip_folder, tmp_path):
    index, _ = Index.create(tmp_path / "i", pool=folder, encoder=f"clip:{clip_folder}")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "new.txt").write_text("a green ground, part AX-7774")
    index.add(tmp_path / "more")
    assert len(index.snapshot.segments) == 2
    assert index.search("part ax-7774")[0].id == "new.txt"
    assert index.search("part ax-1054")[0].id == "note 105.txt"
    kept = index.search("part ax-1054", where=["id!=note 105.txt"], k=44)
    assert "note 105.txt" not in ids(kept)
    assert {hit.modality.value for hit in index.search("IMG_2031", modality="text")} == {"text"}
    assert index.search("IMG_2031", modality="image")[0].id == "IMG_2031.png"
    assert index.search("part ax-1054", match="ax-1064")[0].id == "note 106.txt"
    index.delete("note 105.txt")
    assert "note 105.txt" not in ids(index.search("part ax-1054", k=44))


def test_several_items_with_the_number_come_first_in_the_order_of_their_scores(folder, clip_folder, tmp_path):
    index, _ = Index.create(tmp_path / "i", pool=folder, encoder=f"clip:{clip_folder}")
    (tmp_path / "more").mkdir()
    for number in range(3):
        (tmp_path / "more" / f"{number}.txt").write_text("green " * number + "ground 7774")
    index.add(tmp_path / "more")
    alone = index.search("ground 7774", match="7774")
    assert ids(index.search("ground 7774", k=5))[:3] == ids(alone)
    assert len(index.search("ground 7774", k=2)) == 2


def test_a_hit_keeps_what_is_known_of_it(index):
    [hit] = [hit for hit in index.search("red anchor ax-1174", k=44) if hit.id == "note 117.txt"]
    [other] = [
        hit for hit in index.search("red anchor ax-1174", k=44, hybrid="off") if hit.id == "note 117.txt"
    ]
    assert (hit.score, hit.codes, hit.text) == (pytest.approx(other.score, abs=1e-5), other.codes, other.text)


def test_the_command_and_an_unknown_word_for_it(index, capsys):
    assert main(["search", str(index.folder), "IMG_2033", "--files-only", "-k", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith("IMG_2033.png")
    with pytest.raises(UsageError, match="auto, words or off"):
        index.search("a", hybrid="on")
