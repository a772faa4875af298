"""A tree of k-means clusters: the path to an item is its ID (DSI, NCI, GRACE's structured IDs).

Items are divided into clusters, those again, until few enough are left; these are numbered in their leaf. An
item that came later goes down to the nearest centroid each time, and in the leaf to the nearest item there,
whose ID it takes over: nothing is trained anew, and the collision is real.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius.errors import BadData, UsageError
from genius.models.kmeans import assign, kmeans

ITERATIONS: Final = 25
"""Of k-means at each node, at most."""
LEAF: Final = -1
"""In place of a node's number: an item."""


class Built(NamedTuple):
    """A tree, and the paths of the items it was made from."""

    tree: ClusterTree
    paths: list[list[int]]


class ClusterTree:
    """Entries of all nodes, one after the other; an entry is a cluster, or in a leaf an item.

    Parameters
    ----------
    vectors
        of each entry: a cluster's centroid, or an item's embedding.
    starts
        where the entries of each node begin; one more than nodes.
    below
        the node under each entry; −1 for an item.
    """

    def __init__(
        self,
        vectors: Float[Tensor, "entries dim"],
        starts: Int64[Tensor, " fences"],
        below: Int64[Tensor, " entries"],
    ) -> None:
        self.vectors = vectors
        self.starts = starts
        self.below = below

    @staticmethod
    def build(
        items: Float[Tensor, "items dim"], *, branches: int, leaf: int, generator: torch.Generator
    ) -> Built:
        """Divide items into ``branches`` clusters each time, until at most ``leaf`` are together.

        Where k-means cannot tell items apart, they are dealt out in their order.

        Raises
        ------
        BadData
            there are no items.
        UsageError
            fewer than two branches, or no room in a leaf.
        """
        if not len(items):
            raise BadData("a tree needs items to divide; these are none")
        if branches < 2 or leaf < 1:
            raise UsageError(
                f"{branches} branches and leaves of {leaf} items make no tree; take 2 and 1, or more"
            )
        paths: list[list[int]] = [[] for _ in range(len(items))]
        vectors: list[Tensor] = []
        below: list[int] = []
        starts = [0]
        waiting = [torch.arange(len(items))]
        for rows in waiting:  # it grows while it is gone through: level by level
            here = items[rows]
            if len(rows) <= leaf:
                chosen, centres = torch.arange(len(rows)), here
                below += [LEAF] * len(rows)
            else:
                chosen, centres = _divided(here, branches, generator)
                below += range(len(waiting), len(waiting) + len(centres))
                waiting += [rows[chosen == number] for number in range(len(centres))]
            for row, code in zip(rows.tolist(), chosen.tolist(), strict=True):
                paths[row].append(code)
            vectors.append(centres)
            starts.append(len(below))
        tree = ClusterTree(torch.cat(vectors), torch.tensor(starts), torch.tensor(below))
        return Built(tree, paths)

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> ClusterTree:
        """The tree that :meth:`tensors` gave away."""
        return ClusterTree(tensors["vectors"], tensors["starts"], tensors["below"])

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, to be stored."""
        return {"vectors": self.vectors, "starts": self.starts, "below": self.below}

    def paths(self, items: Float[Tensor, "items dim"]) -> list[list[int]]:
        """The way of each item down the tree, always to the nearest."""
        paths: list[list[int]] = [[] for _ in range(len(items))]
        waiting = [(0, np.arange(len(items)))]
        while waiting:
            node, rows = waiting.pop()
            entries = slice(int(self.starts[node]), int(self.starts[node + 1]))
            chosen = assign(items[torch.from_numpy(rows)], self.vectors[entries]).numpy()
            for row, code in zip(rows.tolist(), chosen.tolist(), strict=True):
                paths[row].append(code)
            for code in np.unique(chosen).tolist():
                under = int(self.below[entries.start + code])
                if under != LEAF:
                    waiting.append((under, rows[chosen == code]))
        return paths


def _divided(items: Tensor, branches: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The cluster of each item, and the centroids of those that have any."""
    centroids = kmeans(items, branches, iterations=ITERATIONS, generator=generator).centroids
    used, chosen = assign(items, centroids).unique(return_inverse=True)
    if len(used) > 1:
        return chosen, centroids[used]
    share = -(-len(items) // branches)
    dealt = torch.arange(len(items)) // share
    return dealt, centroids[used].expand(int(dealt[-1]) + 1, -1)
