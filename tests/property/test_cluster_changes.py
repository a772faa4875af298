"""A cluster after any changes is one index after the same changes: items, and what searches find.

Decoder, code vectors and embeddings are multiples of a quarter, so that sums are exact, and many are equal.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from genius_search.cluster.cuts import place_ids
from genius_search.cluster.folder import (
    ClusterManifest,
    ShardEntry,
    open_state,
    read_cluster,
    verify_cluster,
    write_cluster,
)
from genius_search.cluster.routed import AtGeneration
from genius_search.cluster.router import RoutedQuery, Router
from genius_search.cluster.shard import LookupRanker, ShardStates
from genius_search.cluster.writer import one_cluster_writer
from genius_search.config import SearchConfig
from genius_search.errors import SnapshotGone
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest, ItemArrays
from genius_search.index.writer import one_writer
from genius_search.records import Modality
from genius_search.search.beam import search
from genius_search.search.rank import CodeRanker, Evidence, rank_items

SIZES = (3, 5, 4)
DIM = 4
NAMES = 40
"""Different ids, so that many additions replace an item."""
INDEX = IndexManifest(model="m", model_fingerprint="f", embeddings="fused", embedding_type="float16")


def quarters(random, *shape):
    return random.integers(-4, 5, shape).astype(np.float32) / 4


class Answer:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


class Here:
    """A shard in this process."""

    def __init__(self, states):
        self.states = states

    def submit(self, method, generation, *arguments):
        return Answer(self.states.call(method, generation, arguments))


class Both:
    """A cluster and an index of the same items."""

    def __init__(self, folder, plain, seed):
        self.folder, self.single = folder / "cluster", folder / "single"
        self.random = np.random.default_rng(seed)
        self.decoder = plain.ExactDecoder(SIZES, seed)
        self.tables = [quarters(self.random, size, DIM) for size in SIZES]
        self.known: set[str] = set()
        cuts = sorted({tuple(row) for row in self.random.integers(0, SIZES, (3, 3)).tolist()})
        cuts = [cut[: int(self.random.integers(1, 4))] for cut in cuts]
        entries = []
        for number, first in enumerate([(), *sorted({cut for cut in cuts if any(cut)})]):
            place = self.folder / "shards" / f"{number:06d}"
            with one_writer(place) as writer:
                writer.create_batches(INDEX, [])
            entries.append(ShardEntry.of(place, first))
        with one_writer(self.single) as writer:
            writer.create_batches(INDEX, [])
        write_cluster(
            self.folder,
            ClusterManifest(
                model="m", model_fingerprint="f", pool="", partitions=0, left_out=0, shards=tuple(entries)
            ),
        )

    def add(self):
        """Items with random IDs, some of which replace others."""
        random = self.random
        names = random.choice(NAMES, int(random.integers(1, 25)), replace=False)
        items = [
            Item(f"item {name}", Modality.TEXT, "text", source=json.dumps({"price": int(random.integers(9))}))
            for name in names.tolist()
        ]
        count = len(items)
        arrays = ItemArrays(
            np.concatenate(
                [random.integers(0, SIZES, (count, 3)), random.integers(0, [4, 3], (count, 2))], axis=1
            ).astype(np.int16),
            (random.integers(0, 3, count) / 4).astype(np.float16),
            quarters(random, count, DIM).astype(np.float16),
            "fused",
            random.integers(0, 3, count).astype(np.uint8),
        )
        self.known |= {item.id for item in items}
        return [writer.add(items, arrays) for writer in self.writers]

    def delete(self):
        names = [f"item {name}" for name in self.random.choice(NAMES, 6, replace=False).tolist()]
        self.known -= set(names)
        return [writer.delete(names) for writer in self.writers]

    def change(self):
        """Change both; the outcome has to be the same."""
        kind = str(self.random.choice(["add", "add", "add", "delete", "delete", "compact", "rebalance"]))
        with one_cluster_writer(self.folder) as cluster, one_writer(self.single) as index:
            self.writers = (cluster, index)
            if kind == "rebalance":
                if self.known:
                    cluster.rebalance(int(self.random.integers(1, 5)))
            elif kind == "compact":
                cluster.compact()
            else:
                first, second = getattr(self, kind)()
                assert first == second

    def router(self, depth):
        ranker = LookupRanker(self.tables)
        shards = []
        for entry in read_cluster(self.folder).shards:
            states = ShardStates(self.folder, entry.name, ranker)
            shards.append(AtGeneration(Here(states), entry.generation))
        return Router(self.decoder, shards, depth=depth)

    def expected(self, snapshot, queries, asked, config):
        """What a search of all segments of a snapshot finds: ids, scores and items touched."""
        allowed = [None if one.allowed is None else snapshot.restriction(one.allowed) for one in asked]
        beams = search(
            self.decoder,
            snapshot.search_segments,
            torch.from_numpy(queries),
            config,
            restrictions=allowed,
            widths=[one.width for one in asked],
        )
        evidence = Evidence(CodeRanker(self.tables), snapshot.vectors, False, snapshot.densities)
        found = []
        for number, one in enumerate(asked):
            ranking = rank_items(
                snapshot.search_segments,
                beams,
                number,
                queries[number],
                config=config,
                evidence=evidence,
                k=one.k,
                restriction=allowed[number],
            )
            ids = [item.id for item in snapshot.items(ranking.segments, ranking.items)]
            found.append((ids, ranking.scores.tolist(), ranking.touched))
        return found

    def check(self):
        cluster, snapshot = open_state(self.folder)
        assert sorted(snapshot.ids()) == sorted(self.known)
        assert verify_cluster(self.folder).items == len(self.known)
        single = Snapshot.open(self.single)
        assert set(single.ids()) == self.known
        if not self.known:
            return 0
        router = self.router(int(self.random.integers(1, 4)))
        queries = quarters(self.random, 3, DIM)
        queries[:, 0] = np.arange(3)
        cheap = Filter.parse(["price<4"])
        config = SearchConfig(
            beam=int(self.random.choice([1, 3, 8])),
            rerank=str(self.random.choice(["none", "codes", "embeddings"])),
            candidates=int(self.random.choice([0, 8])),
        )
        asked = [RoutedQuery(8, 5), RoutedQuery(3, 3, frozenset(), cheap), RoutedQuery(40, 40)]

        def found(config):
            results = []
            for ranking, _ in router.find(queries, queries, asked, config):
                ids = [item.id for item in snapshot.items(ranking.segments, ranking.items)]
                results.append((ids, ranking.scores.tolist(), ranking.touched))
            return results

        assert found(config) == self.expected(snapshot, queries, asked, config)
        # Where all IDs are ranked, it is the same as with one index, up to the order of equal scores.
        exhaustive = SearchConfig(beam=200, rerank="codes", candidates=500)
        asked = [RoutedQuery(200, 100), RoutedQuery(200, 100, frozenset(), cheap), RoutedQuery(200, 100)]
        for mine, theirs in zip(
            found(exhaustive), self.expected(single, queries, asked, exhaustive), strict=True
        ):
            assert mine[1] == theirs[1]
            assert dict(zip(*mine[:2], strict=True)) == dict(zip(*theirs[:2], strict=True))
        return len(snapshot.segments) - len(cluster.shards)


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.usefixtures("no_waiting")
def test_a_cluster_after_any_changes_is_one_index_after_the_same(plain, tmp_path):
    several = 0
    for seed in range(plain.SOME_POOLS // 2):
        both = Both(tmp_path / str(seed), plain, seed)
        for _ in range(8):
            both.change()
            several += both.check() > 0
    assert several > 5  # shards had several segments


@pytest.mark.usefixtures("no_waiting")
def test_a_state_is_answered_until_it_is_gone(plain, tmp_path):
    both = Both(tmp_path, plain, 0)
    with one_cluster_writer(both.folder) as cluster, one_writer(both.single) as index:
        both.writers = (cluster, index)
        both.add()
        router, (_, snapshot) = both.router(2), open_state(both.folder)
        fresh = {shard.name: shard.generation for shard in read_cluster(both.folder).shards}
        both.writers = (cluster, index)
        for _ in range(3):
            both.delete()
            both.add()
    queries = quarters(both.random, 1, DIM)
    config = SearchConfig(beam=8, rerank="codes", candidates=8)
    asked = [RoutedQuery(8, 8)]
    ((ranking, _),) = router.find(queries, queries, asked, config)  # open, so it is still there
    assert ranking.scores.tolist() == both.expected(snapshot, queries, asked, config)[0][1]
    changed = [
        shard.name for shard in read_cluster(both.folder).shards if shard.generation > fresh[shard.name]
    ]
    with pytest.raises(SnapshotGone):
        ShardStates(both.folder, changed[0], LookupRanker(both.tables)).call("top", fresh[changed[0]], (1,))


def test_ids_are_placed_as_the_cuts_say():
    codes = np.array([[0, 5, 1], [1, 0, 0], [1, 2, 2], [1, 3, 0], [2, 0, 0]])
    assert place_ids(codes, [(1,), (1, 2, 2), (1, 3)]).tolist() == [0, 1, 2, 3, 3]
    assert place_ids(codes, []).tolist() == [0] * 5
