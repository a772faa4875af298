"""Pulling and pushing against a hub on this machine: sizes, resuming, damage, offline, strangers' files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genius import Index
from genius.cli import main
from genius.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius.hub.originals import ORIGINALS
from genius.model import Genius
from genius.stages.save import About, save_model
from genius.stages.share import find_index, plan_pull, pull, push


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return save_model(trained.model, tmp_path_factory.mktemp("saved") / "model", About())


@pytest.fixture
def spoiled(saved, tmp_path) -> Path:
    """A copy that a test may change before a stranger publishes it."""
    return Path(shutil.copytree(saved, tmp_path / "stranger"))


class Counted:
    """A progress that notes how far it came, and may stop it."""

    def __init__(self, stop_at=None):
        self.done, self.total, self.stop_at = 0, 0, stop_at

    def begin(self, stage, total):
        self.total = total

    def advance(self, done, measures):
        self.done = done
        if self.stop_at is not None and done >= self.stop_at:
            raise KeyboardInterrupt

    def say(self, message):
        pass


def edit(path, change):
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_a_plan_lists_files_and_sizes_and_downloads_nothing(hub, saved):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    sizes = {file.path: file.bytes for file in plan.listing.files}
    assert sizes == {
        file.relative_to(saved).as_posix(): file.stat().st_size for file in saved.rglob("*") if file.is_file()
    }
    assert plan.what == "model"
    assert plan.bytes_to_come == plan.bytes == sum(sizes.values())
    assert hub.downloads() == []


def test_a_pulled_model_opens_by_name_without_the_network(hub, saved, monkeypatch):
    hub.hold("me/model", saved)
    counted = Counted()
    folder = pull(plan_pull("me/model"), progress=counted)
    assert counted.done == counted.total
    assert plan_pull("me/model").bytes_to_come == 0
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    hub.asked.clear()
    model = Genius.from_pretrained("me/model")
    assert hub.asked == []
    assert model.folder == folder
    assert model.fingerprint == Genius.open(saved).fingerprint


def test_a_model_that_is_not_here_is_downloaded_when_it_is_opened_by_name(hub, saved):
    hub.hold("me/model", saved)
    with pytest.raises(NetworkNeeded, match="genius pull me/model"):
        Genius.from_pretrained("me/model", download=False)
    assert Genius.from_pretrained("me/model").fingerprint == Genius.open(saved).fingerprint


def test_a_second_pull_fetches_nothing(hub, saved):
    hub.hold("me/model", saved)
    pull(plan_pull("me/model"))
    hub.asked.clear()
    pull(plan_pull("me/model"))
    assert hub.downloads() == []


def test_a_plain_folder_appears_when_all_is_there_and_is_like_the_original(hub, saved, tmp_path):
    hub.hold("me/model", saved)
    out = pull(plan_pull("me/model"), tmp_path / "out")
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == {
        p.relative_to(saved): p.read_bytes() for p in saved.rglob("*") if p.is_file()
    }
    with pytest.raises(UsageError, match="--out"):
        pull(plan_pull("me/model"), out)


@pytest.mark.parametrize("plain", [True, False])
def test_a_killed_pull_goes_on_where_it_stopped(hub, tmp_path, monkeypatch, plain):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    content = bytes(range(256)) * 20_000
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.json").write_text("{}")
    (tmp_path / "held" / "model.safetensors").write_bytes(content)
    hub.hold("me/encoder", tmp_path / "held")
    out = tmp_path / "out" if plain else None
    with pytest.raises(KeyboardInterrupt):
        pull(plan_pull("me/encoder"), out, progress=Counted(stop_at=3))
    assert out is None or not out.exists()
    hub.asked.clear()
    folder = pull(plan_pull("me/encoder"), out)
    assert (folder / "model.safetensors").read_bytes() == content
    ranges = dict(hub.downloads())
    begun = int(ranges["model.safetensors"].removeprefix("bytes=").rstrip("-"))
    assert 2_900_000 <= begun < len(content)


def test_a_cut_connection_is_taken_up_again(hub, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    hub.hold("me/model", saved)
    hub.cut_after = 50_000
    out = pull(plan_pull("me/model"), tmp_path / "out")
    resumed = [wanted for _, wanted in hub.downloads() if wanted and not wanted.startswith("bytes=0-")]
    assert len(resumed) == 1
    assert Genius.open(out).fingerprint == Genius.open(saved).fingerprint


@pytest.mark.parametrize("name", ["generator/generator.safetensors", "model.json"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_damaged_file_is_named_and_not_kept(hub, saved, tmp_path, name, plain):
    hub.hold("me/model", saved)
    hub.wrong = name
    out = tmp_path / "out" if plain else None
    with pytest.raises(ArtifactMismatch, match=rf"{name}.*run the same again"):
        pull(plan_pull("me/model"), out)
    assert not (tmp_path / "out").exists()
    hub.wrong = None
    assert Genius.open(pull(plan_pull("me/model"), out)).fingerprint == Genius.open(saved).fingerprint


def test_a_file_that_rotted_in_the_cache_is_fetched_again(hub, saved):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    weights = (folder / "generator" / "generator.safetensors").resolve()
    weights.write_bytes(bytes(weights.stat().st_size))
    pull(plan_pull("me/model"))
    assert weights.read_bytes() == (saved / "generator" / "generator.safetensors").read_bytes()


def test_a_pull_that_has_no_room_is_refused_before_it_begins(hub, saved, monkeypatch):
    hub.hold("me/model", saved)
    monkeypatch.setattr("genius.stages.share.free_bytes", lambda _: 1000)
    with pytest.raises(UsageError, match="only 1,000 are free"):
        pull(plan_pull("me/model"))
    assert hub.downloads() == []


def test_pickles_and_programs_are_left_out_by_name(hub, spoiled):
    for name in ("pytorch_model.bin", "train.py", "old.pkl"):
        (spoiled / name).write_bytes(b"x")
    hub.hold("me/model", spoiled)
    plan = plan_pull("me/model")
    assert plan.left_out == ("old.pkl", "pytorch_model.bin", "train.py")
    assert not list(pull(plan).glob("*.pkl"))


def test_a_strangers_model_may_not_point_outside_its_folder(hub, spoiled, tmp_path):
    edit(spoiled / "model.json", lambda body: body["encoder"].update(spec="small:/etc"))
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match="inside the model"):
        pull(plan_pull("me/model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for allowed in (True, False):  # the second time it is in the cache
        with pytest.raises(ArtifactMismatch, match="inside the model"):
            Genius.from_pretrained("me/model", download=allowed)


def test_a_strangers_manifest_may_not_name_files_outside(hub, spoiled):
    edit(
        spoiled / "quantizer" / "manifest.json",
        lambda body: body["files"].update({"../../secret": {"bytes": 1, "sha256": "0"}}),
    )
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match="outside its folder"):
        pull(plan_pull("me/model"))


def test_a_file_named_out_of_its_repository_is_refused_before_anything_is_fetched(hub, saved):
    hub.hold("me/model", saved)
    hub.repositories["models/me/model"]["../../evil.json"] = b"{}"
    with pytest.raises(ArtifactMismatch, match="leads out"):
        plan_pull("me/model")


def test_weights_that_our_own_manifest_does_not_know_are_refused(hub, spoiled):
    weights = spoiled / "generator" / "generator.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match=r"generator\.safetensors have changed"):
        pull(plan_pull("me/model"))


def test_what_is_neither_model_nor_index_nor_encoder_is_refused(hub, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "README.md").write_text("hello")
    hub.hold("me/notes", tmp_path / "held")
    with pytest.raises(UsageError, match="neither"):
        plan_pull("me/notes")


def test_a_repository_or_revision_that_is_not_there_is_said_with_advice(hub, saved):
    hub.hold("me/model", saved)
    with pytest.raises(ArtifactMissing, match="HF_TOKEN"):
        plan_pull("me/nothing")
    with pytest.raises(ArtifactMissing, match="no such revision"):
        plan_pull("me/model", revision="nowhere")


@pytest.mark.parametrize("name", ["", "nothing", "a/b/c", "../x/y", "not a/name"])
def test_what_cannot_be_a_repository_is_refused(hub, name):
    with pytest.raises(UsageError, match="owner/name"):
        plan_pull(name)
    assert hub.asked == []


def test_a_pushed_model_comes_back_the_same(hub, trained):
    address = push(trained.model, "me/fresh", About(license="mit"))
    assert address.endswith("/me/fresh")
    assert Genius.from_pretrained("me/fresh").fingerprint == Genius.open(trained.model).fingerprint
    held = hub.repositories["models/me/fresh"]
    assert not [name for name in held if "features" in name or "checkpoint" in name]
    assert b'license: "mit"' in held["README.md"]
    assert json.loads(held["config.json"])["model_type"] == "genius"


def test_a_pushed_index_comes_back_without_the_place_of_its_model(hub, trained, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    for word in ("anchor", "umbrella"):
        (pool / f"{word}.txt").write_text(f"a red {word}")
    Index.create(tmp_path / "some.index", model=trained.model, pool=pool)
    push(tmp_path / "some.index", "me/some", About(model="me/fresh"))
    folder = find_index("me/some")
    assert json.loads((folder / "index.json").read_text())["model"] == "me/fresh"
    assert str(trained.model) not in (folder / "index.json").read_text()
    found = Index.open(folder, model=trained.model).search("a red anchor", modality="text", k=1)
    assert len(found) == 1
    card = (folder / "README.md").read_text()
    assert "texts of the items" in card
    assert "| items: text | 2 |" in card


def test_an_upload_that_is_refused_is_said(hub, trained):
    hub.full = True
    with pytest.raises(ArtifactMissing, match=r"does not let you.*me/fresh.*HF_TOKEN"):
        push(trained.model, "me/fresh", About())


def test_the_authors_checkpoints_have_short_names_and_a_next_command(hub, tmp_path, capsys):
    held = tmp_path / "held"
    for path in ("checkpoint/rq_clip_large.pth", "checkpoint/GENIUS_t5small.pth", "checkpoint/other.pth"):
        (held / path).parent.mkdir(parents=True, exist_ok=True)
        (held / path).write_bytes(path.encode())
    hub.hold(ORIGINALS["genius"].repository, held)
    assert main(["pull", "genius", "--yes", "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"genius import genius --quantizer {tmp_path}/out/checkpoint/rq_clip_large.pth" in said
    assert not (tmp_path / "out" / "checkpoint" / "other.pth").exists()


def test_a_checkpoint_that_is_not_the_published_one_is_refused(hub, tmp_path):
    file = tmp_path / "held" / ORIGINALS["clip-sf"].files[0]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"something else")
    hub.hold(ORIGINALS["clip-sf"].repository, tmp_path / "held")
    with pytest.raises(ArtifactMismatch, match="5e459b96"):
        plan_pull("clip-sf")


def test_without_anybody_to_ask_the_command_wants_yes(hub, saved, capsys, monkeypatch):
    hub.hold("me/model", saved)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["pull", "me/model"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert hub.downloads() == []
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
    assert "generator/generator.safetensors" in captured.err
    assert captured.out.startswith("---\nlicense:")
    assert hub.asked == []
    assert main(["push", str(trained.model), "me/model", "--yes"]) == 5


def test_a_pull_offline_of_what_is_here_says_where_it_is(hub, saved, capsys, monkeypatch):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["pull", "me/model"]) == 0
    assert str(folder) in capsys.readouterr().err.replace("\n", "")
