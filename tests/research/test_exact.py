import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from research import exact
from research.exact import exact_search

CPU = torch.device("cpu")


@given(
    num_queries=st.integers(0, 3),
    num_items=st.integers(1, 40),
    k=st.integers(1, 12),
    block=st.integers(1, 45),
    seed=st.integers(0, 10_000),
)
def test_the_nearest_items_are_a_brute_forces_and_each_block_is_asked_for_once(
    num_queries, num_items, k, block, seed
):
    random = np.random.default_rng(seed)
    queries = random.integers(-1, 2, (num_queries, 2)).astype(np.float32)
    vectors = random.integers(-1, 2, (num_items, 2)).astype(np.float32)
    asked = []

    def read(rows):
        asked.append(rows.start)
        return torch.from_numpy(vectors[rows])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "ITEM_BLOCK", block)
        found = exact_search(torch.from_numpy(queries), read, num_items, k=k, device=CPU)
    assert asked == list(range(0, num_items, block))
    scores = queries @ vectors.T
    assert found.scores.tolist() == [sorted(row, reverse=True)[:k] for row in scores.tolist()]
    assert np.array_equal(np.take_along_axis(scores, found.items, 1), found.scores)
    assert all(len(set(items)) == len(items) for items in found.items.tolist())
