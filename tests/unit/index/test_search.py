"""Searching with conditions, several requests at once, and 8-bit embeddings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from genius_search.config import PAPER_SEARCH, SearchConfig
from genius_search.errors import UsageError, plural
from genius_search.index.candidates import CandidateSearch
from genius_search.index.filters import Filter
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.index.merge import ModalityHits, merge_modalities
from genius_search.index.request import SearchRequest
from genius_search.nn.coder import Coder
from genius_search.records import Modality

COLOURS = ("red", "green", "blue", "white", "black")
THINGS = ("kite", "boat", "leather bag", "clock", "star", "umbrella")


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Path:
    """Thirty texts with fields, and five pictures."""
    root = tmp_path_factory.mktemp("pool")
    rows = []
    for number, (colour, thing) in enumerate((c, t) for c in COLOURS for t in THINGS):
        source = json.dumps({"price": number, "colour": colour, "size": {"width": number % 4}})
        rows.append(
            {
                "did": f"1:{number + 1}",
                "modality": "text",
                "txt": f"a {colour} {thing}",
                "src_content": source,
            }
        )
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (32, 32), colour).save(root / f"{colour}.png")
        rows.append({"did": f"2:{number + 1}", "modality": "image", "img_path": f"{colour}.png"})
    path = root / "pool.jsonl"
    path.write_text(
        "".join(json.dumps({"txt": None, "img_path": None, **row}) + "\n" for row in rows)
    )
    return path


@pytest.fixture(scope="module")
def index(model, pool, tmp_path_factory) -> Index:
    """An index of two segments with deleted items that no test changes."""
    folder = tmp_path_factory.mktemp("made") / "index"
    lines = pool.read_text().splitlines(keepends=True)
    made = Index.create(folder, pool, model=model, embeddings="fused")
    more = pool.with_name("more.jsonl")
    more.write_text(
        "".join(
            line.replace('"did": "1:', '"did": "3:').replace("a red", "one red")
            for line in lines[:6]
        )
    )
    made.add(more)
    made.delete(["1:3", "1:9", "3:2", "2:1"])
    assert (made.info().segments, made.info().deleted) == (2, 4)
    return made


def ids(hits: list[SearchHit]) -> list[str]:
    return [hit.id for hit in hits]


CONDITIONS: list[tuple[dict[str, Any], Any]] = [
    ({"where": ["price<7"]}, lambda hit, fields: fields.get("price", 99) < 7),
    ({"where": {"colour": ["red", "blue"]}}, lambda hit, fields: fields.get("colour") in ("red", "blue")),
    ({"where": ["size.width>=2", "price!=3"]}, lambda hit, fields: fields.get("size", {"width": 0})["width"] >= 2
     and fields["price"] != 3),
    ({"match": "leather"}, lambda hit, fields: "leather" in (hit.text or "")),
    ({"match": '"red kite"'}, lambda hit, fields: "red kite" in (hit.text or "")),
    ({"match": "umb*", "where": "colour=white"}, lambda hit, fields: hit.text == "a white umbrella"),
    ({"where": ["text~one"], "modality": "text"}, lambda hit, fields: "one" in (hit.text or "")),
    ({"where": ["price>1000"]}, lambda hit, fields: False),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "satisfies"), CONDITIONS)
@pytest.mark.parametrize("rerank", ["none", "codes", "embeddings"])
def test_a_filtered_search_finds_what_satisfies_it_in_the_order_of_the_whole(
    index, pool, asked, satisfies, rerank
):
    config = dataclasses.replace(PAPER_SEARCH, beam=500, rerank=rerank)
    fields = {
        row["did"].replace("1:", prefix): json.loads(row.get("src_content") or "{}")
        for row in map(json.loads, pool.read_text().splitlines())
        for prefix in ("1:", "3:")
    }
    wanted = asked.get("modality") or "text"
    usual = index.model.instruction_for(Modality.TEXT, Modality.parse(wanted))
    whole = index.search(
        "a red kite", instruction=usual, modality=asked.get("modality"), k=100, config=config
    )
    assert "modality" in asked or len(whole) == 35 + 6 - 4
    expected = [hit for hit in whole if satisfies(hit, fields[hit.id])]
    found = index.search("a red kite", instruction=usual, k=100, config=config, **asked)
    assert ids(found) == ids(expected)
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-5)
    assert [hit.rank for hit in found] == list(range(1, len(found) + 1))


def test_a_narrow_beam_loses_nothing_of_what_a_filter_leaves(index):
    config = dataclasses.replace(PAPER_SEARCH, beam=4)
    found = index.search("a black star", where=["price>=10", "price<14"], k=4, config=config)
    assert sorted(ids(found)) == ["1:11", "1:12", "1:13", "1:14"]


def test_an_unknown_field_is_an_error_that_names_the_known_ones(index):
    with pytest.raises(UsageError, match=r"'prize'; the fields are .*price"):
        index.search("a kite", where=["prize<20"])


def test_a_request_takes_what_search_takes(index):
    request = SearchRequest(text="a kite", modality="image", where=["price<20"], k=3)
    assert request.modality is Modality.IMAGE
    assert index.search([request]) == [
        index.search("a kite", modality="image", where={"price": {"<": 20}}, k=3)
    ]
    with pytest.raises(UsageError, match="sound"):
        SearchRequest(text="a kite", modality="sound")


REQUESTS = [
    SearchRequest(text="a red kite"),
    SearchRequest(text="a green boat", k=3, modality="text"),
    SearchRequest(text="a blue clock", k=7, where=["price<20"]),
    SearchRequest(text="a white thing", k=40),
    SearchRequest(text="nothing", where=Filter.parse(["price>1000"])),
    SearchRequest(text="a square", modality=Modality.IMAGE, instruction="Find a photo", k=2),
    SearchRequest(text="a bag", k=5, where=Filter.parse(match="leather")),
]


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(PAPER_SEARCH, beam=8),
        dataclasses.replace(PAPER_SEARCH, beam=8, scores="vocabulary"),
        dataclasses.replace(PAPER_SEARCH, beam=8, rerank="codes", candidates=16),
        dataclasses.replace(PAPER_SEARCH, beam=8, rerank="embeddings"),
        dataclasses.replace(PAPER_SEARCH, beam=8, rerank="embeddings", candidates=16, shortlist=12),
    ],
)
def test_many_requests_together_are_answered_as_one_by_one(index, pool, config):
    requests = [*REQUESTS, SearchRequest(text="the same", image=pool.with_name("green.png"), k=4)]
    together = index.search(requests, config=config)
    for request, found in zip(requests, together, strict=True):
        (alone,) = index.search([request], config=config)
        assert ids(found) == ids(alone)
        assert [hit.codes for hit in found] == [hit.codes for hit in alone]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in alone], abs=1e-4)
    assert [len(found) for found in together] == [10, 3, 7, 37, 0, 2, 4, 4]


def test_hits_have_log_probabilities_only_if_the_generator_was_asked(index):
    usual = dataclasses.replace(PAPER_SEARCH, beam=2, rerank="codes")
    geometric = dataclasses.replace(usual, router="geometry")
    for config, is_asked in (
        (usual, True),
        (geometric, False),
        (index.settings, False),
        (dataclasses.replace(geometric, rerank="none"), True),
    ):
        hits = index.search("a red kite", config=config)
        assert hits
        assert any(hit.log_probabilities != () for hit in hits) == is_asked


def test_options_in_python_do_what_the_flags_do(index):
    led = index.search("a red kite", config=SearchConfig(router="generator"))
    assert led == index.search(
        "a red kite",
        config=dataclasses.replace(index.settings, router="generator", candidates=1000),
    )
    with pytest.raises(UsageError, match="does without the generator"):
        index.search("a red kite", config=SearchConfig(router="geometry", rerank="none"))


def test_embeddings_of_fewer_bits_rank_nearly_as_those_of_16(model, pool, tmp_path):
    config = dataclasses.replace(PAPER_SEARCH, beam=500, rerank="embeddings")
    found = []
    for bits in (16, 8, 4, 1):
        made = Index.create(
            tmp_path / str(bits), pool, model=model, embeddings="fused", embedding_bits=bits
        )
        hits = made.search("a red kite", k=100, config=config)
        found.append({hit.id: hit.score for hit in hits})
        info = made.info()
        assert info.embeddings == f"fused, {plural(bits, 'bit')} a number"
        width = model.dim * bits / 8
        assert info.bytes_per_item["embeddings"] == pytest.approx(width, abs=12)  # the file's head
        again = Index.open(made.folder, model=model).search("a red kite", k=100, config=config)
        assert again == hits
    wide, *others = (np.array([scores[name] for name in found[0]]) for scores in found)
    assert len(wide) == 35
    for narrow, error in zip(others, (0.01, 0.05, 0.2), strict=True):
        assert 0 < np.abs(wide - narrow).max() < error


@pytest.mark.parametrize("kind", ["fused", "raw"])
def test_hubness_is_taken_from_scores_by_codes_and_fused_embeddings_only(
    model, pool, tmp_path, kind, monkeypatch
):
    # As if densities were reliable, which so few items do not show.
    spreads = np.array(model.codebooks.weights["spreads"])
    spreads[:, 2] = 1
    monkeypatch.setitem(model.codebooks.weights, "spreads", spreads)
    monkeypatch.setattr(model, "coder", Coder(model.codebooks))
    made = Index.create(tmp_path / "index", pool, model=model, embeddings=kind)
    (table,) = (part.table for part in made._snapshot.searched_segments)
    levels, weight = model.num_levels, 0.25
    of_ids = {tuple(row[:levels]): row[levels + 1] for row in table.ids.tolist()}
    of_items = made._snapshot.evidence(model.ranker).densities
    assert (of_items is not None) == (kind == "fused")
    for rerank, is_corrected in (("codes", True), ("embeddings", kind == "fused"), ("none", False)):
        plain, other = (
            {
                hit.id: hit
                for hit in made.search(
                    "a red kite",
                    k=35,
                    hybrid=False,
                    config=dataclasses.replace(
                        PAPER_SEARCH, beam=500, rerank=rerank, density_weight=density_weight
                    ),
                )
            }
            for density_weight in (0.0, weight)
        )
        assert len(plain) == len(other) == 35
        units: dict[str, list[float]] = {}
        for name, hit in plain.items():
            less = hit.score - other[name].score
            assert len(other[name].codes) == levels
            if not is_corrected:
                assert less == 0
                continue
            density, share = (of_ids[hit.codes] - 128) / 800, 1.0
            if rerank == "embeddings":
                density = (int(of_items[0][made._snapshot.locate(name).row]) - 128) / 800
                share = min(max((1 - hit.score) / 0.25, 0), 1) ** 3  # of a product near 1
            cost = weight * share * density
            if abs(cost) > 1e-3:
                units.setdefault(hit.modality, []).append(less / cost)
            else:
                assert abs(less) < 0.01
        assert not is_corrected or sum(map(len, units.values())) > 10
        for own in units.values():  # the query is scaled alike for all items of a modality
            assert own == pytest.approx([own[0]] * len(own), rel=0.01)
            assert own[0] > 0.1


@pytest.mark.parametrize(
    "config",
    [
        SearchConfig(rerank="embeddings", shortlist=3),
        SearchConfig(rerank="embeddings", shortlist=3, candidates=7, beam=2),
        SearchConfig(rerank="codes", candidates=7, beam=2),
        SearchConfig(rerank="none", beam=2),
        SearchConfig(rerank="codes", router="generator", candidates=5, beam=2),
    ],
)
@pytest.mark.parametrize("options", [{}, {"modality": "image"}, {"where": ["price<20"]}])
def test_pages_of_any_size_are_those_of_one_list_down_to_the_last_item(index, config, options):
    query = {"query": "a red kite", "config": config, **options}
    whole = index.search(**query, k=len(index))
    listed = index.search(**options, k=len(index)) if options else index
    assert sorted(ids(whole)) == sorted(item.id for item in listed)
    for size in (4, 10):
        pages = [
            hit
            for start in range(0, 40, size)
            for hit in index.search(**query, k=size, offset=start)
        ]
        assert [(hit.id, hit.score) for hit in pages] == [
            (hit.id, hit.score) for hit in whole[: len(pages)]
        ]


def test_a_search_that_has_ranked_all_that_it_may_find_is_not_repeated(index, monkeypatch):
    rank_once, searches = CandidateSearch._rank_once, []

    def count(self, queries, num_hits, settings):
        searches.append(settings)
        return rank_once(self, queries, num_hits, settings)

    monkeypatch.setattr(CandidateSearch, "_rank_once", count)
    config = SearchConfig(rerank="embeddings", shortlist=8)
    narrow = {"where": ["price=12"], "modality": "text", "hybrid": False}
    hits = index.search("a red kite", config=config, k=20, **narrow)
    assert 0 < len(hits) <= 8
    assert len(searches) == 1


def test_without_modality_and_instruction_each_modality_is_searched(model, pool, tmp_path):
    made = Index.create(tmp_path / "index", pool, model=model)
    merged = made.search("a red kite", k=6)
    assert [hit.rank for hit in merged] == list(range(1, 7))
    alone = [made.search("a red kite", modality=kind, k=6) for kind in ("text", "image")]
    best = sorted((hit for hits in alone for hit in hits), key=lambda hit: -hit.score)
    assert ids(merged) == ids(best[:6])  # their scores are comparable
    both = made.search(
        [SearchRequest(text="a red kite", k=6), SearchRequest(text="star", modality="text")]
    )
    assert ids(both[0]) == ids(merged)
    assert ids(both[1]) == ids(made.search("star", modality="text"))
    found = made.explain(merged[0].id, "a red kite")
    assert found.rank == 1


def test_merged_hits_are_ordered_by_probability_where_the_index_is_calibrated(
    model, pool, tmp_path
):
    made = Index.create(tmp_path / "index", pool, model=model)
    lists = [
        [
            dataclasses.replace(hit, probability=chance)
            for hit, chance in zip(hits, chances, strict=True)
        ]
        for hits, chances in (
            (made.search("a red kite", modality="image", k=2), (0.9, 0.8)),
            (made.search("a red kite", modality="text", k=2), (0.5, 0.1)),
        )
    ]
    numbers = merge_modalities([ModalityHits.of_hits(hits, [0.0, 0.0]) for hits in lists], 3)
    merged = [[*lists[0], *lists[1]][number] for number in numbers]
    assert [hit.probability for hit in merged] == [0.9, 0.8, 0.5]
    assert [hit.rank for hit in merged] == [1, 2, 1]
