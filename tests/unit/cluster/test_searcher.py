"""A search of every shard has the hits of a single index; changes go to the shard of an item."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from genius_search.cluster.searcher import Searcher, shard_folder, shard_of
from genius_search.config import PAPER_SEARCH, SearchConfig
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index.filters import UnknownField
from genius_search.index.index import Index
from genius_search.index.pool import NewItem, open_pool
from genius_search.index.request import SearchPart, SearchRequest
from genius_search.index.snapshot import UnknownItem
from genius_search.records import Modality

EXHAUSTIVE = SearchConfig(
    rerank="embeddings", router="geometry", candidates=0, beam=200, shortlist=0
)
"""Settings that rank every item, so that a cluster and a single index must have equal hits."""
GENERATED = dataclasses.replace(PAPER_SEARCH, beam=200)


@pytest.fixture
def searcher(cluster_folder) -> Searcher:
    return Searcher.open(cluster_folder)


@pytest.fixture
def changing(cluster_folder, tmp_path) -> Path:
    return shutil.copytree(cluster_folder, tmp_path / "X")


def ids_and_scores(hits) -> list[tuple[int, str, float]]:
    return [(hit.rank, hit.id, round(hit.score, 4)) for hit in hits]


def requests(single) -> list[SearchRequest]:
    first_id = next(single._snapshot.ids())
    picture = next(item for item in single._snapshot.segments[0].items.all() if item.image)
    return [
        SearchRequest(hybrid=False, text="a red umbrella", modality="text", k=9),
        SearchRequest(hybrid=False, text="a red umbrella", modality="image", k=2),
        SearchRequest(hybrid=False, text="a picture of it", instruction="Find a picture", k=12),
        SearchRequest(hybrid=False, text="blue", modality="image", where=["id!=" + first_id], k=4),
        SearchRequest(
            hybrid=False, text="a blue lamp", image=picture.image, modality="image-text", k=7
        ),
        SearchRequest(
            parts=(SearchPart(text="green"), SearchPart(text="a cup", weight=-0.5)),
            modality="text",
            k=5,
        ),
        SearchRequest(
            hybrid=False,
            parts=(SearchPart(text="green"), SearchPart(text="a cup")),
            combine="any",
            modality="image-text",
            k=6,
        ),
        SearchRequest(hybrid=False, text="a red kite or a blue cup", modality="text", k=6),
        SearchRequest(hybrid=False, text="everything", modality="text", k=100),
        SearchRequest(hybrid=False, text="everything -red -blue", match="kite OR cup", k=100),
    ]


def test_a_cluster_has_the_hits_of_a_single_index_if_all_items_are_ranked(searcher, single):
    batch = requests(single)
    answers, expected = (index.search(batch, config=EXHAUSTIVE) for index in (searcher, single))
    for request, hits, expected_hits in zip(batch, answers, expected, strict=True):
        assert ids_and_scores(hits) == ids_and_scores(expected_hits), request


def test_hits_of_each_modality_are_the_best_of_the_whole_cluster(searcher, single):
    """The mixture of modalities may differ, because each shard measures how far hits stand out."""
    for request in (
        SearchRequest(hybrid=False, text="a red umbrella", k=9),
        SearchRequest(parts=(SearchPart(text="green"), SearchPart(text="a cup", weight=-0.5)), k=5),
    ):
        [hits] = searcher.search([request], config=EXHAUSTIVE)
        assert [hit.rank for hit in hits] == [*range(1, request.k + 1)]
        assert {hit.modality for hit in hits} == {*Modality}
        for modality in Modality:
            scores = [(hit.id, round(hit.score, 4)) for hit in hits if hit.modality is modality]
            [best] = single.search(
                [dataclasses.replace(request, modality=modality)], config=EXHAUSTIVE
            )
            assert scores == [(hit.id, round(hit.score, 4)) for hit in best][: len(scores)]


def test_log_probabilities_of_modalities_are_not_compared(searcher, single):
    request = SearchRequest(text="a red umbrella", hybrid=False, k=6)
    [hits], [expected] = (index.search([request], config=GENERATED) for index in (searcher, single))
    # Ids are not compared, because items with the same ID have equal scores.
    assert [(hit.modality, round(hit.score, 4)) for hit in hits] == [
        (hit.modality, round(hit.score, 4)) for hit in expected
    ]


def test_a_cluster_with_a_link_is_not_opened(changing, tmp_path):
    (changing / "shards" / "000000").rename(tmp_path / "elsewhere")
    (changing / "shards" / "000000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactMismatch, match="symbolic link"):
        Searcher.open(changing)


def test_a_copy_of_one_shard_in_the_place_of_another_is_refused(changing):
    shutil.rmtree(changing / "shards" / "000001")
    shutil.copytree(changing / "shards" / "000000", changing / "shards" / "000001")
    with pytest.raises(ArtifactMismatch, match=r"000001 is a copy of .*000000"):
        Searcher.open(changing)


def test_an_item_as_a_query_is_read_from_its_shard(searcher, single):
    for item_id in list(single._snapshot.ids())[:6]:
        assert searcher.search(parts=(SearchPart(id=item_id),), k=60)
    with pytest.raises(UnknownItem):
        searcher.search(parts=(SearchPart(id="nothing"),))


@pytest.mark.parametrize(
    "options", [{"order_by": "price"}, {"facets": ["price"]}, {"group_by": "price"}]
)
def test_a_cluster_refuses_to_sort_count_or_group(searcher, options):
    with pytest.raises(UsageError, match=r"order_by, facets, group_by.*search a single index"):
        searcher.search("a kite", **options)


def test_a_condition_may_name_a_field_that_only_some_shards_have(changing):
    searcher = Searcher.open(changing)
    with pytest.raises(UnknownField, match="colour"):
        searcher.search("new", where=["colour=red"])
    searcher.add([NewItem("new", "a new thing", fields={"colour": "red"})])
    with_condition, without_condition = searcher.search(
        [
            SearchRequest(hybrid=False, text="new", where=["colour=red"]),
            SearchRequest(text="new", k=3, modality="text"),
        ]
    )
    assert [hit.id for hit in with_condition] == ["new"]
    assert len(without_condition) == 3
    not_red, missing = (
        searcher.search(where=[where], k=1000) for where in ("colour!=red", "colour is missing")
    )
    assert len(not_red) == len(missing) == len(searcher) - 1
    page = searcher.search(where={"colour": None}, k=3, offset=2)
    assert [hit.id for hit in page] == [hit.id for hit in missing[2:5]]


def test_an_item_with_the_number_of_a_query_is_a_hit(changing):
    searcher = Searcher.open(changing)
    items = [NewItem(f"n{number}", f"part AB-{number}") for number in range(100, 140)]
    assert searcher.add(items).added == 40
    for number in (103, 117, 138):
        hits = searcher.search(f"AB-{number}", modality="text")
        assert f"n{number}" in [hit.id for hit in hits]


def test_items_are_changed_in_the_shard_of_their_id(changing, single):
    searcher = Searcher.open(changing)
    first_id, second_id = list(single._snapshot.ids())[:2]
    items = [{"id": "a", "text": "one"}, {"id": first_id, "text": "two"}, {"id": "b"}]
    added = searcher.add(items)
    assert (added.added, added.replaced) == (2, 1)
    assert [item.file for item in added.left_out] == ["b"]
    assert searcher.add(items[:2]).unchanged == 2
    assert len(searcher) == 121
    assert "a" in Index.open(shard_folder(changing, shard_of("a", 3)))._snapshot.ids()
    assert searcher.search("one", match="one", modality="text", k=1)[0].id == "a"
    deleted = searcher.delete(["a", second_id, "nothing"])
    assert (deleted.deleted, deleted.missing) == (2, ["nothing"])
    assert searcher.delete("a").missing == ["a"]
    assert len(Searcher.open(changing)) == len(searcher) == 119


def test_ids_are_texts_or_integers(changing):
    searcher = Searcher.open(changing)
    searcher.add([NewItem(7, "a drum"), {"id": 8.0, "text": "a flute"}])
    for key in (7, 7.0, "7"):
        assert "7" in [hit.id for hit in searcher.search(parts=[SearchPart(id=key)], k=3)]
    assert searcher.delete([7, "8"]).deleted == 2
    for key in (7.5, None):
        with pytest.raises(UsageError, match="expected a text or a whole number"):
            searcher.delete(key)


def test_a_pool_is_added_except_for_unchanged_items(changing, pool, texts):
    searcher = Searcher.open(changing)
    unchanged = searcher.add(open_pool(pool, captions=True))
    assert (unchanged.added, unchanged.unchanged) == (0, 120)
    added = searcher.add(open_pool(texts, captions=True))
    assert (added.added, added.replaced, len(searcher)) == (24, 0, 144)
    hit = searcher.search("a note about number 11", modality="text", k=1)[0]
    assert hit.fields["name"]
