"""How well a run answers its queries, by trec_eval's own code (ir-measures over pytrec-eval).

The rankings are measured in the order they are in: trec_eval would sort by score and break ties by
candidate id, so it is given scores that fall by one with every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import ir_measures
import numpy as np
from ir_measures import RR, R, Success, nDCG
from jaxtyping import Float32

from genius_search.artifact import write_file
from genius_search.data.mbeir import bad_record, numbered_lines
from genius_search.errors import BadData, UsageError
from genius_search.records import did_of, qid_of

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Query id -> candidate id -> relevance; above 0 is a right answer."""

NUM_NAMED = 5
"""How many offending ids an error names."""


def filter_to_pool(
    qrels: Qrels, pool_ids: Container[str], *, unanswerable: Literal["refuse", "drop"] = "refuse"
) -> dict[str, dict[str, int]]:
    """Keep the answers that are in the pool, so that recall and nDCG are over what can be found.

    OVEN's queries name InfoSeek's candidates too, which its own pool lacks (M-BEIR, section 1.7).
    A query left without any right answer is refused, or dropped when asked for.

    Raises
    ------
    BadData
        queries have no right answer in the pool and ``unanswerable`` is ``refuse``.
    """
    kept: dict[str, dict[str, int]] = {}
    lost: list[str] = []
    for qid, judged in qrels.items():
        inside = {did: relevance for did, relevance in judged.items() if did in pool_ids}
        if any(relevance > 0 for relevance in inside.values()):
            kept[qid] = inside
        else:
            lost.append(f"{qid} (answered by {some(list(judged))})")
    if lost and unanswerable == "refuse":
        raise BadData(
            f"{len(lost)} of {len(qrels)} queries have no right answer in the pool: {some(lost)}. "
            "Take the pool that these qrels were made for, restore the candidates, or drop such queries"
        )
    return kept


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write TREC's four columns ``qid 0 did relevance``, in one step.

    trec_eval, pytrec_eval and pyserini read these; M-BEIR's own files have a fifth column, the task, that
    they stumble over, and :func:`genius_search.data.mbeir.write_qrels` writes it.
    """
    lines = [
        f"{trec_word(qid)} 0 {trec_word(did)} {relevance}\n"
        for qid, judged in qrels.items()
        for did, relevance in judged.items()
    ]
    write_file(path, "".join(lines).encode())


def some(ids: list[str]) -> str:
    """The first few ids, for an error message."""
    return ", ".join(ids[:NUM_NAMED]) + (", …" if len(ids) > NUM_NAMED else "")


def trec_word(text: str) -> str:
    """The text itself when it can be a column of a TREC file, whose columns are parted by blanks."""
    if len(text.split()) != 1 or text.strip() != text:
        raise BadData(f"{text!r} cannot stand in a TREC file: ids and names must be one word without blanks")
    return text


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


NDCG_DEPTH = 10
"""Where nDCG is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """A run's scores, each the mean over all queries of the qrels, from 0 to 1."""

    queries: int
    """How many queries were measured."""
    hit_rate: Mapping[int, float]
    """k -> share of queries with any right answer in the first k: what M-BEIR prints as ``R@k``."""
    recall: Mapping[int, float]
    """k -> share of a query's right answers that are in the first k."""
    mrr: float
    """One over the rank of the first right answer, over the whole ranking."""
    ndcg: Mapping[int, float]
    """k -> normalised discounted gain of the first k; cut at 10."""
    short_rankings: int
    """Rankings with fewer hits than the largest k (a beam can find fewer); they count as they are."""
    per_query: Mapping[str, Mapping[str, float]]
    """Query id -> measure, named as in :meth:`flat` -> value; for tests of significance."""

    def flat(self) -> dict[str, float]:
        """The means under their names in tables: ``R@5``, ``recall@5``, ``MRR``, ``nDCG@10``."""
        return {
            **{f"R@{k}": value for k, value in self.hit_rate.items()},
            **{f"recall@{k}": value for k, value in self.recall.items()},
            "MRR": self.mrr,
            **{f"nDCG@{k}": value for k, value in self.ndcg.items()},
        }


def evaluate(
    qrels: Qrels, run: Run, *, ks: Sequence[int] = (1, 5, 10), known: Container[str] | None = None
) -> Measures:
    """Measure a run against the right answers (M-BEIR, section 2.9).

    An empty ranking counts 0, but only when the run says so: a query that the run lacks is an error, since
    a silent 0 has hidden lost ids before. For recall and nDCG filter the qrels to the pool first.

    >>> from genius_search.lab.runs import Hit, Run
    >>> run = Run("exact", {"9:1": [Hit("9:7", 0.9), Hit("9:3", 0.8)]})
    >>> evaluate({"9:1": {"9:3": 1}}, run, ks=(1, 5)).hit_rate
    {1: 0.0, 5: 1.0}

    Parameters
    ----------
    qrels, run
        right answers and rankings, over the same queries.
    ks
        how many first hits to look at, each from 1 up.
    known
        the pool's candidate ids; when given, a ranking may hold no other.

    Raises
    ------
    BadData
        the queries differ, one has no right answer, or a ranking holds a candidate outside ``known``.
    """
    if not ks or min(ks) < 1:
        raise UsageError(f"ks is {list(ks)}, expected one or more numbers from 1 up")
    _check_queries(qrels, run)
    if known is not None:
        _check_known(run, known)
    names = {
        **{Success @ k: f"R@{k}" for k in ks},
        **{R @ k: f"recall@{k}" for k in ks},
        RR: "MRR",
        nDCG @ NDCG_DEPTH: f"nDCG@{NDCG_DEPTH}",
    }
    by_rank = {
        qid: {hit.did: float(len(ranking) - place) for place, hit in enumerate(ranking)}
        for qid, ranking in run.hits.items()
    }
    per_query: dict[str, dict[str, float]] = {qid: {} for qid in qrels}
    judged = {qid: dict(answers) for qid, answers in qrels.items()}
    for metric in ir_measures.iter_calc(list(names), judged, by_rank):
        per_query[metric.query_id][names[metric.measure]] = float(metric.value)
    mean = {
        name: math.fsum(values[name] for values in per_query.values()) / len(per_query)
        for name in names.values()
    }
    return Measures(
        queries=len(per_query),
        hit_rate={k: mean[f"R@{k}"] for k in ks},
        recall={k: mean[f"recall@{k}"] for k in ks},
        mrr=mean["MRR"],
        ndcg={NDCG_DEPTH: mean[f"nDCG@{NDCG_DEPTH}"]},
        short_rankings=sum(len(ranking) < max(ks) for ranking in run.hits.values()),
        per_query=per_query,
    )


def _check_queries(qrels: Qrels, run: Run) -> None:
    if not qrels:
        raise BadData(f"run {run.name!r} cannot be measured: the qrels hold no query")
    missing = [qid for qid in qrels if qid not in run.hits]
    if missing:
        raise BadData(
            f"run {run.name!r} lacks {len(missing)} of the qrels' {len(qrels)} queries: {some(missing)}. "
            "Search for them too, or give an empty ranking where nothing was found"
        )
    extra = [qid for qid in run.hits if qid not in qrels]
    if extra:
        raise BadData(
            f"run {run.name!r} answers {len(extra)} queries that the qrels lack: {some(extra)}. "
            "Take the qrels of the same data set, task and split"
        )
    unanswerable = [qid for qid, judged in qrels.items() if max(judged.values(), default=0) < 1]
    if unanswerable:
        raise BadData(
            f"{len(unanswerable)} queries of the qrels have no right answer: {some(unanswerable)}. "
            "Filter the qrels to the pool and drop such queries"
        )


def _check_known(run: Run, known: Container[str]) -> None:
    unknown = [hit.did for ranking in run.hits.values() for hit in ranking if hit.did not in known]
    if unknown:
        raise BadData(
            f"run {run.name!r} names {len(unknown)} candidates that the pool lacks: {some(unknown)}. "
            "The index was made from another pool"
        )
