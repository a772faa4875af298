"""What a search answered to many queries (a run), in memory and as a TREC file.

The order of a run is its own: equal scores stand in the order the search gave them (items that share an
ID, for example). A tool that sorts a run file again, as trec_eval does (by score in single precision, then
by candidate id, last first), can order equal scores otherwise; :mod:`genius.evaluation.measures` never
sorts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from genius.artifact import write_file
from genius.errors import BadData, BadRecord
from genius.evaluation.qrels import trec_word


class Hit(NamedTuple):
    """A candidate that was found, and its score."""

    did: str
    score: float


@dataclass(frozen=True, slots=True)
class Run:
    """One method's ranking for each query, best first. What cannot be a ranking is refused here.

    >>> run = Run("generative", {"9:1": [Hit("9:7", -0.5), Hit("9:3", -2.0)]})
    >>> run.hits["9:1"][0].did
    '9:7'

    Raises
    ------
    BadData
        a candidate twice in one ranking, a score that is not finite, or one above the score before it.
    """

    name: str
    """Its tag in the file: the method."""
    hits: Mapping[str, Sequence[Hit]]
    """Query id -> ranking. A query that found nothing is here with an empty ranking."""

    def __post_init__(self) -> None:
        for qid, ranking in self.hits.items():
            problem = _problem(ranking)
            if problem:
                raise BadData(f"run {self.name!r}, query {qid}: {problem}")


def write_run(path: Path, run: Run) -> None:
    """Write TREC's six columns ``qid Q0 did rank score name``, ranks from 1, scores exact, in one step.

    TREC has no line for an empty ranking: such a query is missing when the file is read again.
    """
    name = trec_word(run.name)
    lines = [
        f"{trec_word(qid)} Q0 {trec_word(hit.did)} {rank} {float(hit.score)!r} {name}\n"
        for qid, ranking in run.hits.items()
        for rank, hit in enumerate(ranking, start=1)
    ]
    write_file(path, "".join(lines).encode())


def read_run(path: Path) -> Run:
    """Read a TREC run; nothing is sorted or mended.

    Raises
    ------
    BadRecord
        a line with other than six columns, ranks of a query that do not count 1, 2, 3, …, a score that is
        not a finite number or rises, a candidate twice in one ranking, a second run's name.
    BadData
        the file holds no ranking.
    """
    hits: dict[str, list[Hit]] = {}
    seen: set[tuple[str, str]] = set()
    name = ""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            columns = line.split()
            if not columns:
                continue
            if len(columns) != 6:
                raise BadRecord(
                    path, number, f"{len(columns)} columns, expected TREC's 6: qid Q0 did rank score name"
                )
            qid, _, did, rank, score, tag = columns
            name = name or tag
            if tag != name:
                raise BadRecord(path, number, f"run name {tag!r}, but the file began with {name!r}")
            ranking = hits.setdefault(qid, [])
            if rank != str(len(ranking) + 1):
                raise BadRecord(path, number, f"rank {rank} of query {qid}, expected {len(ranking) + 1}")
            if (qid, did) in seen:
                raise BadRecord(path, number, f"candidate {did} is twice in the ranking of query {qid}")
            seen.add((qid, did))
            ranking.append(Hit(did, _number(path, number, score)))
            if len(ranking) > 1 and ranking[-1].score > ranking[-2].score:
                raise BadRecord(path, number, f"score {score} of query {qid} is above the one before it")
    if not hits:
        raise BadData(f"{path} holds no ranking: expected lines of qid Q0 did rank score name")
    return Run(name, hits)


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRecord(path, line, f"score {text!r} is not a finite number")
    return value


def _problem(ranking: Sequence[Hit]) -> str | None:
    """Why this cannot be a ranking, or nothing."""
    seen: set[str] = set()
    for hit in ranking:
        if hit.did in seen:
            return f"candidate {hit.did} is twice in the ranking"
        seen.add(hit.did)
        if not math.isfinite(hit.score):
            return f"the score of candidate {hit.did} is {hit.score}, expected a finite number"
    for before, after in pairwise(ranking):
        if after.score > before.score:
            return f"candidate {after.did} scores {after.score}, above {before.score} of the one before it"
    return None
