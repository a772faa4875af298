"""The queries, right answers and pools of a data set, prepared as an evaluation does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.lab.bench.settings import QualitySettings
from genius_search.lab.evaluate import EvaluationPools, embed_queries
from genius_search.lab.methods import PoolCandidates, RowQueries
from genius_search.lab.runs import Hit, Qrels, Run, evaluate, filter_to_pool
from genius_search.lab.settings import EvaluationConfig
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import task_name


def _select(queries: RowQueries, rows: slice | np.ndarray) -> RowQueries:
    qids = np.array(queries.qids, dtype=object)[rows].tolist()
    return RowQueries(qids, queries.raw[rows], queries.fused[rows])


class Task(NamedTuple):
    """The queries of one row of the data set, and their right answers."""

    row: EvaluationRow
    queries: RowQueries
    qrels: Qrels

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.row.dataset}: {task_name(self.row.task_id)}"

    def batches(self, size: int) -> Iterator[RowQueries]:
        """Yield all queries, ``size`` at a time."""
        for start in range(0, len(self.queries.qids), size):
            yield _select(self.queries, slice(start, start + size))

    def sample(self, limit: int) -> Task:
        """Return at most so many of the queries, spread evenly."""
        count = len(self.queries.qids)
        if limit >= count:
            return self
        queries = _select(self.queries, np.linspace(0, count - 1, limit).astype(np.int64))
        return Task(self.row, queries, {qid: self.qrels[qid] for qid in queries.qids})

    def hit_rates(self, found: Iterable[Sequence[str]]) -> dict[int, float]:
        """Return M-BEIR's R@k of each query's candidate ids, best first; only their order counts."""
        hits = {
            qid: [Hit(did, -float(rank)) for rank, did in enumerate(dids)]
            for qid, dids in zip(self.queries.qids, found, strict=True)
        }
        means = evaluate(self.qrels, Run("bench", hits), ks=(1, 5, 10)).means
        return {k: means[f"R@{k}"] for k in (1, 5, 10)}


def select_rows(data: MBeir, settings: QualitySettings) -> Sequence[EvaluationRow]:
    """Return the rows of the data set that the settings name."""
    names = tuple(name.strip() for name in settings.row.split(",")) if settings.row else ()
    return data.rows(settings.split, names=names)


class EvalData:
    """Rows of a data set; their candidates are embedded and encoded when this is made."""

    def __init__(
        self,
        data: MBeir,
        model: Genius,
        rows: Sequence[EvaluationRow],
        settings: QualitySettings,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._data, self._model, self._folder, self._progress = data, model, folder, progress
        self._config = EvaluationConfig(
            split=settings.split,
            pools=(settings.pool,),
            methods=("exact-fused",),
            max_queries=settings.queries,
            seed=settings.seed,
        )
        self.pools = EvaluationPools(data, model, rows, folder, self._config, progress=progress)

    def candidates(self, row: EvaluationRow) -> PoolCandidates:
        """Return the pool that a row's queries search."""
        return self.pools.of(row, self._config.pools[0])

    def task(self, row: EvaluationRow, candidates: PoolCandidates) -> Task:
        """Return a row's queries, with those of their right answers that the pool has."""
        (queries,) = embed_queries(self._data, self._model, row, self._config, self._folder, self._progress)
        return Task(row, queries, filter_to_pool(read_judgements(row, queries.qids), candidates))
