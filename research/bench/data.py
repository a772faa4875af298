"""The items and queries on which searches are compared, and exact search over them."""

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
"""Number of hits of every search."""
QUERY_BATCH: Final = 64
ITEMS_PER_HELD_OUT_QUERY: Final = 10
"""In data without queries, at most one item in this many becomes a query."""
NUM_NEIGHBOURS: Final = 50
"""Nearest items from which an invented item is made."""
INVENTED_BATCH: Final = 1024
MAX_DISTANCE_QUERIES: Final = 1000
"""Items whose neighbours are searched to measure distances."""

Queries = Float32[np.ndarray, "queries dim"]
HitRows = Int64[np.ndarray, "queries k"]
"""Item rows of the hits of each query, best first; −1 where a search found fewer."""
Search = Callable[[Queries], HitRows]


class BenchData(NamedTuple):
    """Items and queries as unit vectors."""

    items: Float32[np.ndarray, "items dim"]
    modality: Int8[np.ndarray, " items"]
    queries: Queries
    answers: list[set[int]] | None = None
    """Item rows of each query's right answers, if they are known; may be empty for a query."""
    kinds: Shaped[np.ndarray, " queries"] | None = None
    """Kind of each query, if there are several."""
    sources: Shaped[np.ndarray, " items"] | None = None
    """Source of each item, such as the file that it is from."""

    def recall(self, hits: HitRows, k: int) -> float | None:
        """Return the share of the queries with answers that have one among their first k hits."""
        if self.answers is None:
            return None
        pairs = zip(self.answers, hits.tolist(), strict=True)
        return float(np.mean([bool(right & set(rows[:k])) for right, rows in pairs if right]))


def read_data(
    path: Path,
    folder: Path,
    *,
    max_queries: int,
    query_vectors: Path | None = None,
    answers: Path | None = None,
    progress: Progress,
) -> BenchData:
    """Read a data set in M-BEIR's layout, a folder of :mod:`research.texts`, or ``.npy`` files.

    Parameters
    ----------
    path
        the data set, the folder, or the file of items.
    folder
        receives the features of a data set; they are read from ``.npy`` files in ``PATH/features``.
    max_queries
        maximum number of queries of a data set or file; all queries of a folder are used.
    query_vectors, answers
        files that go with a file of items: queries, and the item row of each query's right answer
        (−1 for none), or several such columns.

    Raises
    ------
    UsageError
        Files do not go together.
    BadData
        A file has unexpected contents.
    """
    if answers is not None and query_vectors is None:
        raise UsageError(
            f"{answers} holds the answers of queries; give these with --query-vectors FILE.npy"
        )
    if path.suffix == ".npy":
        if query_vectors is None:
            return _hold_out_queries(path, max_queries)[0]
        return _read_arrays(path, query_vectors, answers, max_queries)
    if query_vectors is not None:
        raise UsageError(f"{path} contains queries; --query-vectors is for a .npy file of items")
    if (path / "items.npy").exists():
        return _read_texts_folder(path, max_queries)
    return _read_mbeir(MBeir(path), max_queries, folder, progress=progress)


def _read_texts_folder(folder: Path, max_queries: int) -> BenchData:
    """Read a folder of :mod:`research.texts`, which may have no queries."""
    files = {name: folder / f"{name}.npy" for name in ("queries", "answers", "kinds", "sources")}
    existing = {name: file for name, file in files.items() if file.exists()}
    sources = _open_array(files["sources"]) if "sources" in existing else None
    if "queries" not in existing:
        data, rows = _hold_out_queries(folder / "items.npy", max_queries)
        return data._replace(sources=None if sources is None else sources[rows])
    data = _read_arrays(folder / "items.npy", files["queries"], existing.get("answers"), None)
    kinds = _open_array(files["kinds"]) if "kinds" in existing else None
    return data._replace(kinds=kinds, sources=sources)


def _read_arrays(
    item_file: Path, query_file: Path, answer_file: Path | None, max_queries: int | None
) -> BenchData:
    """Read items, queries and, if given, answers; ``max_queries`` of None reads all queries."""
    items, queries = _read_vectors(item_file), _read_vectors(query_file)
    if queries.shape[1] != items.shape[1]:
        raise BadData(
            f"{query_file} has vectors of {queries.shape[1]} numbers, {item_file} of "
            f"{items.shape[1]}; they must come from one encoder"
        )
    answers = None
    if answer_file is not None:
        answers = _read_answers(answer_file, len(queries), len(items))[:max_queries]
    return BenchData(items, _text_modality(len(items)), queries[:max_queries], answers)


def _hold_out_queries(file: Path, max_queries: int) -> tuple[BenchData, np.ndarray]:
    """Turn some of a file's items into queries; also return the rows of the remaining items."""
    vectors = _read_vectors(file)
    order = np.random.default_rng(0).permutation(len(vectors))
    count = min(max_queries, len(vectors) // ITEMS_PER_HELD_OUT_QUERY)
    if not count:
        raise BadData(
            f"{file} holds {len(vectors)} vectors, too few to take queries from; give some with "
            "--query-vectors FILE.npy"
        )
    rows = np.sort(order[count:])
    return BenchData(vectors[rows], _text_modality(len(rows)), vectors[order[:count]]), rows


def _text_modality(num_items: int) -> Int8[np.ndarray, " items"]:
    return np.full(num_items, Modality.TEXT.code, dtype=np.int8)


def _read_answers(file: Path, num_queries: int, num_items: int) -> list[set[int]]:
    """Return the item rows of each query's right answers."""
    rows = _open_array(file)
    if rows.ndim not in (1, 2) or rows.dtype.kind not in "iu" or len(rows) != num_queries:
        raise BadData(
            f"{file} holds {rows.dtype} of shape {rows.shape}; expected the row of the right item "
            f"for each of {num_queries:,} queries, or several such columns, as integers"
        )
    if rows.min() < -1 or rows.max() >= num_items or rows.max() < 0:
        raise BadData(
            f"{file} holds rows from {rows.min()} to {rows.max()}; expected 0 to "
            f"{num_items - 1:,}, the items' rows, or -1 for none"
        )
    return [set(row[row >= 0].tolist()) for row in rows.reshape(num_queries, -1)]


def _read_vectors(file: Path) -> Float32[np.ndarray, "rows dim"]:
    """Return the vectors of a file, normalised; raise BadData if it has none."""
    vectors = _open_array(file)
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not len(vectors):
        raise BadData(
            f"{file} holds {vectors.dtype} of shape {vectors.shape}; expected floats, a row for "
            "each item"
        )
    unit: np.ndarray = np.ascontiguousarray(normalize(vectors.astype(np.float32)))
    return unit


def _open_array(file: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read as a .npy file: {error}") from None


def _read_mbeir(data: MBeir, max_queries: int, folder: Path, *, progress: Progress) -> BenchData:
    """Embed the global pool and the queries of all rows from ``DATA/features``."""
    encoder = PrecomputedEncoder(data.root / "features")
    rows = data.rows(SPLIT)
    pool = embed_pool(
        data, data.global_pool(SPLIT), encoder, folder / "features", progress=progress
    )
    item_rows = {number: row for row, number in enumerate(pool.ids.tolist())}
    queries, answers = [], []
    max_row_queries = -(-max_queries // len(rows))
    for row in rows:
        qids, features = embed_queries(
            data, encoder, row, folder, max_queries=max_row_queries, seed=0, progress=progress
        )
        judgements = read_judgements(row, qids)
        queries.append(normalize(features.total()))
        for qid in qids:
            positives = (did for did, relevance in judgements[qid].items() if relevance > 0)
            numbers = {candidate_number(did) for did in positives}
            answers.append({item_rows[number] for number in numbers & item_rows.keys()})
    items = normalize(pool.gather(np.arange(len(pool))).total())
    return BenchData(items, pool.modality, np.concatenate(queries), answers)


def invent_items(
    data: BenchData, num_items: int
) -> tuple[BenchData, list[dict[str, int | float | None]]]:
    """Invent items between the real ones, up to ``num_items`` in all; also return distances.

    An invented item is 0.7 of a real item, 0.3 of the mean of its fifty nearest neighbours, and 0.6
    of the difference between two neighbours. The difference is noise of the neighbourhood's shape.
    It alone would move items apart, which the step to the mean corrects.

    The distances are the median distance to the tenth nearest item in pools of several sizes,
    with and without invented items.
    """
    real, random = data.items, np.random.default_rng(0)
    num_neighbours = min(NUM_NEIGHBOURS, len(real) - 1)
    neighbours = faiss.knn(real, real, num_neighbours + 1, metric=faiss.METRIC_INNER_PRODUCT)[1]
    neighbours = neighbours[:, 1:]  # the first one is the item itself
    parts = [real]
    for start in range(len(real), num_items, INVENTED_BATCH):
        rows = random.integers(len(real), size=min(INVENTED_BATCH, num_items - start))
        first, second = neighbours[rows, random.integers(num_neighbours, size=(2, len(rows)))]
        centres = 0.7 * real[rows] + 0.3 * real[neighbours[rows]].mean(axis=1)
        parts.append(normalize(centres + 0.6 * (real[first] - real[second])))
    items = np.concatenate(parts)
    distances = [
        {
            "items": count,
            "real": measure_tenth_distance(real, count) if count <= len(real) else None,
            "real and invented": measure_tenth_distance(items, count),
        }
        for count in (len(real) // 4, len(real) // 2, len(real), len(items))
    ]
    return data._replace(items=items, modality=np.resize(data.modality, len(items))), distances


def measure_tenth_distance(items: Float32[np.ndarray, "items dim"], num_items: int) -> float:
    """Return the median distance to the tenth nearest item in a random sample of the items."""
    sample = items[np.random.default_rng(0).permutation(len(items))[:num_items]]
    queries = sample[:MAX_DISTANCE_QUERIES]
    cosines = faiss.knn(queries, sample, K + 1, metric=faiss.METRIC_INNER_PRODUCT)[0]
    return float(np.median(np.sqrt(2 - 2 * cosines[:, K])))


def exact_search(items: Float32[np.ndarray, "items dim"], queries: Queries) -> HitRows:
    """Return the rows of the nearest items of each query."""
    count = min(K, len(items))
    rows: HitRows = faiss.knn(queries, items, count, metric=faiss.METRIC_INNER_PRODUCT)[1]
    return rows


def search_all(search: Search, queries: Queries) -> HitRows:
    """Search for all queries, in batches."""
    starts = range(0, len(queries), QUERY_BATCH)
    return np.concatenate([search(queries[start : start + QUERY_BATCH]) for start in starts])


def share_of_exact_hits(exact: Int64[np.ndarray, "queries exact_hits"], hits: HitRows) -> float:
    """Return the share of exact search's hits that another search also returns."""
    pairs = zip(exact.tolist(), hits.tolist(), strict=True)
    return float(np.mean([len(set(best) & set(rows)) / len(best) for best, rows in pairs]))
