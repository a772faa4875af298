"""Words beside vectors: names, numbers and codes, which encoders hardly tell apart, find their items."""

from __future__ import annotations

import shutil

import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.config import SearchConfig
from genius_search.index.index import Index
from genius_search.index.words import CODE, find_words, split_places
from genius_search.index.snapshot import Location

NUMBERS = range(100, 140)
NAMES = ("Kerlin", "Vikdal", "Zôra", "Moprasen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts that differ in a number and a name alone, and pictures without texts."""
    place = tmp_path_factory.mktemp("words")
    for number in NUMBERS:
        name = dict(zip(NUMBERS, NAMES, strict=False)).get(number, f"nobody {number}")
        text = f"a red anchor, part AX-{number}4 of {number % 2 + 2020}, painted by {name}"
        (place / f"note {number}.txt").write_text(text)
    for number in range(4):
        Image.new("RGB", (20, 20), (60 * number, 0, 0)).save(place / f"IMG_203{number}.png")
    return place


@pytest.fixture(scope="module")
def index(folder, clip_folder, tmp_path_factory):
    """An index of two segments, which nobody may change."""
    place = tmp_path_factory.mktemp("words")
    index, _ = Index.create(place / "index", pool=folder, encoder=f"clip:{clip_folder}")
    (place / "more").mkdir()
    (place / "more" / "late.txt").write_text("a red anchor, part AX-7774 of 2021, painted by Lindhu")
    index.add(place / "more")
    return index


def ids(hits):
    return [hit.id for hit in hits]


def test_a_number_is_found_where_the_encoder_does_not_see_it(index):
    for number in (103, 117, 138):
        hits = index.search(f"red anchor ax-{number}4", k=5)
        assert hits[0].id == f"note {number}.txt"
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
        assert len(set(ids(hits))) == 5
    assert index.search("part ax-7774")[0].id == "more/late.txt"
    found = {index.search(f"red anchor AX-{other}4", hybrid=False)[0].id for other in NUMBERS}
    assert len(found) < 10


@pytest.mark.parametrize("name", ["IMG_2032", "img_2032", "IMG_2032.png", "holiday/IMG_2032.png"])
def test_a_file_is_found_by_its_name(index, name):
    best, *_ = index.search(name)
    assert (best.id, best.probability) == ("IMG_2032.png", None)
    assert index.search(name, k=1) == [best]


@pytest.mark.parametrize(
    ("name", "item"), [("kerlin", "note 100.txt"), ("ZORA", "note 102.txt"), ("lindhu,", "more/late.txt")]
)
def test_an_item_is_found_by_a_name_that_the_encoder_does_not_know(index, name, item):
    hits = index.search(f"anchor by {name}", modality="text", k=3)
    assert hits[0].id == item
    assert hits[0].score >= hits[1].score >= hits[2].score


def test_what_many_items_contain_changes_nothing(index):
    for text in ("red anchor 2021", "red anchor 77777", "a red anchor", "red"):
        raised, others = index.search(text, k=8), index.search(text, k=8, hybrid=False)
        assert [(hit.id, hit.score) for hit in raised] == [(hit.id, hit.score) for hit in others]


def test_the_rarer_word_weighs_more_and_all_segments_are_searched(index):
    words = find_words(index.snapshot, "painted lindhu kerlin unknown ax-1054 img_2031")

    def named(places):
        rows = zip(*split_places(places), strict=True)
        return {index.snapshot.item_at(Location(*place)).id for place in rows}

    assert named(words.places) == {"note 100.txt", "note 105.txt", "more/late.txt", "IMG_2031.png"}
    assert named(words.places[words.has_code]) == {"note 105.txt", "IMG_2031.png"}


def test_filters_and_deleted_items_count(index, tmp_path):
    assert "note 105.txt" not in ids(index.search("part ax-1054", where=["id!=note 105.txt"], k=45))
    assert {hit.modality.value for hit in index.search("IMG_2031", modality="text")} == {"text"}
    assert index.search("IMG_2031", modality="image")[0].id == "IMG_2031.png"
    assert index.search("part ax-1054", match="ax-1064")[0].id == "note 106.txt"
    changed = Index.open(shutil.copytree(index.folder, tmp_path / "index"))
    changed.delete("note 105.txt")
    assert "note 105.txt" not in ids(changed.search("part ax-1054", k=45))


def test_a_generators_order_is_searched_too(folder, model, tmp_path):
    index, _ = Index.create(tmp_path / "index", model=model, pool=folder)
    config = SearchConfig(router="generator")
    assert index.search("kerlin", modality="text", config=config)[0].id == "note 100.txt"


def test_codes_put_items_first_and_counts_do_not(index):
    words = ("IMG 2034", "ax 7", "b2", "2024", "rtx3090", "2", "2nd", "3D", "80s", "12 5", "2 000", "kite")
    assert [word for word in words if CODE.match(word)] == ["IMG 2034", "ax 7", "b2", "2024", "rtx3090"]
    for text in ("104 anchors", "the 104th anchor"):
        assert not find_words(index.snapshot, text).has_code.any()


def test_the_command(index, capsys):
    assert main(["search", str(index.folder), "IMG_2033", "--files-only", "-k", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith("IMG_2033.png")
    assert main(["search", str(index.folder), "IMG_2033", "--no-hybrid"]) == 0
