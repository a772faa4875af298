from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.artifact import fingerprint_of
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.index import writer as live
from genius_search.index.info import check
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    INDEX_FORM,
    IndexManifest,
    Root,
    read_head,
    read_manifest,
)
from genius_search.index.writer import ItemArrays, Writer, open_writer, write_manifest
from genius_search.records import Modality
from genius_search.writing import NO_LOCKS

FACTS = IndexManifest(
    identity="0" * 32,
    model="/somewhere/model",
    model_fingerprint="f" * 64,
    embeddings="raw",
    embedding_bits=16,
)


def given_items(contents: dict[str, int]) -> tuple[list[Item], ItemArrays]:
    """Items whose text, codes and embedding say a number."""
    numbers = np.array(list(contents.values()), dtype=np.int64)
    return [
        Item(name, Modality.TEXT, str(number)) for name, number in contents.items()
    ], ItemArrays(
        np.stack([numbers % 2, numbers % 3, numbers], axis=1).astype(np.int16),
        np.ones(len(numbers), dtype=np.float16),
        np.eye(8, dtype=np.float16)[numbers % 8],
    )


def read_contents(folder: Path) -> dict[str, int]:
    contents = {}
    for segment in Snapshot.open(folder).segments:
        items = list(segment.items.all())
        expected = given_items({item.id: int(item.text) for item in items})[1]
        codes = np.repeat(segment.table.ids, np.diff(segment.table.bucket_starts), axis=0)
        assert np.array_equal(codes, expected.codes[segment.table.items])
        assert np.allclose(
            segment.vectors(None)(np.arange(len(items))), expected.embeddings, atol=1e-3
        )
        for row, item in enumerate(items):
            if row not in segment.dead:
                assert item.id not in contents
                contents[item.id] = int(item.text)
    return contents


def make(folder: Path, contents: dict[str, int]) -> Path:
    with open_writer(folder) as writer:
        writer.begin(FACTS)
        writer.add([given_items(contents)])
    return folder


def expected_names(folder: Path) -> set[str]:
    manifest = read_manifest(folder)
    return {CURRENT, ".lock", *(f"segments/{entry.name}" for entry in manifest.segments)}


def present_names(folder: Path) -> set[str]:
    """All there is, but what is inside segments, and the folders themselves."""
    here = [path for path in folder.iterdir() if path.name != "segments"]
    return {str(path.relative_to(folder)) for path in (*here, *(folder / "segments").glob("*"))}


ADD = st.tuples(
    st.just("add"), st.dictionaries(st.sampled_from("abcdefghijkl"), st.integers(0, 99), max_size=9)
)
DELETE = st.tuples(st.just("delete"), st.lists(st.sampled_from("abcdefghijklm"), max_size=9))
COMPACT = st.tuples(st.just("compact"), st.sampled_from([0.0, 0.2, 0.5]))


@settings(max_examples=15)
@given(first=ADD, changes=st.lists(st.one_of(ADD, DELETE, COMPACT), max_size=8))
def test_an_index_holds_what_was_added_last_less_what_was_deleted(tmp_path_factory, first, changes):
    folder = make(tmp_path_factory.mktemp("index"), first[1])
    expected = dict(first[1])
    with open_writer(folder) as writer:
        for kind, what in changes:
            if kind == "add":
                replaced = sum(name in expected for name in what)
                assert writer.add([given_items(what)]) == (len(what), replaced)
                expected |= what
            elif kind == "delete":
                wanted = list(dict.fromkeys(what))
                missing = [name for name in wanted if name not in expected]
                assert writer.delete(what) == (len(wanted) - len(missing), missing)
                expected = {name: number for name, number in expected.items() if name not in what}
            else:
                before = writer.snapshot.segments
                dirty = [
                    len(one.dead) >= what * one.num_items and len(one.dead) > 0 for one in before
                ]
                writer.compact(min_deleted=what)
                after = writer.snapshot.segments
                if what == 0:
                    assert [len(one.dead) for one in after] == [0] * bool(expected)
                else:  # what lies before the first that has many deleted items is left alone
                    kept = [*dirty, True].index(True)
                    assert [one.name for one in after[:kept]] == [one.name for one in before[:kept]]
                    assert len(after) <= kept + 1
            assert writer.snapshot.num_alive == len(expected)
    assert read_contents(folder) == expected
    assert check(folder).items == len(expected)
    assert present_names(folder) == expected_names(folder)


def test_an_index_is_not_created_over_another(tmp_path):
    make(tmp_path, {"a": 1})
    with pytest.raises(UsageError, match="genius index add"):
        make(tmp_path, {"b": 2})
    assert read_contents(tmp_path) == {"a": 1}


def test_an_id_that_is_added_twice_at_once_changes_nothing(tmp_path):
    make(tmp_path, {"a": 1, "b": 2})
    before = present_names(tmp_path)
    items, arrays = given_items({"c": 3, "d": 4})
    with open_writer(tmp_path) as writer:
        with pytest.raises(BadData, match="'c'"):
            writer.add([([items[0], items[0]], arrays)])
        assert present_names(tmp_path) == before
        assert writer.add([(items, arrays)]) == (2, 0)  # and the next attempt finds its place free
    assert len(read_contents(tmp_path)) == 4


@pytest.mark.parametrize(
    "sizes", [[1] * 25, [249, 120, 59, 28, 13, 6, 2, 1]]
)  # or each less than half
def test_segments_stay_few_and_the_large_one_is_left_alone(tmp_path, sizes):
    make(tmp_path, {f"old {number}": number for number in range(500)})
    large = Snapshot.open(tmp_path).segments[0].name
    most = 0
    with open_writer(tmp_path) as writer:
        for change, size in enumerate(sizes):
            writer.add([given_items({f"{change}/{number}": number for number in range(size)})])
            most = max(most, len(writer.snapshot.segments))
            if most < live.MAX_SEGMENTS:
                assert writer.snapshot.segments[0].name == large
    assert 1 < most <= live.MAX_SEGMENTS
    assert len(read_contents(tmp_path)) == 500 + sum(sizes)


def test_what_is_open_stays_whole_while_the_index_changes(tmp_path):
    make(tmp_path, {f"{number}": number for number in range(50)})
    before = Snapshot.open(tmp_path)
    with open_writer(tmp_path) as writer:
        writer.delete(["3", "4"])
        writer.compact(min_deleted=0)
        writer.add([given_items({"3": 99})])
    (segment,) = before.segments
    assert not segment.folder.exists()
    assert [item.id for item in segment.items.get([3, 4])] == ["3", "4"]
    assert [row for _, row, *_ in segment.items.find_ids(["3"])] == [3]
    assert segment.vectors(None)(np.array([3]))[0].argmax() == 3
    assert segment.table.ids[-1].tolist() == [1, 2, 47]


def delete(writer: Writer) -> object:
    return writer.delete(["old 3", "old 4", "old 45", "new 2"])


def add(writer: Writer) -> object:
    return writer.add([given_items({"old 3": 77, "newer": 78})])


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "work", [add, delete, Writer.compact, partial(Writer.compact, min_deleted=0)]
)
def test_a_writer_killed_at_any_change_of_files_leaves_the_old_state_or_the_new_one(
    tmp_path, work, stride, killed_at
):
    template = make(tmp_path / "template", {f"old {number}": number for number in range(10)})
    with open_writer(template) as writer:
        writer.add([given_items({f"new {number}": number for number in range(3)})])
        writer.delete(["old 5", "new 1"])
    (template / "segments" / "photos").mkdir()
    old = read_contents(template)
    whole = Path(shutil.copytree(template, tmp_path / "whole"))
    with open_writer(whole) as writer:
        work(writer)
    new = read_contents(whole)
    seen = []

    def change(folder: Path) -> None:
        with open_writer(folder) as writer:
            work(writer)

    for number in range(1, 1_000, stride):
        folder = Path(shutil.copytree(template, tmp_path / str(number)))
        was_killed = killed_at(number, lambda folder=folder: change(folder))
        is_new = read_manifest(folder).generation > read_manifest(template).generation
        assert check(folder).items == len(new if is_new else old)
        assert read_contents(folder) == (new if is_new else old)
        if not was_killed:
            break
        seen.append("new" if is_new else "old")
        with open_writer(folder):  # whoever comes next leaves nothing of the killed one behind
            assert present_names(folder) == {*expected_names(folder), "segments/photos"}
        shutil.rmtree(folder)
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"} or stride > 1


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_first_writer_killed_at_any_change_of_files_leaves_no_index_or_a_whole_one(
    tmp_path, stride, killed_at
):
    for number in range(1, 1_000, stride):
        folder = tmp_path / str(number)
        if not killed_at(number, lambda folder=folder: make(folder, {"a": 1, "b": 2})):
            break
        if (folder / CURRENT).exists():
            assert read_contents(folder) == {"a": 1, "b": 2}
        else:
            with pytest.raises(ArtifactMissing, match="genius index create"):
                read_manifest(folder)
            assert read_contents(make(folder, {"c": 3})) == {"c": 3}
            assert present_names(folder) == expected_names(folder)
    assert number > 5


@pytest.mark.parametrize(
    "text", ["", "{}", '"\\ud800"', "[" * 100_000, json.dumps({"format": INDEX_FORM.format + 1})]
)
def test_a_file_that_is_no_manifest_of_this_version_is_refused(tmp_path, text):
    (tmp_path / CURRENT).write_text(text)
    with pytest.raises(ArtifactMismatch, match="create the index again"):
        read_manifest(tmp_path)


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(tmp_path):
    make(tmp_path, {"a": 1})
    whole = (tmp_path / CURRENT).read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place * 5 % 8
        (tmp_path / CURRENT).write_bytes(flipped)
        with pytest.raises(ArtifactMismatch, match=r"index\.json is damaged"):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"embeddings": "some"},
        {"segments": [{"name": "../elsewhere", "items": 1, "files": {}}]},
        {"segments": [{"name": "000001", "items": 1, "files": {}, "deleted": "../x.npy"}]},
        {
            "segments": [
                {"name": "000001", "items": 1, "files": {"../x.npy": {"bytes": 1, "sha256": ""}}}
            ]
        },
        {"segments": [{"name": "000001", "items": 1, "files": {}}] * 2},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_though_its_checksum_is_right(tmp_path, change):
    make(tmp_path, {"a": 1})
    body = {**json.loads((tmp_path / CURRENT).read_text()), **change}
    del body["checksum"]
    (tmp_path / CURRENT).write_text(json.dumps({**body, "checksum": fingerprint_of(body)}))
    assert body["format"] == INDEX_FORM.format
    with pytest.raises(ArtifactMismatch, match=r"index\.json is damaged"):
        read_manifest(tmp_path)


def impossible_places(folder: Path) -> list[Path]:
    (folder / "file").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "gone")
    return [
        folder / name
        for name in ("x" * 256, "loop/index", "file/index", "nowhere", "nowhere/index")
    ]


def test_where_no_folder_can_be_there_is_no_index(tmp_path):
    places = impossible_places(tmp_path)
    for place in places:
        with pytest.raises(ArtifactMissing, match="genius index create"):
            read_manifest(place)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ArtifactMissing, match="is a model"):
        read_manifest(tmp_path)
    for place in (*places, tmp_path / "file"):
        with pytest.raises(UsageError, match="choose another folder"), open_writer(place):
            pass


@pytest.mark.parametrize("code", live.READ_ONLY_ERRORS)
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch, code):
    make(tmp_path, {"a": 1})

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(live.FileLock, "acquire", refuse)
    with pytest.raises(live.NotWritable, match=re.escape(str(tmp_path))), open_writer(tmp_path):
        pass


@pytest.mark.parametrize("code", NO_LOCKS)
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(live.NotWritable, match="does not support file locks"),
        open_writer(tmp_path),
    ):
        pass


def test_threads_wait_for_each_other_and_a_thread_does_not_wait_for_itself(tmp_path):
    make(tmp_path, {"a": 1})

    def add(name: str) -> None:
        with open_writer(tmp_path) as writer:
            time.sleep(0.02)
            writer.add([given_items({name: 2})])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, "bcde"))
    assert set(read_contents(tmp_path)) == set("abcde")
    with open_writer(tmp_path):
        with pytest.raises(live.HeldByAnother), open_writer(tmp_path / ".." / tmp_path.name):
            pass
        with ThreadPoolExecutor(1) as threads:

            def wait() -> None:
                with open_writer(tmp_path, wait_seconds=0.05):
                    pass

            with pytest.raises(live.HeldByAnother):
                threads.submit(wait).result()


def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path):
    make(tmp_path, {"a": 1})
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with open_writer(tmp_path):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            with open_writer(tmp_path, wait_seconds=60) as writer:
                writer.delete(["a"])
        finally:
            os._exit(0)
    leave.set()
    thread.join()
    os.waitpid(child, 0)
    assert read_contents(tmp_path) == {}


def test_a_lock_is_taken_although_another_process_removes_the_folder_meanwhile(
    tmp_path, monkeypatch
):
    real = live.check_locks

    def remove(file: Path) -> None:
        monkeypatch.setattr(live, "check_locks", real)
        shutil.rmtree(file.parent)

    monkeypatch.setattr(live, "check_locks", remove)
    assert read_contents(make(tmp_path / "i", {"a": 1})) == {"a": 1}


def test_the_first_bytes_of_a_manifest_differ_between_any_two_states(tmp_path):
    heads = set()
    for generation in (1, 2, 2**40):
        for roots in ((), (Root(folder="/somewhere", name="photos"),)):
            write_manifest(tmp_path, FACTS.replace(generation=generation, roots=roots))
            heads.add(read_head(tmp_path / CURRENT))
    assert len(heads) == 6
    assert all(FACTS.identity.encode() in head for head in heads)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_change_that_fails_does_not_stand_in_the_way_of_the_next(
    tmp_path, monkeypatch, is_committed
):
    make(tmp_path, {"a": 1})

    def fail(folder: Path, manifest: IndexManifest) -> None:
        if is_committed:
            write_manifest(folder, manifest)
        raise OSError("failed")

    with open_writer(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(live, "write_manifest", fail)
            with pytest.raises(OSError, match="failed"):
                writer.add([given_items({"b": 2, "c": 3})])
        writer.add([given_items({"d": 4})])
    assert read_contents(tmp_path) == {"a": 1, "d": 4} | ({"b": 2, "c": 3} if is_committed else {})


def test_the_names_of_new_folders_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()),
    )
    make(tmp_path / "new" / "index", {"a": 1})
    assert {tmp_path, tmp_path / "new"} <= set(synced)
