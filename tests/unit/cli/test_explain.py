"""Items that share codes, and `genius search --explain`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from genius_search.config import PAPER_SEARCH
from genius_search.data.mbeir import MBeir
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.records import Modality

from .conftest import run, run_json


@pytest.fixture(scope="module")
def index(trained, tmp_path_factory) -> Index:
    """An index in two segments with some items deleted; no test changes it."""
    pools = MBeir(trained.data)
    folder = tmp_path_factory.mktemp("codes") / "index"
    made = Index.create(folder, pools.global_pool("test")[0], model=Genius.open(trained.model))
    lines = pools.global_pool("test")[0].read_text().splitlines()[:3]
    again = [{**json.loads(line), "did": f"77:{number}"} for number, line in enumerate(lines)]
    copies = folder.parent / "copies.jsonl"
    copies.write_text("".join(json.dumps(line) + "\n" for line in again))
    (folder.parent / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    made.delete([json.loads(line)["did"] for line in lines[1:2]])
    made.add(copies)
    return made


@pytest.mark.parametrize("router", ["geometry", "generator"])
def test_the_first_hit_is_explained_as_it_was_found(index, trained, capsys, router):
    (hit,) = index.search(
        "a red square", k=1, config=dataclasses.replace(index.settings, router=router)
    )
    words = ("search", index.folder, "a red square", "--explain", hit.id, "--model", trained.model)
    words = (*words, "--router", router)
    printed = run_json(capsys, *words)
    assert printed["rank"] == 1
    assert printed["score"] == pytest.approx(hit.score, abs=1e-5)
    assert (
        tuple(printed["codes"]) == hit.codes == tuple(level["code"] for level in printed["levels"])
    )
    whole = index.search("a red square", k=1002, modality=hit.modality, config=PAPER_SEARCH)
    (generated,) = [one.log_probabilities for one in whole if one.id == hit.id]
    for level in printed["levels"]:
        assert 1 <= level["rank"] <= level["num_siblings"]
        probabilities = [one["probability"] for one in (level, *level["siblings"])]
        if router == "geometry":
            assert {level["log_probability"], *probabilities} == {None}
        else:
            assert level["log_probability"] == pytest.approx(generated[level["level"]], abs=1e-4)
            assert probabilities[1] == max(probabilities)
        assert level["items"] >= 1
    table, _ = run(capsys, *words)
    assert "Found: rank 1 of" in table
    assert ("%" in table) is (router == "generator")


def test_an_item_of_another_modality_is_not_allowed(index):
    hits = index.search("a red square", modality="image", k=1)
    found = index.explain(hits[0].id, "a red square", modality=Modality.TEXT)
    assert not found.is_allowed
    assert found.rank is None
