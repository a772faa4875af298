"""Commands that build, search and change a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genius_search.cli import main

from .conftest import run, run_json


@pytest.fixture(scope="module")
def cluster_folder(trained, tmp_path_factory) -> Path:
    """A cluster of twelve texts in two shards."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "notes").mkdir()
    for number in range(12):
        (folder / "notes" / f"note {number}.txt").write_text(f"text {number}")
    words = ["cluster", "build", folder / "notes", "--model", trained.model, "--out", folder / "X"]
    assert main([str(word) for word in [*words, "--shards", "2"]]) == 0
    return folder / "X"


def test_a_cluster_is_searched(cluster_folder, capsys):
    hits = run_json(
        capsys, "search", cluster_folder, "text", "3", "--where", 'name>"note 2"', "-k", "3"
    )["hits"]
    assert len(hits) == 3
    assert all(hit["fields"]["name"] > "note 2" for hit in hits)
    out, _ = run(capsys, "search", cluster_folder, "text 3", "-k", "12")
    assert "note 7.txt" in out
    run(capsys, "search", cluster_folder, "text 3", "--modality", "image", status=3)


def test_items_are_added_and_deleted(cluster_folder, tmp_path, capsys):
    folder = shutil.copytree(cluster_folder, tmp_path / "X")
    (tmp_path / "more").mkdir()
    for number in range(9):
        (tmp_path / "more" / f"more {number}.txt").write_text(f"more {number}")
    assert run_json(capsys, "index", "add", folder, tmp_path / "more")["added"] == 9
    assert run_json(capsys, "index", "add", folder, tmp_path / "more")["unchanged"] == 9
    found = run_json(capsys, "index", "delete", folder, "more/more 1.txt", "note 2.txt", "nothing")
    assert (found["deleted"], found["missing"]) == (2, ["nothing"])
    run(capsys, "index", "delete", folder, "nothing", status=3)
    assert run_json(capsys, "index", "info", folder, "--check")["items"] == 19


def test_the_same_names_in_other_folders_are_other_items(cluster_folder, tmp_path, capsys):
    folder = shutil.copytree(cluster_folder, tmp_path / "X")
    for name in ("a/notes", "b/notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "note 1.txt").write_text(f"in {name}")
        added = run_json(capsys, "index", "add", folder, tmp_path / name)
        assert (added["added"], added["replaced"]) == (1, 0)
    assert (
        run_json(capsys, "index", "add", folder, cluster_folder.parent / "notes")["unchanged"] == 12
    )
    assert (
        run_json(capsys, "index", "add", folder, tmp_path / "b/notes/note 1.txt")["unchanged"] == 1
    )
    hits = run_json(capsys, "search", folder, "text 1", "-k", "14")["hits"]
    assert {"note 1.txt", "notes/note 1.txt", "notes-2/note 1.txt"} < {hit["id"] for hit in hits}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("index", "info", "{built}"), 4, "cluster"),
        (("search", "{built}", "text", "--beam", "5"), 2, "choose their settings"),
        (("index", "sync", "{built}"), 2, "genius index add"),
        (("cluster", "serve", "{built}"), 2, "--address"),
        (("cluster", "build", "{notes}", "--out", "{new}", "--shards", "2"), 2, "model"),
    ],
)
def test_what_a_cluster_cannot_do_is_said(cluster_folder, tmp_path, capsys, words, status, said):
    places = {
        "built": cluster_folder,
        "notes": cluster_folder.parent / "notes",
        "new": tmp_path / "Y",
    }
    _, err = run(capsys, *(word.format(**places) for word in words), status=status)
    assert said in err
