"""A hub or mirror that lies: nothing outside the target is created, changed or removed, and the error says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.encoders.pretrained import find_checkpoint
from genius_search.errors import ArtifactMismatch
from genius_search.hub.pull import plan_pull, pull

ELSEWHERE = ("{home}/thesis", "../../../home/thesis", "a/../../../../home/x", "..", "x/y")
LFS = {"oid": "a" * 64, "size": 3, "pointerSize": 1}


@pytest.fixture
def home(tmp_path) -> Path:
    """Somebody's folder, which no pull may touch."""
    (tmp_path / "home" / "thesis").mkdir(parents=True)
    (tmp_path / "home" / "thesis" / "chapter.txt").write_text("years of work")
    return tmp_path / "home"


@pytest.fixture
def held(hub, tmp_path, home):
    """An encoder on the hub, with files of both kinds."""
    folder = tmp_path / "held"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    hub.hold("me/encoder", folder)
    return hub


def is_refused(tmp_path: Path, fact: str = "me/encoder", *, plain: bool = False) -> None:
    """Pull, and compare everything outside the target with what was there."""
    out = tmp_path / "out" if plain else None

    def others():
        return {
            path: path.read_bytes() if path.is_file() else None
            for path in sorted(tmp_path.rglob("*"))
            if not {"cache", ".out.partial", ".out.lock"} & set(path.relative_to(tmp_path).parts)
        }

    before = others()
    with pytest.raises(ArtifactMismatch, match=fact):
        pull(plan_pull("me/encoder"), out)
    assert others() == before
    assert not (tmp_path / "out").exists()
    if not plain:
        with pytest.raises(ArtifactMismatch, match=fact):
            find_checkpoint("me/encoder", download=True)
        assert others() == before


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("plain", [True, False])
def test_a_commit_is_no_path(held, home, tmp_path, name, plain):
    held.commit_name = name.format(home=home)
    is_refused(tmp_path, "commit", plain=plain)


@pytest.mark.parametrize("header", ["ETag", "X_Linked_Etag", "X_Repo_Commit"])
@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("plain", [True, False])
def test_a_header_names_no_file_elsewhere(held, home, tmp_path, header, name, plain):
    held.headers = {
        header: f'"{name.format(home=home)}"' if "tag" in header.lower() else name.format(home=home)
    }
    is_refused(tmp_path, "nothing was written", plain=plain)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc/passwd.json"},
        {"path": "../config.json"},
        {"path": "a\0b.json"},
        {"path": 3},
        {"oid": "../../x"},
        {"oid": None},
        {"size": "three"},
        {"size": -1},
        {"size": None},
        {"lfs": {**LFS, "oid": "/var/x"}},
        {"lfs": {**LFS, "oid": 3}},
        {"lfs": {**LFS, "size": "3"}},
        {"lfs": {"size": 3}},
        {"lfs": "a" * 64},
    ],
    ids=str,
)
def test_a_listing_says_nothing_that_is_no_file(held, tmp_path, change):
    held.changes = change
    is_refused(tmp_path)


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[]", b"3", b'"x"', {}, {"sha": 3}, [[]], [3], {"sha": None}], ids=str
)
def test_an_answer_of_another_shape_is_no_traceback(held, tmp_path, answer):
    held.answer = answer
    is_refused(tmp_path)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("says_so", [True, False])
def test_no_more_is_taken_than_the_hub_lists(held, tmp_path, plain, says_so):
    held.too_much = 64 << 20
    if says_so:
        held.headers = {"X_Linked_Size": str(held.too_much + 2)}
    with pytest.raises(ArtifactMismatch, match="more than the 6 bytes that it lists"):
        pull(plan_pull("me/encoder"), tmp_path / "out" if plain else None)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written < 8 << 20
    assert not (tmp_path / "out").exists()
    held.too_much, held.headers = 0, {}
    pull(plan_pull("me/encoder"), tmp_path / "out" if plain else None)
