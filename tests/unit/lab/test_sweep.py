"""The sweep's commands are replaced by a small program; what `genius` does is tested elsewhere."""

import json
import os
import shutil
from pathlib import Path

import pytest

from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData
from genius_search.lab import sweep as module
from genius_search.lab.sweep import Recipe, Row, jobs_of, read_rows, records_of, sweep
from genius_search.progress import Silent

FAKE = """
import os, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
with (out / "times.txt").open("a") as file:
    file.write(words[0] + " ")
if words[0] == "fit":
    (out / "quantizer").mkdir(exist_ok=True)
    if not (out / "quantizer" / "maker").exists():
        (out / "quantizer" / "maker").write_text("/".join(out.parts[-3:-1]))
    (out / "encoder").mkdir(exist_ok=True)
    (out / "features" / "queries").mkdir(parents=True, exist_ok=True)
    made = out / "encoder" / "weights"
    if not made.exists():
        made.write_text(str(out))
if "--fail" in words:
    print("genius: it cannot be done", file=sys.stderr)
    sys.exit(6)
if "--kill" in words:
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    monkeypatch.setattr(module, "START", FAKE)


def rows(*flags: str) -> Recipe:
    return Recipe(
        row=tuple(
            Row(name=f"row-{number}", table="systems", fit="", evaluate=flag)
            for number, flag in enumerate(flags)
        )
    )


def make(recipe: Recipe, root: Path, *, machine: str = "a machine", **settings):
    return sweep(jobs_of(recipe), root / "data", root / "out", machine=machine, progress=Silent(), **settings)


def times(root: Path, place: str) -> str:
    return (root / "out" / place / "times.txt").read_text()


def test_a_finished_row_is_not_made_again_and_says_how_it_was_made(tmp_path):
    make(rows(""), tmp_path)
    ((folder, row),) = read_rows(tmp_path / "out")
    assert folder == tmp_path / "out" / "row-0" / "seed-0"
    assert (row.state, row.error, row.machine, row.seed) == ("done", "", "a machine", 0)
    assert row.commands[0].startswith("genius fit data --encoder small --out row-0/seed-0/model")
    make(rows(""), tmp_path, machine="another")
    assert times(tmp_path, "row-0/seed-0/model") == "fit "
    assert read_rows(tmp_path / "out")[0][1].machine == "a machine"


def test_a_row_that_fails_is_recorded_stops_no_other_and_is_tried_again(tmp_path):
    made = make(rows("--fail", ""), tmp_path)
    assert [(row.state, row.error) for _, row in made] == [
        ("failed", "genius: it cannot be done"),
        ("done", ""),
    ]
    make(rows("--fail", ""), tmp_path)
    assert times(tmp_path, "row-0/seed-0/evaluation") == "evaluate evaluate "
    assert times(tmp_path, "row-1/seed-0/evaluation") == "evaluate "


def test_a_frame_around_an_error_is_not_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "START", "print('╭── no ──╮\\n│ no such flag │\\n╰────────╯'); raise SystemExit(2)"
    )
    ((_, row),) = make(rows(""), tmp_path)
    assert row.error == "no such flag"


def test_a_command_that_is_killed_fails_its_row_alone(tmp_path):
    (_, killed), (_, other) = make(rows("--kill", ""), tmp_path)
    assert killed.error == "exit status -9"
    assert other.state == "done"


def test_a_sweep_that_was_killed_within_a_row_makes_it_again(tmp_path):
    make(rows("", ""), tmp_path)
    (tmp_path / "out" / "row-1" / "seed-0" / "row.json").unlink()  # it is written last
    make(rows("", ""), tmp_path)
    assert times(tmp_path, "row-0/seed-0/model") == "fit "
    assert times(tmp_path, "row-1/seed-0/model") == "fit fit "


def test_a_row_whose_flags_changed_is_made_again(tmp_path):
    make(rows(""), tmp_path)
    make(rows("--beam 3"), tmp_path)
    assert times(tmp_path, "row-0/seed-0/evaluation") == "evaluate evaluate "


def test_records_are_those_of_a_data_set_not_of_its_pictures(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained.data, copy, ignore=shutil.ignore_patterns("mbeir_images"))
    assert records_of(MBeir(copy)) == records_of(MBeir(trained.data))
    (copy / "query" / ".DS_Store").touch()
    assert records_of(MBeir(copy)) == records_of(MBeir(trained.data))
    first = min((copy / "query" / "test").iterdir())
    first.write_bytes(first.read_bytes() + b"\n")
    assert records_of(MBeir(copy)) != records_of(MBeir(trained.data))


def test_rows_share_the_encoder_of_the_first_without_a_copy(tmp_path):
    make(rows("", ""), tmp_path)
    first, second = (
        tmp_path / "out" / f"row-{number}" / "seed-0" / "model" / "encoder" / "weights" for number in (0, 1)
    )
    assert second.read_text() == str(first.parents[1])
    assert first.samefile(second)


def test_a_model_lends_its_encoder_and_no_locks(tmp_path):
    lender = tmp_path / "model"
    (lender / "encoder").mkdir(parents=True)
    (lender / "encoder" / "weights").write_text("lent")
    (lender / "features").mkdir()
    (lender / "features" / ".queries.lock").touch()
    make(rows(""), tmp_path, encoder_of=lender)
    made = tmp_path / "out" / "row-0" / "seed-0" / "model"
    assert (made / "encoder" / "weights").read_text() == "lent"
    assert not (made / "features" / ".queries.lock").exists()


def test_rows_that_differ_in_the_generator_take_each_others_quantizer(tmp_path):
    flags = {
        "first": "--quantizer.levels 3",
        "wider": "--quantizer.levels 3 --generator.width 64 --generator.layers 2",
        "deeper": "--quantizer.levels 4",
    }
    recipe = Recipe(
        row=tuple(Row(name=name, table="systems", seeds=(0, 1), fit=fit) for name, fit in flags.items())
    )
    make(recipe, tmp_path)

    def maker(place: str) -> str:
        return (tmp_path / "out" / place / "model" / "quantizer" / "maker").read_text()

    assert maker("wider/seed-0") == "first/seed-0"
    assert maker("wider/seed-1") == "first/seed-1"
    assert maker("deeper/seed-0") == "deeper/seed-0"


def test_rows_come_in_the_order_of_the_recipe_also_when_that_changes(tmp_path):
    recipe = rows("", "--beam 3", "--beam 5")
    for those in (recipe, Recipe(row=recipe.row[::-1])):
        make(those, tmp_path)
        assert [row.name for _, row in read_rows(tmp_path / "out")] == [row.name for row in those.row]
    assert times(tmp_path, "row-1/seed-0/evaluation") == "evaluate "


def test_a_damaged_row_is_named(tmp_path):
    make(rows(""), tmp_path)
    path = tmp_path / "out" / "row-0" / "seed-0" / "row.json"
    path.write_text(json.dumps({"name": 3}))
    with pytest.raises(BadData, match=r"row\.json"):
        read_rows(tmp_path / "out")


SLOW = """
import os, pathlib, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
(out.parent / "pid").write_text(str(os.getpid()))
os.kill(os.getppid(), 15)
time.sleep(60)
"""


def test_a_sweep_that_is_terminated_takes_its_commands_along(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "START", SLOW)
    with pytest.raises(KeyboardInterrupt):
        make(rows("", ""), tmp_path)
    pid = int((tmp_path / "out" / "row-0" / "seed-0" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not read_rows(tmp_path / "out")
