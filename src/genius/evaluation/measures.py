"""How well a run answers its queries, by trec_eval's own code (ir-measures over pytrec-eval).

The rankings are measured in the order they are in: trec_eval would sort by score and break ties by
candidate id, so it is given scores that fall by one with every rank.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import ir_measures
from ir_measures import RR, R, Success, nDCG

from genius.errors import BadData, UsageError
from genius.evaluation.qrels import Qrels, some
from genius.evaluation.runs import Run

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

    >>> from genius.evaluation.runs import Hit, Run
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
