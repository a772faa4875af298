"""Rare words, such as names, which encoders hardly tell apart: items that have them rise if this is asked for."""

from __future__ import annotations

import pytest

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.index.words import find_rare_words, split_words

NAMES = ("Kerlin", "Vikdal", "Zôra", "Moprasen")


@pytest.fixture(scope="module")
def index(clip_folder, tmp_path_factory):
    """Texts of two segments that differ in a name alone, and one without a name."""
    place = tmp_path_factory.mktemp("names")
    for number in range(30):
        name = NAMES[number] if number < len(NAMES) else f"nobody{number}"
        (place / f"{number}.txt").write_text(f"a red anchor on a beach, painted by {name}")
    index, _ = Index.create(tmp_path_factory.mktemp("i") / "i", pool=place, encoder=f"clip:{clip_folder}")
    (place / "more").mkdir()
    (place / "more" / "late.txt").write_text("a red anchor on a beach, painted by Lindhu")
    index.add(place / "more")
    return index


@pytest.mark.parametrize(("name", "item"), [("kerlin", "0.txt"), ("ZORA", "2.txt"), ("lindhu", "late.txt")])
def test_an_item_is_found_by_a_name_that_the_encoder_does_not_know(index, name, item):
    hits = index.search(f"an anchor by {name}", hybrid="words", k=3)
    assert hits[0].id == item
    assert [hit.rank for hit in hits] == [1, 2, 3]
    assert hits[0].score >= hits[1].score >= hits[2].score


def test_words_that_many_items_have_change_nothing(index):
    for text in ("a red anchor on a beach", "by somebody else"):
        assert index.search(text, hybrid="words", k=9) == index.search(text, k=9)


def test_the_rarer_word_weighs_more_and_all_rows_are_found(index):
    text = "painted lindhu kerlin unknown"
    words = find_rare_words(index.snapshot, text, None)
    assert set(words.weights) == {"lindhu", "kerlin"}
    assert words.item_ids == {"0.txt", "late.txt"}


def test_filters_and_deleted_items_count(index, clip_folder, tmp_path):
    found = index.search("kerlin", hybrid="words", where=["id!=0.txt"], k=31)
    assert "0.txt" not in {hit.id for hit in found}
    (tmp_path / "pool").mkdir()
    for number in range(12):
        (tmp_path / "pool" / f"{number}.txt").write_text(f"a kite of {NAMES[number % 4]}")
    other, _ = Index.create(tmp_path / "i", pool=tmp_path / "pool", encoder=f"clip:{clip_folder}")
    other.delete(["0.txt", "4.txt"])
    hits = other.search("kerlin", hybrid="words", k=12)
    assert hits[0].id == "8.txt"
    assert len(hits) == 10


def test_scores_of_a_generator_are_refused(index):
    with pytest.raises(UsageError, match="rerank is none"):
        index.search("kerlin", hybrid="words", config=SearchConfig(rerank="none", router="generator"))


def test_words_are_split_without_case_and_accents():
    assert split_words("Zôra's_kite, 3D—ÉTÉ") == ["zora", "s", "kite", "3d", "ete"]
