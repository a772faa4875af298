"""Settings that are kept with an index."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from genius_search.artifact import fingerprint_of
from genius_search.config import SearchConfig
from genius_search.errors import ArtifactMismatch
from genius_search.index import writer as live
from genius_search.index.items import Item
from genius_search.index.settings import KindChoice, Tuned, from_dict, to_dict
from genius_search.index.store import (
    CURRENT,
    IndexManifest,
    ItemArrays,
    read_manifest,
)
from genius_search.index.writer import one_writer
from genius_search.records import Modality

TUNED = Tuned(
    search=SearchConfig(beam=20, candidates=600, rerank="codes", generator_weight=0.01),
    wish="recall 0.97",
    data="photos val",
    queries=40,
    items=3,
    recall=0.5,
    share=1.0,
    cpu_ms=0.25,
)


def added(writer, first: int, count: int) -> None:
    """Add some items."""
    items = [
        Item(f"1:{number}", Modality.TEXT, "words", None, None, None)
        for number in range(first, first + count)
    ]
    codes = np.arange(first, first + count, dtype=np.int16)[:, None]
    writer.add(items, ItemArrays(codes, np.ones(count, dtype=np.float16), None, "none"))


@pytest.fixture
def index(tmp_path):
    """An index of three items."""
    with one_writer(tmp_path / "index") as writer:
        none = ItemArrays(np.zeros((0, 1), np.int16), np.zeros(0, np.float16), None, "none")
        writer.create(
            IndexManifest(model="/somewhere/model", model_fingerprint="f" * 64, embeddings="none"), [], none
        )
        added(writer, 1, 3)
    return tmp_path / "index"


def test_only_what_is_unusual_is_written():
    told = json.loads(json.dumps(to_dict(TUNED)))
    assert told["search"] == {"beam": 20, "candidates": 600, "rerank": "codes", "generator_weight": 0.01}
    assert from_dict(Tuned, told) == TUNED


def test_kinds_are_kept_and_settings_without_kinds_are_read():
    numbers = {"queries": 40, "recall": 0.5, "share": 1.0, "cpu_ms": 0.25}
    kind = KindChoice(query="text", item="image", search=SearchConfig(rerank="codes"), **numbers)
    with_kinds = dataclasses.replace(TUNED, kinds=(kind,))
    told = json.loads(json.dumps(to_dict(with_kinds)))
    assert told["kinds"][0]["search"] == {"rerank": "codes"}
    assert from_dict(Tuned, told) == with_kinds
    assert with_kinds.of_kind(Modality.TEXT, Modality.IMAGE) == kind.search
    assert with_kinds.of_kind(Modality.TEXT, Modality.TEXT) == TUNED.search
    assert with_kinds.of_kind(Modality.TEXT, None) == TUNED.search
    del told["kinds"]
    assert from_dict(Tuned, told) == TUNED


@pytest.mark.parametrize(
    "odd",
    [
        "fast",
        {},
        {**to_dict(TUNED), "search": {"beam": 0}},
        {**to_dict(TUNED), "search": {"width": 3}},
        {**to_dict(TUNED), "queries": "many"},
        {**to_dict(TUNED), "more": 1},
    ],
)
def test_settings_that_are_none_are_refused(odd):
    with pytest.raises(ValueError):
        from_dict(Tuned, odd)


def test_an_index_that_was_never_tuned_says_nothing_of_it(index):
    assert "tuned" not in json.loads((index / CURRENT).read_text())
    assert read_manifest(index).tuned is None


def test_settings_stay_while_items_come_and_go(index):
    with one_writer(index) as writer:
        before = writer.snapshot.manifest.generation
        writer.tune(TUNED)
        assert writer.snapshot.manifest.generation == before + 1
        added(writer, 4, 2)
        writer.delete(["1:1"])
        writer.compact()
    manifest = read_manifest(index)
    assert manifest.tuned == TUNED
    assert sum(entry.items for entry in manifest.segments) == 4


def test_a_writer_that_dies_leaves_the_settings_before(index, monkeypatch):
    with one_writer(index) as writer:
        writer.tune(TUNED)

    def die(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(live, "write_manifest", die)
    with pytest.raises(OSError, match="no room"), one_writer(index) as writer:
        writer.tune(TUNED)
    assert read_manifest(index).tuned == TUNED


def test_impossible_settings_in_an_index_are_damage(index):
    with one_writer(index) as writer:
        writer.tune(TUNED)
    body = json.loads((index / CURRENT).read_text())
    del body["checksum"]
    body["tuned"]["search"]["beam"] = -1
    (index / CURRENT).write_text(json.dumps({**body, "checksum": fingerprint_of(body)}))
    with pytest.raises(ArtifactMismatch, match="damaged"):
        read_manifest(index)
