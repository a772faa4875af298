"""The vectors that searches are compared on: a researcher's own, and more that are invented from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import faiss
import numpy as np
from jaxtyping import Float32, Int8, Int64

from genius_search.data.features import FeatureBatch
from genius_search.data.mbeir import MBeir, read_judgements
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData, UsageError
from genius_search.model import Genius
from genius_search.nn.spread import normalize
from genius_search.progress import Progress
from genius_search.records import Modality, candidate_number
from genius_search.training.features import embed_pool, embed_queries
from research.bench.settings import SearchSettings

BLOCK: Final = 65_536
NEIGHBOURS: Final = 8
"""An invented item differs from a real one as another does from one of so many nearest."""
PAIRS: Final = 4096
SAMPLE: Final = 200
"""Items whose nearest other is looked for."""
QUICK_ITEMS: Final = 2000
K: Final = 10
"""Hits of every search."""
BATCH: Final = 64
HELD_OUT: Final = 10
"""Without queries, at most one item in so many becomes one."""


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
    real: int = 0
    """Items from the first on that are not invented."""

    def recall(self, found: Found, k: int) -> float | None:
        """Return the share of the queries that have a right answer with one among the first k."""
        if self.right is None:
            return None
        pairs = zip(self.right, found.tolist(), strict=True)
        return float(np.mean([bool(right & set(rows[:k])) for right, rows in pairs if right]))


def read_given(
    data: Path,
    settings: SearchSettings,
    model: Genius | None,
    folder: Path,
    *,
    query_vectors: Path | None = None,
    answers: Path | None = None,
    progress: Progress,
) -> Given:
    """Read features: a data set in M-BEIR's layout, or ``.npy`` files of items, queries and right answers.

    ``answers`` holds the row of each query's right item, −1 for none, or a row of several such numbers.
    Without a model, a data set's features are ``.npy`` files in ``DATA/features``. Features are kept in
    ``folder``.

    Raises UsageError where files do not go together, BadData where one is not what it should be.
    """
    if answers is not None and query_vectors is None:
        raise UsageError(f"{answers} holds the answers of queries; give these with --query-vectors FILE.npy")
    if data.suffix == ".npy":
        if model is not None:
            raise UsageError(f"{data} holds embeddings, which no model is for; leave --model out")
        given = _read_arrays(data, query_vectors, answers, settings)
    elif query_vectors is not None:
        raise UsageError(f"{data} has queries of its own; --query-vectors is for a .npy file of items")
    else:
        given = _read_mbeir(MBeir(data), settings, model, folder, progress=progress)
    return _cut(given, QUICK_ITEMS, settings.seed) if settings.quick else given


def _read_arrays(
    file: Path, query_vectors: Path | None, answers: Path | None, settings: SearchSettings
) -> Given:
    """Read items, and queries with their answers from the other files or queries from among the items."""
    vectors, right = _load(file), None
    if query_vectors is not None:
        queries = _load(query_vectors)
        if queries.shape[1] != vectors.shape[1]:
            raise BadData(
                f"{query_vectors} has vectors of {queries.shape[1]} numbers, {file} of "
                f"{vectors.shape[1]}; they must come from one encoder"
            )
        if answers is not None:
            right = _load_answers(answers, len(queries), len(vectors))[: settings.queries]
        queries = queries[: settings.queries]
    else:
        order = np.random.default_rng(settings.seed).permutation(len(vectors))
        count = min(settings.queries, len(vectors) // HELD_OUT)
        if not count:
            raise BadData(
                f"{file} holds {len(vectors)} vectors, too few to take queries from; give some with "
                "--query-vectors FILE.npy"
            )
        queries, vectors = vectors[order[:count]], vectors[np.sort(order[count:])]
    texts = np.full(len(vectors), Modality.TEXT.code, dtype=np.int8)
    return Given(vectors, texts, queries, right, len(vectors))


def _load_answers(file: Path, num_queries: int, num_items: int) -> list[set[int]]:
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


def _load(file: Path) -> Float32[np.ndarray, "rows dim"]:
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


def _read_mbeir(
    data: MBeir, settings: SearchSettings, model: Genius | None, folder: Path, *, progress: Progress
) -> Given:
    """Embed the global pool and the queries of all rows, by a model or from ``DATA/features``."""
    encoder = PrecomputedEncoder(data.root / "features") if model is None else model.encoder

    def embed(features: FeatureBatch) -> np.ndarray:
        return normalize(features.total()) if model is None else model.embed(features)

    rows = data.rows(settings.split)
    pool = embed_pool(data, data.global_pool(settings.split), encoder, folder / "features", progress=progress)
    place = {number: row for row, number in enumerate(pool.ids.tolist())}
    queries, right = [], []
    for row in rows:
        most = -(-settings.queries // len(rows))
        qids, features = embed_queries(
            data, encoder, row, folder, max_queries=most, seed=settings.seed, progress=progress
        )
        judged = read_judgements(row, qids)
        queries.append(embed(features))
        for qid in qids:
            dids = [did for did, relevance in judged[qid].items() if relevance > 0]
            right.append({place[number] for did in dids if (number := candidate_number(did)) in place})
    items = embed(pool.gather(np.arange(len(pool))))
    return Given(items, pool.modality, np.concatenate(queries), right, len(items))


def _cut(given: Given, items: int, seed: int) -> Given:
    """Keep some items, the right answers first."""
    wanted = sorted(set().union(*(given.right or [])))
    drawn = np.random.default_rng(seed).permutation(len(given.items))
    kept = np.array(list(dict.fromkeys([*wanted, *drawn.tolist()]))[:items])
    place = {row: number for number, row in enumerate(kept.tolist())}
    right = given.right and [{place[row] for row in own if row in place} for own in given.right]
    return Given(given.items[kept], given.modality[kept], given.queries, right, len(kept))


def invent(given: Given, count: int, seed: int) -> Given:
    """Return a pool of so many items: the real ones, and others that are about as far from one another.

    An invented item is a real one plus the difference between another one and one of that one's nearest:
    neither one of the shortest differences, which would make near-duplicates, nor of the longest.
    """
    random = np.random.default_rng(seed)
    real, dim = given.items.shape
    chosen = random.permutation(real)[:PAIRS]
    flat = faiss.IndexFlatIP(dim)
    flat.add(given.items)
    cosines, near = (
        found[:, 1:] for found in flat.search(given.items[chosen], 1 + min(NEIGHBOURS, real - 1))
    )
    by_cosine = cosines.argsort(axis=None)
    pairs = by_cosine[len(by_cosine) // 4 : -(len(by_cosine) // 4)]
    items = np.empty((count, dim), dtype=np.float32)
    items[:real] = given.items
    bases = random.integers(0, real, count)
    for start in range(real, count, BLOCK):
        base = bases[start : start + BLOCK]
        pair = random.choice(pairs, len(base))
        one, other = chosen[pair // near.shape[1]], near.ravel()[pair]
        vectors = given.items[base] + given.items[one] - given.items[other]
        items[start : start + BLOCK] = normalize(vectors)
    modality = np.concatenate([given.modality, given.modality[bases[real:]]])
    return Given(items, modality, given.queries, given.right, real)


def nearest_cosines(given: Given, seed: int) -> tuple[float, float]:
    """Return the mean cosine of real and of invented items with the nearest other one, of a sample."""
    random = np.random.default_rng(seed)
    flat = faiss.IndexFlatIP(given.items.shape[1])
    flat.add(given.items)
    bounds = ((0, given.real), (given.real, len(given.items)))
    real, invented = (
        float(flat.search(given.items[random.integers(low, high, SAMPLE)], 2)[0][:, 1].mean())
        for low, high in bounds
    )
    return real, invented


def exact_search(items: Float32[np.ndarray, "items dim"], queries: Queries) -> Found:
    """Return the nearest items of each query."""
    found: Found = faiss.knn(queries, items, min(K, len(items)), metric=faiss.METRIC_INNER_PRODUCT)[1]
    return found


def search_all(search: Search, queries: Queries) -> Found:
    """Search in batches."""
    return np.concatenate([search(queries[start : start + BATCH]) for start in range(0, len(queries), BATCH)])


def share_found(truth: Int64[np.ndarray, "queries known"], found: Found, k: int) -> float:
    """Return the share of the true first k that is among the first k found."""
    pairs = zip(truth[:, :k].tolist(), found[:, :k].tolist(), strict=True)
    return float(np.mean([len(set(best) & set(own)) / len(best) for best, own in pairs]))
