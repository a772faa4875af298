"""An index chooses its own search settings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from genius_search.cli import main
from genius_search.config import USUAL_SEARCH, SearchConfig
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.search.beam import search
from genius_search.search.rank import Evidence, rank_items
from genius_search.tune import (
    TuneConfig,
    ValidationConfig,
    exhaustive_recall,
    is_found,
    tune,
    validation_queries,
)

FEW = {
    "split": "test",
    "queries": 6,
    "beams": (10, 40),
    "candidates": (0, 60),
    "generator_weights": (0.0, 0.1),
}


class World(NamedTuple):
    """A data set, and an index of its candidates."""

    data: MBeir
    model: Path
    index: Path


@pytest.fixture(scope="module")
def world(trained, tmp_path_factory) -> World:
    """An index that no test changes."""
    data = MBeir(trained.data)
    (pool,) = data.global_pool("test")
    folder = tmp_path_factory.mktemp("tuned") / "index"
    Index.create(folder, model=Genius.open(trained.model), pool=pool, embeddings="fused")
    return World(data, trained.model, folder)


@pytest.fixture
def index(world, tmp_path) -> Index:
    """A copy to change."""
    return Index.open(shutil.copytree(world.index, tmp_path / "index"), model=world.model)


def found(world: World, index: Index, **wished):
    """Tune with few settings."""
    return tune(index, world.data, TuneConfig(**{**FEW, **wished}), progress=Silent())


def test_the_cheapest_settings_that_find_enough_are_chosen(world, index):
    result = found(world, index, recall=0.5)
    assert len(result.tried) == 10
    assert {one.search.router for one in result.tried} == {"generator", "geometry"}
    assert USUAL_SEARCH in [one.search for one in result.tried]
    assert result.left_out == 0
    enough = [one for one in result.tried if one.share >= 0.5]
    assert result.best.share >= 0.5
    assert result.best.cpu_ms <= 1.05 * min(one.cpu_ms for one in enough)
    assert result.best.search in [one.search for one in enough]
    assert result.best.items == index.info().items
    for one in result.tried:
        assert one.share == pytest.approx(one.recall / result.ceiling)
        assert one.touched <= max(one.search.beam, one.search.candidates or 30) + 30
        assert one.search.generator_weight == result.best.search.generator_weight


def test_the_best_settings_within_a_time_are_chosen(world, index):
    result = found(world, index, milliseconds=1e6, rerank="embeddings")
    assert result.best.share >= max(one.share for one in result.tried) - 1e-9
    assert {one.search.rerank for one in result.tried} == {"embeddings"}
    assert {one.search.generator_weight for one in result.tried} == {0.0}


@pytest.mark.parametrize("rerank", ["codes", "embeddings"])
def test_looking_at_everything_is_the_ceiling(world, index, rerank):
    index.delete([item for number, item in enumerate(ids(index)) if number % 7 == 0])
    result = found(world, index, recall=1.0, rerank=rerank, beams=(10**6,), generator_weights=(0.0,))
    assert [one.share for one in result.tried] == [1.0] * 6
    assert result.left_out > 0


@pytest.mark.parametrize("density_weight", [0.0, 1.0])
def test_the_ceiling_takes_hubness_from_embeddings_as_a_search_does(world, index, density_weight):
    chosen = ValidationConfig(split="test", queries=20)
    asked = validation_queries(index, world.data, chosen, rerank="embeddings", progress=Silent())
    config = SearchConfig(beam=10**6, rerank="embeddings", density_weight=density_weight)
    opened = index.snapshot
    evidence = Evidence(index.model.ranker, opened.vectors, densities=opened.densities)
    beams = search(index.model.decoder, opened.search_segments, asked.fused, config)
    found = [
        rank_items(opened.search_segments, beams, number, query, config=config, evidence=evidence, k=5)
        for number, query in enumerate(asked.evidence)
    ]
    shares = [is_found(right, one.segments, one.items) for right, one in zip(asked.right, found, strict=True)]
    assert exhaustive_recall(index, asked, config) == pytest.approx(sum(shares) / len(shares))
    assert 0 < sum(shares) < len(shares)


def ids(index: Index) -> list[str]:
    """Of all its items."""
    return [
        item.id
        for segment in index.snapshot.segments
        for item in segment.items.get(list(range(segment.table.num_items)))
    ]


@pytest.mark.parametrize(
    ("wished", "advice"),
    [
        ({}, "recall"),
        ({"recall": 0.9, "milliseconds": 3.0}, "milliseconds"),
        ({"recall": 1.5}, "recall"),
        ({"milliseconds": 1e-9}, "--milliseconds"),
        ({"recall": 0.9, "beams": ()}, "at least one"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(world, index, wished, advice):
    with pytest.raises(UsageError, match=advice):
        found(world, index, **wished)


def test_too_much_recall_names_the_best_there_is(world, index, monkeypatch):
    monkeypatch.setattr("genius_search.tune.exhaustive_recall", lambda *_: 1.0)
    with pytest.raises(UsageError, match=r"the best reach 0\.\d+ \(beam"):
        found(world, index, recall=1.0, beams=(10,), generator_weights=(0.0,))


def test_an_index_without_the_right_answers_cannot_be_tuned(world, index, tmp_path):
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"did": "9:1", "modality": "text", "txt": "a kite", "img_path": null}\n')
    other, _ = Index.create(tmp_path / "other", model=index.model, pool=pool)
    with pytest.raises(BadData, match="genius index create"):
        found(world, other, recall=0.9)
    with pytest.raises(UsageError, match="stores no embeddings"):
        found(world, other, recall=0.9, rerank="embeddings")


def test_what_was_chosen_is_how_the_index_is_searched(world, index):
    plain = [hit.id for hit in index.search("a red kite")]
    assert index.settings == USUAL_SEARCH
    best = found(world, index, recall=0.2).best
    index.keep_settings(best)
    again = Index.open(index.folder, model=index.model)
    assert index.settings == again.settings == best.search
    expected = again.search("a red kite", config=best.search)
    assert again.search("a red kite") == expected == index.search("a red kite")
    assert [hit.id for hit in again.search("a red kite", config=USUAL_SEARCH)] == plain


@pytest.fixture
def _few_settings(monkeypatch):
    """The command tries a few settings instead of its whole grid."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Few(TuneConfig):
        beams: tuple[int, ...] = FEW["beams"]
        candidates: tuple[int, ...] = FEW["candidates"]
        generator_weights: tuple[float, ...] = FEW["generator_weights"]

    monkeypatch.setattr("genius_search.tune.TuneConfig", Few)


def told(capsys, *words: object) -> dict:
    """What a command says as JSON."""
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("_few_settings")
def test_the_command_keeps_settings_and_flags_of_a_search_win(world, index, capsys):
    words = ("tune", index.folder, "--data", world.data.root, "--split", "test", "--queries", "6")
    first = told(capsys, *words, "--recall", "0.2", "--dry-run")
    assert first["kept"] is False
    assert told(capsys, "index", "info", index.folder)["tuned"] is None
    kept = told(capsys, *words, "--recall", "0.2")
    assert told(capsys, "index", "info", index.folder)["tuned"] == kept["best"]
    assert main(["index", "info", str(index.folder)]) == 0
    assert "tuned for recall 0.2" in " ".join(capsys.readouterr().out.split())

    by_codes = told(capsys, "search", index.folder, "a red kite")["hits"]
    asked = [hit.id for hit in index.search("a red kite", config=index.settings)]
    assert [hit["id"] for hit in by_codes] == asked
    alone = told(capsys, "search", index.folder, "a red kite", "--rerank", "none", "--beam", "50")["hits"]
    usual = index.search("a red kite", config=dataclasses.replace(index.settings, rerank="none", beam=50))
    assert [hit["score"] for hit in alone] == [hit.score for hit in usual]
    assert alone[0]["score"] < 0 < by_codes[0]["score"]


@pytest.mark.usefixtures("_few_settings")
def test_the_command_prints_its_grid(world, index, capsys):
    words = ["tune", index.folder, "--data", world.data.root, "--split", "test", "--queries", "1"]
    words += ["--milliseconds", "1e6", "--dry-run"]
    assert main([str(word) for word in words]) == 0
    shown = capsys.readouterr().out
    assert "all levels" in shown
    assert shown.count("→") == 1
    assert "Nothing was changed." in " ".join(shown.split())
