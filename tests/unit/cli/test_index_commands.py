"""Commands that delete items and maintain an index."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from genius_search.cli import main
from genius_search.index.writer import open_writer

from .conftest import run, run_json


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Path:
    """An index of eight texts with fields, that no test changes."""
    folder = tmp_path_factory.mktemp("cli")
    rows = [
        {
            "did": f"1:{number + 1}",
            "modality": "text",
            "txt": f"a {colour} {thing}",
            "img_path": None,
            "src_content": json.dumps({"price": 10 * number, "colour": colour}),
        }
        for number, (colour, thing) in enumerate(
            (colour, thing)
            for colour in ("red", "blue")
            for thing in ("kite", "boat", "leather bag", "clock")
        )
    ]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "index",
        "create",
        folder / "index",
        "--model",
        trained.model,
        "--pool",
        folder / "pool.jsonl",
    )
    kinds = ("--embeddings", "fused", "--embedding-bits", "8")
    assert main([str(word) for word in (*words, *kinds)]) == 0
    return folder / "index"


@pytest.fixture
def index(whole, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "index"))


def found_by(capsys, index: Path, *words: str) -> set[str]:
    status = main(["search", str(index), "a kite", "-k", "50", "--json", *words])
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert status == (0 if hits else 3)
    return {hit["id"] for hit in hits}


ALL = {f"1:{number}" for number in range(1, 9)}


def test_delete_takes_ids_and_reports_unknown_ones(index, capsys):
    out, err = run(capsys, "index", "delete", index, "1:1", "1:99", "1:3")
    assert out == ""
    assert err == "not in the index: 1:99\n2 items deleted\n"
    assert found_by(capsys, index) == ALL - {"1:1", "1:3"}
    assert run_json(capsys, "index", "delete", index, "1:1", "1:2") == {
        "deleted": 1,
        "missing": ["1:1"],
    }


def test_delete_reads_ids_from_a_file_or_from_stdin(index, tmp_path, capsys, monkeypatch):
    (tmp_path / "ids").write_text("1:1\n\n1:2\r\nx\n", newline="")
    found = run_json(capsys, "index", "delete", index, "1:8", "--ids-from", tmp_path / "ids")
    assert found == {"deleted": 3, "missing": ["x"]}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1:3\n1:4")))
    assert run_json(capsys, "index", "delete", index, "--ids-from", "-") == {
        "deleted": 2,
        "missing": [],
    }
    assert found_by(capsys, index) == {"1:5", "1:6", "1:7"}
    assert run(capsys, "index", "delete", index, "--compact") == ("", "0 items deleted\n")
    assert run_json(capsys, "index", "info", index)["deleted"] == 0


def test_verify_reports_what_it_read(index, capsys):
    run(capsys, "index", "delete", index, "1:1")
    found = run_json(capsys, "index", "info", index, "--check")
    assert found == {"segments": 1, "items": 7, "deleted": 1}


def test_search_finds_only_items_that_meet_all_conditions(whole, capsys):
    flags = ("--where", "price>=20", "--where", "colour=red", "--match", '"red leather"')
    assert found_by(capsys, whole, *flags) == {"1:3"}
    assert found_by(capsys, whole, "--where", "price>1000") == set()


def test_search_can_stop_early_and_takes_other_settings_from_a_file(whole, tmp_path, capsys):
    file = tmp_path / "search.toml"
    file.write_text("candidates = 8")
    stopped = ("--rerank", "codes", "--router", "generator", "--config", file)
    hits = run_json(capsys, "search", whole, "a red kite", *stopped)["hits"]
    assert {hit["id"] for hit in hits} == ALL
    assert all(len(hit["log_probabilities"]) < len(hit["codes"]) for hit in hits)
    file.write_text('candidates = 8\ndensity_weight = 0.0\nscores = "level"\n')
    plain = run_json(capsys, "search", whole, "a red kite", *stopped)["hits"]
    given = {hit["id"]: hit["score"] for hit in hits}
    assert all(hit["score"] >= given[hit["id"]] for hit in plain)
    assert any(hit["score"] > given[hit["id"]] for hit in plain)
    file.write_text("generator_wait = 0.5")
    assert "generator_wait" in run(capsys, "search", whole, "a", "--config", file, status=2)[1]


def test_a_beam_width_is_for_searches_of_the_generator(whole, capsys):
    generated = run_json(capsys, "search", whole, "a kite", "--router", "generator", "--beam", "3")
    assert generated["settings"]["router"] == "generator"
    assert "--router generator" in run(capsys, "search", whole, "a", "--beam", "3", status=2)[1]


def test_a_change_during_another_waits_or_is_refused(index, capsys):
    with open_writer(index):
        for words in (("delete", index, "1:1"), ("delete", index, "1:1", "--compact")):
            _, err = run(capsys, "index", *words, "--wait", "0.05", status=2)
            assert "being changed by another process" in err
        assert found_by(capsys, index) == ALL


def test_settings_that_do_not_go_together_are_refused(index, capsys):
    flags = ("--router", "geometry", "--rerank", "none")
    _, err = run(capsys, "search", index, "a star", *flags, status=2)
    assert "does without the generator" in err
