"""What a query of a cluster costs: calls to shards, bytes, CPU, and the first levels of the IDs that a router holds.

Usage: python benchmarks/cluster.py CLUSTER TEXTS [ITEMS ...] [--candidates 1000] [--address HOST:PORT]

CLUSTER was built with `genius cluster build`, without deleted items; TEXTS holds a query on each line, of which 1,000 are
taken. Compares the hits with those of one index of the same items, which is written beside the cluster, and CPU times in
one process for 200 queries; with ``--address`` also those of shards on a Ray cluster, one copy of each. Then the IDs are
cut into 1 to 64 shards, which are called in this process; arguments and answers are pickled, and their bytes counted. ITEMS
are numbers of items of larger, invented pools: the first three codes of an item, followed by the rest of another's that
shares the first two; above 30 million only the first levels are counted. Prints Markdown.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from genius_search.cluster.cuts import choose_cuts, row_of
from genius_search.cluster.folder import Cluster
from genius_search.cluster.routed import RoutedCluster
from genius_search.cluster.router import RoutedQuery, Router
from genius_search.cluster.shard import Shard, shard_ranker
from genius_search.config import SearchConfig, usual_search
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.index.query import encode_queries
from genius_search.index.requests import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.writer import Piece, one_writer
from genius_search.search.table import IdTable, SearchSegment
from research.bench.measure import describe_machine, use_one_thread
from research.bench.pools import invent_ids

QUERIES = 1000
TIMED = 200
"""Queries whose CPU times are taken and calls counted."""
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


def count_prefixes(table: IdTable, items: int) -> None:
    """Print the size of the first levels of an invented pool."""
    random = np.random.default_rng(0)
    known = np.zeros(0, dtype=np.int64)
    places = 256 ** np.arange(DEPTH)[::-1]
    for start in range(0, items, CHUNK):
        codes = invent_ids(table, min(CHUNK, items - start), random)[:, :DEPTH]
        known = np.union1d(known, codes.astype(np.int64) @ places)
    top = IdTable.build((known[:, None] // places % 256).astype(np.int16), np.zeros(len(known)))
    mib = (top.nbytes + 16 * len(known)) / 2**20  # and two numbers for each prefix
    print(f"\n{items:,} invented items: {len(known):,} prefixes of {DEPTH} codes, {mib:.1f} MiB")


def cpu_ms(run: Callable[[], object], queries: int, clock: Callable[[], float]) -> float:
    """Return CPU-milliseconds for each query, the smaller of two runs."""
    found = []
    for _ in range(2):
        began = clock()
        run()
        found.append(1000 * (clock() - began) / queries)
    return min(found)


def batches(requests: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the requests in batches."""
    yield from (requests[start : start + size] for start in range(0, len(requests), size))


def compare(found: Sequence[Sequence[SearchHit]], known: Sequence[Sequence[SearchHit]], name: str) -> None:
    """Compare lists of hits with those of one index."""
    equal = 0
    difference = 0.0
    for mine, theirs in zip(found, known, strict=True):
        equal += [hit.id for hit in mine] == [hit.id for hit in theirs]
        pairs = zip(mine, theirs, strict=False)
        difference = max(difference, *(abs(one.score - other.score) for one, other in pairs))
    print(f"{name}: {equal} of {len(known)} lists are equal; scores differ by at most {difference:.1g}\n")


def search_all(
    index: Index, requests: Sequence[SearchRequest], size: int, config: SearchConfig
) -> list[list[SearchHit]]:
    """Search in batches."""
    return [hits for some in batches(requests, size) for hits in index.search_many(some, config=config)]


def time_searches(
    indexes: dict[str, tuple[Index, Callable[[], float]]],
    requests: Sequence[SearchRequest],
    config: SearchConfig,
) -> None:
    """Print CPU times of a query, each by its clock."""
    print(f"| CPU-ms a query | {' | '.join(indexes)} |\n|---|{'---|' * len(indexes)}")
    for size in BATCHES:
        times = [
            cpu_ms(partial(search_all, index, requests, size, config), len(requests), clock)
            for index, clock in indexes.values()
        ]
        print(f"| batch {size} | {' | '.join(f'{one:.2f}' for one in times)} |", flush=True)


def time_with_copies(cluster: RoutedCluster) -> float:
    """Return the CPU-seconds of this process and of all copies of shards."""
    import ray  # noqa: PLC0415  an extra

    copies = [copy for shard in cluster.shards.values() for copy in shard.copies]
    return time.process_time() + sum(
        ray.get([copy.__ray_call__.remote(lambda _: time.process_time()) for copy in copies])
    )


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
                router.find(
                    index.model.decoder_for(config), vectors[some], vectors[some], routed[some], config
                )
            calls = (counts["children"] + counts["rank"]) / len(requests)
            print(
                f"| {count} | {router.nbytes / 2**20:.1f} | {size} | {calls:.2f} | "
                f"{counts['rank'] / len(requests):.2f} | {counts['bytes'] / len(requests) / 1000:.1f} |",
                flush=True,
            )


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("items", type=float, nargs="*")
    parser.add_argument("--candidates", type=int, help="default: as of an index that was not tuned")
    parser.add_argument("--address", help="of a Ray cluster's head, or local")
    return parser.parse_args()


def main() -> None:
    """Print the tables."""
    given = read_arguments()
    use_one_thread()
    cluster = Cluster.open(given.cluster)
    place = given.cluster.with_suffix(".single")
    if not place.exists():
        snapshot = cluster.snapshot
        with one_writer(place) as writer:
            writer.create_from(
                snapshot.manifest.replace(model=str(cluster.model.folder.resolve())),
                [Piece(segment) for segment in snapshot.segments],
            )
    single = Index.open(place, model=cluster.model)
    lines = given.texts.read_text(encoding="utf-8").splitlines()
    chosen = lines[:: max(1, len(lines) // QUERIES)][:QUERIES]
    requests = [SearchRequest(text=line, modality="text", k=K) for line in chosen]
    wanted = {} if given.candidates is None else {"candidates": given.candidates}
    config = replace(usual_search(single.snapshot.num_alive), **wanted)
    print(f"{describe_machine()}\n\n{len(requests)} queries, {single.snapshot.num_alive:,} items; {config}\n")
    known = search_all(single, requests, 32, config)
    compare(search_all(cluster, requests, 32, config), known, "Cluster in one process")
    indexes = {
        "one index": (single, time.process_time),
        "cluster in one process": (cluster, time.process_time),
    }
    if given.address is None:
        time_searches(indexes, requests[:TIMED], config)
    else:
        from genius_search.cluster.ray import Ray, place_shards  # noqa: PLC0415  an extra

        with Ray(given.address):
            placed = place_shards(given.cluster, cluster.model, copies=1)
            compare(search_all(placed, requests, 32, config), known, "Shards on Ray")
            indexes["shards on Ray: this process"] = (placed, time.process_time)
            indexes["and all copies"] = (placed, partial(time_with_copies, placed))
            time_searches(indexes, requests[:TIMED], config)
    (segment,) = single.snapshot.search_segments
    count_calls(single, segment.table, requests[:TIMED], config)
    for size in map(int, given.items):
        if size > MOST_ITEMS:
            count_prefixes(segment.table, size)
            continue
        codes = invent_ids(segment.table, size, np.random.default_rng(0)).astype(np.int16)
        table = IdTable.build(codes, np.zeros(size, dtype=np.float16))
        count_calls(single, table, requests[:TIMED], replace(usual_search(size), **wanted))


if __name__ == "__main__":
    main()
