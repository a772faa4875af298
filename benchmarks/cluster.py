"""What a query of a cluster costs: calls to shards, bytes, CPU, and the first levels of the IDs that a router holds.

Usage: python benchmarks/cluster.py CLUSTER TEXTS [ITEMS ...]

CLUSTER was built with `genius cluster build`, without deleted items; TEXTS holds a query on each line, of which 1,000 are
taken. Compares the hits with those of one index of the same items, which is written beside the cluster, and CPU times in
one process. Then the IDs are cut into 1 to 64 shards, which are called in this process; arguments and answers are pickled,
and their bytes counted. ITEMS are numbers of items of larger, invented pools: the first three codes of an item, followed by
the rest of another's that shares the first two; above 30 million only the first levels are counted. Prints Markdown.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from genius_search.cluster.cuts import choose_cuts, row_of
from genius_search.cluster.folder import Cluster
from genius_search.cluster.router import RoutedQuery, Router
from genius_search.cluster.shard import Shard, shard_ranker
from genius_search.config import SearchConfig
from genius_search.index.index import Index
from genius_search.index.query import encode_queries
from genius_search.index.requests import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.writer import Piece, one_writer
from genius_search.lab.bench.measure import describe_machine, use_one_thread
from genius_search.search.table import IdTable, SearchSegment

QUERIES = 1000
K = 10
SHARDS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 8, 32)
DEPTH = 4
MOST_ITEMS = 30_000_000
CHUNK = 10_000_000


class Answer:
    """An answer that was pickled."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def result(self) -> Any:
        """Return the answer."""
        return pickle.loads(self._data)  # noqa: S301  our own


class CountedShard:
    """A shard in this process that is called as if it were elsewhere."""

    def __init__(self, shard: Shard, counts: Counter[str]) -> None:
        self._shard, self._counts = shard, counts

    def submit(self, method: str, *arguments: Any) -> Answer:
        """Call a method, and count the call and its bytes."""
        given = pickle.dumps(arguments)
        answer = pickle.dumps(getattr(self._shard, method)(*pickle.loads(given)))  # noqa: S301  our own
        self._counts[method] += 1
        self._counts["bytes"] += len(given) + len(answer)
        return Answer(answer)


def slice_table(table: IdTable, low: int, high: int) -> IdTable:
    """Return the rows of a table from ``low`` to before ``high``, with the items' old numbers."""
    starts = [table.starts[first:last] for first, last in pairwise(table.level_bounds.tolist())]
    starts = [own[(own > low) & (own < high)] - low for own in starts]
    return IdTable(
        table.ids[low:high],
        np.concatenate(starts),
        np.cumsum([0, *map(len, starts)]),
        table.bucket_starts[low : high + 1] - table.bucket_starts[low],
        table.items[table.bucket_starts[low] : table.bucket_starts[high]],
    )


def cut(index: Index, table: IdTable, count: int, counts: Counter[str]) -> Router:
    """Cut a table into shards in this process."""
    rows = [0, *(row_of(table, one) for one in choose_cuts(table, count)), len(table)]
    shards = []
    for low, high in pairwise(rows):
        snapshot = Snapshot(index.snapshot.manifest.replace(embeddings="none", segments=()), ())
        snapshot.__dict__["search_segments"] = [SearchSegment(slice_table(table, low, high), None)]
        shards.append(CountedShard(Shard(snapshot, shard_ranker(index.model.ranker)), counts))
    return Router(shards, [shard.submit("top", DEPTH).result() for shard in shards], depth=DEPTH)


def invent(table: IdTable, items: int, random: np.random.Generator) -> np.ndarray:
    """Return invented IDs: three codes of one, the rest of another that shares the first two."""
    codes = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
    bounds = np.append(np.unique(codes[:, :2], axis=0, return_index=True)[1], len(codes))
    first = random.integers(0, len(codes), items)
    group = bounds.searchsorted(first, side="right") - 1
    other = random.integers(bounds[group], bounds[group + 1])
    return np.concatenate([codes[first, :3], codes[other, 3:]], axis=1)


def count_prefixes(table: IdTable, items: int) -> None:
    """Print the size of the first levels of an invented pool."""
    random = np.random.default_rng(0)
    known = np.zeros(0, dtype=np.int64)
    places = 256 ** np.arange(DEPTH)[::-1]
    for start in range(0, items, CHUNK):
        codes = invent(table, min(CHUNK, items - start), random)[:, :DEPTH]
        known = np.union1d(known, codes.astype(np.int64) @ places)
    top = IdTable.build((known[:, None] // places % 256).astype(np.int16), np.zeros(len(known)))
    mib = (top.nbytes + 16 * len(known)) / 2**20  # and two numbers for each prefix
    print(f"\n{items:,} invented items: {len(known):,} prefixes of {DEPTH} codes, {mib:.1f} MiB")


def cpu_ms(run: Callable[[], object], queries: int) -> float:
    """Return CPU-milliseconds for each query, the smaller of two runs."""
    found = []
    for _ in range(2):
        began = time.process_time()
        run()
        found.append(1000 * (time.process_time() - began) / queries)
    return min(found)


def batches(requests: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the requests in batches."""
    yield from (requests[start : start + size] for start in range(0, len(requests), size))


def compare(cluster: Cluster, single: Index, requests: Sequence[SearchRequest], config: SearchConfig) -> None:
    """Compare hits and CPU times of a cluster in one process with those of one index."""
    equal = 0
    for some in batches(requests, 32):
        both = (index.search_many(some, config=config) for index in (cluster, single))
        for mine, theirs in zip(*both, strict=True):
            equal += [(hit.id, hit.score) for hit in mine] == [(hit.id, hit.score) for hit in theirs]
    print(f"Equal hits and scores: {equal} of {len(requests)} queries.\n")
    print("| CPU-ms a query | one index | cluster in one process |\n|---|---|---|")
    for size in BATCHES:
        times = [
            cpu_ms(
                lambda index=index, size=size: [
                    index.search_many(some, config=config) for some in batches(requests, size)
                ],
                len(requests),
            )
            for index in (single, cluster)
        ]
        print(f"| batch {size} | {times[0]:.2f} | {times[1]:.2f} |", flush=True)


def count_calls(
    index: Index, table: IdTable, requests: Sequence[SearchRequest], config: SearchConfig
) -> None:
    """Count calls and bytes of a query, and the size of what the router holds, for different numbers of shards."""
    queries = [
        one
        for some in batches(requests, 32)
        for one in encode_queries(index.model, index.snapshot, some, config)
    ]
    routed = [RoutedQuery(max(config.beam, K), K, one.level0) for one in queries]
    vectors = np.stack([one.embedding for one in queries])
    print(f"\n{table.num_items:,} items, {len(table):,} IDs\n")
    print("| shards | first levels, MiB | batch | calls a query | of which rankings | kB a query |")
    print("|---|---|---|---|---|---|")
    for count in SHARDS:
        counts: Counter[str] = Counter()
        router = cut(index, table, count, counts)
        for size in BATCHES:
            counts.clear()
            for start in range(0, len(queries), size):
                some = slice(start, start + size)
                router.find(index.model.decoder, vectors[some], vectors[some], routed[some], config)
            calls = (counts["children"] + counts["rank"]) / len(requests)
            print(
                f"| {count} | {router.nbytes / 2**20:.1f} | {size} | {calls:.2f} | "
                f"{counts['rank'] / len(requests):.2f} | {counts['bytes'] / len(requests) / 1000:.1f} |",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    folder, texts, *sizes = sys.argv[1:]
    use_one_thread()
    cluster = Cluster.open(folder)
    place = Path(folder).with_suffix(".single")
    if not place.exists():
        snapshot = cluster.snapshot
        with one_writer(place) as writer:
            writer.create_from(
                snapshot.manifest.replace(model=str(cluster.model.folder.resolve())),
                [Piece(segment) for segment in snapshot.segments],
            )
    single = Index.open(place, model=cluster.model)
    lines = Path(texts).read_text(encoding="utf-8").splitlines()
    chosen = lines[:: max(1, len(lines) // QUERIES)][:QUERIES]
    requests = [SearchRequest(text=line, modality="text", k=K) for line in chosen]
    config = SearchConfig(rerank="codes", beam=10, candidates=max(1000, single.snapshot.num_alive // 10))
    print(f"{describe_machine()}\n\n{len(requests)} queries, {single.snapshot.num_alive:,} items; {config}\n")
    compare(cluster, single, requests, config)
    (segment,) = single.snapshot.search_segments
    count_calls(single, segment.table, requests, config)
    for size in map(int, map(float, sizes)):
        if size > MOST_ITEMS:
            count_prefixes(segment.table, size)
            continue
        codes = invent(segment.table, size, np.random.default_rng(0)).astype(np.int16)
        table = IdTable.build(codes, np.zeros(size, dtype=np.float16))
        count_calls(single, table, requests[:100], SearchConfig(rerank="codes", beam=10, candidates=1000))


if __name__ == "__main__":
    main()
