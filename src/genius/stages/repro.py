"""The reproduction of published rows when all is there, and our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from genius.data.mbeir import MBeir
from genius.evaluation.published import PAPER_BEAM, SIZES, TOLERANCE, UNION_SIZE, Reference
from genius.evaluation.tables import ResultRow, in_order, published_beside
from genius.model import Genius
from genius.stages.evaluate import EvaluationConfig, evaluate
from genius.stages.progress import Progress
from genius.stages.repro_plan import CAPTION_SETS, INSTRUCTION_CHOICE, METHODS, SCORES, Pool, ReproPlan


class Verdict(NamedTuple):
    """One of our numbers beside the published ones."""

    row: str
    pool: Pool
    method: str
    score: float
    """Percent."""
    references: list[Reference]
    """Empty when queries or candidates are not as many as the published numbers are for."""
    ok: bool | None
    """For exact-raw beside the released CLIP_SF: within the tolerance; None where nothing is promised."""


class Reproduction(NamedTuple):
    """What came out."""

    rows: list[ResultRow]
    verdicts: list[Verdict]


def reproduce(plan: ReproPlan, model: Genius, folder: Path, *, progress: Progress) -> Reproduction:
    """Evaluate the rows in the pools that were asked for, or in every pool whose files are there.

    As the published numbers were measured: the first instruction of each query (pyserini), a beam of 50, and
    the released code's scores.

    Raises
    ------
    ArtifactMissing
        a file that is needed is not there.
    """
    plan.require()
    config = EvaluationConfig(
        pools=plan.pools,
        methods=METHODS,
        rows=plan.rows,
        beam=PAPER_BEAM,
        scores=SCORES,
        instructions=INSTRUCTION_CHOICE,
    )
    rows = evaluate(MBeir(plan.data), model, config, folder, progress=progress).rows
    return Reproduction(in_order(rows), verdicts(rows))


def verdicts(rows: Sequence[ResultRow]) -> list[Verdict]:
    """Our numbers beside the published ones."""
    found = []
    for row in in_order(rows):
        if row.method not in METHODS or row.score is None:
            continue
        score = 100 * row.score
        published = published_beside(row)
        target = next((one for one in published if one.weights == "released"), None)
        promised = row.method == "exact-raw" and target is not None
        ok = abs(score - target.value) <= TOLERANCE if promised and target is not None else None
        found.append(Verdict(row.name, row.pool, row.method, score, published, ok))
    return found


def nothing_compared(plan: ReproPlan, rows: Sequence[ResultRow]) -> str | None:
    """Why no published number stands beside any of ours; None where at least one does."""
    kind = CAPTION_SETS.get(plan.name)
    if kind is not None:
        same = any((row.queries, row.pool_size) == (kind.queries, kind.images) for row in rows)
        whose, expected = "Karpathy's test split", (kind.queries, kind.images)
    else:
        same = any(verdict.references for verdict in verdicts(rows))
        first = in_order(rows)[0]
        size = SIZES[first.name]
        whose, expected = "M-BEIR", (size.queries, size.pool if first.pool == "local" else UNION_SIZE)
    if same:
        return None
    first = in_order(rows)[0]
    return (
        f"nothing was compared: no row here is as large as {whose}'s ({first.name}, {first.pool}: "
        f"{first.queries:,} of {expected[0]:,} queries, pool {first.pool_size:,} of {expected[1]:,}); "
        "published numbers are for the whole test data"
    )
