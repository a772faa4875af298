"""Evaluate an index, or a model, with the queries of a data set in M-BEIR's layout, beside exact search.

Measures are trec_eval's own (ir-measures over pytrec-eval). R@k is M-BEIR's: the share of queries with any
right answer among the first k.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from genius_search.config import SearchConfig
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import BadData, need_packages
from genius_search.index.index import Index
from genius_search.index.query import EncodedQuery, SnapshotSearcher
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.records import task_name
from genius_search.training.features import embed_queries

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Query id -> item id -> relevance; above 0 is a right answer."""
KS: Final = (1, 5, 10)
"""Depths of R@k."""
RECALL_DEPTH: Final = 100
"""Depth of the recall that is always measured."""
NDCG_DEPTHS: Final = (10, 50)
DEPTH: Final = 50
"""Hits of a query."""
BATCH: Final = 64
EVERYTHING: Final = 10**9
"""Candidates that no index has."""
AVERAGE: Final = "average"
NUM_NAMED: Final = 5
"""Ids that an error names at most."""


class Measures(NamedTuple):
    """Measures of rankings, from 0 to 1."""

    queries: int
    """Number of queries."""
    means: dict[str, float]
    """Means over all queries. ``R@k``: share of queries with any right answer in the first k (M-BEIR's).
    ``recall@k``: share of a query's right answers that are in the first k. ``MRR``: one over the rank of the
    first right answer. ``R-precision``: share of right answers among the first as many as there are right
    answers. ``nDCG@k``: normalised discounted gain of the first k."""
    per_query: dict[str, dict[str, float]]
    """Query id -> measure -> value; for significance tests."""


def measure(
    qrels: Qrels, rankings: Mapping[str, Sequence[str]], *, ks: Sequence[int] = KS
) -> Measures:
    """Measure rankings of items against the right answers (M-BEIR, section 2.9).

    A ranking is measured in its own order: trec_eval would sort by score and break ties by id. An empty
    ranking counts as 0; a query without a ranking is an error, since a silent 0 hides lost ids.

    >>> measure({"9:1": {"9:3": 1}}, {"9:1": ["9:7", "9:3"]}, ks=(1, 5)).means["R@5"]
    1.0

    Raises
    ------
    BadData
        There is no query, the queries differ, or one has no right answer.
    MissingExtra
        ir-measures is not installed (extra ``evaluate``).
    """
    need_packages("evaluation needs", "ir_measures", "pytrec_eval")
    import ir_measures  # noqa: PLC0415  optional
    from ir_measures import RR, R, Rprec, Success, nDCG  # noqa: PLC0415

    if not qrels:
        raise BadData("there is nothing to measure: the qrels hold no query")
    unanswerable = [qid for qid, judged in qrels.items() if max(judged.values(), default=0) < 1]
    for qids, problem in (
        (qrels.keys() - rankings.keys(), "have no ranking; give an empty one for each"),
        (rankings.keys() - qrels.keys(), "have a ranking and no qrels; are they of one split?"),
        (unanswerable, "have no right answer in the qrels; drop them"),
    ):
        if qids:
            raise BadData(f"{len(qids)} queries {problem}: {format_first_ids(sorted(qids))}")
    names = {
        **{Success @ k: f"R@{k}" for k in ks},
        **{R @ k: f"recall@{k}" for k in (*ks, RECALL_DEPTH)},
        RR: "MRR",
        Rprec: "R-precision",
        **{nDCG @ k: f"nDCG@{k}" for k in NDCG_DEPTHS},
    }
    by_rank = {
        qid: {item: float(len(ranking) - place) for place, item in enumerate(ranking)}
        for qid, ranking in rankings.items()
    }
    per_query: dict[str, dict[str, float]] = {qid: {} for qid in qrels}
    judged = {qid: dict(answers) for qid, answers in qrels.items()}
    for metric in ir_measures.iter_calc(list(names), judged, by_rank):
        per_query[metric.query_id][names[metric.measure]] = float(metric.value)
    means = {name: _mean(values[name] for values in per_query.values()) for name in names.values()}
    return Measures(len(per_query), means, per_query)


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return math.fsum(given) / len(given)


def format_first_ids(ids: Sequence[str]) -> str:
    """Return the first few ids, for an error message."""
    return ", ".join(ids[:NUM_NAMED]) + (", …" if len(ids) > NUM_NAMED else "")


class Evaluated(NamedTuple):
    """What one way of searching finds for the queries of one row."""

    row: str
    """Its name in files: ``mscoco_task0``; or ``average``."""
    task: str
    """``text -> image``; empty for the average."""
    method: str
    queries: int
    measures: dict[str, float]
    """As in :class:`Measures`."""
    touched: float
    """Items that were scored for a query, on average."""


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    rows: list[Evaluated]
    """Each row by each method, then their average."""
    items: int
    """Items of the index."""
    left_out: int
    """Queries without a right answer in the index."""


def evaluate_index(
    index: Index,
    data: MBeir,
    *,
    split: str = "test",
    progress: Progress,
) -> Evaluation:
    """Evaluate an index whose items are candidates of a data set, with their ids.

    Methods are ``search`` (the index's own settings), ``generator`` where the model has one (the same,
    with candidates found by it) and ``exact`` (every item is compared, by stored embeddings if there are
    any, otherwise by codes). Queries without a right answer in the index are left out and counted.

    >>> evaluate_index(Index.open("i"), MBeir("data"), progress=Silent())  # doctest: +SKIP

    Raises
    ------
    BadData
        The data set lacks something, or no query has a right answer in the index.
    """
    methods = search_methods(index)
    results: list[Evaluated] = []
    left_out = 0
    for row in data.rows(split):
        qids, queries = _encode(index, data, row, progress)
        qrels = _known(index, read_judgements(row, qids))
        left_out += len(qids) - len(qrels)
        kept = [query for qid, query in zip(qids, queries, strict=True) if qid in qrels]
        if not kept:
            continue
        progress.begin(f"evaluate {row.name}", len(kept) * len(methods))
        for number, (method, config) in enumerate(methods.items()):
            rankings, touched = [], 0.0
            for start in range(0, len(kept), BATCH):
                batch = [
                    query._replace(number=place)
                    for place, query in enumerate(kept[start : start + BATCH])
                ]
                found = SnapshotSearcher(index.model, index.snapshot, config).search_encoded(batch)
                rankings += [[hit.id for hit in one.hits] for one in found]
                touched += sum(one.touched for one in found)
                progress.advance(number * len(kept) + start + len(batch), {})
            means = measure(qrels, dict(zip(qrels, rankings, strict=True))).means
            task = task_name(row.task_id)
            results.append(Evaluated(row.name, task, method, len(kept), means, touched / len(kept)))
    if not results:
        raise BadData(
            f"none of the {left_out} queries of {data.root} (split {split}) has a right answer in "
            f"{index.folder}: its items need the ids of the data set's candidates; `genius index create "
            "INDEX --pool FILE` with a pool's .jsonl file of this data set makes such an index"
        )
    return Evaluation([*results, *_averages(results)], index.info().items, left_out)


def evaluate_model(
    model: Genius,
    data: MBeir,
    folder: Path,
    *,
    split: str = "test",
    progress: Progress,
) -> Evaluation:
    """Evaluate a model on the union of a split's pools: make an index of it in ``folder``, and evaluate that.

    The index stores fused embeddings, for exact search. One that is there already is used if it is the same
    model's. Parameters as of :func:`evaluate_index`.

    Raises
    ------
    BadData
        The data set has several files for the union of its pools.
    ArtifactMismatch
        The index in the folder is another model's.
    """
    pools = data.global_pool(split)
    if len(pools) != 1:
        raise BadData(
            f"{data.root}: the pool of split {split} is {len(pools)} files; make an index of them "
            "with `genius index create` and `genius index add`, and evaluate that with --index"
        )
    if (folder / "index.json").exists():
        index = Index.open(folder, model=model)
    else:
        index, _ = Index.create(
            folder, model=model, pool=pools[0], embeddings="fused", progress=progress
        )
    return evaluate_index(index, data, split=split, progress=progress)


def search_methods(index: Index) -> dict[str, SearchConfig]:
    """Return the options of each way of searching an index."""
    has_embeddings = index.snapshot.manifest.embeddings != "none"
    exact = SearchConfig(
        router="geometry",
        rerank="embeddings" if has_embeddings else "codes",
        candidates=EVERYTHING,
        shortlist=0,
    )
    methods = {"search": SearchConfig(), "exact": exact}
    if index.model.has_generator:
        methods["generator"] = SearchConfig(router="generator")
    return methods


def _encode(
    index: Index, data: MBeir, row: EvaluationRow, progress: Progress
) -> tuple[list[str], list[EncodedQuery]]:
    """Return ids and vectors of a row's queries, each with one of its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        qids, features = embed_queries(
            data, index.model.encoder, row, Path(folder), progress=progress
        )
    fused = index.model.embed(features)
    is_raw = index.snapshot.manifest.embeddings == "raw"
    evidence = normalize(features.total()) if is_raw else fused
    return qids, [EncodedQuery(0, DEPTH, *vectors) for vectors in zip(fused, evidence, strict=True)]


def _known(index: Index, judged: Qrels) -> dict[str, dict[str, int]]:
    """Return the right answers that are in the index, of the queries that have any."""
    wanted = list({item for answers in judged.values() for item in answers})
    known = index.snapshot.item_states(wanted)
    found = {
        qid: {item: relevance for item, relevance in answers.items() if item in known}
        for qid, answers in judged.items()
    }
    return {qid: answers for qid, answers in found.items() if max(answers.values(), default=0) > 0}


def _averages(rows: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the mean of each method over several rows, every row counting the same."""
    averages = []
    for method in dict.fromkeys(one.method for one in rows):
        same = [one for one in rows if one.method == method]
        if len(same) > 1:
            means = {name: _mean(one.measures[name] for one in same) for name in same[0].measures}
            queries, touched = sum(one.queries for one in same), _mean(one.touched for one in same)
            averages.append(Evaluated(AVERAGE, "", method, queries, means, touched))
    return averages
