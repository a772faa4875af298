"""What share of exact search's first hits clusters find, beside one index with the same model.

    python benchmarks/cluster.py flickr8k [SHARDS ...]

The data are in M-BEIR's layout, with features of texts in ``features/text_features.npy``. The index and the
clusters have the same codebooks, fitted to all items, and all search with their own usual settings. Exact
search compares the queries with the features of all items.
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
from genius_search.index.index import Index, current_state
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
    """Open a model whose queries are looked up by their text, which is the id of a query."""
    model = Genius.open(folder)
    look_up = model.encoder.text_features
    model.encoder.text_features = lambda texts: look_up(
        [one._replace(key=ItemKey("query", one.text.rstrip("."))) for one in texts]
    )
    return model


def measure(name: str, search, qids: list[str], truth: np.ndarray) -> None:
    """Print recall, and the CPU time of all threads of this process for a query, alone and in batches."""
    requests = [SearchRequest(text=qid, modality="text", hybrid=False, k=K) for qid in qids]
    hits = [
        one
        for start in range(0, len(requests), BATCH)
        for one in search(requests[start : start + BATCH])
    ]
    found = [{int(hit.id.partition(":")[2]) - 1 for hit in one} for one in hits]
    recall = np.mean(
        [len(own & set(known)) / K for own, known in zip(found, truth.tolist(), strict=True)]
    )
    times = []
    for size in (1, BATCH):
        began = time.process_time()
        for start in range(0, len(requests) // BATCH * BATCH, size):
            search(requests[start : start + size])
        times.append((time.process_time() - began) * 1000 / (len(requests) // BATCH * BATCH))
    print(f"| {name} | {recall:.4f} | {times[0]:.2f} | {times[1]:.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    given = read_arguments()
    data = MBeir(given.data)
    (pool,) = data.global_pool("test")
    features = np.load(given.data / "features" / "text_features.npy").astype(np.float32)
    encoder = f"precomputed:{given.data / 'features' / 'text_features.npy'}"
    rows = np.array([int(one.did.partition(":")[2]) - 1 for one in read_pool([pool])])
    qids = [query.qid for row in data.rows("test") for query in read_queries(row.queries)]
    queries = features[[int(qid.partition(":")[2]) - 1 for qid in qids]]
    truth = rows[np.argsort(-(queries @ features[rows].T), axis=1, kind="stable")[:, :K]]
    print(
        "| | share of exact search's first ten | CPU-ms a query, alone | in batches |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        single = Index.create(f"{scratch}/index", pool, encoder=encoder)
        model = open_model(single.model.folder)
        single = Index.open(f"{scratch}/index", model=model)
        bits = current_state(single).snapshot.manifest.embedding_bits
        measure("one index", single.search, qids, truth)
        for shards in given.shards:
            folder = Path(scratch) / str(shards)
            settings = Settings(
                str(pool), str(model.folder), shards=shards, embeddings="fused", embedding_bits=bits
            )
            build_cluster(folder, settings)
            opened = [Shard(shard_folder(folder, number), model).begin for number in range(shards)]
            measure(f"{shards} shards", Searcher(opened).search, qids, truth)


if __name__ == "__main__":
    main()
