from __future__ import annotations

import io
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.serve.schemas import SearchResult

from .conftest import run, run_json

WORDS = "remember the milk, " * 30


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Three photos, one with a caption; a text; a broken photo."""
    folder = tmp_path_factory.mktemp("photos")
    for name, colour in [("red [final].png", "red"), ("green.png", "green"), ("blue.png", "blue")]:
        Image.new("RGB", (32, 32), colour).save(folder / name)
    (folder / "red [final].txt").write_text("a [bold]red[/] square [/nonsense]")
    (folder / "milk.txt").write_text(WORDS)
    (folder / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    return folder


@pytest.fixture(scope="module")
def index(trained, photos, tmp_path_factory) -> Path:
    """An index that no test changes."""
    folder = tmp_path_factory.mktemp("cli") / "photos.index"
    assert (
        main(["index", "create", str(folder), "--model", str(trained.model), "--pool", str(photos)])
        == 0
    )
    return folder


def test_create_reports_left_out_files_on_stderr_and_only_data_on_stdout(
    trained, photos, tmp_path, capsys
):
    words = ("index", "create", tmp_path / "index", "--model", trained.model, "--pool", photos)
    out, err = run(capsys, *words, "--json")
    assert (
        json.loads(out).items()
        >= {
            "added": 4,
            "replaced": 0,
            "unchanged": 0,
            "left_out": [
                {
                    "file": str(photos / "torn.png"),
                    "reason": json.loads(out)["left_out"][0]["reason"],
                }
            ],
        }.items()
    )
    assert f"left out: {photos / 'torn.png'}: " in err
    assert "4 items added" in err


def test_the_next_command_can_be_pasted(trained, photos, tmp_path, capsys):
    folder = tmp_path / "it's mine.index"
    out, err = run(capsys, "index", "create", folder, "--model", trained.model, "--pool", photos)
    assert out == ""
    words = shlex.split(err.splitlines()[-1].removeprefix("next: "))
    assert words[:3] == ["genius", "search", str(folder)]
    assert main(words[1:]) == 0


def test_info_describes_the_index(index, trained, capsys):
    found = run_json(capsys, "index", "info", index)
    assert found["items"] == 4
    assert found["by_modality"] == {"image": 2, "image-text": 1, "text": 1}
    assert found["model"] == str(trained.model.resolve())
    assert (found["segments"], found["deleted"]) == (1, 0)
    out, err = run(capsys, "index", "info", index)
    assert "distinct ids" in out
    assert err == ""


def test_search_prints_names_and_texts_unchanged_with_brackets(index, photos, capsys):
    words = ("search", index, "a red square", "--modality", "image-text")
    (hit,) = run_json(capsys, *words)["hits"]
    assert (hit["id"], hit["image"]) == ("red [final].png", str(photos / "red [final].png"))
    out, err = run(capsys, *words)
    assert err == ""
    assert "red [final].png" in out
    assert "a [bold]red[/] square [/nonsense]" in out


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self):
        return True


def test_lines_are_cut_at_the_width_of_a_terminal_and_texts_in_a_pipe(
    index, photos, capsys, monkeypatch
):
    assert WORDS.strip() in run(capsys, "search", index, "red", "--full")[0]
    out, _ = run(capsys, "search", index, "red")
    assert f"{WORDS[:240]}…" in out
    assert str(photos / "red [final].png") in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    main(["search", str(index), "red"])
    [line] = [line for line in sys.stdout.getvalue().splitlines() if "milk.txt" in line]
    assert len(line) == 58
    assert line.endswith("…")


def test_json_is_that_of_the_service(index, capsys):
    found = run_json(capsys, "search", index, "red", "-k", "2")
    assert set(SearchResult.model_fields) - set(found) == {"request_id", "took_ms"}
    SearchResult.model_validate({**found, "request_id": "", "took_ms": {"queue": 0, "search": 0}})


def test_nothing_found_is_exit_status_3(index, tmp_path, capsys):
    words = ("search", index, "a kite", "--where", "name=nothing")
    assert run(capsys, *words, status=3) == ("", "nothing found\n")
    assert run_json(capsys, *words, status=3)["hits"] == []


def test_every_command_of_an_index_takes_a_moved_model(trained, photos, tmp_path, capsys):
    shutil.copytree(trained.model, tmp_path / "here")
    run(capsys, "index", "create", tmp_path / "i", "--model", tmp_path / "here", "--pool", photos)
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("a kite")
    for words in (
        ("search", tmp_path / "i", "x"),
        ("index", "add", tmp_path / "i", tmp_path / "more"),
    ):
        assert "--model" in run(capsys, *words, status=4)[1]
        run(capsys, *words, "--model", tmp_path / "there")
    run(capsys, "index", "delete", tmp_path / "i", "milk.txt")
    for words in (("info",), ("info", "--check")):  # these need no model
        run(capsys, "index", words[0], tmp_path / "i", *words[1:])


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("search", "{index}", "  "), 2),
        (("search", "{index}", "--explain", "milk.txt"), 2),
        (("search", "{index}", "x", "--explain", "milk.txt", "--files-only"), 2),
        (("search", "{index}", "x", "-k", "0"), 2),
        (("search", "a kite", "{index}"), 4),
        (("search", "{index}/..", "x"), 2),
        (("index", "add", "{index}", ""), 2),
        (("search", "{index}", "x", "--where", "price<"), 2),
        (("search", "{index}", "x", "--config", "{new}"), 2),
        (("index", "delete", "{index}"), 2),
        (("index", "delete", "{index}", "--ids-from", "{new}"), 6),
        (("index", "info", "{model}", "--check"), 4),
        (("search", "{index}", "--image", "{photos}/torn.png"), 6),
        (("index", "create", "{index}", "--model", "{model}", "--pool", "{photos}"), 2),
        (("index", "create", "{new}", "--model", "{photos}", "--pool", "{photos}"), 4),
        (("index", "create", "{new}", "--model", "{model}", "--pool", "{new}"), 6),
        (("index", "info", "{new}"), 4),
        (("evaluate", "{photos}", "--model", "{model}"), 6),
        (("fit", "{photos}", "--encoder", "small", "--out", "{new}"), 6),
        (("fit", "{data}", "--encoder", "clip:nobody/has-this", "--out", "{new}"), 5),
        (("fit", "{data}", "--encoder", "small:{photos}", "--out", "{new}"), 4),
        (("data", "check", "{photos}"), 6),
    ],
)
def test_errors_are_one_line_on_stderr_and_an_exit_status(
    trained, index, photos, tmp_path, capsys, words, status
):
    places = {
        "index": index, "photos": photos, "model": trained.model, "data": trained.data, "new": tmp_path / "new"
    }  # fmt: skip
    out, err = run(capsys, *(word.format(**places) for word in words), status=status)
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("reading ")]
    assert [line.startswith("genius: ") for line in lines] == [True]
