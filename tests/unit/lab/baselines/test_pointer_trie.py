import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.lab.baselines.generate import PointerTrie
from genius_search.search.table import IdTable


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_items=st.integers(1, 30),
    is_sorted=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_children_are_those_of_the_id_table(sizes, num_items, is_sorted, seed):
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, num_items) for size in sizes], axis=1).astype(np.int16)
    table = IdTable.build(codes, np.zeros(num_items))
    trie = PointerTrie(table.ids if is_sorted else codes)
    assert len(trie) == len(table)
    prefixes = [((), 0, len(table))]
    for level in range(len(sizes)):
        below = []
        for prefix, low, high in prefixes:
            children = table.children(level, np.array([low]), np.array([high]))
            assert sorted(trie.children(prefix)) == children.code.tolist()
            below += [
                ((*prefix, code), *bounds)
                for code, *bounds in zip(
                    children.code.tolist(), children.low.tolist(), children.high.tolist(), strict=True
                )
            ]
        prefixes = below
    assert [prefix for prefix, _, _ in prefixes] == [tuple(row) for row in table.ids.tolist()]
    assert all(trie.children(prefix) == [] for prefix, _, _ in prefixes)


def test_offsets_make_tokens_of_the_codes():
    trie = PointerTrie(np.array([[0, 1], [2, 0]], dtype=np.int16), (3, 6))
    assert trie.children([]) == [3, 5]
    assert trie.children([3]) == [7]
    assert trie.children([5]) == [6]
    assert trie.children([4]) == []


def test_a_trie_of_nothing_has_no_children():
    trie = PointerTrie(np.zeros((0, 3), dtype=np.int16))
    assert len(trie) == 0
    assert trie.children([]) == []


def test_the_bytes_it_names_are_what_it_took():
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(0, 200, (3_000, 5)).astype(np.int16), axis=0)
    tracemalloc.start()
    try:
        trie = PointerTrie(ids)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trie.num_bytes() == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        PointerTrie(np.zeros((1, 2), dtype=np.int16))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
