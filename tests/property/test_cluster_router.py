"""Searching shards finds what searching one index finds: items, scores, order of ties, items touched.

Decoder, code vectors and embeddings are multiples of a quarter, so that sums are exact, and many are equal.
"""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

from genius_search.cluster.cuts import choose_cuts, row_of
from genius_search.cluster.router import RoutedQuery, Router
from genius_search.cluster.shard import LookupRanker, Shard
from genius_search.config import SearchConfig
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest, ItemArrays
from genius_search.index.writer import Piece, one_writer
from genius_search.records import Modality
from genius_search.search.beam import search
from genius_search.search.rank import CodeRanker, Evidence, rank_items

DIM = 5
QUERIES = 6
MANIFEST = IndexManifest(model="m", model_fingerprint="f", embeddings="fused", embedding_type="float16")


class Here:
    """A shard in this process that speaks as if it were elsewhere, and counts calls."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.calls: list[str] = []

    def submit(self, method, *arguments):
        self.calls.append(method)
        given = pickle.loads(pickle.dumps(arguments))  # noqa: S301  our own
        answer = pickle.dumps(getattr(self.shard, method)(*given))

        class Answer:
            def result(self):
                return pickle.loads(answer)  # noqa: S301  our own

        return Answer()


def quarters(random, *shape, most=4):
    return random.integers(-most, most + 1, shape).astype(np.float32) / 4


class Drawn:
    """A random index, the same items in shards, and the model's parts."""

    def __init__(self, plain, seed, folder):
        random = self.random = np.random.default_rng(seed)
        self.sizes = tuple(random.integers(1, 7, int(random.integers(1, 5))).tolist())
        count = int(random.choice([1, 3, 30, 120]))
        codes = np.stack([random.integers(0, size, count) for size in self.sizes], axis=1)
        columns = random.integers(0, [4, 3], (count, 2))
        self.decoder = plain.ExactDecoder(self.sizes, seed)
        self.tables = [quarters(random, size, DIM) for size in self.sizes]
        items = [
            Item(f"item {number}", Modality.TEXT, f"text {number % 7}", source=self.source())
            for number in range(count)
        ]
        arrays = ItemArrays(
            np.concatenate([codes, columns], axis=1).astype(np.int16),
            (random.integers(0, 3, count) / 4).astype(np.float16),
            quarters(random, count, DIM).astype(np.float16),
            "fused",
            random.integers(0, 3, count).astype(np.uint8),
        )
        with one_writer(folder / "single") as writer:
            writer.create(MANIFEST, items, arrays)
        self.shard_folders = self.split(folder, int(random.integers(1, 6)))
        if random.random() < 0.4:
            gone = [item.id for item in items[1:] if random.random() < 0.3]
            for place in [folder / "single", *self.shard_folders]:
                with one_writer(place) as writer:
                    writer.delete(gone)
        self.single = Snapshot.open(folder / "single")

    def source(self):
        if self.random.random() < 0.2:
            return None
        return json.dumps({"price": int(self.random.integers(0, 10))})

    def split(self, folder, shards):
        (segment,) = Snapshot.open(folder / "single").segments
        table = segment.table
        cuts = choose_cuts(table, shards)
        if len(cuts) > 1 and self.random.random() < 0.5:  # cuts in the middle of short prefixes too
            rows = np.sort(self.random.choice(len(table), len(cuts), replace=False))
            cuts = [tuple(table.ids[row].tolist()) for row in rows]
        rows = [0, *(row_of(table, cut) for cut in cuts), len(table)]
        places = []
        for number in range(len(rows) - 1):
            places.append(folder / str(number))
            own = table.items[table.bucket_starts[rows[number]] : table.bucket_starts[rows[number + 1]]]
            others = np.setdiff1d(np.arange(table.num_items), own)
            with one_writer(places[-1]) as writer:
                writer.create_from(MANIFEST, [Piece(segment._replace(dead=others))])
        return places

    def config(self):
        random = self.random
        rerank = str(random.choice(["none", "codes", "embeddings"]))
        settings = {
            "beam": int(random.choice([1, 2, 5, 20])),
            "scores": str(random.choice(["level", "children"])),
            "rerank": rerank,
        }
        if rerank != "none":
            settings["candidates"] = int(random.choice([0, 5, 30, 200]))
            settings["density_weight"] = float(random.choice([0.0, 0.5]))
        if rerank == "embeddings":
            settings["shortlist"] = int(random.choice([0, 3, 12]))
        if rerank == "codes" or settings.get("shortlist"):
            settings["generator_weight"] = float(random.choice([0.0, 0.5]))
        return SearchConfig(**settings)

    def asked(self, config):
        conditions = [None, Filter.parse(["price<5"]), Filter.parse(["price=3"]), Filter.parse([], "text")]
        found = []
        for _ in range(QUERIES):
            k = int(self.random.choice([1, 4, 15]))
            codes = self.random.choice(self.sizes[0] + 1, int(self.random.integers(0, 3)))
            allowed = conditions[int(self.random.integers(0, 4))] if self.random.random() < 0.6 else None
            if allowed is not None and allowed.match is None and not self.has_prices:
                allowed = None
            found.append(RoutedQuery(max(config.beam, k), k, frozenset(codes.tolist()), allowed))
        return found

    @property
    def has_prices(self):
        return bool(self.single.segments[0].items.field_names)

    def expected(self, queries, evidence, asked, config):
        """What one index finds: ids, scores and touched of each query."""
        snapshot = self.single
        restrictions = [None if one.allowed is None else snapshot.restriction(one.allowed) for one in asked]
        beams = search(
            self.decoder,
            snapshot.search_segments,
            torch.from_numpy(queries),
            config,
            level0=[one.level0 for one in asked],
            restrictions=restrictions,
            widths=[one.width for one in asked],
        )
        known = Evidence(CodeRanker(self.tables), snapshot.vectors, False, snapshot.densities)
        found = []
        for number, one in enumerate(asked):
            vector = evidence[number] if config.rerank == "embeddings" else queries[number]
            ranking = rank_items(
                snapshot.search_segments,
                beams,
                number,
                vector,
                config=config,
                evidence=known,
                k=one.k,
                restriction=restrictions[number],
                for_codes=queries[number],
            )
            ids = [item.id for item in snapshot.items(ranking.segments, ranking.items)]
            history = beams.log_probabilities[number, ranking.beams]
            found.append((ids, ranking.scores.tolist(), np.nan_to_num(history).tolist(), ranking.touched))
        return found


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.usefixtures("no_waiting")
def test_shards_answer_as_one_index(plain, tmp_path):
    nonempty = 0
    for seed in range(plain.SOME_POOLS * 3):
        drawn = Drawn(plain, seed, tmp_path / str(seed))
        ranker = LookupRanker(drawn.tables)
        opened = [Snapshot.open(folder) for folder in drawn.shard_folders]
        shards = [Here(Shard(snapshot, ranker)) for snapshot in opened]
        router = Router(drawn.decoder, shards, depth=int(drawn.random.integers(1, 5)))
        for _ in range(4):
            config = drawn.config()
            asked = drawn.asked(config)
            queries, evidence = quarters(drawn.random, 2, QUERIES, DIM)
            queries[:, 0] = np.arange(QUERIES)
            found = router.find(queries, evidence, asked, config)
            expected = drawn.expected(queries, evidence, asked, config)
            for (ranking, history), known in zip(found, expected, strict=True):
                segments = [segment for snapshot in opened for segment in snapshot.segments]
                places = zip(ranking.segments.tolist(), ranking.items.tolist(), strict=True)
                ids = [segments[part].items.get([row])[0].id for part, row in places]
                decoded = np.nan_to_num(history).tolist()
                assert (ids, ranking.scores.tolist(), decoded, ranking.touched) == known, (seed, config)
                nonempty += bool(ids)
    assert nonempty > 100


@pytest.mark.usefixtures("no_waiting")
def test_a_batch_costs_each_shard_one_ranking_and_no_call_at_levels_held_by_the_router(plain, tmp_path):
    drawn = next(
        one
        for seed in range(100)
        if (one := Drawn(plain, seed, tmp_path / str(seed))).single.segments[0].table.num_items == 120
        and len(one.shard_folders) > 2
        and len(one.single.segments[0].dead) == 0
    )
    ranker = LookupRanker(drawn.tables)
    shards = [Here(Shard(Snapshot.open(folder), ranker)) for folder in drawn.shard_folders]
    router = Router(drawn.decoder, shards, depth=len(drawn.sizes))
    queries = quarters(drawn.random, QUERIES, DIM)
    config = SearchConfig(beam=120, rerank="codes", candidates=50)
    router.find(queries, queries, [RoutedQuery(120, 120)] * QUERIES, config)
    assert all(shard.calls == ["top", "rank"] for shard in shards)
    filtered = [RoutedQuery(120, 5, frozenset(), Filter.parse([], "text"))] * QUERIES
    router.find(queries, queries, filtered, config)
    deepest = len(drawn.sizes) + 1  # the first level is looked at once more, before anything is decoded
    assert all(shard.calls.count("children") <= deepest for shard in shards)
    assert all(shard.calls.count("rank") == 2 for shard in shards)
