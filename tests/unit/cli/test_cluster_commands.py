"""Commands that build, inspect and search a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from genius_search.cli import main
from genius_search.cluster.folder import open_index
from genius_search.serve.app import create_app
from genius_search.serve.service import Service

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
    found = run_json(capsys, "index", "info", built)
    assert (found["items"], found["partitions"], len(found["shards"])) == (12, 3, 2)
    out, _ = run(capsys, "index", "info", built)
    assert "000001" in out
    assert run_json(capsys, "index", "verify", built)["items"] == 12


def test_search_and_explain_take_a_cluster(built, capsys):
    hits = run_json(capsys, "search", built, "text 3", "--where", "price>2", "-k", "3")["hits"]
    assert len(hits) == 3
    assert all(hit["fields"]["price"] > 2 for hit in hits)
    run(capsys, "explain", built, "text 3", "--item", hits[0]["id"])


def test_the_service_answers_for_a_cluster_and_changes_it(built, tmp_path):
    service = Service({"X": open_index(shutil.copytree(built, tmp_path / "X"))})
    with TestClient(create_app(service), base_url="http://localhost") as client:
        found = client.post("/v1/search", json={"text": "text 3", "k": 4})
        assert found.status_code == 200, found.text
        assert len(found.json()["hits"]) == 4
        item = {"items": [{"id": "new", "text": "a new text"}, {"id": "item 3", "text": "another"}]}
        added = client.post("/v1/items", json=item)
        assert added.status_code == 200, added.text
        assert client.get("/v1/indexes").json()["indexes"][0]["items"] == 13
        found = client.post("/v1/search", json={"text": "a new text", "k": 13})
        assert "new" in [hit["id"] for hit in found.json()["hits"]]
        assert client.delete("/v1/items", params={"id": "new"}).json()["deleted"] == 1
        assert client.get("/v1/indexes").json()["indexes"][0]["items"] == 12


def test_items_are_added_deleted_and_shards_rebalanced(built, tmp_path, capsys):
    folder = shutil.copytree(built, tmp_path / "X")
    pool = tmp_path / "more.jsonl"
    pool.write_text("".join(json.dumps({"id": f"m{n}", "text": f"more {n}"}) + "\n" for n in range(9)))
    assert run_json(capsys, "index", "add", folder, pool)["added"] == 9
    found = run_json(capsys, "index", "delete", folder, "m1", "item 2", "nothing")
    assert (found["deleted"], found["missing"]) == (2, ["nothing"])
    run(capsys, "index", "delete", folder, "nothing", status=3)
    run(capsys, "cluster", "rebalance", folder, "--shards", "3")
    _, err = run(capsys, "cluster", "rebalance", folder)
    assert "even already" in err
    run(capsys, "index", "compact", folder)
    found = run_json(capsys, "index", "info", folder)
    assert (found["items"], len(found["shards"])) == (19, 3)
    assert run_json(capsys, "index", "verify", folder)["deleted"] == 0


def test_give_a_model_or_an_encoder(built, tmp_path, capsys):
    _, err = run(capsys, "cluster", "build", built.parent / "pool.jsonl", "--out", tmp_path / "Y", status=2)
    assert "model" in err
