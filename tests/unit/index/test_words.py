"""Words beside vectors: names, numbers and codes, which encoders hardly tell apart, find their items."""

from __future__ import annotations

import math
import shutil
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from genius_search.cli import main
from genius_search.config import SearchConfig
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.index.merge import ModalityHits, merge_modalities
from genius_search.index.snapshot import Location
from genius_search.index.words import CODE, find_word_matches, split_words, unpack_locations
from genius_search.records import Modality

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
    index = Index.create(place / "index", folder, encoder=f"clip:{clip_folder}")
    (place / "more").mkdir()
    (place / "more" / "late.txt").write_text(
        "a red anchor, part AX-7774 of 2021, painted by Lindhu"
    )
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
    ("name", "item"),
    [("kerlin", "note 100.txt"), ("ZORA", "note 102.txt"), ("lindhu,", "more/late.txt")],
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
    words = find_word_matches(index._snapshot, "painted lindhu kerlin unknown ax-1054 img_2031")

    def named(places):
        rows = zip(*unpack_locations(places), strict=True)
        return {index._snapshot.item_at(Location(*place)).id for place in rows}

    assert named(words.locations) == {
        "note 100.txt",
        "note 105.txt",
        "more/late.txt",
        "IMG_2031.png",
    }
    assert named(words.locations[words.has_code]) == {"note 105.txt", "IMG_2031.png"}


def test_filters_and_deleted_items_count(index, tmp_path):
    assert "note 105.txt" not in ids(index.search("part ax-1054", where=["id!=note 105.txt"], k=45))
    assert {hit.modality.value for hit in index.search("IMG_2031", modality="text")} == {"text"}
    assert index.search("IMG_2031", modality="image")[0].id == "IMG_2031.png"
    assert index.search("part ax-1054", match="ax-1064")[0].id == "note 106.txt"
    changed = Index.open(shutil.copytree(index.folder, tmp_path / "index"))
    changed.delete("note 105.txt")
    assert "note 105.txt" not in ids(changed.search("part ax-1054", k=45))


def test_a_generators_order_is_searched_too(folder, model, tmp_path):
    index = Index.create(tmp_path / "index", folder, model=model)
    config = SearchConfig(router="generator")
    assert index.search("kerlin", modality="text", config=config)[0].id == "note 100.txt"


def test_codes_put_items_first_and_counts_do_not(index):
    words = (
        "IMG 2034",
        "ax 7",
        "b2",
        "2024",
        "rtx3090",
        "2",
        "2nd",
        "3D",
        "80s",
        "12 5",
        "2 000",
        "kite",
    )
    assert [word for word in words if CODE.match(word)] == [
        "IMG 2034",
        "ax 7",
        "b2",
        "2024",
        "rtx3090",
    ]
    for text in ("104 anchors", "the 104th anchor"):
        assert not find_word_matches(index._snapshot, text).has_code.any()


def test_the_command(index, capsys):
    assert main(["search", str(index.folder), "IMG_2033", "--files-only", "-k", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith("IMG_2033.png")
    assert main(["search", str(index.folder), "IMG_2033", "--no-hybrid"]) == 0


KINDS = ("kite", "umbrella", "lantern", "ladder", "anchor")
COLOURS = ("green", "violet", "amber", "scarlet", "ivory", "teal", "ochre")


@pytest.fixture(scope="module")
def many(clip_folder, tmp_path_factory):
    """An index of 100 texts; each kind is in 7 of them, each colour in 8 or 9."""
    texts = []
    for number in range(100):
        kind = KINDS[number % 15] if number % 15 < len(KINDS) else "thing"
        colour = COLOURS[number % 12] if number % 12 < len(COLOURS) else "plain"
        texts.append(f"number {number} is a {colour} {kind}")
    return Index.create(
        tmp_path_factory.mktemp("many") / "index", texts, encoder=f"clip:{clip_folder}"
    )


def texts_of(hits):
    return [hit.text for hit in hits]


@pytest.mark.parametrize("kind", KINDS)
def test_items_with_the_only_word_of_a_query_come_before_others(many, kind):
    assert all(kind in text for text in texts_of(many.search(kind, k=7)))
    assert kind not in many.search(kind, k=8)[-1].text


def test_items_with_both_words_of_a_query_come_before_those_with_one(many):
    both = [text for text in texts_of(many.search("green kite", k=100)) if "green kite" in text]
    assert len(both) == 2
    assert set(texts_of(many.search("green kite", k=2))) == set(both)


def test_a_word_counts_by_how_rare_it_is(many):
    matches = find_word_matches(many._snapshot, "a scarlet kite number 7 of them")
    texts = texts_of(many._snapshot.items_at(*unpack_locations(matches.locations)))
    shares = dict(zip(texts, matches.shares.tolist(), strict=True))
    rare, kite, scarlet = (0.3 * math.log(100 / items) / math.log(100) for items in (1, 7, 9))
    assert shares["number 7 is a plain thing"] == pytest.approx(rare)
    assert shares["number 15 is a scarlet kite"] == pytest.approx(kite + scarlet)
    assert shares["number 0 is a green kite"] == pytest.approx(kite)
    assert "number 8 is a plain thing" not in shares  # "is" and "a" are frequent
    assert not matches.has_all.any()  # nothing contains "of" or "them"
    assert find_word_matches(many._snapshot, "a number").is_frequent


def test_of_a_long_query_only_rare_words_count(many, monkeypatch):
    monkeypatch.setattr("genius_search.index.words.MAX_RARE_ITEMS", 5)
    page = " ".join([*(f"word{number}x" for number in range(40)), "kite", "number 7"])
    matches = find_word_matches(many._snapshot, page)
    (item,) = many._snapshot.items_at(*unpack_locations(matches.locations))
    assert item.text == "number 7 is a plain thing"


@given(
    words=st.lists(st.sampled_from([*KINDS, *COLOURS, "7", "number"]), min_size=1, max_size=4),
    size=st.integers(1, 40),
)
def test_pages_and_conditions_keep_the_order_that_words_give(many, words, size):
    text = " ".join(words)
    whole = texts_of(many.search(text, k=100))
    pages = [many.search(text, k=size, offset=start) for start in range(0, 100, size)]
    assert [one for page in pages for one in texts_of(page)][:100] == whole
    kept = many.search(text, where=["text~kite"], k=100)
    assert texts_of(kept) == [one for one in texts_of(many.search(text, k=100)) if "kite" in one]


def test_words_change_the_order_of_a_modality_and_not_its_place_among_others():
    def hit(name, rank, excess):
        blank = {"modality": Modality.TEXT, "text": None, "image": None, "fields": {}}
        return SearchHit(
            rank=rank,
            id=name,
            score=1.0,
            codes=(),
            log_probabilities=(),
            excess=excess,
            **blank,
        )

    raised = [hit("with the word", 1, 1.0), hit("nearest", 2, 4.0)]
    pictures = [hit("picture", 1, 3.0), hit("farther picture", 2, 0.5)]
    parts = [(raised, [0.2, 0.3]), (pictures, [0.1, 0.0])]
    numbers = merge_modalities([ModalityHits.of_hits(*part) for part in parts], 4)
    merged = [[*raised, *pictures][number] for number in numbers]
    assert ids(merged) == ["with the word", "picture", "nearest", "farther picture"]


def test_a_text_without_words_of_the_query_is_compared_and_one_with_all_is_not(many):
    least = [hit.least_score for hit in many.search("umbrella", k=8)]
    assert least[:7] == [None] * 7
    assert least[7] is not None
    assert many.search("umbrella").good_match is not False
    assert [hit.least_score for hit in many.search("umbrella", where=["text~number"], k=9)] == [
        None
    ] * 9


@pytest.mark.parametrize("word", ["\N{NAZAR AMULET}", "/", "a/", "1/", "."])
def test_a_query_of_one_long_word_is_split_in_a_bounded_time(word):
    began = time.process_time()
    split_words(word * 100_000)
    assert time.process_time() - began < 2
