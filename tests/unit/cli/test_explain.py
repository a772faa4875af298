"""The tree of an index's codes, and `genius explain`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from genius_search.config import SearchConfig
from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.records import Modality
from genius_search.search.tree import UnknownPrefix

from .conftest import run, run_json


@pytest.fixture(scope="module")
def index(trained, tmp_path_factory) -> Index:
    """An index in two segments with some items deleted; no test changes it."""
    pools = MBeir(trained.data)
    folder = tmp_path_factory.mktemp("codes") / "index"
    made, _ = Index.create(folder, model=Genius.open(trained.model), pool=pools.global_pool("test")[0])
    lines = pools.global_pool("test")[0].read_text().splitlines()[:3]
    again = [{**json.loads(line), "did": f"77:{number}"} for number, line in enumerate(lines)]
    copies = folder.parent / "copies.jsonl"
    copies.write_text("".join(json.dumps(line) + "\n" for line in again))
    (folder.parent / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    made.delete([json.loads(line)["did"] for line in lines[1:2]])
    made.add(copies)
    return made


def test_a_node_counts_the_items_below_it(index):
    node = index.tree(())
    assert node.items == index.info().items == sum(child.items for child in node.children)
    assert sum(child.share for child in node.children) == pytest.approx(1)
    assert 0 <= node.entropy <= 2
    first = node.children[0]
    below = index.tree((first.code,), most_children=1)
    assert below.items == first.items
    assert below.truncated is (below.num_children > 1)


def test_a_whole_id_lists_its_items_and_no_codes(index):
    (hit,) = index.search("a red square", k=1)
    node = index.tree(hit.codes)
    assert node.children == []
    assert hit.id in {item.id for item in node.examples}
    with pytest.raises(UsageError, match="the IDs of this index have"):
        index.tree((*hit.codes, 1))
    with pytest.raises(UnknownPrefix, match="begins with 99"):
        index.tree([99])


def test_copies_in_another_segment_collide_and_deleted_items_do_not(index):
    found = index.near_duplicates(0, limit=1000)
    assert found.total == len(found.groups)
    assert found.items == sum(group.items for group in found.groups)
    codes = {tuple(group.codes) for group in found.groups}
    for number, is_shared in ((0, True), (1, False), (2, True)):  # the original of the second was deleted
        kept = index.snapshot.id_at(index.snapshot.locate(f"77:{number}"))
        own = tuple(kept[: index.model.quantizer.num_levels].tolist())
        assert index.tree(own).items >= 1 + is_shared
        assert (own in codes) is (index.tree(own).items > 1)
    near = index.near_duplicates(1)
    assert near.items >= found.items
    assert index.near_duplicates(1, offset=1, limit=2).groups == near.groups[1:3]
    for levels in (-1, 99):
        with pytest.raises(UsageError, match="cannot be shared"):
            index.near_duplicates(levels)


@pytest.mark.parametrize("router", ["geometry", "generator"])
def test_the_first_hit_is_explained_as_it_was_found(index, trained, capsys, router):
    (hit,) = index.search("a red square", k=1, config=dataclasses.replace(index.settings, router=router))
    words = ("explain", index.folder, "a red square", "--item", hit.id, "--model", trained.model)
    words = (*words, "--router", router)
    printed = run_json(capsys, *words)
    assert printed["rank"] == 1
    assert printed["score"] == pytest.approx(hit.score, abs=1e-5)
    assert tuple(printed["codes"]) == hit.codes == tuple(level["code"] for level in printed["levels"])
    whole = index.search("a red square", k=1002, modality=hit.modality, config=SearchConfig())
    (generated,) = [one.log_probabilities for one in whole if one.id == hit.id]
    assert [level["name"] for level in printed["levels"][:2]] == ["modality", "level 1"]
    for level in printed["levels"]:
        assert 1 <= level["rank"] <= level["num_siblings"]
        probabilities = [one["probability"] for one in (level, *level["siblings"])]
        if router == "geometry":
            assert {level["log_probability"], *probabilities} == {None}
        else:
            assert level["log_probability"] == pytest.approx(generated[level["level"]], abs=1e-4)
            assert probabilities[1] == max(probabilities)
        assert level["items"] == index.tree(hit.codes[: level["level"] + 1]).items
    table, _ = run(capsys, *words)
    assert "Found: rank 1 of" in table
    assert ("%" in table) is (router == "generator")


def test_an_item_of_another_modality_is_not_allowed(index):
    hits = index.search("a red square", modality="image", k=1)
    found = index.explain(hits[0].id, "a red square", modality=Modality.TEXT)
    assert not found.is_allowed
    assert found.rank is None
