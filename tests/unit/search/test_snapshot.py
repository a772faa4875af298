from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from genius.data.records import Modality
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.search.items import Item
from genius.search.snapshot import (
    CURRENT,
    IndexFacts,
    ItemArrays,
    commit_snapshot,
    one_writer,
    open_current,
    open_snapshot,
    read_facts,
)

MODEL = ("/somewhere/model", "f" * 64)


def state(seed: int, count: int = 12, *, embeddings: bool = True) -> tuple[list[Item], ItemArrays]:
    random = np.random.default_rng(seed)
    items = [Item(f"{seed}/{number} é", Modality.TEXT, f"text {number}") for number in range(count)]
    arrays = ItemArrays(
        random.integers(0, 3, (count, 3)).astype(np.int16),
        random.random(count).astype(np.float16),
        random.standard_normal((count, 4)).astype(np.float16) if embeddings else None,
        "fused" if embeddings else "none",
    )
    return items, arrays


OLD, NEW = state(1), state(2, 15)


def holds(folder: Path, facts: IndexFacts, expected: tuple[list[Item], ItemArrays]) -> bool:
    snapshot = open_snapshot(folder, facts)
    items, arrays = expected
    found = snapshot.arrays()
    return (
        list(snapshot.items.all()) == items
        and np.array_equal(found.codes, arrays.codes)
        and np.array_equal(found.typicality, arrays.typicality)
        and (found.embeddings is None) == (arrays.embeddings is None)
        and (arrays.embeddings is None or np.array_equal(found.embeddings, arrays.embeddings))
    )


@pytest.mark.parametrize("embeddings", [True, False])
def test_a_state_comes_back_as_it_was_written(tmp_path, embeddings):
    given = state(7, embeddings=embeddings)
    facts = commit_snapshot(tmp_path, None, *given, model=MODEL)
    assert read_facts(tmp_path) == facts
    assert (facts.model, facts.model_fingerprint, facts.embeddings) == (*MODEL, given[1].stored)
    assert holds(tmp_path, facts, given)


def test_a_new_state_takes_the_place_of_the_old_one_which_is_removed(tmp_path):
    old = commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    new = commit_snapshot(tmp_path, old, *NEW, model=MODEL)
    assert holds(tmp_path, read_facts(tmp_path), NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CURRENT, new.snapshot])


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed at its ``number``-th file operation; False if it finishes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread
        child = os.fork()
    if child == 0:
        left = number

        def count(event: str, _: object) -> None:
            nonlocal left
            if event in _FILE_OPERATIONS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            work()
        except BaseException:  # noqa: BLE001  the child must not go on as a second pytest
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


_FILE_OPERATIONS = frozenset(
    {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "sqlite3.connect"}
)


def test_a_writer_killed_at_any_of_its_file_operations_leaves_the_old_state_or_the_new_one(tmp_path):
    template = tmp_path / "template"
    template.mkdir()
    old = commit_snapshot(template, None, *OLD, model=MODEL)
    seen = []
    for number in range(1, 1_000):
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)
        if not killed_at(number, lambda folder=folder: commit_snapshot(folder, old, *NEW, model=MODEL)):
            break
        facts = read_facts(folder)
        seen.append("old" if facts == old else "new")
        assert holds(folder, facts, OLD if facts == old else NEW)
        # Whoever comes next can write, and leaves nothing of the killed one behind.
        after = commit_snapshot(folder, facts, *NEW, model=MODEL)
        assert holds(folder, read_facts(folder), NEW)
        assert sorted(path.name for path in folder.iterdir()) == sorted([CURRENT, after.snapshot])
        shutil.rmtree(folder)
    assert len(seen) > 20
    assert seen == sorted(seen, reverse=True)
    assert {"old", "new"} == set(seen)


def test_the_first_writer_killed_at_any_of_its_file_operations_leaves_no_index_or_a_whole_one(tmp_path):
    for number in range(1, 1_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        if not killed_at(number, lambda folder=folder: commit_snapshot(folder, None, *OLD, model=MODEL)):
            break
        if (folder / CURRENT).exists():
            assert holds(folder, read_facts(folder), OLD)
        else:
            with pytest.raises(ArtifactMissing, match="genius index create"):
                read_facts(folder)
            # The next one may store no embeddings, and must not inherit the killed one's.
            bare = state(3, embeddings=False)
            assert holds(folder, commit_snapshot(folder, None, *bare, model=MODEL), bare)
    assert number > 20


def test_a_writer_that_begins_from_an_outdated_state_is_refused_and_harms_nothing(tmp_path):
    first = commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    second = commit_snapshot(tmp_path, first, *NEW, model=MODEL)
    with pytest.raises(ArtifactMismatch, match="again"):
        commit_snapshot(tmp_path, first, *OLD, model=MODEL)
    assert holds(tmp_path, read_facts(tmp_path), NEW)
    assert read_facts(tmp_path) == second


def test_a_second_writer_is_refused_while_the_first_one_writes(tmp_path):
    with one_writer(tmp_path), pytest.raises(UsageError, match="another process"), one_writer(tmp_path):
        pass
    with one_writer(tmp_path):  # and let in afterwards
        pass


def test_folders_that_only_look_like_states_are_left_alone(tmp_path):
    (tmp_path / "snapshot-of-my-thesis").mkdir()
    first = commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    commit_snapshot(tmp_path, first, *NEW, model=MODEL)
    assert (tmp_path / "snapshot-of-my-thesis").exists()


def test_readers_never_meet_half_a_state_while_another_process_writes(tmp_path):
    commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    writer = os.fork()
    if writer == 0:
        for number in range(40):
            commit_snapshot(tmp_path, read_facts(tmp_path), *(NEW, OLD)[number % 2], model=MODEL)
        os._exit(0)
    reads = 0
    while os.waitpid(writer, os.WNOHANG)[0] == 0:
        current = open_current(tmp_path)
        items = list(current.snapshot.items.all())
        assert items in (OLD[0], NEW[0])
        assert current.snapshot.table.num_items == len(items)
        reads += 1
    assert reads > 3


def test_adding_nothing_changes_no_order_inside_an_id(tmp_path):
    items = [Item(name, Modality.TEXT, name) for name in "ab"]
    alike = np.full(2, 0.9, dtype=np.float16)
    arrays = ItemArrays(np.zeros((2, 3), dtype=np.int16), alike, None, "none")
    facts = commit_snapshot(tmp_path, None, items, arrays, model=MODEL)
    before = open_snapshot(tmp_path, facts)
    after = open_snapshot(tmp_path, commit_snapshot(tmp_path, facts, items, before.arrays(), model=MODEL))
    assert before.table.items.tolist() == after.table.items.tolist()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": "x"}', "null"])
def test_a_damaged_manifest_is_said_to_be_damaged(tmp_path, text):
    (tmp_path / CURRENT).write_text(text)
    with pytest.raises(ArtifactMismatch, match="damaged"):
        read_facts(tmp_path)


def test_an_index_of_a_newer_version_is_refused_with_advice(tmp_path):
    commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    body = json.loads((tmp_path / CURRENT).read_text())
    (tmp_path / CURRENT).write_text(json.dumps({**body, "format": 99}))
    with pytest.raises(ArtifactMismatch, match="upgrade"):
        read_facts(tmp_path)


def test_an_index_of_an_older_version_is_refused_with_advice(tmp_path):
    commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    body = json.loads((tmp_path / CURRENT).read_text())
    (tmp_path / CURRENT).write_text(json.dumps({**body, "format": 1}))
    with pytest.raises(ArtifactMismatch, match="create the index again"):
        read_facts(tmp_path)


def test_a_snapshot_with_a_missing_or_shortened_file_does_not_open(tmp_path):
    facts = commit_snapshot(tmp_path, None, *OLD, model=MODEL)
    items = tmp_path / facts.snapshot / "items.npy"
    items.write_bytes(items.read_bytes()[:-1])
    with pytest.raises(ArtifactMismatch, match=r"items\.npy"):
        open_snapshot(tmp_path, facts)
    items.unlink()
    with pytest.raises(ArtifactMissing, match=r"items\.npy"):
        open_snapshot(tmp_path, facts)
