"""Items counted and deleted by conditions, and their vectors."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.index.snapshot import UnknownItem

VECTORS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)


@pytest.fixture
def index(tmp_path) -> Index:
    """Items 0 to 11 with their numbers as prices; even ones are of acme. Item 3 is deleted."""
    fields = [
        {"price": number, "brand": "acme" if number % 2 == 0 else "other"} for number in range(12)
    ]
    texts = ["a kite"] * 6 + ["a boat"] * 6
    options = {"embedding_bits": 16, "modalities": ["image"] * 2 + ["text"] * 10}
    index = Index.from_vectors(tmp_path / "index", VECTORS, fields=fields, texts=texts, **options)
    index.delete("3")
    return index


def test_items_are_counted_by_conditions(index):
    assert (index.count(), len(index)) == (11, 11)
    assert index.count("price<10 and brand=acme") == 5
    assert index.count(["price<10", "brand=acme"], match="kite") == 3
    assert index.count({"brand": "other"}, modality="image") == 1
    assert index.count("price>100") == 0
    with pytest.raises(LookupError, match="has a field 'colour'"):
        index.count("colour=red")


def test_items_are_deleted_by_conditions(index):
    assert index.delete(where="price<10 and brand=acme") == (5, [])
    assert index.last_change.deleted == 5
    assert {item.id for item in index} == {"1", "5", "7", "9", "10", "11"}
    assert index.delete(where="price<0") == (0, [])
    assert index.delete(match="kite").deleted == 2
    assert index.delete(where="id is not missing").deleted == 4
    assert len(index) == 0
    assert index.check().items == 0


@pytest.mark.parametrize("options", [{}, {"item_ids": ["1"], "where": "price<3"}])
def test_deleting_needs_either_ids_or_a_condition(index, options):
    with pytest.raises(UsageError, match="either the ids of the items to delete, or a condition"):
        index.delete(**options)


def test_vectors_are_returned_by_id(index):
    index.add_vectors(VECTORS[:1] + 1, ids=["new"])
    vectors = index.get_vectors(["new", "7", "0"])
    expected = np.stack([VECTORS[0] + 1, VECTORS[7], VECTORS[0]])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, atol=2e-3)
    assert index.get_vectors(5).shape == (1, 8)
    with pytest.raises(UnknownItem, match="no item '3'"):
        index.get_vectors(["7", "3"])


def test_pages_list_the_items_that_meet_conditions(index):
    page = index.scroll(limit=3, where="brand=acme")
    assert ([item.id for item in page.items], page.cursor) == (["0", "10", "2"], "2")
    page = index.scroll(page.cursor, limit=3, where="brand=acme")
    assert ([item.id for item in page.items], page.cursor) == (["4", "6", "8"], None)
    assert index.scroll(limit=11).cursor is None
    with pytest.raises(UsageError, match=r"limit is 1\.5"):
        index.scroll(limit=1.5)
    with pytest.raises(UsageError, match="limit is 0"):
        index.scroll(limit=0)
