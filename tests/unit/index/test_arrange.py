"""Hits sorted by a field, counts of values, and one hit for each group."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from genius_search import NewItem
from genius_search.errors import DeadlinePassed, UsageError
from genius_search.index.arrange import NUM_SORTED_HITS
from genius_search.index.index import Index
from genius_search.index.request import SearchRequest

VECTORS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
FIELDS = [
    {"price": 5, "brand": "acme", "taken": "2024-05-01", "sale": True},
    {"price": 2.5, "brand": "bata", "taken": "2023", "sale": False},
    {"price": "12", "brand": "acme", "taken": "2024-05-01T12:00", "tags": ["new", "red"]},
    {"price": 12, "brand": "acme", "tags": ["red"], "size": {"width": 3}},
    {"brand": "Cord", "tags": []},
    {"price": 9, "brand": "bata", "tags": ["old"]},
]


@pytest.fixture
def index(tmp_path) -> Index:
    """Items a to f; f and e are the newest."""
    index = Index.from_vectors(
        tmp_path / "index", VECTORS[:4], ids=[*"abcd"], fields=FIELDS[:4], embedding_bits=16
    )
    index.add_vectors(VECTORS[4:5], ids=["e"], fields=FIELDS[4:5])
    index.add_vectors(VECTORS[5:7], ids=["f", "gone"], fields=[FIELDS[5], {"brand": "lost"}])
    index.delete("gone")
    return index


def ids(hits) -> str:
    return "".join(hit.id for hit in hits)


def test_without_a_query_all_items_are_sorted_and_those_without_the_field_come_last(index):
    assert ids(index.search(order_by="price")) == "bafcde"
    assert ids(index.search(order_by="-price")) == "cdfabe"
    assert ids(index.search(order_by="-taken", where="brand!=Cord")) == "cabfd"
    assert ids(index.search(order_by="id", k=2, offset=2)) == "cd"
    assert ids(index.search(order_by="tags", k=3)) == "cfd"
    assert ids(index.search(order_by="-size.width", k=1)) == "d"
    assert [hit.rank for hit in index.search(order_by="price", k=2, offset=3)] == [4, 5]
    index.compact(min_deleted=0)
    assert ids(index.search(order_by="price")) == "bafcde"


def test_with_a_query_the_first_hits_are_sorted(index):
    vector = VECTORS[2]
    hits = index.search(vector=vector, order_by="-price", k=4)
    assert ids(hits)[0] in "cd"
    assert (ids(hits)[2:], hits.cut_off) == ("fa", "first hits")
    scores = {hit.id: hit.score for hit in index.search(vector=vector, k=6)}
    assert [hit.score for hit in hits] == [scores[hit.id] for hit in hits]
    assert ids(index.search(vector=vector, order_by="price", k=1, offset=5)) == "e"


def test_only_hits_above_the_least_score_are_sorted(index, monkeypatch):
    best = index.search(vector=VECTORS[2], k=3)
    searcher = index._state.searcher
    settings = searcher._hit_settings._replace(least_scores={"text": best[2].score - 1e-6})
    monkeypatch.setattr(searcher, "_hit_settings", settings)
    hits = index.search(vector=VECTORS[2], order_by="price")
    assert (hits.cut_off, set(ids(hits))) == ("least score", set(ids(best)))


def test_only_the_first_hundred_are_sorted_without_a_least_score(tmp_path):
    vectors = np.random.default_rng(1).normal(size=(150, 8))
    index = Index.from_vectors(tmp_path / "index", vectors, fields=[{"n": n} for n in range(150)])
    hits = index.search(vector=vectors[0], order_by="n", k=1000)
    assert len(hits) == NUM_SORTED_HITS
    first = index.search(vector=vectors[0], k=NUM_SORTED_HITS)
    assert [hit.id for hit in hits] == sorted((hit.id for hit in first), key=int)


def test_periods_are_counted_the_newest_first(index):
    facets = index.search(facets=["taken:month", "taken:year", "taken:day"]).facets
    assert facets["taken:month"] == [("2024-05", 2)]
    assert facets["taken:day"] == [("2024-05-01", 2)]
    assert index.search(facets="taken:year", where="brand=bata").facets == {"taken:year": []}
    assert index.search(facets="price:year", k=1).facets == {"price:year": []}
    index.update("f", fields={"taken": ["2025-01-02", "2025-01-03", "2023-12"]})
    facets = index.search(facets="taken:year").facets
    assert facets["taken:year"] == [("2025", 1), ("2024", 2), ("2023", 1)]


def test_ranges_of_numbers_are_counted_with_given_or_automatic_bounds(index):
    facets = index.search(facets={"price": [3, 9, 10, 11]}).facets
    ranges = [("..3", 1), ("3..9", 1), ("9..10", 1), ("10..11", 0), ("11..", 2)]
    assert facets == {"price:3,9,10,11": ranges}
    assert index.search(facets="price:3,9,10,11", where="price<9").facets["price:3,9,10,11"] == [
        ("..3", 1),
        ("3..9", 1),
        ("9..10", 0),
        ("10..11", 0),
    ]
    automatic = index.search(facets="price:ranges").facets["price:ranges"]
    assert sum(count for _, count in automatic) == 5
    assert index.search(facets="brand:ranges").facets == {"brand:ranges": []}
    with pytest.raises(UsageError, match="not ascending"):
        index.search(facets="price:9,3")


def test_values_are_counted_among_all_items_that_the_conditions_allow(index):
    facets = index.search(vector=VECTORS[0], k=1, facets=["brand", "tags", "price"]).facets
    assert facets["brand"] == [("acme", 3), ("bata", 2), ("Cord", 1)]
    assert facets["tags"] == [("red", 2), ("new", 1), ("old", 1)]
    assert facets["price"] == [(12, 2), (2.5, 1), (5, 1), (9, 1)]
    facets = index.search(where="brand=acme", facets=["taken", "sale", "modality"]).facets
    assert facets["taken"] == [("2024-05-01", 1), ("2024-05-01T12:00", 1)]
    assert (facets["sale"], facets["modality"]) == ([(True, 1)], [("text", 3)])
    assert index.search(facets="brand", k=2, where="price>100").facets == {"brand": []}
    assert json.dumps(index.search(facets="sale").facets) == '{"sale": [[false, 1], [true, 1]]}'


def test_one_hit_for_each_value_with_the_number_of_the_others(index):
    hits = index.search(group_by="brand")
    assert (ids(hits), hits.more_in_group) == ("fea", [1, 0, 2])
    hits = index.search(group_by="brand", where="price>5", order_by="-price")
    assert (ids(hits), hits.more_in_group) == ("cf", [1, 0])
    hits = index.search(vector=VECTORS[3], group_by="brand", k=2)
    assert (hits[0].id, hits.more_in_group[0], len(hits)) == ("d", 2, 2)
    assert len({hit.fields["brand"] for hit in hits}) == 2
    assert len(index.search(vector=VECTORS[3], group_by="brand", k=2, offset=2)) == 1
    assert ids(index.search(group_by="taken")) == "feabcd"


def test_near_duplicates_are_one_hit(index):
    nearby = VECTORS[:2] + 0.01
    index.add_vectors(nearby, ids=["x", "y"], fields=[{"brand": "x"}] * 2)
    hits = index.search(vector=VECTORS[0], group_by="near", k=20)
    assert len(hits) == 6
    assert hits.more_in_group[0] == 1
    with pytest.raises(UsageError, match="needs a query"):
        index.search(group_by="near")


def test_copies_are_one_hit(model, tmp_path):
    items = [NewItem("1", "a kite"), NewItem("2", "a kite"), NewItem("3", "a boat")]
    encoded = Index.create(tmp_path / "encoded", items, model=model)
    assert encoded.search(group_by="content").more_in_group == [1, 0]
    assert encoded.search("a kite", group_by="content", k=1).more_in_group[0] in (0, 1)
    assert len(encoded.search("a kite", group_by="content")) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"order_by": "colour"}, LookupError, "has a field 'colour'; the fields are brand"),
        ({"facets": ["text"]}, UsageError, "facets: 'text' is not a field"),
        ({"group_by": "a b"}, UsageError, "group_by: 'a b' is not the name of a field"),
        ({"order_by": ""}, UsageError, "not the name of a field"),
    ],
)
def test_what_is_no_field_is_refused(index, options, error, message):
    with pytest.raises(error, match=message):
        index.search(where="price>0", **options)


def test_a_deadline_ends_the_reading_of_fields(index):
    request = SearchRequest(facets=["brand"], where="price>0", deadline=time.monotonic() - 1)
    with pytest.raises(DeadlinePassed):
        index.search(request)
