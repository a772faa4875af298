"""Changing a cluster: all of a change or none of it, whenever the writer is killed, and readers go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.folder import Cluster, describe_cluster, open_state, read_cluster, verify_cluster
from genius_search.cluster.writer import ShardWriter, one_cluster_writer
from genius_search.config import SearchConfig
from genius_search.errors import BadData, UsageError
from genius_search.index.adding import NewItem, add_new_items
from genius_search.index.verify import verify

CONFIG = SearchConfig(rerank="codes", candidates=200, beam=50)


def text_rows(path: Path, texts: dict[str, str]) -> Path:
    rows = ({"id": name, "text": text} for name, text in texts.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def template(trained, tmp_path_factory) -> Path:
    """A cluster of forty texts in two shards, with deleted items and several segments."""
    folder = tmp_path_factory.mktemp("template")
    pool = text_rows(folder / "pool.jsonl", {f"{n}": f"text {n}" for n in range(40)})
    build_cluster(folder / "X", Settings(str(pool), model=str(trained.model), shards=2, rows=20))
    cluster = Cluster.open(folder / "X")
    cluster.add_items([{"id": f"new {n}", "text": f"a kite {n}"} for n in range(3)])
    cluster.delete(["3", "17", "31"])
    return folder / "X"


@pytest.fixture
def cluster(template, model, tmp_path) -> Cluster:
    return Cluster.open(Path(shutil.copytree(template, tmp_path / "X")), model=model)


def found(folder: Path) -> dict[str, str | None]:
    """Ids and texts of all items; an id in two places fails."""
    _, snapshot = open_state(folder)
    items = {}
    for segment in snapshot.segments:
        dead = set(segment.dead.tolist())
        for row, item in enumerate(segment.items.all()):
            if row not in dead:
                assert item.id not in items
                items[item.id] = item.text
    return items


def present(folder: Path) -> set[str]:
    """Files below the shards, without those of a lock or a reserve."""
    return {
        str(path.relative_to(folder))
        for path in (folder / "shards").rglob("*")
        if path.is_file() and path.name not in (".lock", ".reserve")
    }


def test_an_item_that_moves_to_another_shard_is_in_one(cluster, model):
    before = cluster.snapshot
    texts = ["a red kite", "a striped horse", "a blue lamp", "seven birds", "text 5"]
    for text in texts:
        assert cluster.add_items([NewItem("5", text)])[0].status in ("replaced", "unchanged")
        assert found(cluster.folder)["5"] == text
        assert cluster.search(text, k=1, config=CONFIG)[0].text is not None
        assert verify_cluster(cluster.folder).items == 40
    assert sum(1 for item in before.ids() if item == "5") == 1  # a reader keeps its state
    shards = read_cluster(cluster.folder).shards
    assert sum(verify(cluster.folder / "shards" / shard.name).items for shard in shards) == 40


def test_a_pool_of_any_kind_is_added_and_what_is_unchanged_is_skipped(cluster, tmp_path):
    pool = text_rows(tmp_path / "more.jsonl", {"5": "text 5", "6": "another text", "z": "a new one"})
    added = cluster.add(pool)
    assert (added.added, added.replaced, added.unchanged) == (2, 1, 0 + 1)
    again = cluster.add(pool)
    assert (again.added, again.unchanged) == (0, 3)
    assert describe_cluster(cluster.folder).generation == read_cluster(cluster.folder).generation
    doubled = tmp_path / "doubled.jsonl"
    doubled.write_text('{"id": "q", "text": "one"}\n{"id": "q", "text": "two"}\n')
    with pytest.raises(BadData, match="two items"):
        cluster.add(doubled)
    assert "q" not in found(cluster.folder)


def test_pictures_of_new_items_are_stored_in_the_cluster(cluster, trained):
    picture = next((trained.data / "mbeir_images").rglob("*.jpg")).read_bytes()
    outcome = cluster.add_items([NewItem("photo", "a photo", picture)])
    assert outcome[0].status == "added"
    hit = next(hit for hit in cluster.search("a photo", k=50, config=CONFIG) if hit.id == "photo")
    assert Path(hit.image).read_bytes() == picture
    assert Path(hit.image).resolve().is_relative_to((cluster.folder / "pictures").resolve())
    assert cluster.add_items([NewItem("photo", "a photo", picture)])[0].status == "unchanged"


def add(writer, model):
    items = [NewItem("4", "a red kite"), NewItem("11", "a striped horse"), NewItem("newest", "a blue lamp")]
    add_new_items(writer, model, items)


def delete(writer, _):
    writer.delete(["4", "11", "22", "new 2"])


def compact(writer, _):
    writer.compact()


def rebalance(writer, _):
    writer.rebalance(3)


@pytest.mark.parametrize("work", [add, delete, compact, rebalance])
def test_a_writer_killed_at_any_change_of_files_leaves_the_old_state_or_the_new_one(
    template, model, tmp_path, work, killed_at
):
    def change(folder: Path) -> None:
        with one_cluster_writer(folder) as writer:
            work(writer, model)

    old, generation = found(template), read_cluster(template).generation
    whole = Path(shutil.copytree(template, tmp_path / "whole"))
    change(whole)
    new, expected = found(whole), present(whole)
    seen = []
    for number in range(1, 1_000):
        folder = Path(shutil.copytree(template, tmp_path / str(number)))
        was_killed = killed_at(number, lambda folder=folder: change(folder))
        is_new = read_cluster(folder).generation > generation
        if number % 3 == 0:
            assert verify_cluster(folder).items == len(new if is_new else old)
        assert found(folder) == (new if is_new else old)
        if not was_killed:
            break
        seen.append("new" if is_new else "old")
        with one_cluster_writer(folder) as writer:  # whoever comes next leaves nothing behind
            for shard in read_cluster(folder).shards:
                verify(folder / "shards" / shard.name)
            if not is_new:
                assert present(folder) == present(template)
            elif work is not compact:  # the others are compacted by the next
                assert present(folder) == expected
            if number % 7 == 0:
                work(writer, model)
                assert found(folder) == new
        shutil.rmtree(folder)
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}


def test_a_state_counts_only_when_its_files_are_on_the_disk(cluster, disk):
    """Power may fail at any moment: everything in a shard reaches the disk before ``cluster.json``."""
    with one_cluster_writer(cluster.folder) as writer:
        disk.clear()
        add(writer, cluster.model)
    manifest = (cluster.folder / "cluster.json").stat().st_ino
    checked = 0
    # Inodes are used again, so the last move of this one counts.
    named = max(place for place, event in enumerate(disk) if event == ("move", manifest))
    synced_before = {inode for kind, inode in disk[:named] if kind == "sync"}
    for shard in read_cluster(cluster.folder).shards:
        place = cluster.folder / "shards" / shard.name
        number = f"{shard.generation:06d}"
        new = [place / "deleted" / one.deleted for one in shard.segments if one.deleted]
        new = [path for path in new if path.name.startswith(number)]
        new += list((place / "segments" / number).glob("*.*"))
        checked += len(new)
        assert {path.stat().st_ino for path in new} <= synced_before
    assert checked > 5
    assert manifest in synced_before


def test_a_change_that_fails_in_one_shard_changes_none(cluster, monkeypatch):
    before, files = found(cluster.folder), present(cluster.folder)
    original, calls = ShardWriter.delete, []

    def fail(self, ids):
        calls.append(self.folder.name)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return original(self, ids)

    monkeypatch.setattr(ShardWriter, "delete", fail)
    with one_cluster_writer(cluster.folder) as writer:
        assert writer.delete(["4", "11", "22"]).deleted == 3  # the reserve is given, and it is tried again
    monkeypatch.setattr(ShardWriter, "delete", original)
    assert before.keys() - found(cluster.folder).keys() == {"4", "11", "22"}

    def fail_always(*_):
        raise RuntimeError("a fault")

    after, files = found(cluster.folder), present(cluster.folder)
    monkeypatch.setattr(ShardWriter, "put", fail_always)
    with one_cluster_writer(cluster.folder) as writer, pytest.raises(RuntimeError):
        add(writer, cluster.model)
    assert found(cluster.folder) == after
    assert present(cluster.folder) == files


def test_rebalancing_evens_shards_and_changes_no_search(cluster):
    shards = read_cluster(cluster.folder).shards
    _, snapshot = open_state(cluster.folder)
    lost = [item.id for item in next(iter(snapshot.segments)).items.all()]
    cluster.delete(lost)
    queries = ["text 9", "a kite", "text 33"]
    config = SearchConfig(rerank="codes", candidates=200, beam=60)
    before = [[(hit.id, hit.score) for hit in cluster.search(text, k=20, config=config)] for text in queries]
    reader = cluster.snapshot
    assert cluster.rebalance()
    sizes = [shard.items for shard in read_cluster(cluster.folder).shards]
    assert max(sizes) - min(sizes) <= 4
    assert not {shard.name for shard in read_cluster(cluster.folder).shards} & {one.name for one in shards}
    assert sorted(reader.ids()) == sorted(cluster.snapshot.ids())
    after = [[(hit.id, hit.score) for hit in cluster.search(text, k=20, config=config)] for text in queries]
    for old, new in zip(before, after, strict=True):
        assert [score for _, score in new] == pytest.approx([score for _, score in old], abs=1e-6)
        assert {name for name, _ in new} == {name for name, _ in old}
    assert not cluster.rebalance()
    assert cluster.rebalance(5)
    assert len(read_cluster(cluster.folder).shards) == 5
    assert verify_cluster(cluster.folder).deleted == 0


def test_one_writer_at_a_time(cluster):
    with (
        one_cluster_writer(cluster.folder),
        pytest.raises(UsageError, match="another process"),
    ):
        cluster.delete("1")
