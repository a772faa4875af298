"""Runs and qrels in TREC's formats, and their measures."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius_search.data.mbeir import numbered_lines
from genius_search.errors import BadData, BadRecord
from genius_search.evaluate import KS, Measures, Qrels, first_few
from genius_search.evaluate import measure as measure_rankings
from genius_search.writing import write_file

TREC_COLUMNS: Final = "qid Q0 did rank score name"


def filter_to_pool(qrels: Qrels, pool_ids: Container[str]) -> dict[str, dict[str, int]]:
    """Keep the answers that are in the pool, so that recall and nDCG are over candidates that can be found.

    OVEN's queries name InfoSeek's candidates too, which its own pool lacks (M-BEIR, section 1.7). Raises
    BadData if queries have no right answer in the pool.
    """
    kept: dict[str, dict[str, int]] = {}
    lost: list[str] = []
    for qid, judged in qrels.items():
        kept[qid] = {did: relevance for did, relevance in judged.items() if did in pool_ids}
        if not any(relevance > 0 for relevance in kept[qid].values()):
            lost.append(f"{qid} (answered by {first_few(list(judged))})")
    if lost:
        raise BadData(
            f"{len(lost)} of {len(qrels)} queries have no right answer in the pool: {first_few(lost)}. "
            "Take the pool that these qrels were made for, or restore the candidates"
        )
    return kept


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write TREC's four columns ``qid 0 did relevance``, in one step.

    trec_eval, pytrec_eval and pyserini read these. They fail on the fifth column of M-BEIR's own files, the
    task, which :func:`research.mbeir_files.write_qrels` writes.
    """
    lines = [
        f"{trec_word(qid)} 0 {trec_word(did)} {relevance}\n"
        for qid, judged in qrels.items()
        for did, relevance in judged.items()
    ]
    write_file(path, "".join(lines).encode())


def trec_word(text: str) -> str:
    """Return the text if it can be a column of a TREC file, whose columns are separated by blanks."""
    if len(text.split()) != 1 or text.strip() != text:
        raise BadData(
            f"{text!r} is not allowed in a TREC file: ids and names are single words without blanks"
        )
    return text


class Hit(NamedTuple):
    """A candidate of a ranking."""

    did: str
    score: float


@dataclass(frozen=True, slots=True)
class Run:
    """One method's ranking for each query, best first.

    >>> run = Run("generative", {"9:1": [Hit("9:7", -0.5), Hit("9:3", -2.0)]})
    >>> run.hits["9:1"][0].did
    '9:7'
    """

    name: str
    """The method; the last column of the file."""
    hits: Mapping[str, Sequence[Hit]]
    """Query id -> ranking, which is empty if nothing was found."""


def strictly_decreasing(
    scores: Sequence[float] | Float32[np.ndarray, " hits"],
) -> Float32[np.ndarray, " hits"]:
    """Return the scores of a ranking so that each is below the one before it in single precision.

    trec_eval and similar tools sort a ranking by score in single precision, and equal scores by candidate id,
    last first. Items that share an ID have equal scores, so such a tool would measure another ranking than
    ours (R@1 of 0.124 for 0.121 on Flickr8k). A score that is not below the one before it therefore becomes
    the next smaller number of single precision; the others do not change.

    >>> strictly_decreasing([-0.5, -0.5, -2.0]).tolist()
    [-0.5, -0.5000000596046448, -2.0]

    Raises BadData: there is no such number in single precision.
    """
    with np.errstate(over="ignore"):
        lowered = np.array(scores, dtype=np.float32)
        if (lowered[1:] >= lowered[:-1]).any():
            for place in range(1, len(lowered)):
                if lowered[place] >= lowered[place - 1]:
                    lowered[place] = np.nextafter(lowered[place - 1], np.float32(-np.inf))
    if not np.isfinite(lowered).all():
        raise BadData(
            f"scores from {scores[0]} to {scores[-1]} do not fit the single precision of TREC's tools"
        )
    return lowered


def write_run(path: Path, run: Run) -> None:
    """Write TREC's six columns ``qid Q0 did rank score name``, ranks from 1, in one step.

    The scores are made :func:`strictly_decreasing`, so that every tool sees the ranking that we measure. TREC
    has no line for an empty ranking, so such a query is missing when the file is read.
    """
    for word in {run.name, *run.hits, *(hit.did for ranking in run.hits.values() for hit in ranking)}:
        trec_word(word)
    lines = [
        f"{qid} Q0 {hit.did} {rank} {score!s} {run.name}\n"
        for qid, ranking in run.hits.items()
        for rank, (hit, score) in enumerate(
            zip(ranking, strictly_decreasing([hit.score for hit in ranking]), strict=True), start=1
        )
    ]
    write_file(path, "".join(lines).encode())


def read_run(path: Path) -> Run:
    """Read a TREC run of six columns, or UniIR's of seven, the last of which is the task.

    Hits come in trec_eval's order: by score in single precision, equal scores by candidate id, last first.

    Raises BadRecord: a line has another number of columns, a score that is not a finite number, or a
    candidate twice in one ranking. Raises BadData: the file cannot be read or has no ranking.
    """
    rankings: dict[str, dict[str, float]] = {}
    name = ""
    for line, raw in numbered_lines(path):
        columns = raw.decode(errors="replace").split()
        if len(columns) not in {6, 7}:
            expected = f"TREC's 6 ({TREC_COLUMNS}) or UniIR's 7 (and the task)"
            raise BadRecord(path, line, f"{len(columns)} columns, expected {expected}")
        qid, _, did, _, text, name = columns[:6]
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise BadRecord(path, line, f"score {text!r} is not a finite number")
        ranking = rankings.setdefault(qid, {})
        if did in ranking:
            raise BadRecord(path, line, f"candidate {did} is twice in the ranking of query {qid}")
        with np.errstate(over="ignore"):
            ranking[did] = float(np.float32(score))
    if not rankings:
        raise BadData(f"{path} holds no ranking: expected lines of {TREC_COLUMNS}")
    hits = {qid: [Hit(*pair) for pair in ranking.items()] for qid, ranking in rankings.items()}
    for found in hits.values():
        found.sort(key=lambda hit: (hit.score, hit.did.encode()), reverse=True)
    return Run(name, hits)


def measure(qrels: Qrels, run: Run, *, ks: Sequence[int] = KS) -> Measures:
    """Measure a run against the right answers, as :func:`genius_search.evaluate.measure` does."""
    rankings = {qid: [hit.did for hit in ranking] for qid, ranking in run.hits.items()}
    try:
        return measure_rankings(qrels, rankings, ks=ks)
    except BadData as error:
        raise BadData(f"run {run.name!r}: {error}") from None
