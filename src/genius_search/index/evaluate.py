"""Evaluate an index with the queries of a data set, and compare it with exact search.

The data set has M-BEIR's layout. Measures are computed by trec_eval (ir-measures with
pytrec-eval). R@k is defined as in M-BEIR: the share of queries with any right answer among the
first k hits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from genius_search.config import SearchConfig
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import BadData, need_packages
from genius_search.index.encode import EncodedQuery
from genius_search.index.query import SearchResult, SnapshotSearcher
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.records import task_name
from genius_search.training.records import embed_queries

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Query id -> item id -> relevance; a relevance above 0 marks a right answer."""
KS: Final = (1, 5, 10)
"""The values of k for R@k and recall@k."""
RECALL_DEPTH: Final = 100
"""An additional k, for recall@k only."""
NDCG_DEPTHS: Final = (10, 50)
"""The values of k for nDCG@k."""
RANKING_DEPTH: Final = 50
"""Number of hits to retrieve for each query."""
QUERIES_PER_BATCH: Final = 64
"""Number of queries to search for in one call."""
ALL_CANDIDATES: Final = 10**9
"""A number of candidates that exceeds the size of any index, so that every item is scored."""
AVERAGE: Final = "average"
"""The name of the rows that average over the rows of one method."""
MAX_SHOWN_IDS: Final = 5
"""Maximum number of ids that an error message lists."""


class Measures(NamedTuple):
    """Measures of rankings, each between 0 and 1."""

    queries: int
    """Number of queries."""
    means: dict[str, float]
    """Name of a measure -> mean over all queries:

    - ``R@k``: share of queries with any right answer among the first k hits (M-BEIR's definition),
    - ``recall@k``: share of a query's right answers that are among the first k hits,
    - ``MRR``: reciprocal rank of the first right answer,
    - ``R-precision``: share of right answers among the first n hits, for n right answers,
    - ``nDCG@k``: normalised discounted cumulative gain of the first k hits.
    """
    per_query: dict[str, dict[str, float]]
    """Query id -> name of a measure -> value, for significance tests."""


def measure(
    qrels: Qrels, rankings: Mapping[str, Sequence[str]], *, ks: Sequence[int] = KS
) -> Measures:
    """Measure rankings of items against the right answers (M-BEIR, section 2.9).

    Items are measured in the order of the ranking; trec_eval alone would sort by score and break
    ties by id. An empty ranking counts as 0. A query without a ranking is an error, since counting
    it as 0 would hide lost ids.

    >>> measure({"9:1": {"9:3": 1}}, {"9:1": ["9:7", "9:3"]}, ks=(1, 5)).means["R@5"]
    1.0

    Raises
    ------
    BadData
        There are no queries, the queries of qrels and rankings differ, or a query has no right
        answer.
    MissingExtra
        ir-measures is not installed (extra ``evaluate``).
    """
    need_packages("evaluation needs", "ir_measures", "pytrec_eval")
    import ir_measures  # noqa: PLC0415  optional
    from ir_measures import RR, R, Rprec, Success, nDCG  # noqa: PLC0415

    _check_queries(qrels, rankings)
    names = {
        **{Success @ k: f"R@{k}" for k in ks},
        **{R @ k: f"recall@{k}" for k in (*ks, RECALL_DEPTH)},
        RR: "MRR",
        Rprec: "R-precision",
        **{nDCG @ k: f"nDCG@{k}" for k in NDCG_DEPTHS},
    }
    # Scores that fall with the rank keep trec_eval from breaking ties: of 3 items, 3, 2, 1.
    scores = {
        qid: {item: float(len(ranking) - rank) for rank, item in enumerate(ranking)}
        for qid, ranking in rankings.items()
    }
    per_query: dict[str, dict[str, float]] = {qid: {} for qid in qrels}
    relevance = {qid: dict(answers) for qid, answers in qrels.items()}
    for metric in ir_measures.iter_calc(list(names), relevance, scores):
        per_query[metric.query_id][names[metric.measure]] = float(metric.value)
    means = {name: _mean(values[name] for values in per_query.values()) for name in names.values()}
    return Measures(len(per_query), means, per_query)


def _check_queries(qrels: Qrels, rankings: Mapping[str, Sequence[str]]) -> None:
    """Raise :class:`BadData` unless each query has a ranking and a right answer."""
    if not qrels:
        raise BadData("there is nothing to measure: the qrels contain no query")
    unanswerable = [qid for qid, answers in qrels.items() if max(answers.values(), default=0) < 1]
    for qids, problem in (
        (qrels.keys() - rankings.keys(), "have no ranking; give each an empty one"),
        (rankings.keys() - qrels.keys(), "have a ranking but no qrels; are both of one split?"),
        (unanswerable, "have no right answer in the qrels; leave them out"),
    ):
        if qids:
            raise BadData(f"{len(qids)} queries {problem}: {format_first_ids(sorted(qids))}")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def format_first_ids(ids: Sequence[str]) -> str:
    """Return the first few ids as a list for an error message."""
    return ", ".join(ids[:MAX_SHOWN_IDS]) + (", …" if len(ids) > MAX_SHOWN_IDS else "")


class Evaluated(NamedTuple):
    """The measures of one search method on one row, which has the queries of one task."""

    row: str
    """The name of the row in files, such as ``mscoco_task0``, or :data:`AVERAGE`."""
    task: str
    """The task, such as ``text -> image``; empty for the average."""
    method: str
    """The search method: ``search``, ``exact`` or ``generator``."""
    queries: int
    """Number of queries."""
    measures: dict[str, float]
    """Name of a measure -> mean over the queries, as in :class:`Measures`."""
    num_ranked: float
    """Mean number of items that were scored for a query."""


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    rows: list[Evaluated]
    """The measures of each row and method, followed by the averages of each method."""
    items: int
    """Number of items in the index."""
    left_out: int
    """Number of queries that were left out, since the index has no right answer."""


def evaluate_index(
    model: Genius,
    snapshot: Snapshot,
    data: MBeir,
    *,
    split: str = "test",
    max_queries: int = 0,
    progress: Progress,
) -> Evaluation:
    """Evaluate an index whose items are candidates of a data set, with the candidates' ids.

    Up to three methods are compared:

    - ``search``: the settings of the index,
    - ``generator``: the same, with the generator as the router, if the model has a generator,
    - ``exact``: every item is scored, by its stored embedding if there is one, otherwise by codes.

    Of each row, all queries are searched for, or ``max_queries`` evenly spaced ones if it is not 0.
    Queries without a right answer in the index are left out and counted.

    Raises
    ------
    BadData
        The data set is incomplete, or no query has a right answer in the index.
    """
    methods = search_methods(model, snapshot)
    results: list[Evaluated] = []
    left_out = 0
    for row in data.rows(split):
        qids, encoded = _encode(model, snapshot, data, row, max_queries, progress)
        qrels = _indexed_answers(snapshot, read_judgements(row, qids))
        left_out += len(qids) - len(qrels)
        queries = [query for qid, query in zip(qids, encoded, strict=True) if qid in qrels]
        if not queries:
            continue
        progress.begin(f"evaluate {row.name}", len(queries) * len(methods))
        for number, (method, config) in enumerate(methods.items()):
            rankings: list[list[str]] = []
            num_ranked = 0.0
            searcher = SnapshotSearcher(model, snapshot, config)
            for result in _search_in_batches(searcher, queries):
                rankings.append([hit.id for hit in result.hits])
                num_ranked += result.num_ranked
                progress.advance(number * len(queries) + len(rankings), {})
            means = measure(qrels, dict(zip(qrels, rankings, strict=True))).means
            task = task_name(row.task_id)
            mean_ranked = num_ranked / len(queries)
            results.append(Evaluated(row.name, task, method, len(queries), means, mean_ranked))
    if not results:
        raise BadData(
            f"none of the {left_out} queries of {data.root} (split {split}) has a right answer in "
            f"{snapshot.folder}: its items need the ids of the data set's candidates; create such "
            "an index with `genius index create INDEX --pool FILE`, where FILE is a .jsonl file of "
            "a pool of this data set"
        )
    return Evaluation([*results, *_averages(results)], snapshot.num_alive, left_out)


def _search_in_batches(
    searcher: SnapshotSearcher, queries: Sequence[EncodedQuery]
) -> Iterator[SearchResult]:
    for start in range(0, len(queries), QUERIES_PER_BATCH):
        batch = queries[start : start + QUERIES_PER_BATCH]
        yield from searcher.search_encoded([[query] for query in batch])


def search_methods(model: Genius, snapshot: Snapshot) -> dict[str, SearchConfig]:
    """Return the name and the settings of each method to search an index."""
    has_embeddings = snapshot.manifest.embeddings != "none"
    exact = SearchConfig(
        router="geometry",
        rerank="embeddings" if has_embeddings else "codes",
        candidates=ALL_CANDIDATES,
        shortlist=0,
    )
    methods = {"search": SearchConfig(), "exact": exact}
    if model.has_generator:
        methods["generator"] = SearchConfig(router="generator")
    return methods


def _encode(
    model: Genius,
    snapshot: Snapshot,
    data: MBeir,
    row: EvaluationRow,
    max_queries: int,
    progress: Progress,
) -> tuple[list[str], list[EncodedQuery]]:
    """Return the ids and the encoded queries of a row, each query with one of its instructions."""
    qids, features = embed_queries(
        data, model.encoder, row, None, max_queries=max_queries, progress=progress
    )
    fused = model.embed_features(features)
    is_raw = snapshot.manifest.embeddings == "raw"
    compared = normalize(features.total()) if is_raw else fused
    return qids, [
        EncodedQuery(embedding, vector, RANKING_DEPTH, feature=vector)
        for embedding, vector in zip(fused, compared, strict=True)
    ]


def _indexed_answers(snapshot: Snapshot, qrels: Qrels) -> dict[str, dict[str, int]]:
    """Return the judgements of items in the index, for the queries that have a right one."""
    judged_ids = list({item for answers in qrels.values() for item in answers})
    indexed_ids = snapshot.item_states(judged_ids)
    indexed_qrels = {}
    for qid, answers in qrels.items():
        indexed = {item: relevance for item, relevance in answers.items() if item in indexed_ids}
        if max(indexed.values(), default=0) > 0:
            indexed_qrels[qid] = indexed
    return indexed_qrels


def _averages(rows: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the mean measures of each method with several rows; every row has the same weight."""
    averages = []
    for method in dict.fromkeys(row.method for row in rows):
        rows_of_method = [row for row in rows if row.method == method]
        if len(rows_of_method) < 2:
            continue
        averages.append(
            Evaluated(
                row=AVERAGE,
                task="",
                method=method,
                queries=sum(row.queries for row in rows_of_method),
                measures={
                    name: _mean(row.measures[name] for row in rows_of_method)
                    for name in rows_of_method[0].measures
                },
                num_ranked=_mean(row.num_ranked for row in rows_of_method),
            )
        )
    return averages
