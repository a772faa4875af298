"""``genius baseline evaluate``: a fitted rival, measured as ``genius evaluate`` measures a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor

from genius_search.artifact import write_json
from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.lab.baselines.ids import NUMBERED, TRAITS, Items
from genius_search.lab.baselines.train import Baseline, Sources, check_model, pool_items, rows_of
from genius_search.lab.evaluate import (
    RESULTS,
    EvaluationConfig,
    EvaluationPools,
    chosen_rows,
    embed_queries,
    evaluate_rows,
)
from genius_search.lab.methods import DEPTH, SEARCH_BATCH, MethodHits, PoolCandidates, RowQueries
from genius_search.lab.results import ResultRow, to_json
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.search.beam import search as beam_search
from genius_search.search.decoder import T5Decoder
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import IdTable, Part

SAMPLE: Final = 500
"""Items that are asked for by their own embedding."""


class BaselineIndex(NamedTuple):
    """The IDs of a pool, ready to be searched."""

    table: IdTable
    items: Int64[np.ndarray, " indexed"]
    """Places in the pool of those that have an ID."""
    absent: int
    """Items of the pool that cannot be found, since they have none."""


class IdFacts(NamedTuple):
    """How good the IDs are for finding anything: of all candidates together."""

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
    """Rows of the table, and what the IDs are like."""

    rows: list[ResultRow]
    ids: IdFacts
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As ``genius evaluate`` has it, with ``ids`` in place of ``health``."""
        return {**self.about, **to_json(self.rows), "ids": self.ids._asdict()}


class Rival:
    """A fitted baseline that answers queries: :meth:`index` a pool, then :meth:`search` it."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self._decoder = T5Decoder(baseline.generator)

    def name(self, split: str) -> str:
        """Its method in tables and runs, of a split's pools: whether their items were learned is told.

        Raises
        ------
        UsageError
            they were not, and such IDs cannot be given to new items.
        """
        config = self.baseline.config
        is_known = config.indexing and config.split == split
        if not is_known and config.kind in NUMBERED:
            raise UsageError(
                f"{config.kind} IDs were given to the pools of split {config.split!r} and cannot be given to "
                f"other items; evaluate that split, or fit again with --split {split}"
            )
        return config.kind if is_known else f"{config.kind}-unindexed"

    def ids(self, items: Items) -> tuple[Int16[np.ndarray, "given levels"], Int64[np.ndarray, " given"]]:
        """IDs of items, and which of the items have one.

        Known items keep theirs; others get one if it can be read off them, else none.
        """
        baseline = self.baseline
        places = rows_of(items.numbers, baseline.numbers)
        new = np.flatnonzero(places < 0)
        codes = np.zeros((len(places), baseline.codes.shape[1]), dtype=np.int16)
        codes[places >= 0] = baseline.codes[places[places >= 0]]
        if baseline.giver is None:
            given = np.flatnonzero(places >= 0)
            return codes[given], given
        if len(new):
            codes[new] = baseline.giver.give(_some(items, new))
        return codes, np.arange(len(codes))

    def index(self, items: Items) -> BaselineIndex:
        """A table of the IDs of these items."""
        codes, given = self.ids(items)
        return BaselineIndex(
            IdTable.build(codes, np.zeros(len(codes))), given, len(items.numbers) - len(given)
        )

    def search(
        self, index: BaselineIndex, queries: Float[Tensor, "queries dim"], *, beam: int, k: int
    ) -> Iterator[tuple[Int64[np.ndarray, " hits"], np.ndarray, int]]:
        """Places of items, scores, and how many were touched, of each query; in the generator's order.

        ``queries`` are the model's fused embeddings.
        """
        config = SearchConfig(beam=beam)
        parts = [Part(index.table)]
        for batch in queries.split(SEARCH_BATCH):
            beams = beam_search(self._decoder, parts, batch, config)
            for query in range(len(batch)):
                found = rank_items(parts, beams, query, batch[query], config=config, evidence=Evidence(), k=k)
                yield index.items[found.items], found.scores, found.touched


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
    """Measure a rival as ``genius evaluate`` measures GENIUS; ``folder`` receives runs and results.

    Of ``config`` only rows, pools, split, beam, instructions, and the number of queries count.

    Parameters
    ----------
    evaluation
        of the model: where features are, or go; default: in its folder.

    Raises
    ------
    ArtifactMismatch
        the rival was fitted on another model.
    UsageError
        it knows no item of this split, and can give none an ID.
    """
    check_model(baseline, model)
    rival = Rival(baseline)
    method = rival.name(checked(config).split)
    config = dataclasses.replace(checked(config), methods=(method,))
    place = evaluation or model.folder / "evaluation"
    rows = chosen_rows(data, config)
    pools = EvaluationPools(
        data, model.encoder, rows, place, split=config.split, pools=config.pools, progress=progress
    )
    with_codes = TRAITS[baseline.config.kind].needs == "codes"
    items = pool_items(Sources(data, model, place), config.split, with_codes=with_codes, progress=progress)
    asked = [(row, embed_queries(data, model, row, config, place, progress)) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)

    def answer(queries: Sequence[RowQueries], candidates: PoolCandidates) -> Iterator[list[MethodHits]]:
        chosen = rows_of(candidates.dids, items.numbers)
        index = rival.index(_some(items, chosen))
        size = index.table.nbytes / len(candidates)
        for some in queries:
            answers = list(rival.search(index, some.fused, beam=config.beam, k=DEPTH))
            hits = [candidates.hits(items, scores) for items, scores, _ in answers]
            touched = sum(count for _, _, count in answers) / max(1, len(answers))
            yield [MethodHits(method, hits, size, touched)]

    results = evaluate_rows(asked, pools, answer, config, folder, progress)
    facts = examine_ids(rival, items, beam=config.beam)
    about = {
        "model": model.fingerprint,
        "baseline": baseline.manifest.fingerprint,
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
    }
    result = BaselineResult(results, facts, about)
    write_json(folder / RESULTS, result.to_json())
    return result


def examine_ids(rival: Rival, items: Items, *, beam: int) -> IdFacts:
    """Collisions, items without an ID, and items that are not found even by their own embedding."""
    index = rival.index(items)
    sizes = np.diff(index.table.bucket_starts)
    rows = np.linspace(0, len(items.numbers) - 1, min(SAMPLE, len(items.numbers))).astype(np.int64)
    embeddings = items.embeddings[torch.from_numpy(rows)]
    found = rival.search(index, embeddings, beam=beam, k=DEPTH)
    lost = sum(row not in hits for row, (hits, _, _) in zip(rows, found, strict=True))
    memory = rival.baseline.memory
    return IdFacts(
        candidates=len(items.numbers),
        levels=index.table.num_levels,
        distinct_ids=len(index.table),
        collision_rate=float(sizes[sizes > 1].sum() / max(1, len(items.numbers))),
        largest_bucket=int(sizes.max(initial=0)),
        absent=index.absent,
        not_found=lost / max(1, len(rows)),
        pairs_known=memory.pairs,
        items_known=memory.items,
    )


def _some(items: Items, rows: Int64[np.ndarray, " rows"]) -> Items:
    return Items(
        items.numbers[rows],
        items.embeddings[torch.from_numpy(rows)],
        [items.texts[row] for row in rows.tolist()],
        None if items.codes is None else items.codes[rows],
    )
