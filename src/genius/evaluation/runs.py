"""What a search answered to many queries (a run), in memory and as a TREC file.

The order of a run is its own: equal scores stand in the order the search gave them (items that share an
ID, for example), and :mod:`genius.evaluation.measures` never sorts. trec_eval, pytrec_eval and mteb do: by
score in single precision, then by candidate id, last first. So what is given to them has scores that fall
with every rank, see :func:`falling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius.artifact import write_file
from genius.data.lines import bad_record, numbered_lines
from genius.data.records import did_of, qid_of
from genius.errors import BadData
from genius.evaluation.qrels import trec_word

TREC_COLUMNS: Final = "qid Q0 did rank score name"


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


def falling(scores: Sequence[float] | Float32[np.ndarray, " hits"]) -> Float32[np.ndarray, " hits"]:
    """Scores of a ranking, each below the one before it even in single precision, otherwise unchanged.

    trec_eval and its relatives order a ranking anew, by score in single precision and equal scores by
    candidate id, last first. Items that share an ID have equal scores, so such a tool would measure another
    ranking than ours (R@1 of 0.124 for 0.121 on Flickr8k). A score that is not below the one before it
    therefore becomes the next smaller number of single precision.

    >>> falling([-0.5, -0.5, -2.0]).tolist()
    [-0.5, -0.5000000596046448, -2.0]

    Raises
    ------
    BadData
        single precision has no such number.
    """
    with np.errstate(over="ignore"):
        single = np.array(scores, dtype=np.float32)
    # Read as whole numbers, floats from 0 up are in their own order; mirrored, so are those below 0.
    bits = single.view(np.int32).astype(np.int64)
    place = np.where(bits < 0, -(bits & _MAGNITUDE), bits)
    steps = np.arange(len(place))
    place = np.minimum.accumulate(place + steps) - steps
    lowered: np.ndarray = np.where(place < 0, -place | _SIGN, place).astype(np.uint32).view(np.float32)
    if not np.isfinite(lowered).all():
        raise BadData(
            f"scores from {scores[0]} to {scores[-1]} do not fit the single precision of TREC's tools"
        )
    return lowered


_MAGNITUDE: Final = 0x7FFFFFFF
_SIGN: Final = 0x80000000


def write_run(path: Path, run: Run) -> None:
    """Write TREC's six columns ``qid Q0 did rank score name``, ranks from 1, in one step.

    The scores are written :func:`falling`, so that every tool sees the ranking that we measure.
    TREC has no line for an empty ranking: such a query is missing when the file is read again.
    """
    words = {run.name, *run.hits, *(hit.did for ranking in run.hits.values() for hit in ranking)}
    for word in words:
        trec_word(word)
    lines = [
        f"{qid} Q0 {hit.did} {rank} {score!s} {run.name}\n"
        for qid, ranking in run.hits.items()
        for rank, (hit, score) in enumerate(
            zip(ranking, falling([hit.score for hit in ranking]), strict=True), start=1
        )
    ]
    write_file(path, "".join(lines).encode())


def read_run(path: Path, *, hashed: bool = False, order: Literal["ranks", "scores"] = "ranks") -> Run:
    """Read a TREC run: six columns, or UniIR's seven, whose last is the task.

    Parameters
    ----------
    hashed
        the ids are UniIR's whole numbers, as in the run files of GENIUS's authors.
    order
        ``ranks``: as the lines stand, whose ranks must count 1, 2, 3, … and whose scores must not rise.
        ``scores``: as trec_eval orders them, whatever the ranks: by score in single precision, equal scores
        by candidate id, last first.

    Raises
    ------
    BadRecord
        a line with another number of columns, a rank or a score out of ``order``, a score that is not a
        finite number, a candidate twice in one ranking, a second run's name, an id that is no number when
        ``hashed``.
    BadData
        the file cannot be read or holds no ranking.
    """
    hits: dict[str, list[Hit]] = {}
    seen: dict[str, set[str]] = {}
    name = ""
    for line, row in _rows(path, hashed=hashed):
        name = name or row.name
        if row.name != name:
            raise bad_record(path, line, f"run name {row.name!r}, but the file began with {name!r}")
        ranking = hits.setdefault(row.qid, [])
        if order == "ranks":
            problem = _out_of_order(row, ranking)
            if problem:
                advice = "if the ranks mean nothing, read the file in the order of its scores"
                raise bad_record(path, line, f"{problem}; {advice}")
        found = seen.setdefault(row.qid, set())
        if row.did in found:
            raise bad_record(path, line, f"candidate {row.did} is twice in the ranking of query {row.qid}")
        found.add(row.did)
        ranking.append(Hit(row.did, row.score if order == "ranks" else _single(row.score)))
    if not hits:
        raise BadData(f"{path} holds no ranking: expected lines of {TREC_COLUMNS}")
    if order == "scores":
        hits = {qid: sorted(ranking, key=_trec_eval, reverse=True) for qid, ranking in hits.items()}
    return Run(name, hits)


class _Row(NamedTuple):
    qid: str
    did: str
    rank: str
    score: float
    name: str


def _rows(path: Path, *, hashed: bool) -> Iterator[tuple[int, _Row]]:
    num_columns = 0
    for line, raw in numbered_lines(path):
        columns = raw.split()
        if len(columns) not in {6, 7} or len(columns) != (num_columns or len(columns)):
            expected = f"TREC's 6 ({TREC_COLUMNS}) or UniIR's 7 (and the task), the same on every line"
            raise bad_record(path, line, f"{len(columns)} columns, expected {expected}")
        num_columns = len(columns)
        try:
            qid, _, did, rank, score, name = (column.decode() for column in columns[:6])
            if hashed:
                qid, did = _unhashed(qid, qid_of), _unhashed(did, did_of)
            row = _Row(qid, did, rank, _number(score), name)
        except (BadData, UnicodeDecodeError) as error:
            raise bad_record(path, line, str(error)) from None
        yield line, row


def _out_of_order(row: _Row, ranking: Sequence[Hit]) -> str | None:
    if row.rank != str(len(ranking) + 1):
        return f"rank {row.rank} of query {row.qid}, expected {len(ranking) + 1}"
    if ranking and row.score > ranking[-1].score:
        return f"score {row.score} of query {row.qid} is above the one before it"
    return None


def _single(score: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(score))


def _trec_eval(hit: Hit) -> tuple[float, bytes]:
    return hit.score, hit.did.encode()


def _unhashed(text: str, id_of: Callable[[int], str]) -> str:
    if not (text.isascii() and text.isdecimal()):
        raise BadData(f"id {text!r} is not one of UniIR's whole numbers; read the file without `hashed`")
    return id_of(int(text))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadData(f"score {text!r} is not a finite number")
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
