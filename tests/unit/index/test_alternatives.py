"""Queries with several answers: texts that name alternatives, and parts that are searched for by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from genius_search.errors import UsageError
from genius_search.index.alternatives import split_alternatives
from genius_search.index.hits import SearchHit, SearchResult, interleave
from genius_search.index.index import Index
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.model import Genius
from genius_search.records import Modality


@pytest.mark.parametrize(
    ("text", "alternatives"),
    [
        ("a dog or a red car", ["a dog", "a red car"]),
        ("A dog, a cat OR the red car?", ["A dog", "a cat", "the red car"]),
        ("dogs playing, or children on a swing", ["dogs playing", "children on a swing"]),
        ("a dog on a lawn, or children playing there", ["a dog on a lawn", "children playing there"]),
        ("a red, or blue umbrella", []),
        ("cat or dog", ["cat", "dog"]),
        ("left arrow or right arrow", ["left arrow", "right arrow"]),
        ("align end horizontal or message star", ["align end horizontal", "message star"]),
        ("red car or bicycle", []),
        ("a man, in a hat, or a dog on a lawn", ["a man, in a hat", "a dog on a lawn"]),
        ("a dog", []),
        ("a black or white dog", []),
        ("two or three people", []),
        ("red, green, or blue umbrellas", []),
        ("a dog on a path beside a lake or a stream", []),
        ("or", []),
        (" or a dog", []),
        ("a dog or ", []),
        ("", []),
        ("orange corridor", []),
        (" or ".join(f"a thing{number}" for number in range(9)), []),
    ],
)
def test_a_text_is_split_where_it_clearly_names_alternatives(text, alternatives):
    assert split_alternatives(text) == alternatives


@pytest.fixture(scope="module")
def index(trained, tmp_path_factory) -> Index:
    root: Path = tmp_path_factory.mktemp("alternatives")
    things = ("kite", "boat", "leather bag", "clock", "star", "umbrella")
    rows = [
        {"did": f"1:{number + 1}", "modality": "text", "txt": f"a {colour} {thing}", "img_path": None}
        for number, (colour, thing) in enumerate((c, t) for c in ("red", "green", "blue") for t in things)
    ]
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (32, 32), colour).save(root / f"{colour}.png")
        rows.append({"did": f"2:{number + 1}", "modality": "image", "txt": None, "img_path": f"{colour}.png"})
    pool = root / "pool.jsonl"
    pool.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, _ = Index.create(root / "index", model=Genius.open(trained.model), pool=pool, embeddings="fused")
    return made


def test_a_text_with_alternatives_is_searched_for_as_a_whole_and_by_each(index):
    text, k = "a red kite or a blue clock", 6
    apart = [index.search(one, modality="text", k=k) for one in ("a red kite", "a blue clock")]
    hits = index.search(text, modality="text", k=k)
    assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5, 6]
    assert len({hit.id for hit in hits}) == k
    assert {apart[0][0].id, apart[1][0].id} <= {hit.id for hit in hits[:3]}
    other = index.search("a red kite beside a blue clock", modality="text", k=k)
    assert hits != other


def test_any_searches_for_each_part_by_itself(index):
    parts = [SearchPart(text="a red kite"), SearchPart(id="1:16"), SearchPart(text="a green star")]
    apart = [index.search(parts=[part], modality="text", k=3) for part in parts]
    hits = index.search(parts=parts, combine="any", modality="text", k=4)
    expected = list(dict.fromkeys(found[rank].id for rank in range(3) for found in apart))
    assert [hit.id for hit in hits] == expected[:4]
    assert hits != index.search(parts=parts, modality="text", k=4)


def test_alternatives_in_every_modality_come_in_turn(index):
    hits = index.search(parts=[SearchPart(text="red"), SearchPart(text="blue")], combine="any", k=8)
    apart = [index.search(text, k=8) for text in ("red", "blue")]
    assert {apart[0][0].id, apart[1][0].id} <= {hits[0].id, hits[1].id}
    assert {hit.modality for hit in hits} == {Modality.TEXT, Modality.IMAGE}


def test_many_requests_with_and_without_alternatives_are_answered_as_one_by_one(index):
    requests = [
        SearchRequest(text="a red kite or a blue clock"),
        SearchRequest(text="a boat", modality="text", k=3),
        SearchRequest(text="kite or clock", where=["id!=1:1"], k=2),
    ]
    together = index.search_many(requests)
    for request, hits in zip(requests, together, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in index.search_many([request])[0]]


def test_the_alternative_that_finds_an_item_best_is_explained(index):
    text = "a red kite or a blue clock"
    for own in ("a red kite", "a blue clock"):
        found = index.search(own, modality="text")[0].id
        assert index.explain(found, text, modality="text").rank == 1


def test_weights_without_effect_are_refused(index):
    with pytest.raises(UsageError, match="no effect"):
        index.search(parts=[SearchPart(text="a kite", weight=2.0)], combine="any")


def test_an_item_that_several_alternatives_find_is_listed_once():
    def result(*ids: str) -> SearchResult:
        hits = [
            SearchHit(rank, name, 1 / rank, Modality.TEXT, name, None, {}, (0,), ())
            for rank, name in enumerate(ids, start=1)
        ]
        return SearchResult(hits, len(ids))

    merged = interleave([result("a", "b", "c"), result("b", "d"), result("a")], 3)
    assert [(hit.id, hit.rank) for hit in merged.hits] == [("a", 1), ("b", 2), ("d", 3)]
    assert merged.touched == 6
