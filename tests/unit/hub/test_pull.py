"""Pulling and pushing against a hub on this machine: sizes, resuming, damage, offline, strangers' files."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
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
from genius_search.hub.files import ORIGINALS
from genius_search.hub.pull import find_index, plan_pull, pull
from genius_search.hub.push import About, push, save_model
from genius_search.model import Genius


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


def heavy(hub):
    """What was downloaded besides the lists of files, which a plan reads."""
    return [name for name, _ in hub.downloads() if not name.endswith(("model.json", "manifest.json"))]


def edit(path, change):
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_a_plan_lists_files_and_sizes_and_downloads_nothing_but_lists(hub, saved):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    sizes = {file.path: file.bytes for file in plan.listing.files}
    assert sizes == {
        file.relative_to(saved).as_posix(): file.stat().st_size for file in saved.rglob("*") if file.is_file()
    }
    assert plan.what == "model"
    assert plan.bytes_to_come == plan.bytes == sum(sizes.values())
    assert heavy(hub) == []


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
    monkeypatch.setattr("genius_search.hub.pull.free_bytes", lambda _: 1000)
    with pytest.raises(UsageError, match="only 1,000 are free"):
        pull(plan_pull("me/model"))
    assert heavy(hub) == []


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
    assert heavy(hub) == []
    with pytest.raises(ArtifactMismatch, match="inside the model"):
        Genius.from_pretrained("me/model")


def test_what_another_program_put_into_the_cache_may_not_point_outside_either(hub, saved):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    edit(folder / "model.json", lambda body: body["encoder"].update(spec="small:/etc"))
    with pytest.raises(ArtifactMismatch, match="inside the model"):
        Genius.from_pretrained("me/model", download=False)


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
    assert heavy(hub) == []
    assert main(["pull", "me/model", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] is None
    assert heavy(hub) == []
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
    assert bool(heavy(hub)) == (status == 0)


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
    assert main(["pull", "me/model", "--json"]) == 0
    online = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["pull", "me/model", "--json"]) == 0
    captured = capsys.readouterr()
    offline = json.loads(captured.out)
    for answer in (online, offline):
        answer["files"].sort(key=lambda file: file["path"])
    assert offline == online
    said = captured.err.replace("\n", "")
    assert str(folder) in said
    assert "the hub was not asked because HF_HUB_OFFLINE=1 forbids it" in " ".join(captured.err.split())
    assert "Connect" not in said
    assert "needs the hub" not in said


def test_a_model_that_was_pulled_opens_by_its_name_everywhere_and_nothing_is_downloaded(
    hub, saved, some_index, tmp_path, monkeypatch, capsys
):
    hub.hold("me/model", saved)
    push(some_index, "me/some", About(model="me/model"))
    index = find_index("me/some")
    with pytest.raises(
        ArtifactMissing, match=r"is me/model, which is not on this machine; `genius pull me/m"
    ):
        Index.open(index)
    folder = pull(plan_pull("me/model"))
    hub.asked.clear()
    monkeypatch.chdir(tmp_path)
    assert Genius.open("me/model").folder == folder
    assert Genius.open(Path("me/model")).folder == folder
    assert Index.open(index).model.folder == folder
    assert Index.open(some_index, model="me/model").model.folder == folder
    made, _ = Index.create(tmp_path / "new.index", model="me/model", pool=tmp_path / "pool")
    assert made.info().items == 1
    assert main(["search", str(index), "a red anchor"]) == 0
    assert hub.asked == []


def test_an_evaluation_of_a_pulled_model_does_not_go_into_the_cache(hub, saved, trained, capsys):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    before = sorted(folder.rglob("*"))
    assert main(["evaluate", str(trained.data), "--model", "me/model"]) == 2
    assert "--out FOLDER" in " ".join(capsys.readouterr().err.split())
    assert sorted(folder.rglob("*")) == before
    assert not Path("me").exists()


def test_a_large_file_that_nothing_names_is_not_fetched(hub, spoiled):
    for name in ("film.json", "quantizer/more.safetensors", "encoder/more.safetensors", "sub/x.npy"):
        (spoiled / name).parent.mkdir(exist_ok=True)
        (spoiled / name).write_bytes(b"x" * 1000)
    hub.hold("me/model", spoiled)
    plan = plan_pull("me/model")
    assert set(plan.left_out) == {
        "film.json",
        "quantizer/more.safetensors",
        "encoder/more.safetensors",
        "sub/x.npy",
    }
    assert Genius.open(pull(plan)).fingerprint


def test_a_list_of_files_is_small(hub, spoiled):
    (spoiled / "quantizer" / "manifest.json").write_bytes(b" " * 16_000_001)
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match="no such list is so large"):
        plan_pull("me/model")
    (spoiled / "quantizer" / "manifest.json").unlink()
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMissing, match=r"it has no quantizer/manifest\.json"):
        plan_pull("me/model")


@pytest.mark.parametrize("change", ["bytes", "sha256", "kind", "files"])
def test_a_manifest_of_another_form_is_refused(hub, spoiled, change):
    def spoil(body):
        if change in ("bytes", "sha256"):
            next(iter(body["files"].values())).pop(change)
        else:
            body[change] = 7

    edit(spoiled / "generator" / "manifest.json", spoil)
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMismatch, match=r"^me/model/generator/manifest\.json .*do not use"):
        plan_pull("me/model")


@pytest.mark.parametrize("spec", ["text:./encoder", "clip:./encoder", "small:./encoder"])
def test_an_encoder_that_did_not_come_along_is_said_when_the_model_is_pulled(hub, spoiled, spec, tmp_path):
    edit(spoiled / "model.json", lambda body: body["encoder"].update(spec=spec))
    shutil.rmtree(spoiled / "encoder")
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMissing, match=rf"encoder is {spec}.*lacks.*ask whoever published"):
        pull(plan_pull("me/model"), tmp_path / "out")


@pytest.mark.parametrize(("kind", "said"), [("text", "names no model_type"), ("uniir", r"lacks uniir\.json")])
def test_an_encoder_of_another_kind_than_is_said_is_found_out(hub, spoiled, tmp_path, kind, said):
    edit(spoiled / "model.json", lambda body: body["encoder"].update(spec=f"{kind}:./encoder"))
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMissing, match=said):
        pull(plan_pull("me/model"), tmp_path / "out")


def test_an_imported_encoder_needs_its_manifest(hub, spoiled, tmp_path):
    edit(spoiled / "model.json", lambda body: body["encoder"].update(spec="uniir:./encoder"))
    (spoiled / "encoder" / "manifest.json").unlink()
    (spoiled / "encoder" / "uniir.json").write_text("{}")
    hub.hold("me/model", spoiled)
    with pytest.raises(ArtifactMissing, match=r"encoder lacks manifest\.json"):
        pull(plan_pull("me/model"), tmp_path / "out")


def test_a_damaged_cached_model_is_said_without_the_network_and_repaired_with_it(hub, saved, monkeypatch):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    weights = (folder / "generator" / "generator.safetensors").resolve()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    config = (folder / "config.json").resolve()
    config.write_bytes(b"{}")
    assert plan_pull("me/model").bytes_to_come == len(whole) + (saved / "config.json").stat().st_size
    with pytest.raises(NetworkNeeded, match=r"damaged.*`genius pull me/model` repairs it"):
        Genius.from_pretrained("me/model", download=False)
    with monkeypatch.context() as switched:
        switched.setenv("GENIUS_OFFLINE", "1")
        with pytest.raises(NetworkNeeded, match=r"damaged.*genius pull me/model"):
            Genius.from_pretrained("me/model")
    assert Genius.from_pretrained("me/model").fingerprint
    assert weights.read_bytes() == whole
    assert config.read_bytes() == (saved / "config.json").read_bytes()


@pytest.mark.parametrize("text", ["", '{"format": 1, "enc'])
def test_a_cached_model_whose_own_list_is_cut_short_is_damaged(hub, saved, text):
    hub.hold("me/model", saved)
    folder = pull(plan_pull("me/model"))
    (folder / "model.json").resolve().write_text(text)
    with pytest.raises(NetworkNeeded, match="repairs it"):
        Genius.from_pretrained("me/model", download=False)
    assert Genius.from_pretrained("me/model").fingerprint


def in_two_threads(work):
    """What two at once return or raise; the second begins while the first is amid a file."""
    begun, found = threading.Event(), []

    class Told(Counted):
        def advance(self, done, measures):
            begun.set()
            time.sleep(0.002)

    def one():
        try:
            found.append(work(Told()))
        except GeniusError as error:
            found.append(error)

    first = threading.Thread(target=one)
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=one)
    second.start()
    first.join()
    second.join()
    return found


def test_two_pulls_at_once_to_the_cache_both_have_it_and_each_file_comes_once(hub, saved, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 16384)
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    first, second = in_two_threads(lambda told: pull(plan, progress=told))
    assert first == second
    assert Genius.open(first).fingerprint
    sent = [name for name, _ in hub.downloads() if name.endswith(".safetensors")]
    assert len(sent) == len(set(sent))


def test_two_pulls_at_once_to_one_folder_are_one_too_many(hub, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 16384)
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    found = in_two_threads(lambda told: pull(plan, tmp_path / "out", progress=told))
    (refused,) = [one for one in found if isinstance(one, UsageError)]
    assert re.search("another process|is there already", str(refused))
    assert Genius.open(tmp_path / "out").fingerprint
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("number", "said"),
    [(28, "No space left on device"), (13, "Permission denied"), (30, "Read-only file system")],
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_disk_that_refuses_is_not_called_a_network(hub, saved, tmp_path, monkeypatch, number, said, plain):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")

    def refuse(*_, **__):
        raise OSError(number, said)

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuse)
    with pytest.raises(UsageError, match=rf"cannot be written here.*{said}"):
        pull(plan, tmp_path / "out" if plain else None)


def test_a_folder_that_may_not_be_made_is_said(hub, saved, tmp_path):
    hub.hold("me/model", saved)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written here at .*file: "):
        pull(plan_pull("me/model"), tmp_path / "file" / "out")


def test_a_connection_that_breaks_is_still_the_networks_fault(hub, saved, tmp_path, monkeypatch):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")

    def broken(*_, **__):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", broken)
    with pytest.raises(NetworkNeeded, match="Connection reset"):
        pull(plan, tmp_path / "out")


def test_a_pull_takes_no_folder_for_its_own_and_does_not_replace_the_one_it_is_in(
    hub, saved, tmp_path, monkeypatch
):
    hub.hold("me/model", saved)
    plan = plan_pull("me/model")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="in the way"):
        pull(plan, tmp_path / "out")
    assert (tmp_path / ".out.partial" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="you are in"):
        pull(plan, Path())


def test_the_hub_is_probed_once(hub, saved):
    hub.hold("me/model", saved)
    Genius.from_pretrained("me/model")
    assert [path for _, path, _ in hub.asked].count("/") == 1


@pytest.fixture
def some_index(trained, tmp_path) -> Path:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "anchor.txt").write_text("a red anchor")
    Index.create(tmp_path / "photos.index", model=trained.model, pool=tmp_path / "pool")
    return Path(tmp_path / "photos.index")


@pytest.mark.parametrize("name", ["photos.index", "./photos.index", "sub/photos.index", "~/photos.index"])
def test_an_index_beside_one_opens_by_its_folders_name(some_index, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    if name.startswith("sub"):
        some_index.rename(tmp_path / name)
    assert Index.from_pretrained(name).info().items == 1


def test_a_model_beside_one_opens_by_its_folders_name(saved, monkeypatch):
    monkeypatch.chdir(saved.parent.parent)
    assert Genius.from_pretrained(f"{saved.parent.name}/{saved.name}").fingerprint
    monkeypatch.chdir(saved.parent)
    monkeypatch.setenv("HOME", str(saved.parent))
    assert Genius.from_pretrained(saved.name).fingerprint
    assert Genius.from_pretrained(f"~/{saved.name}").fingerprint
    with pytest.raises(ArtifactMissing, match="no folder nothing"):
        Genius.from_pretrained("nothing")


def test_no_name_is_not_the_folder_one_is_in(saved, monkeypatch):
    monkeypatch.chdir(saved)
    with pytest.raises(ArtifactMissing, match="--model"):
        Genius.from_pretrained("")


def test_an_index_without_its_models_name_asks_for_it(hub, some_index, trained, monkeypatch):
    push(some_index, "me/some", About())
    monkeypatch.chdir(trained.model)
    with pytest.raises(ArtifactMissing, match="model="):
        Index.from_pretrained("me/some")
    assert Index.from_pretrained("me/some", model=trained.model).info().items == 1


def test_of_an_index_only_its_state_is_fetched(hub, some_index):
    push(some_index, "me/some", About())
    held = hub.repositories["datasets/me/some"]
    more = {"film.jsonl", "segments/000009/ids.npy", "segments/000001/more.npy", "deleted/000009-000001.npy"}
    held.update(dict.fromkeys(more, b"x" * 1000))
    plan = plan_pull("datasets/me/some")
    assert set(plan.left_out) == more


def tell(held, **change):
    """Let a stranger's index.json say something else, its checksum right."""
    body = {**json.loads(held["index.json"]), **change}
    del body["checksum"]
    held["index.json"] = json.dumps({**body, "checksum": fingerprint_of(body)}).encode()


@pytest.mark.parametrize("model", ["/somewhere/model", "../model", "small:/etc", ".", "a/b\n"])
def test_a_strangers_index_may_not_say_that_its_model_is_a_folder_here(hub, some_index, model):
    push(some_index, "me/some", About())
    tell(hub.repositories["datasets/me/some"], model=model)
    with pytest.raises(ArtifactMismatch, match="owner/name or nothing"):
        plan_pull("datasets/me/some")


@pytest.mark.parametrize(
    "change", [{"name": "../000001"}, {"name": "/etc"}, {"deleted": "../x.npy"}, {"name": 3}, {"more": 3}]
)
def test_a_strangers_index_may_only_name_what_is_inside_it(hub, some_index, change):
    push(some_index, "me/some", About())
    held = hub.repositories["datasets/me/some"]
    (entry,) = json.loads(held["index.json"])["segments"]
    tell(held, segments=[{**entry, **change}])
    with pytest.raises(ArtifactMismatch, match=r"me/some/index\.json is damaged"):
        plan_pull("datasets/me/some")


@pytest.mark.parametrize("file", ["../../x.npy", "/etc/passwd"])
def test_a_strangers_segment_may_only_name_what_is_inside_it(hub, some_index, file):
    push(some_index, "me/some", About())
    held = hub.repositories["datasets/me/some"]
    manifest = json.loads(held["segments/000001/manifest.json"])
    manifest["files"][file] = manifest["files"]["ids.npy"]
    held["segments/000001/manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(ArtifactMismatch, match=r"segments/000001/manifest\.json names files outside"):
        plan_pull("datasets/me/some")


@pytest.mark.parametrize("name", ["ids.npy", "items.sqlite", "manifest.json"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_pulled_index_that_lacks_a_file_or_has_another_is_refused_by_its_name(
    hub, some_index, tmp_path, name, lost
):
    push(some_index, "me/some", About())
    held = hub.repositories["datasets/me/some"]
    if lost:
        del held[f"segments/000001/{name}"]
    else:
        whole = held[f"segments/000001/{name}"]
        held[f"segments/000001/{name}"] = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    with pytest.raises(ArtifactError, match=rf"000001.*{name}"):
        pull(plan_pull("datasets/me/some"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_index_that_is_damaged_in_the_cache_is_pulled_anew(hub, some_index, trained):
    push(some_index, "me/some", About())
    folder = find_index("me/some")
    for file in (folder / "segments" / "000001" / "ids.npy", folder / "index.json"):
        place = file.resolve()
        whole = place.read_bytes()
        place.write_bytes(whole[:-2])
        with pytest.raises(NetworkNeeded, match="damaged or not complete"):
            find_index("me/some", download=False)
        assert find_index("me/some") == folder
        assert file.read_bytes() == whole
    assert Index.open(folder, model=trained.model).info().items == 1


def test_publishing_again_removes_what_the_index_does_not_name_any_more(hub, some_index, trained):
    index = Index.open(some_index, model=trained.model)
    (some_index.parent / "pool" / "kite.txt").write_text("a green kite")
    index.add(some_index.parent / "pool")
    push(some_index, "me/some", About())
    held = hub.repositories["datasets/me/some"]
    held["notes.txt"] = b"of somebody"
    before = set(held)
    index.delete(["anchor.txt"])
    push(some_index, "me/some", About())
    assert "notes.txt" in held
    assert {name.split("/")[1] for name in before if name.startswith("segments/")} == {"000002"}
    assert {name.split("/")[1] for name in held if name.startswith("segments/")} == {"000004"}
    assert not [name for name in held if name.startswith("deleted/")]
    assert b"red anchor" not in held["segments/000004/items.sqlite"]
    opened = Index.open(find_index("me/some"), model=trained.model)
    assert {hit.id for hit in opened.search("a red anchor")} == {"kite.txt"}
    assert opened.verify().items == 1
