"""The vectors that searches are compared on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import faiss
import numpy as np
from jaxtyping import Float32, Int8, Int64, Shaped

from genius_search.data.mbeir import MBeir, read_judgements
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData, UsageError
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.records import Modality, candidate_number
from genius_search.training.records import embed_pool, embed_queries

SPLIT: Final = "test"
K: Final = 10
"""Hits of every search."""
BATCH: Final = 64
HELD_OUT: Final = 10
"""Without queries, at most one item in so many becomes one."""
NEAR: Final = 50
"""Items near to a real one, of which invented ones are made."""
INVENTED: Final = 1024
"""Items that are invented at a time."""
TRIED: Final = 1000
"""Items whose neighbours are found."""


Queries = Float32[np.ndarray, "queries dim"]
Found = Int64[np.ndarray, "queries k"]
"""Item rows of each query, best first; −1 where fewer were found."""
Search = Callable[[Queries], Found]


class Given(NamedTuple):
    """Items and queries as unit vectors."""

    items: Float32[np.ndarray, "items dim"]
    modality: Int8[np.ndarray, " items"]
    queries: Queries
    right: list[set[int]] | None = None
    """Rows of the right answers to each query, if they are known; an empty set where there is none."""
    kinds: Shaped[np.ndarray, " queries"] | None = None
    """The kind of each query, if there are several."""
    sources: Shaped[np.ndarray, " items"] | None = None
    """A field of each item, if there is one."""

    def recall(self, found: Found, k: int) -> float | None:
        """Return the share of the queries that have a right answer with one among the first k."""
        if self.right is None:
            return None
        pairs = zip(self.right, found.tolist(), strict=True)
        return float(np.mean([bool(right & set(rows[:k])) for right, rows in pairs if right]))


def read_given(
    data: Path,
    folder: Path,
    *,
    most_queries: int,
    query_vectors: Path | None = None,
    answers: Path | None = None,
    progress: Progress,
) -> Given:
    """Read a data set in M-BEIR's layout, a folder of :mod:`research.texts`, or ``.npy`` files.

    ``answers`` holds the row of each query's right item, −1 for none, or a row of several such numbers.
    A data set's features are ``.npy`` files in ``DATA/features``; what is read of them is kept in ``folder``.
    Of a data set or file, ``most_queries`` are asked.

    Raises UsageError where files do not go together, BadData where one is not what it should be.
    """
    if answers is not None and query_vectors is None:
        raise UsageError(
            f"{answers} holds the answers of queries; give these with --query-vectors FILE.npy"
        )
    if data.suffix == ".npy":
        return _read_arrays(data, query_vectors, answers, most_queries)
    if query_vectors is not None:
        raise UsageError(
            f"{data} has queries of its own; --query-vectors is for a .npy file of items"
        )
    if (data / "items.npy").exists():
        known = {name: data / f"{name}.npy" for name in ("answers", "kinds", "sources")}
        read = {name: _open_array(file) for name, file in known.items() if file.exists()}
        own = known["answers"] if "answers" in read else None
        given = _read_arrays(data / "items.npy", data / "queries.npy", own, None)
        return given._replace(kinds=read.get("kinds"), sources=read.get("sources"))
    return _read_mbeir(MBeir(data), most_queries, folder, progress=progress)


def _read_arrays(
    file: Path, query_vectors: Path | None, answers: Path | None, most: int | None
) -> Given:
    """Read items, and queries with their answers from the other files or queries from among the items."""
    vectors, right = _read_vectors(file), None
    if query_vectors is not None:
        queries = _read_vectors(query_vectors)
        if queries.shape[1] != vectors.shape[1]:
            raise BadData(
                f"{query_vectors} has vectors of {queries.shape[1]} numbers, {file} of "
                f"{vectors.shape[1]}; they must come from one encoder"
            )
        if answers is not None:
            right = _read_answers(answers, len(queries), len(vectors))[:most]
        queries = queries[:most]
    else:
        order = np.random.default_rng(0).permutation(len(vectors))
        count = min(most or len(vectors), len(vectors) // HELD_OUT)
        if not count:
            raise BadData(
                f"{file} holds {len(vectors)} vectors, too few to take queries from; give some with "
                "--query-vectors FILE.npy"
            )
        queries, vectors = vectors[order[:count]], vectors[np.sort(order[count:])]
    texts = np.full(len(vectors), Modality.TEXT.code, dtype=np.int8)
    return Given(vectors, texts, queries, right)


def _read_answers(file: Path, num_queries: int, num_items: int) -> list[set[int]]:
    """Return the rows of the right items of each query."""
    rows = _open_array(file)
    if rows.ndim not in (1, 2) or rows.dtype.kind not in "iu" or len(rows) != num_queries:
        raise BadData(
            f"{file} holds {rows.dtype} of shape {rows.shape}; expected the row of the right item for each "
            f"of {num_queries:,} queries, or several such columns, as integers"
        )
    if rows.min() < -1 or rows.max() >= num_items or rows.max() < 0:
        raise BadData(
            f"{file} holds rows from {rows.min()} to {rows.max()}; expected 0 to {num_items - 1:,}, the "
            "items' rows, or -1 for none"
        )
    return [{row for row in own if row >= 0} for own in rows.reshape(num_queries, -1).tolist()]


def _read_vectors(file: Path) -> Float32[np.ndarray, "rows dim"]:
    """Return the unit vectors of a file; BadData if it holds something else."""
    vectors = _open_array(file)
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not len(vectors):
        raise BadData(
            f"{file} holds {vectors.dtype} of shape {vectors.shape}; expected floats, a row for each item"
        )
    unit: np.ndarray = np.ascontiguousarray(normalize(vectors.astype(np.float32)))
    return unit


def _open_array(file: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read as a .npy file: {error}") from None


def _read_mbeir(data: MBeir, most_queries: int, folder: Path, *, progress: Progress) -> Given:
    """Embed the global pool and the queries of all rows from ``DATA/features``."""
    encoder = PrecomputedEncoder(data.root / "features")
    rows = data.rows(SPLIT)
    pool = embed_pool(
        data, data.global_pool(SPLIT), encoder, folder / "features", progress=progress
    )
    place = {number: row for row, number in enumerate(pool.ids.tolist())}
    queries, right = [], []
    for row in rows:
        most = -(-most_queries // len(rows))
        qids, features = embed_queries(
            data, encoder, row, folder, max_queries=most, seed=0, progress=progress
        )
        judged = read_judgements(row, qids)
        queries.append(normalize(features.total()))
        for qid in qids:
            dids = [did for did, relevance in judged[qid].items() if relevance > 0]
            right.append(
                {place[number] for did in dids if (number := candidate_number(did)) in place}
            )
    items = normalize(pool.gather(np.arange(len(pool))).total())
    return Given(items, pool.modality, np.concatenate(queries), right)


def exact_search(items: Float32[np.ndarray, "items dim"], queries: Queries) -> Found:
    """Return the nearest items of each query."""
    found: Found = faiss.knn(queries, items, min(K, len(items)), metric=faiss.METRIC_INNER_PRODUCT)[
        1
    ]
    return found


def invent(given: Given, number: int) -> tuple[Given, list[dict[str, int | float | None]]]:
    """Invent items between the real ones until there are so many; return them all, and distances of both.

    An invented one is .7 of a real item and .3 of the mean of the fifty nearest, plus .6 of the difference of
    two of these: noise of the neighbourhood's shape, and a step inwards, since noise alone moves items apart.
    """
    real, random, made = given.items, np.random.default_rng(0), [given.items]
    near = faiss.knn(real, real, NEAR + 1, metric=faiss.METRIC_INNER_PRODUCT)[1][:, 1:]
    for start in range(len(real), number, INVENTED):
        rows = random.integers(len(real), size=min(INVENTED, number - start))
        one, other = near[rows, random.integers(NEAR, size=(2, len(rows)))]
        centres = 0.7 * real[rows] + 0.3 * real[near[rows]].mean(axis=1)
        made.append(normalize(centres + 0.6 * (real[one] - real[other])))
    items = np.concatenate(made)
    distances = [
        {
            "items": count,
            "real": tenth_nearest(real, count) if count <= len(real) else None,
            "real and invented": tenth_nearest(items, count),
        }
        for count in (len(real) // 4, len(real) // 2, len(real), len(items))
    ]
    return given._replace(items=items, modality=np.resize(given.modality, len(items))), distances


def tenth_nearest(items: Float32[np.ndarray, "items dim"], number: int) -> float:
    """Return the median distance to the tenth nearest of so many items, drawn at random."""
    drawn = items[np.random.default_rng(0).permutation(len(items))[:number]]
    nearest = faiss.knn(drawn[:TRIED], drawn, K + 1, metric=faiss.METRIC_INNER_PRODUCT)[0]
    return float(np.median(np.sqrt(2 - 2 * nearest[:, K])))


def search_all(search: Search, queries: Queries) -> Found:
    """Search in batches."""
    return np.concatenate(
        [search(queries[start : start + BATCH]) for start in range(0, len(queries), BATCH)]
    )


def share_found(truth: Int64[np.ndarray, "queries known"], found: Found) -> float:
    """Return the share of the true items that is found."""
    pairs = zip(truth.tolist(), found.tolist(), strict=True)
    return float(np.mean([len(set(best) & set(own)) / len(best) for best, own in pairs]))
