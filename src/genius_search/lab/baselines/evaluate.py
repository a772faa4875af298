"""``genius baseline evaluate``: a fitted rival, measured as ``genius evaluate`` measures a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius_search.artifact import write_json
from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.lab.baselines.ids import SpelledIds, find_rows, select
from genius_search.lab.baselines.train import Baseline, check_model, pool_items
from genius_search.lab.evaluate import RESULTS, evaluate_pools
from genius_search.lab.methods import DEPTH, SEARCH_BATCH, MethodHits, PoolCandidates, RowQueries
from genius_search.lab.results import ResultRow, to_json
from genius_search.lab.settings import EvaluationConfig
from genius_search.model import Genius
from genius_search.nn.ids import Candidates
from genius_search.progress import Progress
from genius_search.search.beam import search as beam_search
from genius_search.search.decoder import T5Decoder
from genius_search.search.rank import Evidence, Ranking, rank_items
from genius_search.search.table import IdTable, Part

SAMPLE: Final = 500
"""Items that are searched with their own embedding."""


class BaselineIndex(NamedTuple):
    """The IDs of a pool."""

    table: IdTable
    items: Int64[np.ndarray, " indexed"]
    """Places in the pool of the items that have an ID."""


class IdFacts(NamedTuple):
    """Quality of the IDs of all candidates."""

    candidates: int
    levels: int
    distinct_ids: int
    collision_rate: float
    """Share of the candidates that share their ID."""
    largest_bucket: int
    absent: int
    """Candidates without an ID."""
    not_found: float
    """Share of a sample that is not among the first hits for its own embedding."""
    pairs_known: float
    """Share of training queries whose positive's ID is written without a fault."""
    items_known: float | None
    """Share of the indexed items whose own ID is; None without indexing."""


class BaselineResult(NamedTuple):
    """Rows of the results table, and facts about the IDs."""

    rows: list[ResultRow]
    ids: IdFacts
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``genius evaluate`` does, with ``ids`` in place of ``health``."""
        return {**self.about, **to_json(self.rows), "ids": self.ids._asdict()}


class Rival:
    """A fitted baseline that answers queries."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self._decoder = T5Decoder(baseline.generator)

    def name(self, split: str) -> str:
        """Return its method in tables and runs, which says whether the items of the split were learned.

        Raises UsageError: they were not, and such IDs cannot be given to new items.
        """
        config = self.baseline.config
        is_known = config.indexing == "yes" and config.split == split
        if not is_known and config.is_numbered:
            raise UsageError(
                f"{config.kind} IDs were given to the pools of split {config.split!r} and cannot be given to "
                f"other items; evaluate that split, or fit again with --split {split}"
            )
        return config.kind if is_known else f"{config.kind}-unindexed"

    def index(self, items: Candidates) -> BaselineIndex:
        """Return a table of the IDs of the items; without those that can have none."""
        scheme = self.baseline.scheme
        rows = np.arange(len(items.embeddings))
        if self.baseline.config.is_numbered and isinstance(scheme, SpelledIds):
            rows = np.flatnonzero(scheme.knows(items))
        codes = scheme.assign(select(items, rows))
        return BaselineIndex(IdTable.build(codes, np.zeros(len(codes))), rows)

    def search(
        self, index: BaselineIndex, queries: Float[Tensor, "queries dim"], *, beam: int, k: int
    ) -> Iterator[Ranking]:
        """Yield the ranking of each query, in the generator's order; items are places in the pool.

        ``queries`` are the model's fused embeddings.
        """
        config = SearchConfig(beam=beam)
        parts = [Part(index.table)]
        for batch in queries.split(SEARCH_BATCH):
            beams = beam_search(self._decoder, parts, batch, config)
            for query in range(len(batch)):
                found = rank_items(parts, beams, query, batch[query], config=config, evidence=Evidence(), k=k)
                yield found._replace(items=index.items[found.items])


def evaluate_baseline(
    data: MBeir,
    model: Genius,
    baseline: Baseline,
    config: EvaluationConfig,
    folder: Path,
    *,
    evaluation: Path | None = None,
    progress: Progress,
) -> BaselineResult:
    """Measure a rival as ``genius evaluate`` measures a model; ``folder`` receives runs and results.

    Of ``config`` only rows, pools, split, beam, instructions, and the number of queries count. Features are
    kept in ``evaluation``, by default in the model's folder. Raises ArtifactMismatch if the rival was fitted
    on another model, UsageError if it knows no item of this split and can give none an ID.
    """
    check_model(baseline, model)
    rival = Rival(baseline)
    method = rival.name(checked(config).split)
    config = dataclasses.replace(checked(config), methods=(method,))
    place = evaluation or model.folder / "evaluation"
    with_codes = baseline.config.kind == "genius"
    items = pool_items(data, model, config.split, place, with_codes=with_codes, progress=progress)

    def answer(queries: Sequence[RowQueries], pool: PoolCandidates) -> Iterator[list[MethodHits]]:
        index = rival.index(select(items, find_rows(pool.dids, np.asarray(items.numbers))))
        for of_row in queries:
            rankings = list(rival.search(index, of_row.fused, beam=config.beam, k=DEPTH))
            hits = [pool.hits(found.items, found.scores) for found in rankings]
            touched = sum(found.touched for found in rankings) / max(1, len(rankings))
            yield [MethodHits(method, hits, index.table.nbytes / len(pool), touched)]

    rows, _ = evaluate_pools(
        data, model, config, answer, folder, evaluation=place, with_codes=False, progress=progress
    )
    about = {
        "model": model.fingerprint,
        "baseline": baseline.manifest.fingerprint,
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
    }
    result = BaselineResult(rows, examine_ids(rival, items, beam=config.beam), about)
    write_json(folder / RESULTS, result.to_json())
    return result


def examine_ids(rival: Rival, items: Candidates, *, beam: int) -> IdFacts:
    """Count collisions, items without an ID, and items that are not found even by their own embedding."""
    index = rival.index(items)
    num_items = len(items.embeddings)
    sizes = np.diff(index.table.bucket_starts)
    rows = np.linspace(0, num_items - 1, min(SAMPLE, num_items)).astype(np.int64)
    rankings = rival.search(index, items.embeddings[torch.from_numpy(rows)], beam=beam, k=DEPTH)
    lost = sum(row not in found.items for row, found in zip(rows, rankings, strict=True))
    memorization = rival.baseline.memorization
    return IdFacts(
        candidates=num_items,
        levels=index.table.num_levels,
        distinct_ids=len(index.table),
        collision_rate=float(sizes[sizes > 1].sum() / max(1, num_items)),
        largest_bucket=int(sizes.max(initial=0)),
        absent=num_items - len(index.items),
        not_found=lost / max(1, len(rows)),
        pairs_known=memorization.pairs,
        items_known=memorization.items,
    )
