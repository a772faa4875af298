"""Commands that build, inspect and search a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from genius_search.cli import main
from genius_search.cli.serve import Serve, _open_indexes
from genius_search.cluster.folder import open_index
from genius_search.serve.app import create_app
from genius_search.serve.engine import Engine, EngineSettings

from .conftest import run, run_json


@pytest.fixture(scope="module")
def built(trained, tmp_path_factory) -> Path:
    """A cluster of twelve texts in two shards."""
    folder = tmp_path_factory.mktemp("cluster")
    rows = [{"id": f"item {number}", "text": f"text {number}", "price": number} for number in range(12)]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["cluster", "build", folder / "pool.jsonl", "--model", trained.model, "--out", folder / "X"]
    assert main([str(word) for word in [*words, "--shards", "2", "--rows", "5"]]) == 0
    return folder / "X"


def test_info_and_verify(built, capsys):
    found = run_json(capsys, "cluster", "info", built)
    assert (found["items"], found["partitions"], len(found["shards"])) == (12, 3, 2)
    out, _ = run(capsys, "cluster", "info", built)
    assert "000001" in out
    assert run_json(capsys, "cluster", "verify", built)["items"] == 12


def test_search_and_explain_take_a_cluster(built, capsys):
    hits = run_json(capsys, "search", built, "text 3", "--where", "price>2", "-k", "3")["hits"]
    assert len(hits) == 3
    assert all(hit["fields"]["price"] > 2 for hit in hits)
    run(capsys, "explain", built, "text 3", "--item", hits[0]["id"])


def test_a_cluster_is_served_beside_indexes(built):
    indexes = _open_indexes(Serve(indexes=(built,)))
    assert indexes["X"].snapshot.num_alive == 12


def test_the_service_answers_for_a_cluster(built):
    engine = Engine({"X": open_index(built)}, EngineSettings())
    with TestClient(create_app(engine), base_url="http://localhost") as client:
        found = client.post("/v1/search", json={"text": "text 3", "k": 4})
        assert found.status_code == 200, found.text
        assert len(found.json()["hits"]) == 4
        item = {"items": [{"id": "new", "text": "a new text"}]}
        refused = client.post("/v1/items", json=item)
        assert refused.status_code >= 400
        assert client.get("/v1/indexes/X").json()["items"] == 12


@pytest.mark.parametrize("words", [("index", "info"), ("index", "delete"), ("index", "compact")])
def test_commands_for_one_index_name_those_for_a_cluster(built, capsys, words):
    extra = ("x",) if words[1] == "delete" else ()
    _, err = run(capsys, *words, built, *extra, status=4)
    assert "genius cluster" in err


def test_give_a_model_or_an_encoder(built, tmp_path, capsys):
    _, err = run(capsys, "cluster", "build", built.parent / "pool.jsonl", "--out", tmp_path / "Y", status=2)
    assert "model" in err
