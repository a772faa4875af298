"""Training pairs of queries and candidates.

Pairs are integer arrays of feature rows, so M-BEIR's 1.3 million training lines take 50 MB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from genius_search.data.features import Features
from genius_search.errors import BadData
from genius_search.records import NUM_MODALITIES, Query, candidate_number, query_number


class Batch(NamedTuple):
    """Rows of queries and their positives, in pairs."""

    query_rows: Int64[np.ndarray, " batch"]
    """Rows of queries, each with one of its instructions."""
    candidate_rows: Int64[np.ndarray, " batch"]
    """A positive of each."""
    false_negatives: Bool[Tensor, "batch batch"]
    """True where another pair's candidate is also relevant to the query."""


class Pairs:
    """Training queries and their positives, as rows of query and candidate features."""

    def __init__(self, lines: Iterable[Query], queries: Features, candidates: Features) -> None:
        self.queries = queries
        self.candidates = candidates
        numbers: list[int] = []
        positives: list[int] = []
        counts: list[int] = []
        for query in lines:
            if not query.positives:
                raise BadData(f"training query {query.qid} has no positive; leave it out or name one")
            numbers.append(query_number(query.qid))
            positives.extend(candidate_number(did) for did in query.positives)
            counts.append(len(query.positives))
        if not numbers:
            raise BadData("there are no training queries; give a query file that has some")
        order = np.argsort(candidates.ids, kind="stable")
        self._positives, exists = look_up(candidates.ids, order, np.array(positives, dtype=np.int64))
        if not exists.all():
            missing = int((~exists).sum())
            example = positives[int(np.flatnonzero(~exists)[0])]
            raise BadData(
                f"{missing} positives of the training queries are not in the training pool, the first has "
                f"number {example}; run `genius data check` on the data set"
            )
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)[:-1]]).astype(np.int64)
        self._modality = candidates.modality
        self._epoch: tuple[int, int] | None = None
        self._first, self._variants = _variants(queries, np.array(numbers, dtype=np.int64))
        owner = np.repeat(np.arange(len(counts)), counts)
        lacking = owner[self._variants[owner, self._modality[self._positives]] == 0]
        if len(lacking):
            raise BadData(
                f"{len(np.unique(lacking))} training queries have no features for the modality of a "
                f"positive, the first has number {numbers[lacking[0]]}; embed them again"
            )

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of both features, as inputs of what is trained on them."""
        return {
            "queries": self.queries.manifest.fingerprint,
            "candidates": self.candidates.manifest.fingerprint,
        }

    def epoch_order(self, seed: int, epoch: int) -> Int64[np.ndarray, " pairs"]:
        """Return the random order of queries in an epoch; the last one is cached."""
        if self._epoch != (seed, epoch):
            self._epoch = (seed, epoch)
            self._order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return self._order

    def draw(self, step: int, batch_size: int, *, seed: int) -> Batch:
        """Draw the batch of a step, with a random positive and instruction for each query.

        Deviation 9: the released code draws them once per query and keeps them for all epochs.
        """
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs = places // len(self)
        lines = np.concatenate(
            [
                self.epoch_order(seed, int(epoch))[places[epochs == epoch] % len(self)]
                for epoch in np.unique(epochs)
            ]
        )
        random = np.random.default_rng([seed, step, 1])
        share = random.random((2, batch_size))
        positive = self._starts[lines] + (share[0] * self._counts[lines]).astype(np.int64)
        candidate_rows = self._positives[positive]
        wanted = self._modality[candidate_rows]
        variants = self._variants[lines, wanted]
        query_rows = self._first[lines, wanted] + (share[1] * variants).astype(np.int64)
        return Batch(query_rows, candidate_rows, self._false_negatives(lines, candidate_rows))

    def _false_negatives(self, lines: np.ndarray, candidate_rows: np.ndarray) -> Tensor:
        """Find the batch's candidates among each query's positives, in less than quadratic time."""
        unique, inverse = np.unique(candidate_rows, return_inverse=True)
        counts = self._counts[lines]
        owner = np.repeat(np.arange(len(lines)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._positives[np.repeat(self._starts[lines], counts) + offsets]
        place = np.searchsorted(unique, rows).clip(max=len(unique) - 1)
        hit = unique[place] == rows
        mask = np.zeros((len(lines), len(unique)), dtype=bool)
        mask[owner[hit], place[hit]] = True
        mask = mask[:, inverse]
        np.fill_diagonal(mask, val=False)
        return torch.from_numpy(mask)


def look_up(ids: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of wanted ids, and a mask of those that exist; ``order`` sorts ``ids``."""
    place = np.searchsorted(ids, wanted, sorter=order).clip(max=max(0, len(ids) - 1))
    rows = order[place]
    return rows, ids[rows] == wanted


def _variants(features: Features, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the number of rows of each query and target modality.

    The rows of one query and target modality, one for each instruction, are adjacent.
    """
    key = features.ids * NUM_MODALITIES + features.wanted
    starts = (
        np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    )
    counts = np.diff(np.concatenate([starts, [len(key)]]))
    order = np.argsort(key[starts], kind="stable")
    first = np.zeros((len(numbers), NUM_MODALITIES), dtype=np.int64)
    variants = np.zeros((len(numbers), NUM_MODALITIES), dtype=np.int64)
    for modality in range(NUM_MODALITIES):
        place, found = look_up(key[starts], order, numbers * NUM_MODALITIES + modality)
        first[:, modality] = np.where(found, starts[place], 0)
        variants[:, modality] = np.where(found, counts[place], 0)
    return first, variants
