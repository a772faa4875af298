"""A look inside the codes over HTTP says what it says in Python."""

from __future__ import annotations

import pytest

from genius_search.records import Modality

from .test_guard import is_problem


@pytest.fixture(scope="module")
def index(client):
    return client.app.state.service.engine.indexes["things"]


def test_the_tree_is_walked_from_all_items_to_one(client, index):
    prefix: list[int] = []
    for level in range(index.model.quantizer.num_levels + 1):
        answer = client.get("/v1/codes", params={"prefix": ",".join(map(str, prefix))}).json()
        node = index.tree(prefix)
        assert (answer["prefix"], answer["level"], answer["items"]) == (prefix, level, node.items)
        assert (answer["num_children"], answer["truncated"]) == (node.num_children, node.truncated)
        assert [child["code"] for child in answer["children"]] == [child.code for child in node.children]
        assert answer["entropy"] == (pytest.approx(node.entropy) if node.num_children else None)
        if answer["children"]:
            assert sum(child["items"] for child in answer["children"]) == answer["items"]
            prefix.append(answer["children"][-1]["code"])
    assert answer["children"] == []
    assert answer["items"] == len(answer["examples"]) >= 1


def test_examples_say_where_their_pictures_are(client):
    root = client.get("/v1/codes").json()
    pictures = [one["image"] for one in root["examples"] if one["modality"] == "image"]
    assert pictures
    assert client.get(pictures[0]).headers["content-type"] == "image/jpeg"


@pytest.mark.parametrize(
    ("prefix", "status"),
    [
        ("x", 422),
        ("1,,2", 422),
        ("-1", 422),
        ("1.5", 422),
        ("²", 422),
        ("99999", 404),
        ("0," * 64 + "0", 422),
    ],
)
def test_a_prefix_that_is_none_is_refused(client, prefix, status):
    is_problem(client.get("/v1/codes", params={"prefix": prefix}), status)


def test_items_that_share_codes_are_listed_in_groups(client, index):
    levels = index.model.quantizer.num_levels - 1
    answer = client.get("/v1/codes/duplicates", params={"levels": levels, "limit": 1}).json()
    page = index.near_duplicates(levels, limit=1)
    assert (answer["total"], answer["items"], len(answer["groups"])) == (page.total, page.items, 1)
    group = answer["groups"][0]
    assert (group["codes"], group["items"]) == (list(page.groups[0].codes), page.groups[0].items)
    assert len(group["examples"]) == group["items"]
    assert client.get("/v1/codes/collisions").json()["total"] == index.collisions().total
    for query in ({"levels": 64}, {"levels": -1}, {"limit": 0}, {"offset": -1}, {"limit": 101}):
        is_problem(client.get("/v1/codes/duplicates", params=query), 422)


def test_a_hit_is_explained_code_by_code(client, index):
    query = {"text": "a red kite", "modality": "text", "k": 3}
    hit = client.post("/v1/search", json=query).json()["hits"][0]
    answer = client.post("/v1/explain", json={**query, "id": hit["id"]}).json()
    expected = index.explain(hit["id"], "a red kite", modality=Modality.TEXT, k=3)
    assert answer["codes"] == hit["codes"]
    assert (answer["item"]["id"], answer["rank"], answer["is_allowed"]) == (hit["id"], 1, True)
    assert [level["probability"] for level in answer["levels"]] == pytest.approx(
        [level.probability for level in expected.levels], abs=1e-5
    )
    assert answer["levels"][0]["name"] == "modality"
    assert all(level["items"] >= 1 for level in answer["levels"])
    near = {item["id"] for item in answer["neighbours"]}
    assert near
    assert hit["id"] not in near


def test_an_item_that_conditions_exclude_is_not_allowed(client):
    answer = client.post("/v1/explain", json={"text": "a kite", "modality": "image", "id": "1:0"}).json()
    assert (answer["is_allowed"], answer["rank"]) == (False, None)
    is_problem(client.post("/v1/explain", json={"text": "a kite", "id": "nobody"}), 404)
    is_problem(client.post("/v1/explain", json={"text": "a kite"}), 422)
