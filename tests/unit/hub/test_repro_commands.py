"""The commands that `genius repro` prints, run against a hub on this machine as far as their files go."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro
from click.testing import CliRunner
from huggingface_hub.cli.hf import app

from genius_search.cli import all_commands, find, main
from genius_search.data.mbeir import PAPER_ROWS
from genius_search.hub import CHECKPOINTS
from genius_search.lab.published.repro import DATA_REPOSITORY, plan


@pytest.fixture
def held(hub):
    """A hub that holds the authors' files by name, each a few bytes."""
    for checkpoint in CHECKPOINTS.values():
        hub.repositories[f"models/{checkpoint.repository}"] = {
            path: path.encode() for path in checkpoint.files
        }
    return hub


def commands(name, data="my data"):
    return [shlex.split(command) for command in plan(name, Path(data), None).commands]


def test_what_is_pulled_is_what_is_imported(held, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = set()
    for first, *words in commands("cirr_task7"):
        if first == "genius" and words[0] == "pull":
            assert main(words) == 0, words
            made |= {file.as_posix() for file in Path("published").rglob("*.pth")}
    imported = {
        word
        for first, *words in commands("cirr_task7")
        if first == "genius" and words[0] == "import"
        for word in words
        if word.endswith(".pth")
    }
    assert len(imported) == 3
    assert imported == made


@pytest.mark.parametrize("name", ["all", "cirr_task7", "flickr30k", "coco"])
def test_every_command_is_understood_and_uses_what_an_earlier_one_made(name):
    made = set()
    for first, *words in commands(name):
        if first != "genius":
            continue
        size = 2 if " ".join(words[:2]) in all_commands() else 1
        kind = find(" ".join(words[:size]))
        parsed = tyro.cli(kind, args=words[size:], config=(tyro.conf.FlagCreatePairsOff,))
        out = getattr(parsed, "out", None)
        assert out is None or out not in made, f"{words}: {out} is there already"
        made.add(out)
    assert Path("clip-sf") in made
    assert Path("MODEL") in made


@pytest.mark.parametrize("name", ["all", "cirr_task7"])
def test_what_is_downloaded_of_the_data_is_what_is_missing(hub, tmp_path, monkeypatch, name):
    needed = plan(name, Path("my data"), None)
    files = [path for path in needed.files if re.fullmatch(r"[\w/]+\.(jsonl|txt|tsv)", path)]
    assert len(files) == 1 + 3 * len(PAPER_ROWS if name == "all" else [name])
    repository = dict.fromkeys([*files, "query/train/huge.jsonl", "qrels/val/other.txt"], b"x")
    hub.repositories[f"datasets/{DATA_REPOSITORY}"] = repository
    monkeypatch.chdir(tmp_path)
    _, *words = commands(name)[0]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert all((tmp_path / "my data" / path).read_bytes() == b"x" for path in files)
    assert not (tmp_path / "my data" / "query" / "train").exists()
