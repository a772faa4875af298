"""Measure the share of exact search's first hits that clusters, and a single index, find.

    python benchmarks/cluster.py flickr8k [SHARDS ...]

The data set is in M-BEIR's layout, with features of texts in ``features/text_features.npy``. The
index and the clusters have the same codebooks, fitted to all items, and search with their default
settings. Exact search compares the queries with the features of all items.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.searcher import Searcher, Shard, shard_folder
from genius_search.data.mbeir import MBeir, read_pool, read_queries
from genius_search.encoders.base import ItemKey
from genius_search.index.index import Index
from genius_search.index.request import SearchRequest
from genius_search.model import Genius

K = 10
BATCH = 32


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("shards", type=int, nargs="*", default=[2, 4, 8])
    return parser.parse_args()


def open_model(folder: Path) -> Genius:
    """Open a model that encodes the id of a query as the query's features."""
    model = Genius.open(folder)
    encode = model.encoder.text_features

    def encode_ids(texts, _keys=()):
        return encode(texts, [ItemKey("query", text.rstrip(".")) for text in texts])

    model.encoder.text_features = encode_ids
    return model


def feature_row(item_id: str) -> int:
    """Return the row of an item's or a query's features."""
    return int(item_id.partition(":")[2]) - 1


def measure(name: str, search, qids: list[str], exact_hits: np.ndarray) -> None:
    """Print the share of exact search's hits, and CPU time of a query, alone and in batches.

    The CPU time is that of all threads of this process.
    """
    requests = [SearchRequest(text=qid, modality="text", hybrid=False, k=K) for qid in qids]
    shares = []
    for start in range(0, len(requests), BATCH):
        batch = slice(start, start + BATCH)
        for hits, rows in zip(search(requests[batch]), exact_hits[batch].tolist(), strict=True):
            shares.append(len({feature_row(hit.id) for hit in hits} & set(rows)) / K)
    times = []
    num_timed = len(requests) // BATCH * BATCH
    for size in (1, BATCH):
        began = time.process_time()
        for start in range(0, num_timed, size):
            search(requests[start : start + size])
        times.append((time.process_time() - began) * 1000 / num_timed)
    print(f"| {name} | {np.mean(shares):.4f} | {times[0]:.2f} | {times[1]:.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    arguments = read_arguments()
    data = MBeir(arguments.data)
    (pool,) = data.global_pool("test")
    feature_file = arguments.data / "features" / "text_features.npy"
    features = np.load(feature_file).astype(np.float32)
    rows = np.array([feature_row(candidate.did) for candidate in read_pool([pool])])
    qids = [query.qid for row in data.rows("test") for query in read_queries(row.queries)]
    queries = features[[feature_row(qid) for qid in qids]]
    cosines = queries @ features[rows].T
    exact_hits = rows[np.argsort(-cosines, axis=1, kind="stable")[:, :K]]
    print("| | share of exact search's first ten | CPU-ms a query, alone | in batches |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        index_folder = Path(temporary) / "index"
        created = Index.create(index_folder, pool, encoder=f"precomputed:{feature_file}")
        model = open_model(created.model.folder)
        index = Index.open(index_folder, model=model)
        measure("one index", index.search, qids, exact_hits)
        for num_shards in arguments.shards:
            folder = Path(temporary) / str(num_shards)
            settings = Settings(str(pool), str(model.folder), shards=num_shards, embeddings="fused")
            build_cluster(folder, settings)
            shards = [Shard(shard_folder(folder, n), model).begin for n in range(num_shards)]
            measure(f"{num_shards} shards", Searcher(shards).search, qids, exact_hits)


if __name__ == "__main__":
    main()
