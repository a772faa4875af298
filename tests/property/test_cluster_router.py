"""A cluster is one index: a router finds in its shards what one index finds, also after any changes.

Items, hits, scores, order of ties and items touched are the same. The decoder's scores, code vectors and
embeddings are multiples of a quarter, so that sums are exact, and many are equal.
"""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genius_search.cluster.cuts import choose_cuts, place_ids
from genius_search.cluster.folder import (
    ClusterManifest,
    ShardEntry,
    open_state,
    read_cluster,
    verify_cluster,
    write_cluster,
    write_range,
)
from genius_search.cluster.routed import AtGeneration, RoutedSnapshot
from genius_search.cluster.router import RoutedQuery, Router
from genius_search.cluster.shard import LookupRanker, Shard, ShardStates
from genius_search.cluster.writer import one_cluster_writer
from genius_search.config import SearchConfig
from genius_search.errors import SnapshotGone
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.query import EncodedQuery, search_encoded
from genius_search.index.requests import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest, ItemArrays
from genius_search.index.writer import one_writer
from genius_search.model import Genius
from genius_search.records import Modality
from genius_search.search.decoder import GeometricDecoder
from genius_search.search.rank import CodeRanker

DIM = 5
QUERIES = 6
NAMES = 40
"""Different ids in changes, so that many additions replace an item."""
MANIFEST = IndexManifest(model="m", model_fingerprint="f", embeddings="fused", embedding_bits=16)


class Here:
    """A shard in this process that is called as if it were elsewhere, and counts calls."""

    def __init__(self, call):
        self.call = call
        self.calls = []

    def submit(self, method, *arguments):
        self.calls.append(method)
        answer = pickle.dumps(self.call(method, *pickle.loads(pickle.dumps(arguments))))  # noqa: S301  our own

        class Answer:
            def result(self):
                return pickle.loads(answer)  # noqa: S301  our own

        return Answer()


def quarters(random, *shape):
    return random.integers(-4, 5, shape).astype(np.float32) / 4


class DrawnModel(Genius):
    """A model without an encoder."""

    encoder = None

    def __init__(self, plain, sizes, random, seed):
        self.tables = [quarters(random, size, DIM) for size in sizes]
        self.codebooks = SimpleNamespace(
            sizes=tuple(sizes),
            tables=lambda: self.tables,
            has_modality_level=False,
            config=SimpleNamespace(fusion=SimpleNamespace(kind="network"), level0="none"),
        )
        self._generator = object()
        self.decoder = plain.ExactDecoder(tuple(sizes), seed)
        self.router = GeometricDecoder([torch.from_numpy(table) for table in self.tables])
        self.ranker = CodeRanker(self.tables)
        self.fast = self._fast_router = None


def draw_items(random, sizes, names):
    """Items with texts and fields, and their arrays."""
    count = len(names)
    items = []
    for name in names:
        fields = {"price": int(random.integers(0, 10)), "name": f"IMG {name}"}
        source = json.dumps(fields) if random.random() < 0.8 else None
        items.append(Item(f"item {name}", Modality.TEXT, f"text {name % 17}", source=source))
    codes = np.stack([random.integers(0, size, count) for size in sizes], axis=1)
    arrays = ItemArrays(
        np.concatenate([codes, random.integers(0, [4, 3], (count, 2))], axis=1).astype(np.int16),
        (random.integers(0, 3, count) / 4).astype(np.float16),
        quarters(random, count, DIM).astype(np.float16),
        "fused",
        random.integers(0, 3, count).astype(np.uint8),
    )
    return items, arrays


def draw_config(random):
    rerank = str(random.choice(["none", "codes", "embeddings"]))
    settings = {
        "beam": int(random.choice([1, 2, 5, 20])),
        "scores": str(random.choice(["level", "children"])),
        "router": str(random.choice(["generator", "geometry"])),
        "rerank": rerank,
    }
    if rerank != "none":
        settings["candidates"] = int(random.choice([0, 5, 30, 200]))
        settings["density_weight"] = float(random.choice([0.0, 0.5]))
    if rerank == "embeddings":
        settings["shortlist"] = int(random.choice([0, 3, 12]))
    if rerank == "codes" or settings.get("shortlist"):
        settings["generator_weight"] = float(random.choice([0.0, 0.0, 0.5]))
    return SearchConfig(**settings)


def draw_requests(random, sizes, *, has_prices):
    """Requests with the codes that they allow at level 0, some with conditions, some with numbers."""
    conditions = [
        {"match": "text"},
        *([{"where": ["price<5"]}, {"where": ["price=3"]}] if has_prices else []),
    ]
    found = []
    for _ in range(QUERIES):
        own = conditions[int(random.integers(len(conditions)))] if random.random() < 0.5 else {}
        text = ["a text", f"text {random.integers(17)}", f"IMG_{random.integers(40)}.png"][random.integers(3)]
        beam = int(random.choice([1, 3, 40])) if random.random() < 0.5 else None
        codes = random.choice(sizes[0] + 1, int(random.integers(0, 3)))
        request = SearchRequest(text=text, k=int(random.choice([1, 4, 15])), beam=beam, **own)
        found.append((request, frozenset(codes.tolist())))
    return found


def answers(model, snapshot, requests, config, queries, evidence):
    """What a state of an index, or of a cluster, finds for requests with these vectors."""
    encoded = [
        EncodedQuery(
            request,
            number,
            0,
            level0,
            None if request.filter == Filter() else snapshot.restriction(request.filter),
            queries[number],
            evidence[number] if config.rerank == "embeddings" else queries[number],
        )
        for number, (request, level0) in enumerate(requests)
    ]
    return search_encoded(model, snapshot, encoded, config)


def make_router(shards, depth):
    return Router(shards, [shard.submit("top", depth).result() for shard in shards], depth=depth)


def draw_queries(random):
    queries, evidence = quarters(random, 2, QUERIES, DIM)
    queries[:, 0] = np.arange(QUERIES)  # their numbers, to an exact decoder
    return queries, evidence


class Drawn:
    """A random index, and the same items in shards."""

    def __init__(self, plain, seed, folder):
        random = self.random = np.random.default_rng(seed)
        self.sizes = tuple(random.integers(1, 7, int(random.integers(1, 5))).tolist())
        self.model = DrawnModel(plain, self.sizes, random, seed)
        items, arrays = draw_items(random, self.sizes, range(int(random.choice([1, 3, 30, 120]))))
        with one_writer(folder / "single") as writer:
            writer.create(MANIFEST, items, arrays)
        self.shard_folders = self.split(folder, int(random.integers(1, 6)))
        if random.random() < 0.4:
            gone = [item.id for item in items[1:] if random.random() < 0.3]
            for place in [folder / "single", *self.shard_folders]:
                with one_writer(place) as writer:
                    writer.delete(gone)
        self.single = Snapshot.open(folder / "single")
        self.opened = [Snapshot.open(place) for place in self.shard_folders]
        ranker = LookupRanker(self.model.tables)
        shards = [Shard(snapshot, ranker) for snapshot in self.opened]
        self.shards = [
            Here(lambda method, *given, shard=shard: getattr(shard, method)(*given)) for shard in shards
        ]

    def split(self, folder, shards):
        segments = Snapshot.open(folder / "single").segments
        table = segments[0].table
        cuts = choose_cuts(table, shards)
        if len(cuts) > 1 and self.random.random() < 0.5:  # cuts in the middle of short prefixes too
            rows = np.sort(self.random.choice(len(table), len(cuts), replace=False))
            cuts = [tuple(table.ids[row].tolist()) for row in rows]
        bounds = [(), *cuts, None]
        for number, first in enumerate(bounds[:-1]):
            write_range(folder / str(number), MANIFEST, segments, first, bounds[number + 1])
        return [folder / str(number) for number in range(len(bounds) - 1)]

    def routed(self, depth):
        router = make_router(self.shards, min(depth, len(self.sizes)))
        segments = tuple(segment for snapshot in self.opened for segment in snapshot.segments)
        return RoutedSnapshot(Snapshot(self.single.manifest, segments), router, self.model.decoder_for)


def test_shards_answer_as_one_index(plain, tmp_path):
    nonempty = by_words = by_geometry = 0
    for seed in range(plain.SOME_POOLS * 2):
        drawn = Drawn(plain, seed, tmp_path / str(seed))
        random = drawn.random
        routed = drawn.routed(int(random.integers(1, 5)))
        has_prices = bool(drawn.single.segments[0].items.field_names)
        for _ in range(3):
            config = draw_config(random)
            requests = draw_requests(random, drawn.sizes, has_prices=has_prices)
            queries, evidence = draw_queries(random)
            expected = answers(drawn.model, drawn.single, requests, config, queries, evidence)
            assert answers(drawn.model, routed, requests, config, queries, evidence) == expected, (
                seed,
                config,
            )
            nonempty += sum(bool(one.hits) for one in expected)
            by_words += sum(one.hits[0].probability is None for one in expected if one.hits)
            by_geometry += not drawn.model.uses_generator(config)
    assert nonempty > 100
    assert by_words > 10
    assert by_geometry > 10


def test_a_batch_costs_each_shard_one_ranking_and_no_call_at_levels_held_by_the_router(plain, tmp_path):
    drawn = next(
        one
        for seed in range(100)
        if (one := Drawn(plain, seed, tmp_path / str(seed))).single.segments[0].table.num_items == 120
        and len(one.shard_folders) > 2
        and len(one.single.segments[0].dead) == 0
    )
    router = make_router(drawn.shards, len(drawn.sizes))
    queries = quarters(drawn.random, QUERIES, DIM)
    config = SearchConfig(beam=120, rerank="codes", candidates=50)
    decoder = drawn.model.decoder
    router.find(decoder, queries, queries, [RoutedQuery(120, 120)] * QUERIES, config)
    assert all(shard.calls == ["top", "rank"] for shard in drawn.shards)
    filtered = [RoutedQuery(120, 5, frozenset(), Filter.parse([], "text"))] * QUERIES
    router.find(decoder, queries, queries, filtered, config)
    deepest = len(drawn.sizes) + 1  # the first level is looked at once more, before anything is decoded
    assert all(shard.calls.count("children") <= deepest for shard in drawn.shards)
    assert all(shard.calls.count("rank") == 2 for shard in drawn.shards)


class Both:
    """A cluster and an index that are changed alike."""

    sizes = (3, 5, 4)

    def __init__(self, folder, plain, seed):
        self.folder, self.single = folder / "cluster", folder / "single"
        self.random = np.random.default_rng(seed)
        self.model = DrawnModel(plain, self.sizes, self.random, seed)
        self.known: set[str] = set()
        cuts = sorted({tuple(row) for row in self.random.integers(0, self.sizes, (3, 3)).tolist()})
        cuts = [cut[: int(self.random.integers(1, 4))] for cut in cuts]
        entries = []
        for number, first in enumerate([(), *sorted({cut for cut in cuts if any(cut)})]):
            place = self.folder / "shards" / f"{number:06d}"
            with one_writer(place) as writer:
                writer.create_batches(MANIFEST, [])
            entries.append(ShardEntry.of(place, first))
        with one_writer(self.single) as writer:
            writer.create_batches(MANIFEST, [])
        write_cluster(
            self.folder,
            ClusterManifest(
                model="m", model_fingerprint="f", pool="", partitions=0, left_out=0, shards=tuple(entries)
            ),
        )

    def add(self):
        """Items with random IDs, some of which replace others."""
        names = self.random.choice(NAMES, int(self.random.integers(1, 25)), replace=False).tolist()
        items, arrays = draw_items(self.random, self.sizes, names)
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

    def routed(self, depth):
        ranker = LookupRanker(self.model.tables)
        cluster, opened = open_state(self.folder)
        shards = []
        for entry in cluster.shards:
            states = ShardStates(self.folder, entry.name, lambda: ranker)
            here = Here(lambda method, number, *given, own=states: own.call(method, number, given))
            shards.append(AtGeneration(here, entry.generation))
        return opened, RoutedSnapshot(opened, make_router(shards, depth), self.model.decoder_for)

    def check(self):
        opened, routed = self.routed(int(self.random.integers(1, 4)))
        single = Snapshot.open(self.single)
        assert set(opened.ids()) == set(single.ids()) == self.known
        assert verify_cluster(self.folder).items == len(self.known)
        if not self.known:
            return 0
        has_prices = all(any(one.items.field_names for one in state.segments) for state in (opened, single))
        requests = draw_requests(self.random, self.sizes, has_prices=has_prices)
        config, (queries, evidence) = draw_config(self.random), draw_queries(self.random)
        expected = answers(self.model, opened, requests, config, queries, evidence)
        assert answers(self.model, routed, requests, config, queries, evidence) == expected
        # Where all IDs are ranked, it is the same as with one index, up to the order of equal scores.
        exhaustive = SearchConfig(beam=200, rerank="codes", candidates=500)
        requests = [(SearchRequest(text="a text", k=100), frozenset())] * QUERIES
        found, expected = (
            answers(self.model, state, requests, exhaustive, queries, evidence) for state in (routed, single)
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert [hit.score for hit in mine.hits] == [hit.score for hit in theirs.hits]
            assert {hit.id: hit.score for hit in mine.hits} == {hit.id: hit.score for hit in theirs.hits}
        return len(opened.segments) - len(read_cluster(self.folder).shards)


def test_a_cluster_after_any_changes_is_one_index_after_the_same(plain, tmp_path):
    several = 0
    for seed in range(plain.SOME_POOLS // 2):
        both = Both(tmp_path / str(seed), plain, seed)
        for _ in range(8):
            both.change()
            several += both.check() > 0
    assert several > 5  # shards had several segments


def test_a_state_is_answered_until_it_is_gone(plain, tmp_path):
    both = Both(tmp_path, plain, 0)
    with one_cluster_writer(both.folder) as cluster, one_writer(both.single) as index:
        both.writers = (cluster, index)
        both.add()
        opened, routed = both.routed(2)
        fresh = {shard.name: shard.generation for shard in read_cluster(both.folder).shards}
        for _ in range(3):
            both.delete()
            both.add()
    config = SearchConfig(beam=8, rerank="codes", candidates=8)
    given = ([(SearchRequest(text="a text", k=8), frozenset())] * QUERIES, config, *draw_queries(both.random))
    assert answers(both.model, routed, *given) == answers(both.model, opened, *given)  # both are open still
    changed = [
        shard.name for shard in read_cluster(both.folder).shards if shard.generation > fresh[shard.name]
    ]
    states = ShardStates(both.folder, changed[0], lambda: LookupRanker(both.model.tables))
    with pytest.raises(SnapshotGone):
        states.call("top", fresh[changed[0]], (1,))


def test_ids_are_placed_as_the_cuts_say():
    codes = np.array([[0, 5, 1], [1, 0, 0], [1, 2, 2], [1, 3, 0], [2, 0, 0]])
    assert place_ids(codes, [(1,), (1, 2, 2), (1, 3)]).tolist() == [0, 1, 2, 3, 3]
    assert place_ids(codes, []).tolist() == [0] * 5
