"""The usual trie: a dictionary for each prefix, from the next code to the next dictionary.

This is how constrained generation is mostly done, and what makes it cost more than a kilobyte an item. Our
search needs none (``search/table.py``).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Integer

Node = dict[int, Any]
"""Next code → node; the last code of an ID leads to an empty one."""


class PointerTrie:
    """All IDs of a pool, reached code by code."""

    def __init__(self, root: Node, num_ids: int) -> None:
        self._root = root
        self._num_ids = num_ids

    @staticmethod
    def build(ids: Integer[np.ndarray, "ids levels"], offsets: Sequence[int] | None = None) -> PointerTrie:
        """A trie of these IDs, in any order; sorted ones are quickest.

        Parameters
        ----------
        offsets
            added to the codes of each level, which makes them tokens of one vocabulary.
        """
        num_levels = ids.shape[1]
        tokens = ids.astype(np.int64) + (np.zeros(num_levels, np.int64) if offsets is None else offsets)
        shared = list(range(int(tokens.max(initial=-1)) + 1))  # one object for all that are equal
        root: Node = {}
        with _no_collection():
            num_ids = _fill(root, tokens, shared)
        return PointerTrie(root, num_ids)

    def __len__(self) -> int:
        return self._num_ids

    def children(self, prefix: Iterable[int]) -> list[int]:
        """Codes that continue a prefix; none where it does not exist or is a whole ID."""
        node = self._root
        for code in prefix:
            below = node.get(code)
            if below is None:
                return []
            node = below
        return list(node)

    def num_bytes(self) -> int:
        """Memory of the dictionaries, as Python counts it; the process grows by some 8% more."""
        total = 0
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node:
                total += sys.getsizeof(node)
                waiting.extend(node.values())
        return total

    def bytes_per_id(self) -> float:
        """The same for each ID."""
        return self.num_bytes() / max(1, len(self))


def _fill(root: Node, tokens: np.ndarray, shared: list[int]) -> int:
    """Write all rows under the root; how many were new."""
    num_levels = tokens.shape[1]
    leaf: Node = {}  # never written to, so one is enough
    path = [root] * num_levels  # the nodes along the row before
    num_ids = 0
    for row, first in zip(tokens.tolist(), _first_differences(tokens).tolist(), strict=True):
        if first == num_levels:
            continue
        for level in range(first, num_levels - 1):
            node, token = path[level], row[level]
            below = node.get(token)
            if below is None:
                below = node[shared[token]] = {}
            path[level + 1] = below
        num_ids += row[-1] not in path[-1]
        path[-1][shared[row[-1]]] = leaf
    return num_ids


def _first_differences(tokens: np.ndarray) -> np.ndarray:
    """The level at which each row first differs from the one before; the number of levels where nowhere."""
    num_ids, num_levels = tokens.shape
    differs = np.ones((num_ids, num_levels + 1), dtype=bool)
    differs[1:, :num_levels] = tokens[1:] != tokens[:-1]
    first: np.ndarray = differs.argmax(axis=1)
    return first


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would look through millions of dictionaries again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
