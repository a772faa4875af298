"""Items updated, counted, listed and deleted by conditions on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genius_search.cli import main
from genius_search.index.index import Index


@pytest.fixture
def folder(tmp_path) -> str:
    """Items a to f with the prices 0 to 5, of acme and bata in turn."""
    vectors = np.random.default_rng(0).normal(size=(6, 8))
    fields = [{"price": n, "brand": "bata" if n % 2 else "acme"} for n in range(6)]
    Index.from_vectors(tmp_path / "x.index", vectors, ids=[*"abcdef"], fields=fields)
    return str(tmp_path / "x.index")


def test_items_are_updated(folder, tmp_path, capsys):
    assert (
        main(["index", "update", folder, "a", "b", "--field", "price=9.5", "--field", "brand="])
        == 0
    )
    assert "2 items updated" in capsys.readouterr().err
    changes = tmp_path / "changes.jsonl"
    changes.write_text('{"id": "c", "text": "a kite"}\n{"id": "z", "fields": {"price": 1}}\n')
    assert main(["index", "update", folder, "--changes", str(changes), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"updated": 1, "missing": ["z"], "left_out": []}
    index = Index.open(folder)
    assert (index.get("a").fields, index.get("c").text) == ({"price": 9.5}, "a kite")
    assert main(["index", "update", folder, "z", "--text", "x"]) == 3
    assert main(["index", "update", folder, "a", "--field", "price"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


def test_items_are_counted_listed_and_deleted_by_conditions(folder, capsys):
    assert main(["index", "count", folder, "--where", "price>1 and brand=acme"]) == 0
    assert capsys.readouterr().out == "2\n"
    main(["index", "scroll", folder, "--limit", "2", "--where", "price<4"])
    *items, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert ([item["id"] for item in items], end) == (["a", "b"], {"cursor": "b"})
    main(["index", "scroll", folder, "--cursor", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["fields"] == {"price": 5, "brand": "bata"}
    assert len(lines) == 4
    assert main(["index", "delete", folder, "--where", "price<2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": 2, "missing": []}
    assert main(["index", "delete", folder, "a", "--where", "price<2"]) == 2


def test_hits_are_sorted_counted_and_grouped(folder, capsys):
    assert main(["search", folder, "--order-by=-price", "-k", "2", "--facets", "brand"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[1:3]] == ["f", "e"]
    assert lines[3:] == [["brand", "items"], ["acme", "3"], ["bata", "3"]]
    main(["search", folder, "--group-by", "brand", "--facets", "brand", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [hit["id"] for hit in result["hits"]] == ["a", "b"]
    assert result["more_in_group"] == [2, 2]
    assert result["facets"]["brand"][0] == {"value": "acme", "items": 3}
