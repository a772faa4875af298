"""A cluster whose shards are searched elsewhere follows changes, and says which shards answer."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.folder import Cluster, read_cluster
from genius_search.cluster.routed import RoutedCluster, ShardHealth
from genius_search.cluster.shard import ShardCopy
from genius_search.config import SearchConfig
from genius_search.errors import SnapshotGone, UsageError
from genius_search.index.items import ItemStore
from genius_search.index.query import encode_queries, search_encoded
from genius_search.index.requests import SearchRequest

CONFIG = SearchConfig(rerank="codes", candidates=80, beam=8)
REQUESTS = [
    SearchRequest(text="text 7", k=8),
    SearchRequest(text="text 21", k=5, where=["price<20"]),
    SearchRequest(text="a kite", k=60),
]


class Answer:
    def __init__(self, call):
        self.result = call


class Placed:
    """A shard in this process; it loses what it has open when it is told to."""

    def __init__(self, folder, name, model):
        self.new = lambda: ShardCopy(folder, name, model.folder)
        self.states = self.new()
        self.health = ShardHealth(2)

    def submit(self, method, generation, *arguments):
        self.health.answered(0)
        return Answer(lambda: self.states.call(method, generation, arguments))


@pytest.fixture(scope="module")
def template(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    rows = ({"id": str(number), "text": f"text {number}", "price": number} for number in range(60))
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_cluster(
        folder / "X", Settings(str(folder / "pool.jsonl"), model=str(trained.model), shards=3, rows=30)
    )
    return folder / "X"


@pytest.fixture
def here(template, model, tmp_path) -> Cluster:
    return Cluster.open(Path(shutil.copytree(template, tmp_path / "X")), model=model)


@pytest.fixture
def routed(here) -> RoutedCluster:
    return RoutedCluster(here.folder, here.model, lambda name: Placed(here.folder, name, here.model))


def answers(index):
    return [[hit.id for hit in hits] for hits in index.search_many(REQUESTS, config=CONFIG)]


def test_changes_are_searched_at_once(here, routed):
    assert answers(routed) == answers(here)
    here.add_items([{"id": "new", "text": "a kite", "fields": {"price": 3}}, {"id": "7", "text": "text 8"}])
    here.delete(["21", "22"])
    assert answers(routed) == answers(here)
    assert "new" in answers(routed)[2]
    assert routed.snapshot.manifest.generation == 3


def test_a_shard_that_lost_its_state_is_asked_about_the_current_one(here, routed, monkeypatch):
    old = routed.snapshot
    here.delete(["7"])
    for shard in routed.shards.values():
        shard.states = shard.new()
    queries = encode_queries(routed.model, old, REQUESTS, CONFIG)
    with pytest.raises(SnapshotGone):
        search_encoded(routed.model, old, queries, CONFIG)
    known = answers(here)
    stale = iter([(routed.model, old)])
    current = RoutedCluster.current
    monkeypatch.setattr(RoutedCluster, "current", lambda self: next(stale, None) or current(self))
    assert answers(routed) == known


def test_numbers_are_looked_up_only_where_there_is_full_text_search(here, routed, monkeypatch):
    (found,) = routed.search_many([SearchRequest(text="kite 7", k=5)], config=CONFIG)
    assert [hit.id for hit in found] == [hit.id for hit in here.search("kite 7", k=5, config=CONFIG)]
    assert found[0].id == "7"

    def lacks(_):
        raise UsageError("this SQLite lacks full-text search")

    monkeypatch.setattr(ItemStore, "_check_full_text", lacks)
    given = {"k": 5, "config": CONFIG}
    assert routed.search("kite 9", **given) == routed.search("kite 9", hybrid="off", **given)


def test_settings_choose_the_router(here, routed):
    geometry = dataclasses.replace(CONFIG, router="geometry", candidates=5)
    found, expected = (index.search_many(REQUESTS, config=geometry) for index in (routed, here))
    assert [[hit.id for hit in hits] for hits in found] == [[hit.id for hit in hits] for hits in expected]
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine.log_probabilities == pytest.approx(theirs.log_probabilities, abs=1e-5)


def test_searches_go_on_while_new_shards_are_placed(here):
    may_place = threading.Event()
    first = {shard.name for shard in read_cluster(here.folder).shards}

    def place(name):
        if name not in first:
            assert may_place.wait(60)
        return Placed(here.folder, name, here.model)

    routed = RoutedCluster(here.folder, here.model, place)
    known = answers(routed)
    here.rebalance(2)
    assert answers(routed) == known
    assert set(routed.shards) == first
    placing = routed._placing
    may_place.set()
    placing.join(60)
    assert answers(routed) == known
    assert set(routed.shards) == {shard.name for shard in read_cluster(here.folder).shards}
