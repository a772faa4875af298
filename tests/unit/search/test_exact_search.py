import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import BadData
from genius_search.search import exact
from genius_search.search.exact import exact_search


@given(
    num_queries=st.integers(0, 3),
    num_items=st.integers(1, 40),
    k=st.integers(1, 12),
    batch=st.integers(1, 45),
    seed=st.integers(0, 10_000),
)
def test_the_nearest_items_are_a_brute_forces_whatever_the_batch_and_equal_ones_come_by_row(
    num_queries, num_items, k, batch, seed
):
    random = np.random.default_rng(seed)
    queries = random.integers(-1, 2, (num_queries, 2)).astype(np.float32)
    vectors = random.integers(-1, 2, (num_items, 2)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "ITEM_BLOCK", batch)
        found = exact_search(
            torch.from_numpy(queries), lambda rows: torch.from_numpy(vectors[rows]), num_items, k=k
        )
    scores = queries @ vectors.T
    expected = [sorted(range(num_items), key=lambda item: (-row[item], item))[:k] for row in scores]
    assert found.items.tolist() == expected
    assert found.scores.tolist() == [
        [row[item] for item in items] for row, items in zip(scores.tolist(), expected, strict=True)
    ]


@pytest.mark.parametrize("where", ["queries", "items"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_that_no_order_can_place_are_refused(where, value):
    queries, items = torch.ones(2, 3), torch.ones(5, 3)
    (queries if where == "queries" else items)[1, 1] = value
    with pytest.raises(BadData, match=where):
        exact_search(queries, lambda rows: items[rows], 5, k=2)


def test_only_one_batch_of_vectors_is_asked_for_at_a_time(monkeypatch):
    monkeypatch.setattr(exact, "ITEM_BLOCK", 4)
    asked = []

    def vectors(rows):
        asked.append((rows.start, rows.stop))
        return torch.eye(10)[rows]

    found = exact_search(torch.eye(10)[7:8], vectors, 10, k=1)
    assert asked == [(0, 4), (4, 8), (8, 10)]
    assert found.items.tolist() == [[7]]
