"""The tools of agents, called by the client of the Model Context Protocol's own SDK."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest
from mcp import Client

from genius_search import Index, NewItem
from genius_search.serve.mcp import make_server
from tests.unit.serve.conftest import make_index, picture


@pytest.fixture(scope="module")
def index(model, tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("for agents"), model)


def call(server, tool, **arguments):
    """Call one tool; return what it answers, and whether that is an error."""

    async def run():
        async with Client(server) as client:
            return await client.call_tool(tool, arguments)

    answer = asyncio.run(run())
    return answer.content, answer.is_error


def ids(answer):
    content, is_error = answer
    assert not is_error, content
    return [json.loads(one.text)["id"] for one in content]


def test_an_agent_finds_what_a_search_finds(index, tmp_path):
    server = make_server({"things": index})
    assert ids(call(server, "search", text="a red kite", k=3)) == [
        hit.id for hit in index.search("a red kite", k=3)
    ]
    assert ids(call(server, "search", where=["price<2"], modality="text")) == ["1:0", "1:1"]
    assert sorted(ids(call(server, "search", match="kite -red"))) == ["1:3", "1:6"]
    (tmp_path / "query.png").write_bytes(picture("green"))
    wanted = [hit.id for hit in index.search(image=tmp_path / "query.png", k=2)]
    data = base64.b64encode(picture("green")).decode()
    for image in (str(tmp_path / "query.png"), f"data:image/png;base64,{data}"):
        assert ids(call(server, "search", image=image, k=2)) == wanted
    assert "1:4" in ids(call(server, "similar", id="1:4", k=2))


def test_hits_are_sorted_grouped_and_counted(index):
    server = make_server({"things": index})
    assert ids(call(server, "search", where=["price<3"], order_by="-price")) == [
        "1:2",
        "1:1",
        "1:0",
    ]
    hits, _ = call(server, "search", group_by="colour", modality="text")
    colours = [json.loads(hit.text) for hit in hits]
    assert sum(hit["more_in_group"] + 1 for hit in colours) == index.count(modality="text")
    [counts], _ = call(server, "count", where=["price<3"], facets=["colour"])
    facets = index.search(where="price<3", facets="colour").facets["colour"]
    assert json.loads(counts.text) == {"items": 3, "facets": {"colour": [[*v] for v in facets]}}


def test_answers_are_bounded(model, tmp_path):
    index = make_index(tmp_path, model)
    fields = {f"field {number}": "x" * 1000 for number in range(30)}
    index.add([NewItem("long", "word " * 4_000, fields=fields)])
    server = make_server({"things": index})
    [answer], _ = call(server, "search", match="word")
    hit = json.loads(answer.text)
    assert (len(hit["text"]), len(hit["fields"]), hit["more_fields"]) == (1500, 20, 10)
    assert hit["fields"]["field 0"] == "x" * 300 + "…"
    pages = [json.loads(call(server, "read_item", id="long", page=n)[0][0].text) for n in (1, 2, 3)]
    assert "".join(page["text"] for page in pages) == index.get("long").text
    assert (pages[0]["page"], pages[0]["pages"], len(pages[0]["fields"])) == (1, 3, 20)


def test_an_answer_of_many_hits_with_long_texts_and_fields_is_bounded(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(100, 8))
    fields = {"x" * 9_000: 1} | {f"field {number}": "x" * 1000 for number in range(30)}
    index = Index.from_vectors(
        tmp_path / "i.index", vectors, texts=["word " * 900] * 100, fields=[fields] * 100
    )
    for count in (10, 100):
        answers, _ = call(make_server({"things": index}), "search", match="word", k=count)
        assert len(answers) == count
        assert 10_000 < sum(len(answer.text) for answer in answers) < 120_000


def test_an_item_is_read_with_its_picture(index):
    server = make_server({"things": index})
    [text], _ = call(server, "read_item", id="1:1")
    assert json.loads(text.text)["fields"]["colour"] == "red"
    [facts, shown], _ = call(server, "read_item", id="2:0")
    assert json.loads(facts.text)["modality"] == "image"
    assert shown.mime_type == "image/jpeg"


def test_an_item_is_named_by_a_text_or_a_whole_number(model, tmp_path):
    server = make_server({"things": make_index(tmp_path, model)}, allow_add=True)
    assert not call(server, "add", id=7, text="a drum")[1]
    assert ids(call(server, "read_item", id=7)) == ids(call(server, "read_item", id="7")) == ["7"]
    content, is_error = call(server, "read_item", id=7.5)
    assert is_error
    assert "expected a text or a whole number" in content[0].text


def test_a_picture_with_other_contents_is_not_shown(model, tmp_path):
    index = make_index(tmp_path, model)
    (tmp_path / "pool" / "red.png").write_bytes(picture("blue"))
    content, _ = call(make_server({"things": index}), "read_item", id="2:0")
    assert len(content) == 1


def test_mistakes_are_explained(index):
    server = make_server({"things": index, "others": index})
    for tool, arguments, reason in (
        ("search", {"text": "a kite"}, "expected one of things, others"),
        ("search", {"text": "a kite", "index": "none"}, "'none'"),
        ("search", {"index": "things"}, "a query needs"),
        (
            "search",
            {"index": "things", "image": "data:image/png;base64,a"},
            "not encoded in base64",
        ),
        ("search", {"index": "things", "image": "/nowhere.png"}, "/nowhere.png"),
        ("read_item", {"index": "things", "id": "none"}, "'none'"),
    ):
        [answer], is_error = call(server, tool, **arguments)
        assert is_error
        assert reason in answer.text


def test_items_are_added_only_if_that_is_allowed(model, tmp_path):
    index = make_index(tmp_path, model)
    _, is_error = call(make_server({"things": index}), "add", id="new", text="a lamp")
    assert (is_error, len(index)) == (True, 12)
    server = make_server({"things": index}, allow_add=True)
    [answer], _ = call(server, "add", id="new", text="a lamp", fields={"price": 3})
    assert answer.text.strip() == "added"
    assert index.get("new").fields == {"price": 3}
    [answer], _ = call(server, "update", id="new", fields={"price": None, "size": 4})
    assert (answer.text, index.get("new").fields) == ("updated", {"size": 4})
    assert call(server, "update", id="nobody", text="x")[1]
