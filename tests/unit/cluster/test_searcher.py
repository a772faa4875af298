"""Asking every shard finds what one index of all items finds, and items are changed where they lie."""

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

ALL = SearchConfig(rerank="embeddings", router="geometry", candidates=0, beam=200, shortlist=0)
"""Every item is ranked, so that the cluster and the index have no reason to differ."""
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
    some = next(single._snapshot.ids())
    picture = next(item for item in single._snapshot.segments[0].items.all() if item.image)
    return [
        SearchRequest(hybrid=False, text="a red umbrella", modality="text", k=9),
        SearchRequest(hybrid=False, text="a red umbrella", modality="image", k=2),
        SearchRequest(hybrid=False, text="a picture of it", instruction="Find a picture", k=12),
        SearchRequest(hybrid=False, text="blue", modality="image", where=["id!=" + some], k=4),
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


def test_a_cluster_finds_what_one_index_finds_where_all_items_are_ranked(searcher, single):
    asked = requests(single)
    merged = searcher.search(asked, config=ALL)
    for request, one, other in zip(asked, merged, single.search(asked, config=ALL), strict=True):
        assert ids_and_scores(one) == ids_and_scores(other), request


def test_hits_of_each_modality_are_the_best_of_the_whole_cluster(searcher, single):
    """How modalities are mixed may differ, since by how far hits stand out is found in each shard."""
    for asked in (
        SearchRequest(hybrid=False, text="a red umbrella", k=9),
        SearchRequest(parts=(SearchPart(text="green"), SearchPart(text="a cup", weight=-0.5)), k=5),
    ):
        [hits] = searcher.search([asked], config=ALL)
        assert [hit.rank for hit in hits] == [*range(1, asked.k + 1)]
        assert {hit.modality for hit in hits} == {*Modality}
        for modality in Modality:
            own = [(hit.id, round(hit.score, 4)) for hit in hits if hit.modality is modality]
            [best] = single.search([dataclasses.replace(asked, modality=modality)], config=ALL)
            assert own == [(hit.id, round(hit.score, 4)) for hit in best][: len(own)]


def test_log_probabilities_of_modalities_are_not_compared(searcher, single):
    [one], [other] = (
        own.search([SearchRequest(text="a red umbrella", hybrid=False, k=6)], config=GENERATED)
        for own in (searcher, single)
    )  # items with the same ID are equal
    assert [(hit.modality, round(hit.score, 4)) for hit in one] == [
        (hit.modality, round(hit.score, 4)) for hit in other
    ]


def test_a_cluster_with_a_link_is_not_opened(changing, tmp_path):
    (changing / "shards" / "000000").rename(tmp_path / "elsewhere")
    (changing / "shards" / "000000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactMismatch, match="symbolic link"):
        Searcher.open(changing)


def test_an_item_as_a_query_is_read_where_it_lies(searcher, single):
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


def test_a_field_that_items_of_some_shards_have_may_be_asked_for(changing):
    searcher = Searcher.open(changing)
    with pytest.raises(UnknownField, match="colour"):
        searcher.search("new", where=["colour=red"])
    searcher.add([NewItem("new", "a new thing", fields={"colour": "red"})])
    both = [
        SearchRequest(hybrid=False, text="new", where=["colour=red"]),
        SearchRequest(text="new", k=3, modality="text"),
    ]
    one, other = searcher.search(both)
    assert [hit.id for hit in one] == ["new"]
    without = [
        searcher.search(where=[where], k=1000) for where in ("colour is missing", "colour!=red")
    ]
    assert [len(hits) for hits in without] == [len(searcher) - 1] * 2
    assert [hit.id for hit in searcher.search(where={"colour": None}, k=3, offset=2)] == [
        hit.id for hit in without[0][2:5]
    ]
    assert len(other) == 3


def test_numbers_of_a_query_are_found_among_the_first(changing):
    searcher = Searcher.open(changing)
    given = [NewItem(f"n{number}", f"part AB-{number}") for number in range(100, 140)]
    assert searcher.add(given).added == 40
    for number in (103, 117, 138):
        hits = searcher.search(f"AB-{number}", modality="text")
        assert f"n{number}" in [hit.id for hit in hits]


def test_items_are_changed_in_the_shard_of_their_id(changing, single):
    searcher, known = Searcher.open(changing), list(single._snapshot.ids())[:2]
    items = [{"id": "a", "text": "one"}, {"id": known[0], "text": "two"}, {"id": "b"}]
    done = searcher.add(items)
    assert (done.added, done.replaced, [one.file for one in done.left_out]) == (2, 1, ["b"])
    assert searcher.add(items[:2]).unchanged == 2
    assert len(searcher) == 121
    assert "a" in Index.open(shard_folder(changing, shard_of("a", 3)))._snapshot.ids()
    assert searcher.search("one", match="one", modality="text", k=1)[0].id == "a"
    done = searcher.delete(["a", known[1], "nothing"])
    assert (done.deleted, done.missing) == (2, ["nothing"])
    assert searcher.delete("a").missing == ["a"]
    assert len(Searcher.open(changing)) == len(searcher) == 119


def test_ids_are_texts_or_whole_numbers(changing):
    searcher = Searcher.open(changing)
    searcher.add([NewItem(7, "a drum"), {"id": 8.0, "text": "a flute"}])
    for key in (7, 7.0, "7"):
        assert "7" in [hit.id for hit in searcher.search(parts=[SearchPart(id=key)], k=3)]
    assert searcher.delete([7, "8"]).deleted == 2
    for key in (7.5, None):
        with pytest.raises(UsageError, match="expected a text or a whole number"):
            searcher.delete(key)


def test_a_pool_is_added_and_what_is_unchanged_is_skipped(changing, pool, texts):
    searcher = Searcher.open(changing)
    same = searcher.add(open_pool(pool, captions=True))
    assert (same.added, same.unchanged) == (0, 120)
    more = searcher.add(open_pool(texts, captions=True))
    assert (more.added, more.replaced, len(searcher)) == (24, 0, 144)
    hit = searcher.search("a note about number 11", modality="text", k=1)[0]
    assert hit.fields["name"]
