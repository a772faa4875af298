"""What `genius search` prints: on a terminal, in a pipe, as files; the command that it says to run next."""

from __future__ import annotations

import dataclasses
import io
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.serve.schemas import SearchResult

from .conftest import run, run_json

WORDS = "a red anchor on green ground " * 30


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("my photos")
    for colour in ("red", "green"):
        Image.new("RGB", (20, 20), colour).save(folder / f"a {colour} one.png")
    (folder / "note.txt").write_text(WORDS)
    return folder


@pytest.fixture(scope="module")
def index(pool, clip_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "my photos.index"
    return Index.create(folder, pool=pool, encoder=f"clip:{clip_folder}")[0].folder


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self):
        return True


def test_nothing_is_cut_in_a_pipe(index, pool, capsys):
    out, _ = run(capsys, "search", index, "red")
    assert WORDS.strip() in out
    assert str(pool / "a red one.png") in out
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.parametrize("width", [60, 120])
def test_a_table_is_as_wide_as_the_terminal(index, width, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    main(["search", str(index), "red"])
    [line] = [line for line in sys.stdout.getvalue().splitlines() if "note.txt" in line]
    assert len(line) == width - 2
    assert line.endswith("…")


def test_files_alone_can_be_piped(index, pool, capsys):
    out, _ = run(capsys, "search", index, "red", "--files-only")
    assert sorted(out.splitlines()) == [
        str(pool / "a green one.png"),
        str(pool / "a red one.png"),
        "note.txt",
    ]
    run(capsys, "search", index, "red", "--files-only", "--json", status=2)


def test_json_is_that_of_the_service(index, capsys):
    found = run_json(capsys, "search", index, "red", "-k", "2")
    assert set(SearchResult.model_fields) - set(found) == {"request_id", "took_ms"}
    for hit in found["hits"]:
        assert set(hit) == {field.name for field in dataclasses.fields(SearchHit)}
    SearchResult.model_validate({**found, "request_id": "", "took_ms": {"queue": 0, "search": 0}})


def test_the_next_command_can_be_pasted(pool, clip_folder, tmp_path, capsys):
    folder = tmp_path / "it's mine.index"
    _, err = run(capsys, "index", "create", folder, "--pool", pool, "--encoder", f"clip:{clip_folder}")
    [line] = [line for line in err.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words[:3] == ["genius", "search", str(folder)]
    assert main(words[1:]) == 0
    assert "3 items added, 0 unchanged\n" in err


def test_the_files_of_texts_are_known_where_a_folder_is_searched(tmp_path, clip_folder, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "genius_search.cli.index.choose_encoder", lambda *_, **__: (f"clip:{clip_folder}", False)
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("red")
    out, _ = run(capsys, "search", tmp_path / "notes", "red", "--files-only")
    assert out == f"{Path(tmp_path / 'notes' / 'one.txt')}\n"
