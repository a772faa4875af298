"""An open index: it knows its folder and its index whatever happens, and can be pickled and copied."""

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genius_search import Genius, Index, NewItem
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadImage, BadRecord

VECTORS = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
ANOTHER = "is another index than the one that was opened .it was created again.; open it again"


def create(folder: str | Path, prefix: str = "item") -> Index:
    return Index.from_vectors(folder, VECTORS, ids=[f"{prefix}-{n}" for n in range(300)])


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """The folder of an index, for copies that tests change."""
    return create(tmp_path_factory.mktemp("template") / "index").folder


@pytest.fixture
def index(template, tmp_path) -> Index:
    return Index.open(shutil.copytree(template, tmp_path / "index"))


CHANGES: dict[str, Callable[[Index], object]] = {
    "add": lambda index: index.add_vectors(VECTORS[:1], ids=["new"]),
    "delete": lambda index: index.delete("item-5"),
    "learn": lambda index: index.learn("item-6", vector=VECTORS[3]),
    "forget": lambda index: index.forget(),
    "compact": lambda index: index.compact(min_deleted=0),
    "refit": lambda index: index.refit(),
    "sync": lambda index: index.sync(),
}
READS: dict[str, Callable[[Index], object]] = {
    "search": lambda index: index.search(vector=VECTORS[3]),
    "get": lambda index: index.get("item-5"),
    "len": len,
    "info": lambda index: index.info(),
    "verify": lambda index: index.check(),
    "choices": lambda index: list(index.choices()),
}


def test_a_handle_stays_with_its_index_when_the_working_folder_changes(tmp_path, monkeypatch):
    handles = {}
    for place in ("letters", "invoices"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        create("mine.index", place)
        handles[place] = Index.open("mine.index")
    letters, invoices = handles.values()
    assert letters.folder == tmp_path / "letters" / "mine.index"
    assert [hit.id for hit in letters.search(vector=VECTORS[3], k=1)] == ["letters-3"]
    letters.add_vectors(VECTORS[:1], ids=["a new letter"])
    assert "a new letter" in letters
    assert len(invoices) == 300


def test_a_model_that_was_opened_by_a_relative_path_is_read_after_the_working_folder_changed(
    trained, monkeypatch
):
    monkeypatch.chdir(trained.model.parent)
    model = Genius.open(trained.model.name, with_encoder=False)
    monkeypatch.chdir("/")
    assert model.generator is not None
    assert model.encoder.dim == model.dim


@pytest.mark.parametrize("use", {**READS, **CHANGES}.values(), ids={**READS, **CHANGES})
def test_an_index_that_was_created_again_in_its_place_is_refused(index, use):
    shutil.rmtree(index.folder)
    again = create(index.folder)
    files = {path for path in index.folder.rglob("*") if path.name != ".lock"}
    with pytest.raises(ArtifactMismatch, match=ANOTHER):
        use(index)
    assert {path for path in index.folder.rglob("*") if path.name != ".lock"} == files
    assert again.check().items == 300


@pytest.mark.parametrize("use", {**READS, **CHANGES}.values(), ids={**READS, **CHANGES})
def test_nothing_is_left_where_an_index_was_removed(index, use):
    shutil.rmtree(index.folder)
    with pytest.raises(ArtifactMissing, match="no index at"):
        use(index)
    assert not index.folder.exists()


def test_an_index_that_is_removed_while_it_is_changed_is_not_made_again(index, tmp_path):
    another = create(tmp_path / "another").folder
    with (  # noqa: PT012
        pytest.raises(ArtifactMismatch, match=ANOTHER),
        index._open_writer(0) as writer,
    ):
        assert writer.snapshot.num_alive == 300
        shutil.rmtree(index.folder)
        with pytest.raises(ArtifactMissing):
            writer.delete(["item-5"])
        another.rename(index.folder)  # as another process may; this one waits for the writer
        with pytest.raises(ArtifactMismatch, match=ANOTHER):
            writer.delete(["item-5"])
        with pytest.raises(ArtifactMismatch, match=ANOTHER):
            writer.update_manifest(density_weight=0.0)
    again = Index.open(index.folder)
    assert again.check().items == 300
    again.delete("item-7")
    assert again.check().items == 299


def test_changes_and_copies_of_the_folder_are_followed(index, tmp_path):
    other = Index.open(index.folder)
    for name in CHANGES.keys() - {"sync"}:
        CHANGES[name](other)
        assert index._snapshot.manifest == other._snapshot.manifest
    backup = tmp_path / "backup"
    shutil.copytree(index.folder, backup)
    other.delete("item-9")
    assert "item-9" not in index
    shutil.rmtree(index.folder)
    backup.rename(index.folder)
    assert "item-9" in index
    other.delete("item-10")  # as many changes as before, but another
    assert "item-9" in index
    assert "item-10" not in index


def test_changes_are_seen_where_files_have_no_times(index, monkeypatch):
    reader = Index.open(index.folder)
    for number in range(10):
        index.delete(f"item-{number}")
        index.learn("item-20", vector=VECTORS[number])
        for file in index.folder.rglob("*"):
            os.utime(file, (0, 0))
        assert len(reader) == 299 - number
        assert len(reader._current_searcher().choices._searcher.snapshot.searched_segments) > 0
        assert reader._current_searcher().choices._searcher.snapshot.num_alive == number + 1


def test_a_log_of_choices_that_is_replaced_is_opened_again(index):
    index.learn("item-200", vector=VECTORS[3])
    assert index.search(vector=VECTORS[3], k=1)[0].id == "item-200"
    shutil.rmtree(index.folder / "learned")
    assert index.search(vector=VECTORS[3], k=1)[0].id == "item-3"
    other = Index.open(index.folder)
    other.learn("item-100", vector=VECTORS[3])
    assert index.search(vector=VECTORS[3], k=1)[0].id == "item-100"
    shutil.rmtree(index.folder / "learned")
    other.learn("item-150", vector=VECTORS[3])
    assert index.search(vector=VECTORS[3], k=1)[0].id == "item-150"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    index = create("~/mine.index")
    assert index.folder == tmp_path / "home" / "mine.index"
    assert len(Index.open("~/mine.index")) == len(Index.open(Path("~/mine.index"))) == 300
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    with pytest.raises(ArtifactMissing, match="~nobody"):
        Index.open("~nobody-has-this-name/mine.index")


@pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy, copy.copy])
def test_a_pickled_or_copied_handle_opens_the_folder_again(index, duplicate):
    index.delete("item-5")
    other = duplicate(index)
    assert other is not index
    assert (other.folder, other.model.device) == (index.folder, index.model.device)
    assert other.search(vector=VECTORS[3], k=5) == index.search(vector=VECTORS[3], k=5)
    other.delete("item-6")
    assert len(index) == len(other) == 298


def test_an_error_in_a_worker_process_reaches_its_parent():
    for error in (BadImage(Path("a.png"), "is empty"), BadRecord(Path("a.jsonl"), 3, "is empty")):
        copied = pickled(error)
        assert (str(copied), copied.reason, vars(copied)) == (
            str(error),
            error.reason,
            vars(error),
        )


def test_a_pickled_handle_knows_where_its_model_is(trained, tmp_path):
    shutil.copytree(trained.model, tmp_path / "model", ignore=shutil.ignore_patterns("evaluation"))
    pool = [NewItem(str(n), f"a {colour} kite") for n, colour in enumerate(["red", "blue"])]
    made = Index.create(tmp_path / "index", pool, model=trained.model)
    index = Index.open(tmp_path / "index", model=tmp_path / "model")
    other = pickled(index)
    assert other.model.folder == tmp_path / "model"
    assert other.search("a red kite") == made.search("a red kite")


def test_a_pickled_handle_of_an_index_that_was_created_again_or_removed_is_refused(index):
    index.refit()
    assert len(pickled(index)) == 300
    shutil.rmtree(index.folder)
    with pytest.raises(ArtifactMissing):
        pickled(index)
    create(index.folder)
    with pytest.raises(ArtifactMismatch, match=ANOTHER):
        pickled(index)
