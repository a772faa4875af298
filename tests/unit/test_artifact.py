"""A stage's folder: whole or not there, whenever the writer is killed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genius_search import writing
from genius_search.artifact import fingerprint_of, open_artifact, read_json
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.writing import (
    CHECKPOINT,
    ArtifactWriter,
    new_folder,
    write_atomically,
    write_file,
)

KIND = "thing"


def writer(folder, version="new"):
    return ArtifactWriter(folder, kind=KIND, config={"version": version}, inputs={"from": "x"})


def make(folder, version="new"):
    opened = writer(folder, version)
    (opened.path / "data.txt").write_text(version)
    (opened.path / "parts").mkdir(exist_ok=True)
    (opened.path / "parts" / "0.txt").write_text(version * 2)
    (opened.path / CHECKPOINT).write_text("half")
    return opened.finish(facts={"length": len(version)})


def test_a_finished_folder_gives_back_what_was_put_in(tmp_path):
    made = make(tmp_path / "a")
    opened = open_artifact(tmp_path / "a", kind=KIND, check_contents=True)
    assert opened == made
    assert opened.config == {"version": "new"}
    assert opened.inputs == {"from": "x"}
    assert opened.facts == {"length": 3}
    names = sorted(path.name for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert names == ["0.txt", "data.txt", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_a_folder_is_whole_or_not_there(tmp_path, killed_at, stride):
    seen = set()
    for number in range(1, 1_000, stride):
        folder = tmp_path / str(number)
        make(folder, "old")
        was_killed = killed_at(number, lambda folder=folder: make(folder, "new"))
        if folder.exists():
            version = open_artifact(folder, kind=KIND, check_contents=True).config["version"]
            assert (folder / "data.txt").read_text() == version
        else:  # between the old folder and the new one
            version = "neither"
            assert (writer(folder).path / "data.txt").read_text() == "new"
        assert make(folder, "new") == open_artifact(folder, kind=KIND, check_contents=True)
        assert not list(tmp_path.glob(".*"))
        if not was_killed:
            break
        seen.add(version)
    assert seen == {"old", "new", "neither"} or stride > 1


def test_killed_while_finishing_the_work_done_so_far_is_found_again(tmp_path, killed_at):
    for number in range(1, 1_000):
        folder = tmp_path / str(number)
        for name in ("shard", CHECKPOINT):
            (writer(folder).path / name).write_text("an hour of work")
        was_killed = killed_at(number, lambda folder=folder: writer(folder).finish())
        again = writer(folder)
        if again.finished() is None:
            assert (again.path / "shard").read_text() == "an hour of work"
            assert (again.path / CHECKPOINT).read_text() == "an hour of work"
            again.finish()
        assert (open_artifact(folder, kind=KIND, check_contents=True).folder / "shard").exists()
        if not was_killed:
            break
    assert number > 3


def test_only_the_same_plan_counts_as_finished(tmp_path):
    assert writer(tmp_path / "a").finished() is None
    make(tmp_path / "a")
    assert writer(tmp_path / "a").finished() == open_artifact(tmp_path / "a", kind=KIND)
    assert not list(tmp_path.glob(".a.*.partial"))
    assert writer(tmp_path / "a", "other").finished() is None
    for kind, origin in (("other", "x"), (KIND, "y")):
        other = ArtifactWriter(
            tmp_path / "a", kind=kind, config={"version": "new"}, inputs={"from": origin}
        )
        assert other.finished() is None
        (other.path / "shard").write_text("done")  # which another plan does not find
    assert not (writer(tmp_path / "a").path / "shard").exists()
    (tmp_path / "a" / "data.txt").unlink()
    assert writer(tmp_path / "a").finished() is None


def test_changed_contents_of_the_same_size_are_found_when_asked_to_verify(tmp_path):
    make(tmp_path / "a")
    (tmp_path / "a" / "data.txt").write_text("NEW")
    open_artifact(tmp_path / "a", kind=KIND)
    with pytest.raises(ArtifactMismatch, match=r"data\.txt have changed"):
        open_artifact(tmp_path / "a", kind=KIND, check_contents=True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "index"}, "holds a 'index', not a 'thing'"),
        ({"format": 99}, "this version reads 1"),
        ({"files": {"data.txt": {"bytes": 5, "sha256": "x"}}}, "data.txt has 3 bytes, expected 5"),
        ({"files": {"../data.txt": {"bytes": 3, "sha256": "x"}}}, "outside its folder"),
        ({"facts": None}, "damaged"),
    ],
)
def test_a_manifest_with_entries_that_cannot_be_is_refused(tmp_path, change, error):
    make(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    body = {**json.loads(manifest.read_text()), **change}
    del body["fingerprint"]
    manifest.write_text(json.dumps({**body, "fingerprint": fingerprint_of(body)}))
    with pytest.raises(ArtifactMismatch, match=error):
        open_artifact(tmp_path / "a", kind=KIND)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ArtifactMissing, match="does not exist"):
        open_artifact(tmp_path / "a", kind=KIND)
    (tmp_path / "a").mkdir()
    with pytest.raises(ArtifactMissing, match=r"no manifest\.json"):
        open_artifact(tmp_path / "a", kind=KIND)
    make(tmp_path / "a")
    (tmp_path / "a" / "parts" / "0.txt").unlink()
    with pytest.raises(ArtifactMissing, match=r"parts/0\.txt is missing"):
        open_artifact(tmp_path / "a", kind=KIND)


def test_a_block_that_raises_leaves_the_old_file_and_no_new_folder(tmp_path):
    write_file(tmp_path / "x", b"old")
    with pytest.raises(ZeroDivisionError), write_atomically(tmp_path / "x") as temporary:  # noqa: PT012
        temporary.write_bytes(b"new")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "y") as partial:  # noqa: PT012
        (partial / "half").touch()
        raise ZeroDivisionError
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_files_then_the_manifest_then_the_folder_reach_the_disk(tmp_path, disk):
    folder = make(tmp_path / "new" / "a").folder
    manifest, *files = (
        disk.index(("sync", (folder / name).stat().st_ino))
        for name in ("manifest.json", "data.txt", "parts", "parts/0.txt")
    )
    in_place = disk.index(("move", folder.stat().st_ino))
    named = len(disk) - 1 - disk[::-1].index(("sync", folder.parent.stat().st_ino))
    assert max(files) < manifest < in_place < named
    assert ("sync", tmp_path.stat().st_ino) in disk[: min(files)]  # the folder around it is new too


def test_a_new_folder_reaches_the_disk_before_it_has_its_name(tmp_path, disk):
    with new_folder(tmp_path / "a") as partial:
        (partial / "x").touch()
    file, folder, parent = (
        path.stat().st_ino for path in (tmp_path / "a" / "x", tmp_path / "a", tmp_path)
    )
    # A folder and its files are flushed at the same time.
    assert {*disk[-4:-2]} == {("sync", file), ("sync", folder)}
    assert disk[-2:] == [("move", folder), ("sync", parent)]


def test_a_file_that_cannot_be_flushed_leaves_no_folder(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "failed")

    def write_folder() -> None:
        with new_folder(tmp_path / "a") as partial:
            (partial / "x").touch()
            monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(OSError, match="failed"):
        write_folder()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("write", [write_atomically, new_folder])
def test_a_full_disk_is_said_whatever_a_library_calls_it(tmp_path, monkeypatch, write):
    strange, usual = (
        RuntimeError("unexpected pos 576 vs 534"),
        OSError(errno.ENOSPC, "No space left"),
    )
    for full, error, expected in (
        (1 << 62, strange, OSError),
        (0, strange, RuntimeError),
        (0, usual, OSError),
    ):
        monkeypatch.setattr(writing, "MIN_FREE_BYTES", full)
        with pytest.raises(expected) as failed, write(tmp_path / "x"):
            raise error
        place = str(getattr(failed.value, "filename", None))
        assert place.startswith(str(tmp_path)) is (expected is OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_settings_that_would_never_end_are_not_read(tmp_path, make):
    make(tmp_path / "x.json")
    with pytest.raises(ArtifactMismatch, match="not a regular file"):
        read_json(tmp_path / "x.json")


def test_a_folder_that_genius_did_not_make_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(UsageError, match="did not write"):
        ArtifactWriter(tmp_path / "thesis", kind="thing", config={}, inputs={})
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"


_HOLD = """
import sys
from pathlib import Path
from genius_search.writing import ArtifactWriter

writer = ArtifactWriter(Path(sys.argv[1]), kind="thing", config={"version": "new"}, inputs={"from": "x"})
(writer.path / "shard").write_text("theirs")
print("writing", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_fill_one_folder_and_a_killed_one_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_LOCK_SECONDS", 0.0)
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # noqa: S603
        assert other.stdout.readline() == b"writing\n"
        for version in ("new", "other"):
            with pytest.raises(UsageError, match=r"another process is writing .*a; wait until"):
                writer(tmp_path / "a", version)
        assert [path.read_text() for path in tmp_path.glob(".a.*.partial/shard")] == ["theirs"]
        make(tmp_path / "b")
        other.kill()
    opened = writer(tmp_path / "a")
    assert (opened.path / "shard").read_text() == "theirs"
    opened.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
