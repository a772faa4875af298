"""`genius index sync --watch`: changes that come while it runs."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import genius_search
from genius_search.cli import main, watch
from genius_search.index.index import Index

pytest.importorskip("watchfiles")
MAX_SECONDS = 60


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("A red kite flies.")
    words = ["--pool", "notes", "--encoder", "text:wordllama"]
    assert main(["index", "create", "notes/t.index", *words]) == 0
    return folder


def wait_for(condition):
    end = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_the_index_follows_its_folder_until_ctrl_c(folder):
    code = "from genius_search.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "index", "sync", "notes/t.index"]
    environment = {**os.environ, "PYTHONPATH": str(Path(genius_search.__file__).parents[1])}
    process = subprocess.Popen(  # noqa: S603
        [*command, "--watch"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert any("waiting for changes" in line for line in process.stderr)
        index = Index.open("notes/t.index")
        (folder / "b.txt").write_text("Bread is baked.")
        wait_for(lambda: len(index) == 2)
        (folder / "a.txt").unlink()
        (folder / "b.txt").write_text("Bread is baked at home.")
        wait_for(lambda: [hit.text for hit in index.search("bread")] == ["Bread is baked at home."])
        process.send_signal(signal.SIGINT)
        assert process.wait(MAX_SECONDS) == 0
        assert "stopped" in process.stderr.read()
        assert Index.open("notes/t.index").check().items == 1
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def test_failed_work_is_tried_again_and_missing_folders_are_watched_from_their_return(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "QUIET_MILLISECONDS", 50)
    monkeypatch.setattr(watch, "RECHECK_SECONDS", 0.2)
    monkeypatch.setattr(watch.time, "sleep", lambda _: (tmp_path / "a").mkdir(exist_ok=True))
    results = iter([False, True, KeyboardInterrupt])
    calls = []

    def synchronise():
        result = next(results)
        calls.append(result)
        if result is KeyboardInterrupt:
            raise KeyboardInterrupt
        if result:
            (tmp_path / "a" / "i").mkdir()
            (tmp_path / "a" / "i" / "inside.txt").touch()  # in the index, so it does not count
            (tmp_path / "a" / "b.txt").touch()
        return result

    with pytest.raises(KeyboardInterrupt):
        watch.watch_folders(lambda: [tmp_path / "a"], tmp_path / "a" / "i", synchronise)
    assert calls == [False, True, KeyboardInterrupt]


def test_an_error_while_watching_is_printed_and_not_the_end(folder, monkeypatch, capsys):
    outcomes = []

    def watch_once(folders, index, synchronise):
        assert folders() == [folder]
        (folder / "b.xyz").touch()
        monkeypatch.setattr(Index, "sync", fail)
        outcomes.append(synchronise())
        monkeypatch.undo()
        os.chdir(folder.parent)
        outcomes.append(synchronise())
        raise KeyboardInterrupt

    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(watch, "watch_folders", watch_once)
    assert main(["index", "sync", "notes/t.index", "--watch"]) == 0
    assert outcomes == [False, True]
    message = capsys.readouterr().err
    assert "not up to date: the disk is full; this is tried again" in message
    assert "stopped" in message


def test_watching_needs_its_extra_and_no_dry_run(folder, monkeypatch, capsys):
    assert main(["index", "sync", "notes/t.index", "--watch", "--dry-run"]) == 2
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "watchfiles" else find_spec(name)
    )
    assert main(["index", "sync", "notes/t.index", "--watch"]) == 2
    assert "genius-search[watch]" in capsys.readouterr().err
