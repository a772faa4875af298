"""Folders that appear complete or not at all, and never replace other things."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from genius_search.errors import UsageError
from genius_search.hub.folder import write_folder


def check_replaceable(folder: Path) -> None:
    if {entry.name for entry in folder.iterdir()} != {"ours"}:
        raise UsageError(f"{folder} holds something else")


def save(place: Path, text: str = "new") -> None:
    with write_folder(place, check_replaceable=check_replaceable) as folder:
        (folder / "ours").write_text(text)


@pytest.fixture
def old(tmp_path) -> Path:
    save(tmp_path / "copy", "old")
    return tmp_path / "copy"


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_folder_is_made_and_replaced(tmp_path, old):
    save(old)
    assert (old / "ours").read_text() == "new"
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "deeper" / "fresh"):
        save(place)
        assert (place / "ours").read_text() == "new"
    assert names(tmp_path) == {"copy", "empty", "deeper"}


def test_a_failure_leaves_what_was_there(old):
    with pytest.raises(UsageError, match="No space"), write_folder(old, check_replaceable=check_replaceable):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (old / "ours").read_text() == "old"
    assert names(old.parent) == {"copy"}


def test_what_is_not_ours_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    for place in (tmp_path / "thesis", tmp_path / "thesis" / "thesis.txt"):
        with pytest.raises(UsageError, match=place.name):
            save(place)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("sibling", [".copy.old", ".copy.partial"])
def test_what_lies_beside_under_our_names_is_not_touched(old, sibling):
    beside = old.parent / sibling
    beside.mkdir()
    (beside / "thesis.txt").write_text("years of work")
    if sibling.endswith("old"):
        with pytest.raises(UsageError, match=sibling):
            save(old)
    else:
        save(old)
    assert (beside / "thesis.txt").read_text() == "years of work"


def test_a_process_killed_between_the_renames_loses_nothing(old, monkeypatch):
    renamed = []

    def once(self, target):
        renamed.append(target)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return shutil.move(self, target)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            save(old)
    assert not old.exists()
    with pytest.raises(ZeroDivisionError), write_folder(old, check_replaceable=check_replaceable):
        raise ZeroDivisionError
    assert (old / "ours").read_text() == "old"
    save(old)
    assert (old / "ours").read_text() == "new"
    assert names(old.parent) == {"copy"}


def test_a_copy_left_by_a_process_killed_last_of_all_goes_with_the_next(old):
    shutil.copytree(old, old.parent / ".copy.old")
    save(old)
    assert names(old.parent) == {"copy"}


def test_the_current_folder_is_not_replaced(old, tmp_path, monkeypatch):
    (old / "inside").mkdir()
    for place in (old, old / "inside"):
        monkeypatch.chdir(place)
        for target in (Path(), old):
            with pytest.raises(UsageError, match="you are in"):
                save(target)


def test_a_link_is_followed(old, tmp_path):
    (tmp_path / "link").symlink_to(old)
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (old / "ours").read_text() == "new"


def test_two_processes_cannot_write_one_folder(tmp_path):
    with FileLock(tmp_path / ".copy.lock"), pytest.raises(UsageError, match="another process"):
        save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    save(tmp_path / "copy")


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
    left = tmp_path / ".copy.0123abcd.partial"
    left.mkdir()
    (left / "half").write_text("")
    save(tmp_path / "copy")
    assert names(tmp_path) == {"copy"}
