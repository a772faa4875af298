"""Pulling and pushing against a hub on this machine."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from genius_search import Index
from genius_search.artifact import fingerprint_of
from genius_search.cli import main
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMissing, BadData, NetworkNeeded, UsageError
from genius_search.hub import find_cached, is_name, pull
from genius_search.index.store import read_manifest
from genius_search.model import MODEL_FORM, Genius
from genius_search.publish import save

WEIGHTS = "generator/generator.safetensors"


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save(trained.model, tmp_path_factory.mktemp("saved") / "model", name="me/model")


@pytest.fixture
def some_index(trained, tmp_path) -> Path:
    (tmp_path / "pool").mkdir()
    for name, text in (("anchor", "a red anchor"), ("kite", "a green kite")):
        (tmp_path / "pool" / f"{name}.txt").write_text(text)
    Index.create(tmp_path / "photos.index", tmp_path / "pool", model=trained.model)
    return tmp_path / "photos.index"


def contents(folder: Path) -> dict[str, bytes]:
    files = {
        file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()
    }
    return {
        name: file.read_bytes() for name, file in files.items() if not name.startswith(".cache")
    }


def edit(path, change):
    body = json.loads(path.read_text())
    change(body)
    if "kind" in body:
        body["fingerprint"] = fingerprint_of(
            {name: body[name] for name in body if name != "fingerprint"}
        )
    if path.name == "model.json":
        del body["checksum"], body["format"]
        body = MODEL_FORM.seal(body)
    path.write_text(json.dumps(body))


def test_a_saved_model_is_complete_and_holds_nothing_else(trained, saved):
    assert Genius.open(saved).fingerprint == Genius.open(trained.model).fingerprint
    found = {entry.name for entry in saved.iterdir()}
    assert found == {"README.md", "model.json", "encoder", "quantizer", "generator"}
    assert not [file for file in saved.rglob("*") if file.suffix in (".pt", ".pkl", ".pth", ".bin")]
    assert json.loads((saved / "model.json").read_text())["encoder"]["spec"] == "small:./encoder"
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlicense: unknown\n")
    assert 'Genius.open("me/model", download=True)' in card
    assert "2503.19868" in card
    assert "Its parts were imported" not in card


def test_an_encoder_on_this_machine_goes_along_and_a_name_on_the_hub_stays_one(saved, tmp_path):
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    folder = tmp_path / "clip"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    edit(source / "model.json", lambda body: body["encoder"].update(spec=f"clip:{folder}"))
    copy = save(source, tmp_path / "copy", name="me/copy")
    found = set(contents(copy / "encoder"))
    assert found == {"config.json", "model.safetensors", "1_Pooling/config.json"}
    assert json.loads((copy / "model.json").read_text())["encoder"]["spec"] == "clip:./encoder"
    edit(
        source / "model.json",
        lambda body: body["encoder"].update(spec="clip:openai/clip-vit-base-patch32"),
    )
    edit(
        source / "quantizer" / "manifest.json", lambda body: body["inputs"].update(published="hash")
    )
    copy = save(source, tmp_path / "second", name="me/copy")
    assert "checkpoints of GENIUS and UniIR (Wei et al.," in (copy / "README.md").read_text()
    assert not (copy / "encoder").exists()
    spec = json.loads((copy / "model.json").read_text())["encoder"]["spec"]
    assert spec == "clip:openai/clip-vit-base-patch32"


def test_what_cannot_be_saved_is_refused(saved, some_index, tmp_path):
    odd = Path(shutil.copytree(saved, tmp_path / "odd"))
    edit(odd / "model.json", lambda body: body["encoder"].update(spec="precomputed:features"))
    for number, (source, flags, match) in enumerate(
        [
            (saved, {"license": "the MIT licence"}, "short name"),
            (odd, {}, "looks up its features"),
            (some_index, {"model": "../model"}, "owner/name"),
        ]
    ):
        with pytest.raises(UsageError, match=match):
            save(source, tmp_path / f"{number}", name="me/copy", **flags)


def test_a_pulled_model_opens_by_name_without_the_network_and_is_not_fetched_twice(
    hub, saved, some_index, tmp_path, monkeypatch
):
    hub.hold("me/model", saved)
    hub.repositories["models/me/model"]["code.py"] = hub.repositories["models/me/model"][
        "x.pkl"
    ] = b"x"
    with pytest.raises(NetworkNeeded, match="genius pull me/model"):
        Genius.open("me/model")
    folder = pull("me/model")
    assert contents(folder) == contents(saved)  # without programs and pickles
    hub.downloads.clear()
    assert pull("me/model") == find_cached("me/model") == folder
    assert hub.downloads == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("me/model", Path("me/model")):
        assert Genius.open(name).folder == folder
    made = Index.create(tmp_path / "new.index", tmp_path / "pool", model="me/model")
    assert Index.open(made.folder).info().items == 2
    next(folder.rglob("*.safetensors")).unlink()
    assert find_cached("me/model") is None  # as after an interrupted download


def test_what_is_in_the_place_already_stays(hub, saved):
    hub.hold("me/model", saved)
    with pytest.raises(UsageError, match="already exists"):
        pull("me/model", out=saved)


@pytest.mark.parametrize("part", ["first commit", "second commit", "content", "large content"])
@pytest.mark.parametrize("out", [None, "~/pulled"])
def test_a_hub_cannot_name_other_files_than_those_that_are_pulled(
    hub, saved, tmp_path, monkeypatch, part, out
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    hub.hold("me/model", saved)
    victim, commits = tmp_path / "victim", [hub.commit("models/me/model")]
    victim.mkdir()
    for name in ("index", "index.json"):
        (victim / name).write_text("precious")
    path = str(victim / "index")
    if "commit" in part:
        commits = [] if part == "first commit" else commits
        monkeypatch.setattr(hub, "commit", lambda _: commits.pop() if commits else path)
    else:
        changed = (
            {"lfs": {"oid": path, "size": 1, "pointerSize": 1}}
            if "large" in part
            else {"oid": path}
        )
        answers = sys.modules[type(hub).__module__]
        entry = answers.entry
        monkeypatch.setattr(answers, "entry", lambda *file: {**entry(*file), **changed})
    with pytest.raises(
        BadData, match=f"'{re.escape(path[:40])}.*expected a hash"
    ):  # long ones are cut
        pull("me/model", out=None if out is None else Path(out))
    assert {file.name: file.read_text() for file in victim.iterdir()} == dict.fromkeys(
        ("index", "index.json"), "precious"
    )
    assert find_cached("me/model") is None


@pytest.mark.parametrize("name", ["me/nothing", "datasets/me/model"])
def test_what_the_hub_does_not_have_is_said(hub, saved, name):
    hub.hold("me/model", saved)
    with pytest.raises(ArtifactMissing, match=f"no repository {name}.*hf auth login"):
        pull(name)


def test_a_hub_that_does_not_answer_leaves_with_5_and_advice(hub, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["pull", "some/repo"]) == NetworkNeeded.exit_code
    assert "give the folder of a copy" in " ".join(capsys.readouterr().err.split())
    for use, name in ((Genius.open, "some/repo"), (load_encoder, "clip:some/repo")):
        with pytest.raises(NetworkNeeded, match="some/repo is not on this machine"):
            use(name, download=True)


def test_names_of_repositories_and_of_folders_are_told_apart(saved, monkeypatch):
    assert is_name("a/b")
    assert not any(map(is_name, ("./a", "/a/b", "~/a", "a/b/c", "a/../b", "a", "")))
    monkeypatch.chdir(saved.parent.parent)
    assert Genius.open(f"{saved.parent.name}/{saved.name}").fingerprint
    for name in ("nothing", "./me/model/x", ""):
        with pytest.raises(ArtifactMissing, match="no finished model"):
            Genius.open(name, download=True)


def push(*words: object) -> int:
    return main(["push", *map(str, words), "--yes"])


def test_a_pushed_model_comes_back_the_same(hub, trained, capsys):
    assert push(trained.model, "me/fresh", "--license", "mit", "--json") == 0
    assert json.loads(capsys.readouterr().out)["address"].endswith("/me/fresh")
    fresh = Genius.open("me/fresh", download=True)
    assert fresh.fingerprint == Genius.open(trained.model).fingerprint
    held = hub.repositories["models/me/fresh"]
    assert not [name for name in held if "features" in name or "checkpoint" in name]
    assert b"license: mit" in held["README.md"]
    hub.is_closed = True
    assert push(trained.model, "me/other") == ArtifactMissing.exit_code
    assert "HF_TOKEN" in capsys.readouterr().err


def test_a_pushed_index_comes_back_without_what_was_deleted_and_without_paths(
    hub, some_index, trained
):
    index = Index.open(some_index, model=trained.model)
    index.delete(["kite.txt"])
    (some_index / "segments" / "notes.txt").write_text("mine")
    assert push(some_index, "me/some", "--model", "me/model") == 0
    held = hub.repositories["datasets/me/some"]
    assert not [
        name for name in held if "deleted" in name or "notes" in name or name.startswith(".")
    ]
    everything = b"".join(held.values())
    assert b"green kite" not in everything
    assert str(trained.model).encode() not in everything
    pulled = Index.open("me/some", model=trained.model, download=True)
    assert read_manifest(pulled.folder).model == "me/model"
    assert [hit.id for hit in pulled.search("a red anchor")] == ["anchor.txt"]
    assert pulled.check().items == 1
    assert b"| items: text | 1 |" in held["README.md"]
    with pytest.raises(NetworkNeeded, match=r"`genius pull me/model`.*`model=FOLDER`"):
        Index.open(pulled.folder)
    held |= {"segments/000099/ids.npy": b"of an earlier state", "notes.txt": b"of somebody"}
    assert push(some_index, "me/some", "--model", "me/model") == 0
    assert "segments/000099/ids.npy" not in held
    assert "notes.txt" in held


def test_an_index_with_its_own_model_takes_it_along(hub, clip_folder, tmp_path):
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "anchor.txt").write_text("a red anchor")
    made = Index.create(tmp_path / "own.index", tmp_path / "pool", encoder=f"clip:{clip_folder}")
    assert push(made.folder, "me/own") == 0
    assert Index.open("me/own", download=True).search("a red anchor")[0].id == "anchor.txt"


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 2), (None, 2)])
def test_push_shows_what_goes_out_and_asks(hub, trained, monkeypatch, capsys, answer, status):
    class Terminal:
        def isatty(self):
            return answer is not None

        def readline(self):
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["push", str(trained.model), "me/model"]) == status
    assert WEIGHTS in capsys.readouterr().err
    assert bool(hub.repositories) == (status == 0)


def test_what_cannot_be_pushed_is_refused(hub, trained, some_index, tmp_path, capsys):
    for folder, name, flags, status in (
        (trained.model, "me/x", ("--model", "me/other"), 2),
        (some_index, "datasets/me/x", (), 2),
        (some_index, "nothing", (), 2),
        (tmp_path, "me/x", (), 4),
    ):
        assert main(["push", str(folder), name, "--yes", *flags]) == status, flags
        assert capsys.readouterr().err.splitlines()[-1].startswith("genius: ")
    assert not hub.repositories
