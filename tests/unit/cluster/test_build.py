"""Building an index in shards: what is there is not made again, and the result is that of one index."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from genius_search.artifact import fingerprint_of, read_json
from genius_search.cluster import build
from genius_search.cluster.build import Settings, build_cluster, encode_partition, run_here
from genius_search.cluster.cuts import choose_cuts, row_of
from genius_search.cluster.folder import (
    Cluster,
    describe_cluster,
    open_index,
    read_cluster,
    verify_cluster,
)
from genius_search.cluster.run import LocalProcesses
from genius_search.config import SearchConfig
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.requests import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import CLUSTER, read_manifest
from genius_search.index.verify import verify
from genius_search.index.writer import one_writer
from genius_search.search.table import IdTable
from genius_search.writing import write_json


def settings(pool, trained, **changes) -> Settings:
    given = {"model": str(trained.model), "shards": 3, "rows": 25, "embeddings": "fused", **changes}
    return Settings(str(pool), **given)


class Counting:
    """Runs work here and counts it; fails before the call of a given number."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fail_at = fail_at

    def __call__(self, work, folder, numbers):
        for number in numbers:
            if len(self.calls) == self.fail_at:
                raise KeyboardInterrupt
            self.calls.append((work.__name__, number))
            work(folder, number)
            yield number


@pytest.fixture(scope="module")
def built(pool, trained, tmp_path_factory) -> Path:
    """A cluster that no test changes."""
    folder = tmp_path_factory.mktemp("cluster") / "X"
    build_cluster(folder, settings(pool, trained))
    return folder


@pytest.fixture
def cluster(built, model) -> Cluster:
    return Cluster.open(built, model=model)


def rows_of(snapshot: Snapshot) -> list[tuple]:
    """IDs of all segments in their order, each with the ids of its items."""
    found = []
    for segment in snapshot.segments:
        names = [item.id for item in segment.items.all()]
        for row, code in enumerate(segment.table.ids.tolist()):
            found.append((tuple(code), [names[item] for item in segment.table.bucket(row).tolist()]))
    return found


def test_shards_one_after_the_other_are_the_table_of_one_index(cluster, single):
    assert len(cluster.snapshot.segments) == 3
    assert rows_of(cluster.snapshot) == rows_of(single.snapshot)


REQUESTS = [
    SearchRequest(text="a red kite", k=20),
    SearchRequest(text="a striped horse", modality="image", k=5),
    SearchRequest(text="a blue lamp", modality="text", match="a", k=7),
]


@pytest.mark.parametrize(
    "config",
    [
        SearchConfig(rerank="codes", candidates=30, beam=5),
        SearchConfig(rerank="embeddings", candidates=40, beam=5, shortlist=12, density_weight=0.3),
        SearchConfig(beam=7),
    ],
    ids=["codes", "embeddings", "none"],
)
def test_a_cluster_finds_what_one_index_finds(cluster, single, config):
    expected = single.search_many(REQUESTS, config=config)
    for found, known in zip(cluster.search_many(REQUESTS, config=config), expected, strict=True):
        assert [hit.id for hit in found] == [hit.id for hit in known]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in known], abs=1e-6)
        assert [hit.image for hit in found] == [hit.image for hit in known]


def test_every_shard_is_an_index_that_passes_its_checks(built):
    total = verify_cluster(built)
    assert total.items == 120
    assert sum(verify(built / "shards" / shard.name).items for shard in read_cluster(built).shards) == 120
    sizes = [shard.items for shard in read_cluster(built).shards]
    assert max(sizes) <= 45
    info = describe_cluster(built)
    assert info.items == 120
    assert info.bytes == sum(shard["bytes"] for shard in info.shards)


def test_building_leaves_nothing_behind_but_the_cluster(built):
    assert sorted(one.name for one in built.iterdir()) == ["cluster.json", "left-out.jsonl", "shards"]
    assert all(not one.name.startswith(".") for one in (built / "shards").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


@pytest.mark.parametrize("fail_at", [0, 2, 5, 7])
def test_an_interrupted_build_does_only_what_is_missing_and_ends_the_same(
    built, pool, trained, tmp_path, fail_at
):
    first, second = Counting(fail_at), Counting()
    with pytest.raises(KeyboardInterrupt):
        build_cluster(tmp_path / "X", settings(pool, trained), run=first)
    with pytest.raises(ArtifactMissing, match="cluster"):
        read_cluster(tmp_path / "X")
    build_cluster(tmp_path / "X", settings(pool, trained), run=second)
    expected = [("encode_partition", number) for number in range(5)]
    expected += [("write_shard", number) for number in range(3)]
    assert first.calls + second.calls == expected
    assert contents(tmp_path / "X") == contents(built)


def test_a_build_killed_after_its_manifest_only_cleans_up(built, pool, trained, tmp_path):
    folder = Path(shutil.copytree(built, tmp_path / "X"))
    (folder / ".build").mkdir()
    (folder / "parts" / "000002").mkdir(parents=True)
    again = Counting()
    assert build_cluster(folder, settings(pool, trained), run=again).items == 120
    assert again.calls == []
    assert contents(folder) == contents(built)
    assert not (folder / ".build").exists()
    assert not (folder / "parts").exists()


def test_partitions_of_another_size_make_the_same_shards(built, pool, trained, tmp_path):
    build_cluster(tmp_path / "X", settings(pool, trained, rows=1000))
    assert rows_of(Cluster.open(tmp_path / "X", model=trained.model).snapshot) == rows_of(
        Cluster.open(built, model=trained.model).snapshot
    )


def test_an_interrupted_build_of_something_else_is_refused(pool, trained, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build_cluster(tmp_path / "X", settings(pool, trained), run=Counting(1))
    with pytest.raises(UsageError, match="rows 25"):
        build_cluster(tmp_path / "X", settings(pool, trained, rows=30))
    with pytest.raises(UsageError, match="embeddings 'fused'"):
        build_cluster(tmp_path / "X", settings(pool, trained, embeddings="none"))
    with pytest.raises(UsageError, match="other things"):
        build_cluster(trained.model, settings(pool, trained))


def test_a_pool_that_changed_since_the_build_began_is_refused(pool, trained, tmp_path):
    copy = tmp_path / "pool.jsonl"
    lines = [line for line in pool.read_text().splitlines(keepends=True) if '"text"' in line]
    copy.write_text("".join(lines))
    with pytest.raises(KeyboardInterrupt):
        build_cluster(tmp_path / "X", settings(copy, trained), run=Counting(1))
    copy.write_text("".join(lines[:-1]))
    with pytest.raises(UsageError, match="have changed"):
        build_cluster(tmp_path / "X", settings(copy, trained))


def test_a_finished_cluster_is_not_built_over(built, pool, trained):
    with pytest.raises(UsageError, match="finished cluster"):
        build_cluster(built, settings(pool, trained))


def text_rows(path: Path, ids: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": name, "text": f"text {name}"}) + "\n" for name in ids))
    return path


def test_an_id_that_occurs_twice_counts_once_and_is_listed(trained, tmp_path):
    ids = ["a", "b", "c", "a", "d", "b", "e", "b"]
    pool = text_rows(tmp_path / "pool.jsonl", ids)
    built = build_cluster(tmp_path / "X", settings(pool, trained, rows=4, shards=2))
    assert built.items == 5
    assert built.left_out == 3
    listed = [json.loads(line) for line in (tmp_path / "X" / "left-out.jsonl").read_text().splitlines()]
    assert {one["reason"] for one in listed} == {"its id occurred before"}
    cluster = Cluster.open(tmp_path / "X")
    assert sorted(cluster.snapshot.ids()) == ["a", "b", "c", "d", "e"]


def test_unusable_rows_are_left_out_with_their_reason(trained, tmp_path):
    pool = text_rows(tmp_path / "pool.jsonl", ["a", "b"])
    with pool.open("a") as file:
        file.write('{"id": "c"}\nnot json\n{"id": "d", "image": "no-such.jpg"}\n')
    built = build_cluster(tmp_path / "X", settings(pool, trained, rows=2, shards=1))
    assert (built.items, built.left_out) == (2, 3)
    listed = [json.loads(line) for line in (tmp_path / "X" / "left-out.jsonl").read_text().splitlines()]
    assert [one["file"].rpartition("/")[2] for one in listed] == [
        "pool.jsonl: byte 60", "pool.jsonl: byte 72", "no-such.jpg",
    ]  # fmt: skip


def test_a_cluster_made_with_an_encoder_has_a_model_of_its_own(trained, tmp_path):
    pool = text_rows(tmp_path / "pool.jsonl", [f"item {number}" for number in range(50)])
    given = Settings(str(pool), encoder=f"small:{trained.model / 'encoder'}", shards=2, rows=20)
    with pytest.raises(KeyboardInterrupt):
        build_cluster(tmp_path / "X", given, run=Counting(2))
    build_cluster(tmp_path / "X", given._replace(download=True))
    (tmp_path / "X").rename(tmp_path / "moved")
    assert verify_cluster(tmp_path / "moved").items == 50
    opened = open_index(tmp_path / "moved")
    assert opened.search(text="text item 7", k=1)[0].id == "item 7"
    assert read_manifest(tmp_path / "moved" / "shards" / "000000").embeddings == "fused"


def test_what_is_for_one_index_is_refused(cluster):
    with pytest.raises(UsageError, match="shards"):
        cluster.refit()
    shard = cluster.folder / "shards" / "000000"
    with pytest.raises(UsageError, match="change its cluster"), one_writer(shard):
        pass


def test_damage_is_named(pool, trained, tmp_path):
    build_cluster(tmp_path / "X", settings(pool, trained))
    file = next((tmp_path / "X" / "shards" / "000001").rglob("ids.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ArtifactMismatch, match="000001"):
        verify_cluster(tmp_path / "X")


def kill_once(folder: Path, number: int) -> None:
    """Encode a partition; the first process to do so with number 1 is killed before."""
    if number == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(number)).touch()


def test_work_of_a_killed_process_is_done_by_another(tmp_path):
    assert sorted(LocalProcesses(2)(kill_once, tmp_path, range(4))) == [0, 1, 2, 3]
    assert (tmp_path / "killed").exists()
    with pytest.raises(UsageError, match="--local"):
        LocalProcesses(0)


def test_a_second_attempt_at_a_folder_does_no_harm(pool, trained, tmp_path):
    folder = tmp_path / "X"
    with pytest.raises(KeyboardInterrupt):
        build_cluster(folder, settings(pool, trained), run=Counting(5))
    before = contents(folder / "parts")
    encode_partition(folder, 3)
    assert contents(folder / "parts") == before
    build_cluster(folder, settings(pool, trained), run=_twice)
    assert verify_cluster(folder).items == 120


def _twice(work, folder, numbers):
    for number in run_here(work, folder, numbers):
        work(folder, number)
        yield number


@pytest.mark.parametrize("seed", range(20))
def test_cuts_share_items_evenly_and_never_split_an_id(seed):
    random = np.random.default_rng(seed)
    codes = random.integers(0, [3, 5, 6, 7], (int(random.integers(1, 400)), 4))
    table = IdTable.build(codes.astype(np.int16), np.zeros(len(codes)))
    shards = int(random.integers(1, 9))
    cuts = choose_cuts(table, shards)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < shards
    starts = [0, *(int(table.bucket_starts[row_of(table, cut)]) for cut in cuts), len(codes)]
    largest_id = int(np.diff(table.bucket_starts).max())
    assert max(np.diff(starts)) <= 1.04 * len(codes) / shards + 2 * largest_id
    assert min(np.diff(starts)) > 0


def test_fewer_ids_than_shards_make_fewer_shards(trained, tmp_path):
    pool = text_rows(tmp_path / "pool.jsonl", ["a"])
    assert len(build_cluster(tmp_path / "X", settings(pool, trained, shards=5)).shards) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(shards=[]),
        lambda body: body["shards"].reverse(),
        lambda body: body["shards"].append(body["shards"][0]),
        lambda body: body["shards"][1].update(first=body["shards"][2]["first"]),
        lambda body: body["shards"][1].update(name=body["shards"][0]["name"]),
        lambda body: body["shards"][1].update(name="0" * 5_000),
        lambda body: body["shards"][1].update(name="../shards"),
        lambda body: body["shards"][1].update(first=[10**30]),
        lambda body: body["shards"][1].update(first=[-1]),
        lambda body: body["shards"][2].update(first=[1] * 1_000),
        lambda body: body["shards"][0].update(generation=-1),
        lambda body: body.update(partitions=10**3_000),
        lambda body: body.update(pool="x" * (17 << 20)),
    ],
)
@pytest.mark.parametrize("use", [open_index, verify_cluster, describe_cluster])
def test_a_manifest_that_was_made_up_is_refused_before_a_shard_is_opened(built, tmp_path, change, use):
    shutil.copytree(built, tmp_path / "X", ignore=shutil.ignore_patterns("shards"))
    body = read_json(built / CLUSTER)
    del body["checksum"]
    change(body)
    write_json(tmp_path / "X" / CLUSTER, {**body, "checksum": fingerprint_of(body)})
    with pytest.raises(ArtifactMismatch, match="damaged"):
        use(tmp_path / "X")


def test_a_part_is_opened_once_however_many_of_its_ids_occurred_before(tmp_path, monkeypatch):
    (tmp_path / build.BUILD).mkdir()
    (tmp_path / build.PARTS / "000000").mkdir(parents=True)
    (tmp_path / build.PARTS / "000000" / build.LEFT_OUT).write_text("[]")
    np.save(tmp_path / build.BUILD / build.DUPLICATES, np.array([[0, 3], [0, 5]]))
    opened = []
    items = SimpleNamespace(get=lambda rows: [SimpleNamespace(id=f"item {row}") for row in rows])
    monkeypatch.setattr(build, "_part", lambda *given: opened.append(given) or SimpleNamespace(items=items))
    assert [row["file"] for row in build._left_out(tmp_path, 1)] == ["item 3", "item 5"]
    assert len(opened) == 1
