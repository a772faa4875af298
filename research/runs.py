"""Read, write and measure runs and qrels in TREC's formats."""

from __future__ import annotations

import csv
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float32

from genius_search.errors import BadData
from genius_search.index.evaluate import KS, Measures, Qrels, format_first_ids, measure
from genius_search.writing import write_file

TREC_COLUMNS: Final = "qid Q0 did rank score name"


class Hit(NamedTuple):
    """A candidate of a ranking."""

    did: str
    score: float


Run: TypeAlias = Mapping[str, Sequence[Hit]]
"""One method's ranking for each query id, best first; may be empty."""


def filter_to_pool(qrels: Qrels, pool_ids: Container[str]) -> dict[str, dict[str, int]]:
    """Return the judgements of candidates in the pool, so that recall and nDCG count only these.

    OVEN's queries also have answers among InfoSeek's candidates, which are not in OVEN's pool
    (M-BEIR, section 1.7).

    Raises
    ------
    BadData
        A query has no right answer in the pool.
    """
    filtered: dict[str, dict[str, int]] = {}
    unanswered: list[str] = []
    for qid, judged in qrels.items():
        filtered[qid] = {did: relevance for did, relevance in judged.items() if did in pool_ids}
        if not any(relevance > 0 for relevance in filtered[qid].values()):
            unanswered.append(f"{qid} (answered by {format_first_ids(list(judged))})")
    if unanswered:
        raise BadData(
            f"{len(unanswered)} of {len(qrels)} queries have no right answer in the pool: "
            f"{format_first_ids(unanswered)}. Use the pool that belongs to the qrels, or restore "
            "the candidates"
        )
    return filtered


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write TREC's four columns ``qid 0 did relevance``, atomically.

    trec_eval, pytrec_eval and pyserini read this format. They reject the fifth column of M-BEIR's
    files, the task, which :func:`research.mbeir_files.write_qrels` writes.
    """
    lines = [
        f"{check_word(qid)} 0 {check_word(did)} {relevance}\n"
        for qid, judged in qrels.items()
        for did, relevance in judged.items()
    ]
    write_file(path, "".join(lines).encode())


def check_word(text: str) -> str:
    """Return the text; raise BadData if it has a blank, which separates columns in TREC's files."""
    if text.split() != [text]:
        raise BadData(
            f"{text!r} is not allowed in a TREC file: ids and names are single words without blanks"
        )
    return text


def strictly_decreasing(
    scores: Sequence[float] | Float32[np.ndarray, " hits"],
) -> Float32[np.ndarray, " hits"]:
    """Lower the scores of a ranking until each is below the preceding one in single precision.

    trec_eval and similar tools sort a ranking by score in single precision, and equal scores by
    candidate id, last first. Items that share an ID have equal scores, so such a tool would measure
    another ranking than ours (R@1 of 0.124 for 0.121 on Flickr8k). A score that is not below the
    preceding one therefore becomes the next smaller number in single precision; other scores do not
    change.

    >>> strictly_decreasing([-0.5, -0.5, -2.0]).tolist()
    [-0.5, -0.5000000596046448, -2.0]

    Raises
    ------
    BadData
        A score does not fit single precision.
    """
    with np.errstate(over="ignore"):
        lowered = np.array(scores, dtype=np.float32)
        if (lowered[1:] >= lowered[:-1]).any():
            for rank in range(1, len(lowered)):
                if lowered[rank] >= lowered[rank - 1]:
                    lowered[rank] = np.nextafter(lowered[rank - 1], np.float32(-np.inf))
    if not np.isfinite(lowered).all():
        raise BadData(
            f"scores from {scores[0]} to {scores[-1]} do not fit the single precision of TREC's "
            "tools"
        )
    return lowered


def write_run(path: Path, name: str, run: Run) -> None:
    """Write TREC's six columns ``qid Q0 did rank score name``, ranks from 1, atomically.

    The scores are made :func:`strictly_decreasing`, so that every tool sees the ranking that we
    measure. TREC has no line for an empty ranking, so such a query is missing when the file is
    read.
    """
    lines = []
    for qid, ranking in run.items():
        scores = strictly_decreasing([hit.score for hit in ranking])
        lines += [
            f"{check_word(qid)} Q0 {check_word(hit.did)} {rank} {score!s} {check_word(name)}\n"
            for rank, (hit, score) in enumerate(zip(ranking, scores, strict=True), start=1)
        ]
    write_file(path, "".join(lines).encode())


def read_run(path: Path) -> dict[str, list[Hit]]:
    """Read a TREC run of six columns, or UniIR's of seven, the last of which is the task.

    Hits are in trec_eval's order: by score in single precision, equal scores by candidate id, last
    first.

    Raises
    ------
    BadData
        The file is not a run, a score is not finite, or a ranking has a candidate twice.
    """
    try:
        lines = pd.read_csv(
            path, sep=r"\s+", header=None, dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE
        )
    except (OSError, ValueError) as error:
        raise BadData(f"{path} is not a run: {error}; expected lines of {TREC_COLUMNS}") from None
    if lines.shape[1] not in {6, 7} or (lines.fillna("") == "").any(axis=None):
        raise BadData(
            f"{path} is not a run: expected TREC's 6 columns ({TREC_COLUMNS}) or UniIR's 7 (and "
            "task) in each line"
        )
    scores = pd.to_numeric(lines[4], errors="coerce")
    for is_bad, problem in (
        (~np.isfinite(scores), "the score is not a finite number"),
        (lines.duplicated([0, 2]), "the candidate is twice in the ranking of the query"),
    ):
        if is_bad.any():
            line = int(np.flatnonzero(is_bad)[0])
            raise BadData(f"{path}: {' '.join(lines.iloc[line])}: {problem}")
    rankings: dict[str, list[Hit]] = {}
    for qid, did, score in zip(lines[0], lines[2], scores.astype(np.float32).tolist(), strict=True):
        rankings.setdefault(qid, []).append(Hit(did, score))
    for ranking in rankings.values():
        ranking.sort(key=lambda hit: (hit.score, hit.did.encode()), reverse=True)
    return rankings


def measure_run(qrels: Qrels, run: Run, *, ks: Sequence[int] = KS) -> Measures:
    """Measure a run by right answers, as :func:`genius_search.index.evaluate.measure` does."""
    return measure(qrels, {qid: [hit.did for hit in hits] for qid, hits in run.items()}, ks=ks)
