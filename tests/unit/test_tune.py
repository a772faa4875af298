"""An index chooses its own search settings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from genius_search.cli import main
from genius_search.config import RANK_ALL, USUAL_SEARCH, SearchConfig
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.index.query import encode_queries, search_encoded
from genius_search.index.requests import SearchRequest
from genius_search.index.settings import KindChoice, Tuned
from genius_search.model import Genius
from genius_search.nn.arrays import as_floats
from genius_search.progress import Silent
from genius_search.records import Modality
from genius_search.search.rank import Evidence, all_ids, rank_items
from genius_search.tune import (
    FEWEST,
    Asked,
    Trial,
    TuneConfig,
    _items_as_queries,
    choose_for_kind,
    rank_everything,
    tune,
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
        assert one.touched <= max(one.search.beam, RANK_ALL * (one.search.candidates or 15)) + 30
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


@pytest.mark.parametrize("rerank", ["codes", "embeddings"])
@pytest.mark.parametrize("density_weight", [0.0, 1.0])
def test_ranking_everything_takes_hubness_away_as_a_search_does(world, index, rerank, density_weight):
    config = SearchConfig(rerank=rerank, density_weight=density_weight)
    opened, model = index.snapshot, index.model
    rows = np.array([7, 1, 400])
    level0 = model.level0_codes(Modality.IMAGE)
    [vectors] = opened.vectors(model.ranker)
    queries = as_floats(vectors(rows))
    asked = Asked(Modality.TEXT, Modality.IMAGE, level0, queries, queries, [])
    evidence = Evidence(model.ranker, [vectors], densities=opened.densities)
    beams = all_ids(opened.search_segments, 1)
    [segment] = opened.segments
    first = segment.table.ids[segment.table.rows(), 0]
    for query, (segments, items) in zip(queries, rank_everything(index, asked, config, k=5), strict=True):
        slow = rank_items(
            opened.search_segments, beams, 0, query, config=config, evidence=evidence, k=len(first)
        )
        assert items.tolist() == [row for row in slow.items.tolist() if first[row] in level0][:5]
        assert not segments.any()


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
    monkeypatch.setattr("genius_search.tune._ceiling", lambda _, asked, *__: np.ones(len(asked.right)))
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


def test_each_kind_of_query_takes_its_own_settings(world, index):
    usual, narrow, wide = (dataclasses.replace(USUAL_SEARCH, candidates=one) for one in (60, 10, 400))
    numbers = {"queries": 60, "recall": 0.5, "share": 1.0, "cpu_ms": 0.1}
    kinds = (
        KindChoice(search=narrow, query="text", item="image", **numbers),
        KindChoice(search=wide, query="text", item="text", **numbers),
    )
    index.keep_settings(
        Tuned(search=usual, wish="recall 0.9", data="photos", items=1, kinds=kinds, **numbers)
    )
    index = Index.open(index.folder, model=index.model)

    def touched(config: SearchConfig | None, **request) -> int:
        asked = [SearchRequest(text="a red kite", k=5, **request)]
        model, snapshot = index.current()
        config = config or index.settings
        queries = encode_queries(model, snapshot, asked, config)
        return search_encoded(model, snapshot, queries, config)[0].touched

    other = dataclasses.replace(usual, density_weight=0.2)
    images = {one: touched(dataclasses.replace(other, candidates=one), modality="image") for one in (10, 60)}
    texts = {one: touched(dataclasses.replace(other, candidates=one), modality="text") for one in (60, 400)}
    assert images[10] < images[60]
    assert texts[60] < texts[400]
    assert touched(None, modality="image") == images[10]
    assert touched(None, modality="text") == texts[400]
    assert touched(None, modality="image", beam=10) == images[60]
    assert touched(other, modality="text") == texts[60]
    both = [SearchRequest(text="a red kite", modality=one) for one in ("image", "text")]
    assert [[hit.id for hit in hits] for hits in index.search_many(both)] == [
        [hit.id for hit in index.search("a red kite", modality=one, config=config)]
        for one, config in (("image", narrow), ("text", wide))
    ]
    shown = index.explain(index.search("a red kite", modality="image")[0].id, "a red kite", modality="image")
    assert shown.touched == images[10]


def trial(candidates: int, share: float, cpu_ms: float, error: float = 0.02) -> Trial:
    """Measurements of some settings."""
    search = SearchConfig(rerank="codes", candidates=candidates)
    return Trial(search=search, recall=share / 2, share=share, error=error, touched=1.0, cpu_ms=cpu_ms)


@pytest.mark.parametrize(
    ("wished", "queries", "others", "chosen"),
    [
        ({"recall": 0.97}, FEWEST, [trial(1, 0.995, 0.5)], 1),  # surely enough, and quicker
        ({"recall": 0.97}, FEWEST - 1, [trial(1, 0.995, 0.5)], 600),
        ({"recall": 0.97}, FEWEST, [trial(1, 0.98, 0.5)], 600),  # enough by luck
        ({"recall": 0.9}, FEWEST, [trial(1, 0.95, 0.5)], 600),  # quicker, but finds less
        ({"recall": 0.97}, FEWEST, [trial(1, 1.0, 0.95)], 600),  # hardly quicker
        ({"recall": 0.99}, FEWEST, [trial(1, 1.02, 3.0)], 600),  # the usual ones may be enough
        ({"recall": 0.999}, FEWEST, [trial(1, 1.02, 3.0), trial(2, 1.02, 2.0)], 2),  # surely are not
        ({"recall": 0.999}, FEWEST, [trial(1, 1.0, 0.5)], 600),  # nothing surely is
        ({"milliseconds": 1.0}, FEWEST, [trial(1, 1.01, 0.9)], 1),  # surely finds more
        ({"milliseconds": 1.0}, FEWEST, [trial(1, 0.99, 0.1)], 600),  # more by luck
        ({"milliseconds": 1.0}, FEWEST, [trial(1, 1.01, 1.1)], 600),  # too slow
        ({"milliseconds": 0.5}, FEWEST, [trial(1, 0.8, 0.4)], 1),  # the usual ones are too slow
    ],
)
def test_a_kind_departs_only_for_what_is_surely_better(wished, queries, others, chosen):
    usual = trial(600, 0.975, 1.0)
    found = choose_for_kind([usual, *others], usual.search, TuneConfig(**wished), queries)
    assert found.search.candidates == chosen


def test_kinds_are_measured_apart_and_count_by_their_queries(world, index):
    best = found(world, index, recall=0.5).best
    assert sum(kind.queries for kind in best.kinds) == best.queries
    assert len({(kind.query, kind.item) for kind in best.kinds}) == len(best.kinds) > 3
    assert {kind.search for kind in best.kinds} == {best.search}  # too few queries to depart
    weighted = sum(kind.queries * kind.recall for kind in best.kinds) / best.queries
    assert weighted == pytest.approx(best.recall)


def test_without_data_items_look_for_their_neighbours_among_the_others(world, index, monkeypatch):
    monkeypatch.setattr("genius_search.tune.ITEM_SHARES", (0.05, 0.05, 0.4))
    index.delete([item for number, item in enumerate(ids(index)) if number % 7 == 0])
    modalities = index.snapshot.modalities
    config = TuneConfig(recall=0.6, queries=20)
    result = tune(index, None, config, progress=Silent())
    assert len(result.best.kinds) == len(modalities) ** 2
    assert {one.search.router for one in result.tried} == {"geometry"}
    assert result.best.data == "its own items"
    assert max(result.tried, key=lambda one: one.search.candidates).share == 1.0
    assert min(one.share for one in result.tried) < 1.0
    assert all(one.touched <= one.search.candidates + 30 for one in result.tried)
    [segment] = index.snapshot.segments
    first = segment.table.ids[segment.table.rows(), 0]
    alive = np.ones(len(first), dtype=bool)
    alive[segment.dead] = False
    for asked in _items_as_queries(index, config, SearchConfig(rerank="codes")):
        own = index.model.level0_codes(asked.query)
        others = index.model.level0_codes(asked.item)
        for number, (_, row) in enumerate(asked.itself):
            assert alive[row]
            assert first[row] in own
            best = asked.right[number]
            assert len(best) == 10
            assert all(alive[item] and first[item] in others and item != row for _, item in best)
            places = np.array([row, *sorted(item for _, item in best)])
            assert asked.grade(number, np.zeros_like(places), places) == 1.0
            assert asked.grade(number, np.zeros_like(places[:6]), places[:6]) == 0.5


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
    words = ["tune", index.folder, "--data", world.data.root, "--split", "test", "--queries", "4"]
    words += ["--milliseconds", "1e6", "--dry-run"]
    assert main([str(word) for word in words]) == 0
    shown = capsys.readouterr().out
    assert "all levels" in shown
    assert sum(line.startswith("→") for line in shown.splitlines()) == 1
    assert "text → image" in shown
    assert "Nothing was changed." in " ".join(shown.split())
