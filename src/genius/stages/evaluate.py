"""``genius evaluate``: the generative search and its rivals side by side, on local and global pools."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ConfigDict
from torch.nn import functional as F

from genius.artifact import fingerprint_of, write_json
from genius.config import Count, Natural, NonNegative, SearchConfig, checked
from genius.data.features import FeatureBatch
from genius.data.mbeir import PAPER_ROWS, EvaluationRow, MBeir, read_queries
from genius.data.qrels import read_qrels
from genius.data.records import TASKS, Modality, Query, task_name
from genius.encoders.protocol import Encoder
from genius.errors import BadData, UsageError
from genius.evaluation.health import Health
from genius.evaluation.measures import evaluate as measure
from genius.evaluation.qrels import Qrels, filter_to_pool, write_qrels
from genius.evaluation.runs import Run, write_run
from genius.evaluation.tables import METHODS, ResultRow, to_json
from genius.model import Genius
from genius.stages.embed import embed
from genius.stages.embed_records import (
    InstructionChoice,
    choose_instruction,
    fingerprint_of_files,
    instruction_files,
    instructions_for,
    query_row,
)
from genius.stages.methods import Found, PoolCandidates, PoolItems, RowQueries, find
from genius.stages.pools import EvaluationPools, Pool, Pools
from genius.stages.progress import Progress

RESULTS: Final = "results.json"
KS: Final = (1, 5, 10)
KS_FASHION: Final = (1, 5, 10, 20, 50)
"""Where M-BEIR looks at rank 10 first, it reports 20 and 50 too (section 2.9)."""
Candidates = TypeVar("Candidates", bound=PoolItems)
Answer = Callable[[Sequence[RowQueries], Candidates], Iterator[list[Found]]]
"""What each of some methods finds in a pool, for the queries of each row."""


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

    rows: tuple[str, ...] = ()
    """Rows to evaluate, named as in file names (``mscoco_task0``); none named means all."""

    beam: Count = 50
    """IDs kept at each level."""

    scores: Literal["level", "vocabulary", "children"] = "level"
    """How the generator's steps are normalised."""

    leaves: Natural = 0
    """Where hits are re-ranked: stop decoding at so many IDs under the beams; 0 decodes all levels."""

    shortlist: Natural = 0
    """Where hits are re-ranked by embeddings: only so many, the best by codes; 0 means all."""

    mix: NonNegative = 0.0
    """Where hits are ordered by codes: so many times the log-probability of their beam is added."""

    hubness: NonNegative = SearchConfig.hubness
    """Where hits are ordered by codes or by fused embeddings: so many times the density around each is taken
    from its score; not in ``exact-fused``."""

    instructions: InstructionChoice = "hashed"
    """One of the data set's instructions per query, chosen by a hash; or the first; or none; or each of them
    in turn, and the mean of the measures."""

    max_queries: Natural = 0
    """At most this many queries of each row, spread evenly; 0 means all."""

    seed: Natural = 0
    """Of the choice of instructions."""


class EvaluationResult(NamedTuple):
    """Rows of the table, and the health of the IDs of all candidates that were searched."""

    rows: list[ResultRow]
    health: Health
    about: dict[str, Any]
    """Fingerprint of the model, name of the data, split, settings."""

    def to_json(self) -> dict[str, Any]:
        """For scripts, and for a model's card."""
        return {**self.about, **to_json(self.rows), "health": dataclasses.asdict(self.health)}


def evaluate(
    data: MBeir, model: Genius, config: EvaluationConfig, folder: Path, *, progress: Progress
) -> EvaluationResult:
    """Evaluate rows of a split; features and codes are kept under ``folder``, runs are written to it.

    No pool is held in memory: candidates' features and embeddings stay on disk.

    Raises
    ------
    BadData
        a positive, a query or a candidate is missing somewhere; never a silent zero.
    """
    config = checked(config)
    unknown = [method for method in config.methods if method not in METHODS]
    if unknown:
        raise UsageError(f"methods {unknown} are not known; choose from {', '.join(METHODS)}")
    rows = chosen_rows(data, config)
    pools = EvaluationPools(
        data,
        model,
        rows,
        folder,
        split=config.split,
        pools=config.pools,
        methods=config.methods,
        progress=progress,
    )
    settings = SearchConfig(
        beam=config.beam,
        scores=config.scores,
        leaves=config.leaves,
        shortlist=config.shortlist,
        mix=config.mix,
        hubness=config.hubness,
    )

    def answer(queries: Sequence[RowQueries], candidates: PoolCandidates) -> Iterator[list[Found]]:
        return find(model, queries, candidates, config.methods, settings)

    asked = [embed_queries(data, model, row, config, folder, progress) for row in rows]
    results = evaluate_rows(list(zip(rows, asked, strict=True)), pools, answer, config, folder, progress)
    about = {"model": model.fingerprint, "data": data.name, "split": config.split, "config": asdict(config)}
    result = EvaluationResult(results, pools.health(), about)
    write_json(folder / RESULTS, result.to_json())
    return result


def evaluate_rows(
    asked: Sequence[tuple[EvaluationRow, list[RowQueries]]],
    pools: Pools[Candidates],
    answer: Answer[Candidates],
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[ResultRow]:
    """Ask each row's queries in each pool, write the runs, and measure them."""
    results: list[ResultRow] = []
    progress.begin("evaluate", len(asked) * len(config.pools))
    for pool in config.pools:
        # The global pool is gone through once for the queries of all rows.
        for together in [list(asked)] if pool == "global" else [[one] for one in asked]:
            candidates = pools.of(together[0][0], pool)
            for lines in _evaluate(together, pool, candidates, answer, config, folder):
                results += lines
                progress.advance(len(results) // len(config.methods), {})
    return results


def chosen_rows(data: MBeir, config: EvaluationConfig) -> list[EvaluationRow]:
    """The rows of a split that are evaluated.

    Raises
    ------
    BadData, UsageError
        something that they need is missing; a choice is empty or names something twice.
    """
    for name, chosen in (("pools", config.pools), ("methods", config.methods), ("rows", config.rows)):
        if len(set(chosen)) < len(chosen) or (not chosen and name != "rows"):
            raise UsageError(f"{name} is {list(chosen)}, expected each at most once, and at least one")
    rows = data.rows(config.split, names=config.rows)
    if not config.rows:
        unasked = data.rows_without_queries(config.split)
        if unasked:
            raise BadData(
                f"{data.root}: there are qrels for {unasked[0]} in split {config.split}, and no queries; "
                "restore its query file, or name the rows to evaluate (--rows)"
            )
    lacking = [row for row in rows if row.qrels is None]
    if lacking and data.has_qrels(config.split):
        raise BadData(
            f"{data.root}: {lacking[0].name} has no qrels, and other rows of split {config.split} have; "
            f"restore qrels/{config.split}/mbeir_{lacking[0].name}_{config.split}_qrels.txt"
        )
    if (
        config.instructions != "none"
        and data.instructions.file is None
        and any(row.name in PAPER_ROWS for row in rows)
    ):
        raise BadData(
            f"{data.instructions_file} is missing, and M-BEIR's queries need instructions; restore it, or "
            "evaluate without any (--instructions none)"
        )
    return rows


def embed_queries(
    data: MBeir,
    model: Genius,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[RowQueries]:
    """The queries of a row, once for each way of instructing them: one way, unless all are asked for."""
    return [
        RowQueries(asked.qids, F.normalize(asked.features.total(), dim=-1), model.embed(asked.features))
        for asked in query_features(data, model.encoder, row, config, folder, progress)
    ]


class AskedQueries(NamedTuple):
    """The queries of a row under one way of instructing them."""

    qids: list[str]
    features: FeatureBatch


def query_features(
    data: MBeir,
    encoder: Encoder,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[AskedQueries]:
    """What an encoder gives for the queries of a row, kept under ``folder``; as :func:`embed_queries`."""
    wanted = TASKS[row.task_id][1]
    chosen = _spread(list(read_queries(row.queries)), config.max_queries)
    twice = [qid for qid, times in Counter(query.qid for query in chosen).items() if times > 1]
    if twice:
        raise BadData(
            f"{row.queries}: query {twice[0]} occurs twice ({len(twice)} such); a ranking needs one query"
        )
    ways = _ways(data, chosen, wanted, config)
    features = embed(
        (
            query_row(data, query, wanted, instruction, variant, split=row.split)
            for variant, instructions in enumerate(ways)
            for query, instruction in zip(chosen, instructions, strict=True)
        ),
        encoder,
        folder
        / f"queries-{fingerprint_of([config.instructions, config.seed, config.max_queries])[:8]}"
        / row.name,
        inputs={"records": fingerprint_of_files([row.queries, *instruction_files(data)])},
        expected=len(chosen) * len(ways),
        progress=progress,
    )
    return [
        AskedQueries(
            [query.qid for query in chosen], features.gather(np.flatnonzero(features.variant == variant))
        )
        for variant in range(len(ways))
    ]


def _ways(
    data: MBeir, queries: list[Query], wanted: Modality, config: EvaluationConfig
) -> list[list[str | None]]:
    """Ways of instructing the queries: for each way, one instruction (or none) a query."""
    choice = config.instructions
    if choice != "all":
        return [
            [
                choose_instruction(data.instructions, query, wanted, choice, seed=config.seed)
                for query in queries
            ]
        ]
    offered = [instructions_for(data.instructions, query, wanted) for query in queries]
    if len({len(texts) for texts in offered}) > 1:
        raise BadData("the queries of a row have different numbers of instructions; choose hashed or first")
    ways: list[list[str | None]] = [list(way) for way in zip(*offered, strict=True)]
    return ways or [[None] * len(queries)]


def _spread(queries: list[Query], limit: int) -> list[Query]:
    """So many of them, evenly; all without a limit."""
    if not limit or limit >= len(queries):
        return queries
    return [queries[int(number)] for number in np.linspace(0, len(queries) - 1, limit)]


def judgements(row: EvaluationRow, qids: list[str]) -> Qrels:
    """Right answers of these queries of a row.

    Raises
    ------
    BadData
        there are none for one of them.
    """
    if row.qrels is not None:
        everything: Qrels = read_qrels(row.qrels)
    else:
        everything = {query.qid: dict.fromkeys(query.positives, 1) for query in read_queries(row.queries)}
    missing = [qid for qid in qids if qid not in everything]
    if missing:
        raise BadData(f"{row.qrels}: no line for query {missing[0]} and {len(missing) - 1} others")
    return {qid: everything[qid] for qid in qids}


def _evaluate(
    together: list[tuple[EvaluationRow, list[RowQueries]]],
    pool: Pool,
    candidates: Candidates,
    answer: Answer[Candidates],
    config: EvaluationConfig,
    folder: Path,
) -> Iterator[list[ResultRow]]:
    """The lines of each of some rows that share a pool; over several ways of instructing, their mean."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    judged = {}
    ways_of = {row.name: ways for row, ways in together}
    for row, ways in together:
        judged[row.name] = _inside(row, pool, candidates, judgements(row, ways[0].qids))
        # As they were cut to the pool: with these any TREC tool measures the runs alike.
        write_qrels(runs / f"{row.name}_{config.split}.{pool}.qrels", judged[row.name])
    asked = [(row, way, queries) for row, ways in together for way, queries in enumerate(ways, start=1)]
    answers = answer([queries for _, _, queries in asked], candidates)
    lines: dict[str, list[ResultRow]] = {}
    for (row, way, queries), found in zip(asked, answers, strict=True):
        if way == 1:
            lines = {one.method: [] for one in found}
        for one in found:
            run = Run(one.method, dict(zip(queries.qids, one.hits, strict=True)))
            measures = measure(judged[row.name], run, ks=KS_FASHION if row.headline_k == 10 else KS)
            label = f".instruction-{way}" if config.instructions == "all" else ""
            write_run(runs / f"{row.name}_{config.split}.{pool}.{one.method}{label}.trec", run)
            lines[one.method].append(
                ResultRow(
                    dataset=row.dataset,
                    name=row.name,
                    task=task_name(row.task_id),
                    task_id=row.task_id,
                    pool=pool,
                    method=one.method,
                    queries=measures.queries,
                    pool_size=len(candidates),
                    headline_k=row.headline_k,
                    measures=measures.flat(),
                    bytes_per_item=one.bytes_per_item,
                    candidates_touched=one.touched,
                )
            )
        if way == len(ways_of[row.name]):
            yield [_mean(ways) for ways in lines.values()]


def _inside(row: EvaluationRow, pool: Pool, candidates: PoolItems, qrels: Qrels) -> Qrels:
    try:
        return filter_to_pool(qrels, candidates)
    except BadData as error:
        where = row.local_pool if pool == "local" else "global pool"
        raise BadData(f"{row.name}, {where}: {error}") from None


def _mean(lines: list[ResultRow]) -> ResultRow:
    """The same row with the mean of each measure."""
    return dataclasses.replace(
        lines[0],
        measures={
            name: math.fsum(line.measures[name] for line in lines) / len(lines) for name in lines[0].measures
        },
        candidates_touched=math.fsum(line.candidates_touched for line in lines) / len(lines),
    )
