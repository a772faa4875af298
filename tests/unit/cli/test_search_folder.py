"""`genius search FOLDER`: a folder of files is indexed in the user's cache; `genius index sync`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from genius_search.cli import main
from genius_search.cli import search as commands
from genius_search.encoders.static import StaticEncoder
from genius_search.index.index import Index
from genius_search.index.pool import NewItem
from genius_search.index.writer import open_writer

NOTES = {
    "bread": "Knead the dough and bake the bread until it is brown.",
    "train": "The night train to the coast leaves at ten.",
    "bike": "The bicycle's chain slips; replace the rear sprocket.",
}


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in NOTES.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def search(capsys, folder, query):
    main(["search", str(folder), query, "--json"])
    out, err = capsys.readouterr()
    return [hit["id"] for hit in json.loads(out)["hits"]], err


def test_a_folder_is_indexed_once_and_followed(notes, capsys):
    found, said = search(capsys, notes, "repair of a bicycle")
    assert (found[0], len(found)) == ("bike.txt", 3)
    assert "indexing" in said
    [index] = (notes.parent / "cache" / "genius-search").iterdir()
    generation = Index.open(index)._snapshot.manifest.generation

    found, said = search(capsys, notes, "repair of a bicycle")
    assert found[0] == "bike.txt"
    assert "indexing" not in said
    assert Index.open(index)._snapshot.manifest.generation == generation
    (notes / "bike.txt").unlink()
    (notes / "train.txt").write_text("Bicycles are repaired at the station.")
    (notes / "boat.txt").write_text("The sailing boat needs a new mast.")
    (notes / "greek.txt").write_bytes("καφές".encode("iso8859-7"))
    found, said = search(capsys, notes, "repair of a bicycle")
    assert (found[0], "greek.txt: has an unknown encoding" in said) == ("train.txt", True)
    (notes / "greek.txt").unlink()
    assert sorted(search(capsys, notes, "boat")[0]) == ["boat.txt", "bread.txt", "train.txt"]
    assert sorted(file.name for file in notes.iterdir()) == ["boat.txt", "bread.txt", "train.txt"]


@pytest.fixture
def interrupts():
    """Ctrl-C as on a terminal; a process in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("command", ["search", "index add"])
def test_ctrl_c_ends_after_the_texts_at_hand_which_are_kept_and_a_second_one_at_once(
    notes, tmp_path, monkeypatch, presses, command
):
    other = tmp_path / "other.txt"
    other.write_text("A ship in a storm.")
    index = Index.create(tmp_path / "i", other, encoder="text:wordllama")
    words = (
        ["search", str(notes), "bread"]
        if command == "search"
        else ["index", "add", str(index.folder), str(notes)]
    )
    encoded, real = Counter[str](), StaticEncoder.text_features

    def text_features(encoder, texts, keys=()):
        encoded.update(texts)
        for _ in range(presses if encoded.total() == len(NOTES) else 0):
            signal.raise_signal(signal.SIGINT)
        return real(encoder, texts, keys)

    monkeypatch.setattr(StaticEncoder, "text_features", text_features)
    assert main(words) == 130
    assert main(words) == 0
    assert {encoded[text] for text in NOTES.values()} == {presses}


def test_a_download_that_no_installed_package_can_open_is_not_begun(notes, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: real(name) if name != "sentence_transformers" else None,
    )
    assert main(["search", str(notes), "bread", "--download"]) == 2
    assert "[models]" in capsys.readouterr().err
    assert search(capsys, notes, "bread")[0][0] == "bread.txt"


def test_an_index_follows_its_pool_and_an_empty_pool_deletes_nothing(notes, tmp_path, capsys):
    index = Index.create(tmp_path / "i", notes, encoder="text:wordllama")
    assert main(["search", str(tmp_path / "i"), "bread", "--modality", "image"]) == 3
    assert "no items of modality image" in capsys.readouterr().err
    (notes / "bike.txt").rename(notes / "cycle.txt")
    done = index.sync(notes)
    assert (done.added, done.unchanged, done.moved, done.deleted) == (1, 2, 1, 0)
    assert set(index._snapshot.ids()) == {"bread.txt", "train.txt", "cycle.txt"}
    (notes / "cycle.txt").unlink()
    main(["index", "sync", str(tmp_path / "i"), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert {name: count for name, count in said.items() if count} == {"unchanged": 2, "deleted": 1}
    for file in notes.iterdir():
        file.unlink()
    assert main(["index", "sync", str(tmp_path / "i")]) == 3
    assert len(set(Index.open(tmp_path / "i")._snapshot.ids())) == 2


NAMES = (
    "-rf.txt",
    "quote'\"$(touch pwned)`touch pwned`.txt",
    "; touch pwned;.txt",
    "%s%n{0}[bold]x.txt",
    " first.txt",
    "\u202etxt.gnp.txt",
    "line\u2028line.txt",
    "x" * 251 + ".txt",
)
REFUSED = (b"a\nb.txt", b"\x1b]0;title\x07.txt", b"\xff\xfe.txt")


def test_names_of_files_are_neither_run_nor_obeyed_nor_broken_into_lines(
    notes, capsys, monkeypatch
):
    for name in NAMES:
        (notes / name).write_text("a red \x1b[2Jkite \x9b31m")
    for name in REFUSED:
        Path(os.fsdecode(bytes(notes) + b"/" + name)).write_text("a red kite")
    os.mkfifo(notes / "metadata.jsonl")
    os.mkfifo(notes / "fifo.txt")
    command = ["search", str(notes), "a red kite", "-k", "50"]
    files = {str(notes / name) for name in (*NAMES, *(f"{note}.txt" for note in NOTES))}

    assert main([*command, "--files-only"]) == 0
    out, err = capsys.readouterr()
    assert set(out.split("\n")) == {*files, ""}
    assert err.count("\nleft out: ") == len(REFUSED) + 2
    assert main(command) == 0
    said = capsys.readouterr().out
    assert len(said.rstrip("\n").split("\n")) == 1 + len(files)
    for text in (err, said):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*command, "--files-only"]) == 0
    assert "\u202e" not in capsys.readouterr().out
    assert not list(Path().glob("*pwned*"))


def forget_manifest(index):
    (index / "index.json").unlink()


def empty_manifest(index):
    (index / "index.json").write_text("")


def write_other_version(index):
    (index / "index.json").write_text('{"format": 1}')


def cut_items(index):
    items = next(index.glob("segments/*/items.sqlite"))
    items.write_bytes(items.read_bytes()[:-1])


def flip_ids(index):
    ids = next(index.glob("segments/*/ids.npy"))
    ids.write_bytes(ids.read_bytes()[:-1] + b"\x77")


@pytest.mark.parametrize(
    "damage", [forget_manifest, empty_manifest, write_other_version, cut_items, flip_ids]
)
def test_the_index_of_a_folder_is_set_aside_if_it_cannot_be_read(notes, capsys, damage):
    expected, _ = search(capsys, notes, "bread")
    [index] = (notes.parent / "cache" / "genius-search").iterdir()
    Index.open(index).add([NewItem("mine", "my only copy of this text")])
    damage(index)
    before = {path.name: path.read_bytes() for path in index.rglob("*") if path.is_file()}
    before.pop(".lock")
    found, said = search(capsys, notes, "bread")
    assert found == expected
    aside = index.with_name(f"{index.name}.damaged-1")
    assert str(aside) in said
    assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert search(capsys, notes, "bread")[0] == expected
    assert len([*index.parent.iterdir()]) == 2


def test_a_folder_whose_index_another_process_changes_is_searched_as_it_was(
    notes, capsys, monkeypatch
):
    search(capsys, notes, "bread")
    [index] = (notes.parent / "cache" / "genius-search").iterdir()
    (notes / "boat.txt").write_text("The sailing boat needs a new mast.")
    monkeypatch.setattr(commands, "MAX_SYNC_WAIT_SECONDS", 0.05)
    with open_writer(index):
        found, said = search(capsys, notes, "boat")
    assert (len(found), "another process is updating the index" in said) == (3, True)
    assert len(search(capsys, notes, "boat")[0]) == 4


@pytest.mark.slow
def test_of_several_first_searches_at_once_all_find_something(notes):
    command = [sys.executable, "-m", "genius_search", "search", str(notes), "bread", "-k", "1"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]  # noqa: S603
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0
        assert b"bread.txt" in said
