"""``genius evaluate``: the generative search and its rivals side by side, on local and global pools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import ConfigDict
from torch.nn import functional as F

from genius.artifact import fingerprint_of
from genius.config import Count, Natural, SearchConfig, checked
from genius.data.features import Features
from genius.data.mbeir import EvaluationRow, MBeir, read_candidates, read_pool, read_queries
from genius.data.qrels import read_qrels
from genius.data.records import TASKS, Candidate, candidate_number, did_of, qid_of, task_name
from genius.errors import BadData, UsageError
from genius.evaluation.health import Health, examine
from genius.evaluation.measures import evaluate as measure
from genius.evaluation.qrels import Qrels, filter_to_pool
from genius.evaluation.runs import Run, write_run
from genius.evaluation.tables import METHODS, ResultRow
from genius.model import Genius
from genius.stages.embed import embed
from genius.stages.embed_records import (
    InstructionChoice,
    choose_instruction,
    count_lines,
    embed_pool,
    fingerprint_of_files,
    instruction_files,
    query_row,
)
from genius.stages.methods import PoolCandidates, RowQueries, find
from genius.stages.progress import Progress

Pool = Literal["local", "global"]
KS: Final = (1, 5, 10)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is evaluated, and how."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    split: str = "test"
    """Of the data set."""

    pools: tuple[Pool, ...] = ("local", "global")
    """Each query against its own task's pool, against the union of all pools, or both."""

    methods: tuple[str, ...] = METHODS
    """Rows to make."""

    beam: Count = 50
    """IDs kept at each level."""

    scores: Literal["level", "vocabulary"] = "level"
    """How the generator's steps are normalised."""

    instructions: InstructionChoice = "hashed"
    """One of the data set's instructions per query, chosen by a hash; or the first; or none."""

    max_queries: Natural = 0
    """At most this many queries of each row, spread evenly; 0 means all."""

    seed: Natural = 0
    """Of the choice of instructions."""


class EvaluationResult(NamedTuple):
    """Rows of the table, and the health of the global pool's IDs."""

    rows: list[ResultRow]
    health: Health


def evaluate(
    data: MBeir, model: Genius, config: EvaluationConfig, folder: Path, *, progress: Progress
) -> EvaluationResult:
    """Evaluate every row of a split; features are kept under ``folder``, runs are written to it.

    Raises
    ------
    BadData
        a positive, a query or a candidate is missing somewhere; never a silent zero.
    """
    config = checked(config)
    unknown = [method for method in config.methods if method not in METHODS]
    if unknown:
        raise UsageError(f"methods {unknown} are not known; choose from {', '.join(METHODS)}")
    rows = data.rows(config.split)
    files = list(dict.fromkeys([*data.global_pool(config.split), *(row.local_pool for row in rows)]))
    features = embed_pool(data, files, model.encoder, folder / "candidates", progress=progress)
    everyone = _encode(model, features)
    union = everyone.part(_rows_of(everyone, read_pool(data.global_pool(config.split))))
    asked = [_embed_queries(data, model, row, config, folder, progress) for row in rows]
    results: list[ResultRow] = []
    progress.begin("evaluate", len(rows) * len(config.pools))
    for number, (row, queries) in enumerate(zip(rows, asked, strict=True)):
        qrels = _qrels(row, queries.qids)
        for place, pool in enumerate(config.pools):
            candidates = (
                union
                if pool == "global"
                else everyone.part(_rows_of(everyone, read_candidates(row.local_pool)))
            )
            results += _evaluate_row(model, row, pool, queries, candidates, qrels, config, folder)
            progress.advance(number * len(config.pools) + place + 1, {})
    health = examine(
        union.codes,
        union.modality,
        union.typicality,
        sizes=model.quantizer.sizes,
        has_modality_level=model.quantizer.has_modality_level,
    )
    return EvaluationResult(results, health)


def _encode(model: Genius, features: Features) -> PoolCandidates:
    raw, fused, codes, typicality = [], [], [], []
    for rows, batch in features.batches(4096):
        raw.append(F.normalize(batch.total(), dim=-1))
        encoded = model.encode(batch, features.modality[rows].astype(np.int64))
        fused.append(encoded.embeddings)
        codes.append(encoded.codes)
        typicality.append(encoded.typicality)
    return PoolCandidates(
        features.ids,
        torch.cat(raw),
        torch.cat(fused),
        torch.cat(codes).numpy(),
        torch.cat(typicality).numpy(),
        features.modality.astype(np.int64),
    )


def _rows_of(everyone: PoolCandidates, pool: Iterable[Candidate]) -> Int64[np.ndarray, " items"]:
    """Rows of a pool's candidates, each once, in the pool's order."""
    numbers = np.fromiter((candidate_number(candidate.did) for candidate in pool), dtype=np.int64)
    order = np.argsort(everyone.dids, kind="stable")
    place = np.searchsorted(everyone.dids, numbers, sorter=order).clip(max=len(order) - 1)
    rows: np.ndarray = order[place]
    if not (everyone.dids[rows] == numbers).all():
        raise BadData("a pool's candidate has no features; remove the evaluation folder and run again")
    return rows


def _embed_queries(
    data: MBeir,
    model: Genius,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> RowQueries:
    wanted = TASKS[row.task_id][1]
    total = count_lines([row.queries])
    keep = _spread(total, config.max_queries)
    chosen = [query for number, query in enumerate(read_queries(row.queries)) if number in keep]
    rows = (
        query_row(
            data,
            query,
            wanted,
            choose_instruction(data.instructions, query, wanted, config.instructions, seed=config.seed),
            0,
        )
        for query in chosen
    )
    settings = [config.instructions, config.seed, config.max_queries]
    features = embed(
        rows,
        model.encoder,
        folder / f"queries-{fingerprint_of(settings)[:8]}" / row.name,
        inputs={"records": fingerprint_of_files([row.queries, *instruction_files(data)])},
        expected=len(chosen),
        progress=progress,
    )
    batch = features.gather(np.arange(len(features)))
    return RowQueries(
        [qid_of(int(number)) for number in features.ids],
        F.normalize(batch.total(), dim=-1),
        model.embed(batch),
    )


def _spread(total: int, limit: int) -> range | set[int]:
    """Numbers of the queries to take."""
    if not limit or limit >= total:
        return range(total)
    return {int(number) for number in np.linspace(0, total - 1, limit)}


def _qrels(row: EvaluationRow, qids: list[str]) -> Qrels:
    if row.qrels is not None:
        everything: Qrels = read_qrels(row.qrels)
    else:
        everything = {query.qid: dict.fromkeys(query.positives, 1) for query in read_queries(row.queries)}
    missing = [qid for qid in qids if qid not in everything]
    if missing:
        raise BadData(f"{row.qrels}: no line for query {missing[0]} and {len(missing) - 1} others")
    return {qid: everything[qid] for qid in qids}


def _evaluate_row(
    model: Genius,
    row: EvaluationRow,
    pool: Pool,
    queries: RowQueries,
    candidates: PoolCandidates,
    qrels: Qrels,
    config: EvaluationConfig,
    folder: Path,
) -> list[ResultRow]:
    known = {did_of(int(number)) for number in candidates.dids}
    inside = filter_to_pool(qrels, known)
    settings = SearchConfig(beam=config.beam, scores=config.scores)
    results = []
    for found in find(model, queries, candidates, config.methods, settings):
        run = Run(found.method, dict(zip(queries.qids, found.hits, strict=True)))
        measures = measure(inside, run, ks=KS, known=known)
        target = folder / "runs" / f"{row.name}_{config.split}.{pool}.{found.method}.trec"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_run(target, run)
        results.append(
            ResultRow(
                dataset=row.dataset,
                task=task_name(row.task_id),
                task_id=row.task_id,
                pool=pool,
                method=found.method,
                queries=measures.queries,
                pool_size=len(candidates.dids),
                measures=measures.flat(),
                bytes_per_item=found.bytes_per_item,
                candidates_touched=found.touched,
            )
        )
    return results
