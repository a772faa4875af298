"""What ``genius bench quality`` measures on: one pool in memory, and queries that look for something."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from genius.data.mbeir import EvaluationRow
from genius.data.records import candidate_number, did_of, task_name
from genius.evaluation.qrels import Qrels
from genius.model import Genius
from genius.models.marks import measured
from genius.search.allowed import Part
from genius.search.searcher import Evidence
from genius.search.table import IdTable
from genius.stages.methods import PoolCandidates, RowQueries

BATCH: Final = 64
"""Queries that are asked together."""


class Batch(NamedTuple):
    """Some queries of a task."""

    raw: Float[Tensor, "queries dim"]
    fused: Float[Tensor, "queries dim"]


class Task(NamedTuple):
    """The queries of one row of the data set, and what is right."""

    row: EvaluationRow
    queries: RowQueries
    qrels: Qrels

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.row.dataset}: {task_name(self.row.task_id)}"

    def batches(self) -> Iterator[Batch]:
        """All queries, :data:`BATCH` at a time."""
        for start in range(0, len(self.queries.qids), BATCH):
            here = slice(start, start + BATCH)
            yield Batch(self.queries.raw[here], self.queries.fused[here])

    def spread(self, limit: int) -> Task:
        """At most so many of the queries, evenly."""
        count = len(self.queries.qids)
        if limit >= count:
            return self
        chosen = np.linspace(0, count - 1, limit).astype(np.int64)
        qids = [self.queries.qids[number] for number in chosen.tolist()]
        rows = torch.from_numpy(chosen)
        queries = RowQueries(qids, self.queries.raw[rows], self.queries.fused[rows])
        return Task(self.row, queries, {qid: self.qrels[qid] for qid in qids})


class Ground:
    """One pool, its vectors in memory so that all methods find them there, and the model that searches it."""

    def __init__(self, model: Genius, candidates: PoolCandidates) -> None:
        self.model = model
        self.candidates = candidates
        self.table: IdTable = candidates.table
        self.parts = [Part(self.table)]
        self.raw = candidates.raw(slice(None))
        self.fused = candidates.fused(slice(None))

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def densities(self) -> Float32[np.ndarray, " items"]:
        """How crowded it is around the items."""
        return measured(self._kept_densities)

    @property
    def _kept_densities(self) -> UInt8[np.ndarray, " items"]:
        if self.candidates.densities is None:
            raise ValueError("fused embeddings were not kept")
        return self.candidates.densities

    @cached_property
    def evidence(self) -> Evidence:
        """What orders items: codes, and fused embeddings."""
        vectors = [lambda rows: self.fused[torch.from_numpy(rows)]]
        return Evidence(self.model.ranker, vectors, densities=[self._kept_densities])

    @cached_property
    def code_bytes(self) -> float:
        """Of an ID, as short as its codes can be written.

        Its two marks (:mod:`genius.models.marks`) follow from the codes: they are counted in
        :attr:`stored_bytes`, not here.
        """
        return sum(math.log2(size) for size in self.model.quantizer.sizes) / 8

    @cached_property
    def stored_bytes(self) -> float:
        """Of an ID as the table keeps it: its codes and marks, where prefixes begin, lists of items."""
        table = self.table
        return (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / len(self)

    @property
    def vector_bytes(self) -> float:
        """Of an embedding, as an index keeps it."""
        return 2.0 * self.model.dim

    @property
    def semantic_sizes(self) -> tuple[int, ...]:
        """Codes at each level but the modality's."""
        sizes = self.model.quantizer.sizes
        return sizes[1:] if self.model.quantizer.has_modality_level else sizes

    def did(self, item: int) -> str:
        """The candidate in this row."""
        return did_of(int(self.candidates.dids[item]))

    @cached_property
    def _rows_of(self) -> dict[int, int]:
        items = np.repeat(np.arange(len(self.table)), np.diff(self.table.bucket_starts))
        numbers = self.candidates.dids[self.table.items]
        return dict(zip(numbers.tolist(), items.tolist(), strict=True))

    def right_ids(self, task: Task, qid: str) -> Int64[np.ndarray, " ids"]:
        """Rows of the table under which a query's right answers are."""
        right = [did for did, relevance in task.qrels[qid].items() if relevance > 0]
        return np.array([self._rows_of[candidate_number(did)] for did in right], dtype=np.int64)
