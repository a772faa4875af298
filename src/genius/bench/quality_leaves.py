"""The generator against geometry where both may look at equally many leaves.

Both rank the prefixes of one length, by what they think of them. From the best prefix on, the IDs under it
are taken until the budget is full; of the last prefix those that come first in the table. So both have
exactly as many leaves, and what differs is which. It is done for prefixes up to the first semantic code,
and up to the second: a search that stops at a leaf budget stops at one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from genius.bench.quality_ground import Ground, Task
from genius.bench.quality_measure import hit_rates
from genius.bench.quality_tables import LeafRow
from genius.bench.quality_ways import GENERATOR, GEOMETRY, HITS, Rows, filled
from genius.config import SearchConfig
from genius.search.allowed import Part
from genius.search.beam import Beams, search
from genius.search.decoding import Decoding, DecodingState, DecodingStep
from genius.search.searcher import rank_items
from genius.search.table import IdTable

DEPTHS: Final = (1, 2)
"""Semantic codes in a prefix."""
BATCH: Final = 16
"""Queries at a time: beams are as wide as a budget."""
LEAST_BEAM: Final = 1024
BY_CODES: Final = SearchConfig(rerank="codes")


class Shallow:
    """A decoder that ends after its first levels: its IDs are prefixes."""

    def __init__(self, decoder: Decoding, levels: int) -> None:
        self._decoder = decoder
        self.sizes: tuple[int, ...] = decoder.sizes[:levels]
        self.device = decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecodingState:
        """The state before any code."""
        return self._decoder.start(queries)

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecodingStep:
        """Read codes."""
        return self._decoder.advance(state, codes)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""
        return self._decoder.logits(hidden, level)

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised."""
        return self._decoder.log_probabilities(hidden, level, scores)


class Prefixes:
    """The distinct prefixes of one length in a table."""

    def __init__(self, table: IdTable, levels: int) -> None:
        codes = np.asarray(table.ids[:, :levels])
        is_first = np.ones(len(codes), dtype=bool)
        is_first[1:] = (codes[1:] != codes[:-1]).any(axis=1)
        starts = is_first.nonzero()[0]
        self.levels = levels
        self.bounds: Int64[np.ndarray, " fences"] = np.append(starts, len(table))
        self.part = Part(IdTable.build(codes[starts], np.zeros(len(starts), dtype=np.float16)))

    def best(self, decoder: Decoding, queries: Float[Tensor, "queries dim"], count: int) -> Beams:
        """The best prefixes of each query, as ranges of the whole table."""
        found = search(Shallow(decoder, self.levels), [self.part], queries, SearchConfig(beam=count))
        low = self.bounds[found.low]
        high = np.where(found.high > found.low, self.bounds[found.low + 1], low)
        return Beams(low, high, found.log_probabilities)


def compare_leaves(ground: Ground, task: Task, budgets: Sequence[int]) -> Iterator[LeafRow]:
    """For each depth and budget, what either router finds.

    A beam as wide as the largest budget fills it, for a prefix holds at least one ID. It is never narrower
    than :data:`LEAST_BEAM`, so that among prefixes of two codes the best are found, unless there are more
    first codes than that.
    """
    first = 1 if ground.model.quantizer.has_modality_level else 0
    right = [ground.right_ids(task, qid) for qid in task.queries.qids]
    decoders: dict[str, Decoding] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for depth in DEPTHS:
        if first + depth > len(ground.model.quantizer.sizes):
            continue
        prefixes = Prefixes(ground.table, first + depth)
        for router, decoder in decoders.items():
            inside = dict.fromkeys(budgets, 0)
            items: dict[int, Rows] = {budget: [] for budget in budgets}
            for start in range(0, len(right), BATCH):
                queries = task.queries.fused[start : start + BATCH]
                beams = prefixes.best(decoder, queries, max(LEAST_BEAM, *budgets))
                for budget in budgets:
                    kept = filled(beams, budget)
                    items[budget] += [
                        rank_items(
                            ground.parts,
                            kept,
                            number,
                            query,
                            config=BY_CODES,
                            evidence=ground.evidence,
                            k=HITS,
                        ).items
                        for number, query in enumerate(queries)
                    ]
                    inside[budget] += sum(
                        _is_inside(kept, number, right[start + number]) for number in range(len(queries))
                    )
            for budget in budgets:
                recall = hit_rates(ground, task, items[budget])
                yield LeafRow(
                    task=task.name,
                    queries=len(right),
                    leaves=budget,
                    semantic_levels=depth,
                    router=router,
                    positive_inside=inside[budget] / len(right),
                    recall_1=recall[1],
                    recall_5=recall[5],
                )


def _is_inside(beams: Beams, query: int, right: Int64[np.ndarray, " ids"]) -> bool:
    """Whether one of these IDs is under the beams."""
    low, high = beams.low[query, :, 0], beams.high[query, :, 0]
    return bool(((low <= right[:, None]) & (right[:, None] < high)).any())
