"""Pulling and pushing against a hub on this machine: sizes, interruptions, damage, offline, others' files."""

from __future__ import annotations

import json
import re
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from genius_search import Index
from genius_search.artifact import fingerprint_of
from genius_search.cli import main
from genius_search.errors import (
    ArtifactError,
    ArtifactMismatch,
    ArtifactMissing,
    GeniusError,
    NetworkNeeded,
    UsageError,
)
from genius_search.hub.checkpoints import CHECKPOINTS
from genius_search.hub.pull import find_or_pull, plan_pull, pull
from genius_search.index.publish import check_index
from genius_search.model import Genius
from genius_search.model.publish import check_model, save_model

WEIGHTS = "generator/generator.safetensors"


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_model(trained.model, tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def spoiled(saved, tmp_path) -> Path:
    """A copy that a test may change before somebody publishes it."""
    return Path(shutil.copytree(saved, tmp_path / "spoiled"))


@pytest.fixture
def some_index(trained, tmp_path) -> Path:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "anchor.txt").write_text("a red anchor")
    Index.create(tmp_path / "photos.index", model=trained.model, pool=tmp_path / "pool")
    return Path(tmp_path / "photos.index")


find_index = partial(find_or_pull, kind="index", check=check_index)


def pull_model(name: str, out: Path | None = None) -> Path:
    return pull(plan_pull(name), out, check=lambda folder: check_model(folder, verify=True))


def pull_index(name: str, out: Path | None = None) -> Path:
    return pull(plan_pull(name), out, check=lambda folder: check_index(folder, read_all=True))


def push_index(folder: Path, name: str, *flags: str) -> None:
    assert main(["push", str(folder), name, "--yes", *flags]) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


def edit(path, change):
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_a_plan_lists_files_and_sizes_and_downloads_nothing(hub, saved):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    sizes = {file.path: file.bytes for file in plan.files}
    assert sizes == {name: len(content) for name, content in contents(saved).items()}
    assert plan.kind == "model"
    assert plan.bytes_to_fetch == plan.bytes == sum(sizes.values())
    assert hub.downloads() == []


def test_a_pulled_model_opens_by_name_without_the_network_and_is_not_fetched_twice(hub, saved, monkeypatch):
    hub.hold("me/model", saved)
    folder = pull_model("me/model")
    assert contents(folder) == contents(saved)
    assert plan_pull("me/model").bytes_to_fetch == 0
    hub.requests.clear()
    pull_model("me/model")
    assert hub.downloads() == []
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    hub.requests.clear()
    model = Genius.from_pretrained("me/model")
    assert hub.requests == []
    assert model.folder == folder


def test_a_model_that_is_not_here_is_downloaded_when_it_is_opened_by_name(hub, saved):
    hub.hold("me/model", saved)
    with pytest.raises(NetworkNeeded, match="genius pull me/model"):
        Genius.from_pretrained("me/model", download=False)
    assert Genius.from_pretrained("me/model").fingerprint == Genius.open(saved).fingerprint
    assert [path for _, path, _ in hub.requests].count("/") == 1  # the hub is probed once


def test_a_revision_is_found_by_its_name(hub, saved):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model", revision="v1"))
    with pytest.raises(NetworkNeeded):
        Genius.from_pretrained("me/model", download=False)
    for revision in ("v1", folder.name):
        assert Genius.from_pretrained("me/model", revision=revision, download=False).folder == folder


def test_a_plain_folder_appears_complete_and_is_like_the_original(hub, saved, tmp_path):
    hub.hold("me/model", saved)
    out = pull_model("me/model", tmp_path / "out")
    assert contents(out) == contents(saved)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"out", "cache"}
    with pytest.raises(UsageError, match="--out"):
        pull_model("me/model", out)


@pytest.mark.parametrize("plain", [True, False])
def test_finished_files_are_not_fetched_again_after_an_interruption(hub, saved, tmp_path, plain):
    hub.hold("me/model", saved)
    hub.fails = WEIGHTS
    out = tmp_path / "out" if plain else None
    with pytest.raises(NetworkNeeded):
        pull_model("me/model", out)
    assert not (tmp_path / "out").exists()
    with pytest.raises(NetworkNeeded, match="is not on this machine"):
        Genius.from_pretrained("me/model", download=False)
    hub.fails = None
    had = set(hub.sent)
    hub.requests.clear()
    assert contents(pull_model("me/model", out)) == contents(saved)
    assert WEIGHTS in hub.downloads()
    assert had.isdisjoint(hub.downloads())


def test_a_cut_connection_is_taken_up_again(hub, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    hub.hold("me/model", saved)
    hub.cut_after = 50_000
    assert contents(pull_model("me/model", tmp_path / "out")) == contents(saved)


@pytest.mark.parametrize("name", [WEIGHTS, "model.json"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_damaged_file_is_named_and_not_kept(hub, saved, tmp_path, name, plain):
    hub.hold("me/model", saved)
    hub.wrong = name
    out = tmp_path / "out" if plain else None
    with pytest.raises(ArtifactMismatch, match=name):
        pull_model("me/model", out)
    assert not (tmp_path / "out").exists()
    hub.wrong = None
    assert contents(pull_model("me/model", out)) == contents(saved)


@pytest.mark.parametrize("rest", [0, 100])
def test_a_file_damaged_in_the_cache_is_said_without_the_network_and_repaired_with_it(
    hub, saved, monkeypatch, rest
):
    hub.hold("me/model", saved)
    folder = pull_model("me/model")
    for name in (WEIGHTS, "model.json"):
        place = (folder / name).resolve()
        place.write_bytes(place.read_bytes()[:rest])
        with pytest.raises(ArtifactError, match="`genius pull me/model` repairs it"):
            Genius.from_pretrained("me/model", download=False)
        with monkeypatch.context() as offline:
            offline.setenv("GENIUS_OFFLINE", "1")
            with pytest.raises(NetworkNeeded, match=r"damaged.*genius pull me/model"):
                Genius.from_pretrained("me/model")
        assert Genius.from_pretrained("me/model").fingerprint
        assert contents(folder) == contents(saved)


def test_a_file_whose_bytes_rotted_in_the_cache_is_fetched_again(hub, saved):
    hub.hold("me/model", saved)
    weights = (pull_model("me/model") / WEIGHTS).resolve()
    weights.write_bytes(bytes(weights.stat().st_size))
    pull_model("me/model")
    assert weights.read_bytes() == (saved / WEIGHTS).read_bytes()


def test_a_pull_that_has_no_room_is_refused_before_it_begins(hub, saved, monkeypatch):
    hub.hold("me/model", saved)
    monkeypatch.setattr("genius_search.hub.pull.free_bytes", lambda _: 1000)
    with pytest.raises(UsageError, match="only 1,000 are free"):
        pull_model("me/model")
    assert hub.downloads() == []


def test_pickles_programs_and_what_belongs_to_no_model_are_left_out(hub, spoiled, saved):
    others = {"pytorch_model.bin", "train.py", "encoder/old.pkl", "film.json", "sub/x.npy"}
    for name in others:
        (spoiled / name).parent.mkdir(exist_ok=True)
        (spoiled / name).write_bytes(b"x")
    hub.hold("me/model", spoiled)
    assert set(plan_pull("me/model").skipped) == others
    assert contents(pull_model("me/model")) == contents(saved)


def test_a_pulled_model_may_not_point_outside_its_folder(hub, spoiled, tmp_path):
    edit(spoiled / "model.json", lambda body: body["encoder"].update(spec="small:/etc"))
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match="inside the model"):
        pull_model("me/model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for _ in range(2):
        with pytest.raises(ArtifactMismatch, match="inside the model"):
            Genius.from_pretrained("me/model")


def test_what_another_program_put_into_the_cache_may_not_point_outside_either(hub, saved):
    hub.hold("me/model", saved)
    folder = pull_model("me/model")
    edit(folder / "model.json", lambda body: body["encoder"].update(spec="small:/etc"))
    for opening in (partial(Genius.from_pretrained, download=False), Genius.open):
        with pytest.raises(ArtifactMismatch, match="inside the model"):
            opening("me/model")


def test_a_file_named_out_of_its_repository_is_refused_before_anything_is_fetched(hub, saved):
    hub.hold("me/model", saved)
    hub.repositories["models/me/model"]["../../evil.json"] = b"{}"
    with pytest.raises(ArtifactMismatch, match=r"evil\.json"):
        plan_pull("me/model")


def test_weights_that_the_manifest_does_not_know_are_refused(hub, spoiled):
    weights = spoiled / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match=r"generator\.safetensors"):
        pull_model("me/model")


def test_what_is_neither_model_nor_index_nor_encoder_is_refused(hub, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "README.md").write_text("hello")
    hub.hold("me/notes", tmp_path / "held")
    with pytest.raises(UsageError, match="neither"):
        plan_pull("me/notes")


def test_a_repository_or_revision_that_is_not_there_is_said_with_advice(hub, saved):
    hub.hold("me/model", saved)
    with pytest.raises(ArtifactMissing, match=r"me/nothing.*HF_TOKEN"):
        plan_pull("me/nothing")
    with pytest.raises(ArtifactMissing, match="revision"):
        plan_pull("me/model", revision="nowhere")


@pytest.mark.parametrize("name", ["", "nothing", "a/b/c", "../x/y", "not a/name"])
def test_what_cannot_be_a_repository_is_refused(hub, name):
    with pytest.raises(UsageError, match="owner/name"):
        plan_pull(name)
    assert hub.requests == []


def test_a_pushed_model_comes_back_the_same_and_holds_nothing_else(hub, trained):
    model = Genius.open(trained.model)
    assert model.push_to_hub("me/fresh", license="mit").endswith("/me/fresh")
    assert Genius.from_pretrained("me/fresh").fingerprint == model.fingerprint
    held = hub.repositories["models/me/fresh"]
    assert not [name for name in held if "features" in name or "checkpoint" in name]
    assert b'license: "mit"' in held["README.md"]
    hub.full = True
    with pytest.raises(ArtifactMissing, match=r"me/other.*HF_TOKEN"):
        model.push_to_hub("me/other")


def test_a_pushed_index_comes_back_without_the_place_of_its_model(hub, some_index, trained):
    address = Index.open(some_index, model=trained.model).push_to_hub("me/some", model="me/model")
    assert address.endswith("/datasets/me/some")
    folder = find_index("me/some")
    assert json.loads((folder / "index.json").read_text())["model"] == "me/model"
    assert not [name for name, content in contents(folder).items() if str(trained.model).encode() in content]
    assert len(Index.open(folder, model=trained.model).search("a red anchor", modality="text", k=1)) == 1
    assert "| items: text | 1 |" in (folder / "README.md").read_text()


def test_the_authors_checkpoints_have_short_names_and_a_next_command(hub, tmp_path, capsys):
    held = tmp_path / "held"
    for path in (*CHECKPOINTS["genius"].files, "checkpoint/other.pth"):
        (held / path).parent.mkdir(parents=True, exist_ok=True)
        (held / path).write_bytes(path.encode())
    hub.hold(CHECKPOINTS["genius"].repository, held)
    assert main(["pull", "genius", "--yes", "--json", "--out", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["what"] == "original"
    message = " ".join(captured.err.split())
    assert f"--quantizer {tmp_path}/out/checkpoint/rq_clip_large.pth" in message
    assert set(contents(tmp_path / "out")) == set(CHECKPOINTS["genius"].files)


def test_a_checkpoint_that_is_not_the_published_one_is_refused(hub, tmp_path):
    file = tmp_path / "held" / CHECKPOINTS["clip-sf"].files[0]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"something else")
    hub.hold(CHECKPOINTS["clip-sf"].repository, tmp_path / "held")
    with pytest.raises(ArtifactMismatch, match="5e459b96"):
        plan_pull("clip-sf")


def test_without_a_terminal_the_command_wants_yes(hub, saved, capsys, monkeypatch):
    hub.hold("me/model", saved)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["pull", "me/model"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["pull", "me/model", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] is None
    assert hub.downloads() == []
    assert main(["pull", "me/model", "--yes", "--json"]) == 0
    assert Genius.open(json.loads(capsys.readouterr().out)["folder"]).fingerprint


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 2), ("n\n", 2)])
def test_a_person_is_asked_and_silence_means_no(hub, saved, monkeypatch, answer, status):
    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    hub.hold("me/model", saved)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["pull", "me/model"]) == status
    assert bool(hub.downloads()) == (status == 0)


def test_push_shows_what_goes_out_and_a_dry_run_needs_no_network(hub, trained, capsys, monkeypatch):
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    assert main(["push", str(trained.model), "me/model", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert WEIGHTS in captured.err
    assert captured.out.startswith("---\nlicense:")
    assert hub.requests == []
    assert main(["push", str(trained.model), "me/model", "--yes"]) == 5


def test_flags_that_do_not_fit_what_is_pushed_are_refused(hub, trained, some_index, tmp_path, capsys):
    for folder, name, flags, status in (
        (trained.model, "me/x", ("--model", "me/other"), 2),
        (some_index, "me/x", ("--dataset", "toys"), 2),
        (some_index, "me/x", ("--results", "results.json"), 2),
        (some_index, "me/x", ("--model", "../model"), 2),
        (some_index, "datasets/me/x", (), 2),
        (some_index, "nothing", (), 2),
        (tmp_path, "me/x", (), 4),
    ):
        assert main(["push", str(folder), name, "--yes", *flags]) == status, flags
        assert capsys.readouterr().err.startswith("genius: ")
    assert not hub.repositories


def test_a_model_that_was_pulled_opens_by_its_name_everywhere_and_nothing_is_downloaded(
    hub, saved, some_index, tmp_path, monkeypatch, capsys
):
    hub.hold("me/model", saved)
    push_index(some_index, "me/some", "--model", "me/model")
    index = find_index("me/some")
    with pytest.raises(ArtifactMissing, match="`genius pull me/model`"):
        Index.open(index)
    folder = pull_model("me/model")
    hub.requests.clear()
    monkeypatch.chdir(tmp_path)
    assert Genius.open("me/model").folder == folder
    assert Genius.open(Path("me/model")).folder == folder
    assert Index.open(index).model.folder == folder
    made, _ = Index.create(tmp_path / "new.index", model="me/model", pool=tmp_path / "pool")
    assert made.info().items == 1
    assert main(["search", str(index), "a red anchor"]) == 0
    assert hub.requests == []


def test_an_evaluation_of_a_pulled_model_does_not_go_into_the_cache(hub, saved, trained, capsys):
    hub.hold("me/model", saved)
    folder = pull_model("me/model")
    before = sorted(folder.rglob("*"))
    assert main(["evaluate", str(trained.data), "--model", "me/model"]) == 2
    assert "--out FOLDER" in " ".join(capsys.readouterr().err.split())
    assert sorted(folder.rglob("*")) == before
    assert not Path("me").exists()


def test_a_plain_folder_is_claimed_by_one_pull(hub, saved, tmp_path):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    found = []

    def work():
        try:
            found.append(pull(plan, tmp_path / "out"))
        except GeniusError as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (refused,) = [one for one in found if isinstance(one, UsageError)]
    assert re.search("another process|is there already", str(refused))
    assert contents(tmp_path / "out") == contents(saved)


def test_a_pull_takes_no_folder_for_its_own(hub, saved, tmp_path, monkeypatch):
    hub.hold("me/model", saved)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="in the way"):
        pull_model("me/model", tmp_path / "out")
    assert (tmp_path / ".out.partial" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "empty")
    for place in (Path(), tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UsageError):
            pull_model("me/model", place)


@pytest.mark.parametrize("name", ["photos.index", "./photos.index", "sub/photos.index", "~/photos.index"])
def test_an_index_opens_by_its_folders_name(some_index, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    if name.startswith("sub"):
        some_index.rename(tmp_path / name)
    assert Index.from_pretrained(name).info().items == 1


def test_a_model_opens_by_its_folders_name(saved, monkeypatch):
    monkeypatch.chdir(saved.parent.parent)
    assert Genius.from_pretrained(f"{saved.parent.name}/{saved.name}").fingerprint
    monkeypatch.setenv("HOME", str(saved.parent))
    assert Genius.from_pretrained(f"~/{saved.name}").fingerprint
    monkeypatch.chdir(saved)
    for name in ("nothing", ""):
        with pytest.raises(ArtifactMissing, match=name or "--model"):
            Genius.from_pretrained(name)


def test_an_index_without_its_models_name_asks_for_it(hub, some_index, trained, monkeypatch):
    push_index(some_index, "me/some")
    monkeypatch.chdir(trained.model)
    with pytest.raises(ArtifactMissing, match="model="):
        Index.from_pretrained("me/some")
    assert Index.from_pretrained("me/some", model=trained.model).info().items == 1


@pytest.mark.parametrize("name", ["ids.npy"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_pulled_index_that_lacks_a_file_or_has_another_is_refused_by_its_name(
    hub, some_index, tmp_path, name, lost
):
    push_index(some_index, "me/some")
    held = hub.repositories["datasets/me/some"]
    if lost:
        del held[f"segments/000001/{name}"]
    else:
        content = held[f"segments/000001/{name}"]
        held[f"segments/000001/{name}"] = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    with pytest.raises(ArtifactError, match=rf"000001.*{name}"):
        pull_index("datasets/me/some", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hostile_index_is_refused_by_the_command_and_when_it_is_opened_by_name(hub, some_index, capsys):
    push_index(some_index, "me/some")
    held = hub.repositories["datasets/me/some"]
    body = {**json.loads(held["index.json"]), "model": "../model"}
    del body["checksum"]
    held["index.json"] = json.dumps({**body, "checksum": fingerprint_of(body)}).encode()
    capsys.readouterr()
    assert main(["pull", "datasets/me/some", "--yes"]) == ArtifactMismatch.exit_code
    assert "owner/name or nothing" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ArtifactMismatch, match="owner/name or nothing"):
        Index.from_pretrained("me/some")


def test_an_index_that_is_damaged_in_the_cache_is_pulled_anew(hub, some_index, trained):
    push_index(some_index, "me/some")
    folder = find_index("me/some")
    before = contents(folder)
    for file in (folder / "segments" / "000001" / "ids.npy", folder / "index.json"):
        place = file.resolve()
        place.write_bytes(place.read_bytes()[:-2])
        with pytest.raises(ArtifactError, match="damaged or not complete"):
            find_index("me/some", download=False)
        assert find_index("me/some") == folder
        assert contents(folder) == before
    assert Index.open(folder, model=trained.model).info().items == 1


def test_publishing_again_removes_what_the_index_no_longer_names(hub, some_index, trained):
    index = Index.open(some_index, model=trained.model)
    (some_index.parent / "pool" / "kite.txt").write_text("a green kite")
    index.add(some_index.parent / "pool")
    push_index(some_index, "me/some")
    held = hub.repositories["datasets/me/some"]
    held["notes.txt"] = b"of somebody"
    before = {name for name in held if name.startswith("segments/")}
    index.delete(["anchor.txt"])
    push_index(some_index, "me/some")
    assert "notes.txt" in held
    assert before.isdisjoint(held)
    assert not [name for name in held if name.startswith("deleted/")]
    assert b"red anchor" not in b"".join(held.values())
    opened = Index.open(find_index("me/some"), model=trained.model)
    assert opened.verify().items == 1
