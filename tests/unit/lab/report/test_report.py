import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from genius_search.cli import main
from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.lab.report.analysis import group_by_code, read_items
from genius_search.lab.report.evaluated import gather
from genius_search.lab.report.report import report, report_runs
from genius_search.lab.runs import Hit, Run, write_qrels, write_run
from genius_search.lab.table import Table
from genius_search.model import MODEL_FILE
from genius_search.progress import Silent

QRELS = {f"q{number}": {f"d{number}": 1} for number in range(20)}


def run(name: str, right: int) -> Run:
    """A run that is right about the first so many queries, and right at rank 2 about the others."""
    hits = {}
    for number, qid in enumerate(QRELS):
        dids = [f"d{number}", "x"] if number < right else ["x", f"d{number}"]
        hits[qid] = [Hit(dids[0], 2.0), Hit(dids[1], 1.0)]
    return Run(name, hits)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    write_qrels(tmp_path / "qrels.txt", QRELS)
    write_run(tmp_path / "good.trec", run("good", 20))
    write_run(tmp_path / "fair.trec", run("fair", 8))
    return [tmp_path / "good.trec", tmp_path / "fair.trec"]


def tables(found) -> dict[str, Table]:
    return {part.name: part for part in found.parts if isinstance(part, Table)}


def test_anybodys_runs_are_measured_and_compared(runs, tmp_path):
    found = tables(report_runs(runs, tmp_path / "qrels.txt", progress=Silent()))
    good, fair = found["runs"].cells()
    assert good[:3] == ["good", "0", "100.0"]
    assert fair[2:4] == ["40.0", "100.0"]
    low, high = found["runs"].lines[1][2].low, found["runs"].lines[1][2].high
    assert low < 40 < high
    lines = found["significance"].cells()
    assert [line[2] for line in lines] == ["R@5", "nDCG@10"]
    assert lines[0][3:7] == ["+0.0", "0", "0", "1.000"]
    assert lines[1][4:6] == ["12", "0"]
    assert lines[1][-1] == "yes"


def test_a_query_that_a_run_lacks_counts_nothing_and_is_counted(runs, tmp_path):
    half = run("half", 20)
    write_run(tmp_path / "half.trec", Run("half", dict(list(half.hits.items())[:10])))
    found = tables(report_runs([tmp_path / "half.trec"], tmp_path / "qrels.txt", progress=Silent()))
    assert found["runs"].cells()[0][:3] == ["half", "10", "50.0"]
    assert "significance" not in found


def test_runs_of_other_queries_or_of_one_name_are_refused(runs, tmp_path):
    write_run(tmp_path / "other.trec", Run("other", {"z": [Hit("d1", 1.0)]}))
    with pytest.raises(BadData, match="answers none of the 20 queries"):
        report_runs([tmp_path / "other.trec"], tmp_path / "qrels.txt", progress=Silent())
    with pytest.raises(UsageError, match="the same file name"):
        report_runs([runs[0], runs[0]], tmp_path / "qrels.txt", progress=Silent())


def test_the_command_writes_the_files_it_names(runs, tmp_path, capsys):
    out = tmp_path / "report"
    arguments = ["report", "--runs", *map(str, runs), "--qrels", str(tmp_path / "qrels.txt")]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files[0] == "report.md"
    assert all((out / file).exists() for file in files)
    assert "| good " in (out / "report.md").read_text()


def test_sources_and_runs_are_two_ways_to_ask(tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert main(["report", "here", "--runs", "a", "--qrels", "b", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("give folders to report on, or --runs together with --qrels") == 2


@pytest.fixture
def evaluated(evaluation):
    """Write an evaluation of ten queries, so many of them answered rightly at rank 1, the others never."""

    def write(folder: Path, right: int, methods: Sequence[str] = ("exact-fused", "generative")) -> Path:
        places = dict.fromkeys(methods, [1] * right + [0] * (10 - right))
        return evaluation(folder, places, beam=3, tasks=("toys_task1",))

    return write


def made_row(folder: Path, name: str, **changed) -> None:
    row = {
        "name": name, "title": name, "table": "systems", "seed": 0, "state": "done", "error": "",
        "commands": [f"genius fit {name}"], "model": "", "seconds": 1.5, "machine": "a machine",
        "date": "2026-01-01", "plan": "",
    }  # fmt: skip
    (folder / "row.json").write_text(json.dumps({**row, **changed}))


def test_evaluations_of_one_name_are_its_seeds(evaluated, tmp_path):
    places = [str(evaluated(tmp_path / f"seed-{seed}", right)) for seed, right in enumerate((10, 8))]
    found = tables(report(gather([f"ours={','.join(places)}"]), data=None, progress=Silent()))
    assert found["recall-global"].cells()[0][:3] == ["ours", "exact-fused", "90.0 ± 14.1"]
    assert found["significance"].cells()[0][:2] == ["ours: generative", "ours: exact-fused"]


def test_a_sweeps_rows_stand_in_their_tables_and_failures_are_shown(evaluated, tmp_path):
    for name, changed in (
        ("whole", {}),
        ("less", {"table": "ablations"}),
        ("narrow", {"table": "beam"}),
        ("broken", {"table": "ablations", "state": "failed", "error": "genius: no"}),
    ):
        folder = tmp_path / "rows" / name / "seed-0"
        folder.mkdir(parents=True)
        if name != "broken":
            evaluated(folder / "evaluation", 10 if name == "whole" else 5)
        made_row(folder, name, **changed)
    whole = report(gather([str(tmp_path / "rows")]), data=None, progress=Silent())
    assert "4 rows, 1 failed; 0.0 hours of work, 2026-01-01." in whole.about[1]
    found = tables(whole)
    assert [line[0] for line in found["ablations"].cells()] == ["whole", "less"]
    assert [line[0] for line in found["beam"].cells()] == ["3"]
    states = {line[0]: line[2] for line in found["rows"].cells()}
    assert states == {"whole": "done", "less": "done", "narrow": "done", "broken": "failed: genius: no"}


def test_indexes_of_the_systems_own_encoder_are_tested_against_its_codes(evaluated, tmp_path):
    kinds = ("dense-exact", "dense-ivf-pq")
    for name, methods, changed in (
        ("another-encoder", kinds, {}),
        ("indexes", kinds, {"model": "ours/seed-0/model"}),
        ("ours", ("generative", "generative+codes"), {"model": "ours/seed-0/model"}),
    ):
        folder = tmp_path / "rows" / name / "seed-0"
        folder.mkdir(parents=True)
        evaluated(folder / "evaluation", 10, methods)
        made_row(folder, name, **changed)
    found = tables(report(gather([str(tmp_path / "rows")]), data=None, progress=Silent()))
    assert {tuple(line[:2]) for line in found["significance"].cells()} == {
        ("ours: generative", "indexes: dense-exact"),
        ("ours: generative+codes", "indexes: dense-ivf-pq"),
        ("ours: generative", "another-encoder: dense-exact"),
    }


def test_changes_are_compared_with_the_row_that_they_are_like(evaluated, tmp_path):
    for name, right, changed in (
        ("first", 2, {}),
        ("whole", 10, {}),
        ("less", 5, {"table": "ablations", "like": "whole"}),
        ("lost", 5, {"table": "codes", "like": "never-made"}),
    ):
        folder = tmp_path / "rows" / name / "seed-0"
        folder.mkdir(parents=True)
        evaluated(folder / "evaluation", right)
        made_row(folder, name, **changed)
    found = tables(report(gather([str(tmp_path / "rows")]), data=None, progress=Silent()))
    assert [line[0] for line in found["ablations"].cells()] == ["whole", "less"]
    assert found["ablations"].cells()[1][-2] == "−50.0"
    assert [line[0] for line in found["codes"].cells()] == ["lost"]
    assert "is missing" in found["codes"].note


def test_the_model_is_that_of_the_first_seed_that_is_finished(evaluated, tmp_path):
    for seed, state in ((0, "failed"), (1, "done"), (2, "done")):
        folder = tmp_path / "rows" / "paper" / f"seed-{seed}"
        folder.mkdir(parents=True)
        if state == "done":
            evaluated(folder / "evaluation", 10)
        made_row(folder, "paper", seed=seed, state=state, model=f"paper/seed-{seed}/model")
    found = gather([str(tmp_path / "rows")])
    assert [one.seed for one in found.systems[0].seeds] == [1, 2]
    assert found.models == {"paper": tmp_path / "rows" / "paper/seed-1/model"}


def test_models_are_systems_of_their_folders_names(evaluated, tmp_path):
    for name in ("lr=0.1", "lr=0.2"):
        evaluated(tmp_path / name / "evaluation", 10)
        (tmp_path / name / MODEL_FILE).write_text("{}")
    found = gather([str(tmp_path / "lr=0.1"), str(tmp_path / "lr=0.2" / "evaluation")])
    assert [system.name for system in found.systems] == ["lr=0.1", "lr=0.2"]
    assert found.models == {name: tmp_path / name for name in ("lr=0.1", "lr=0.2")}
    with pytest.raises(UsageError, match=r"two systems are named 'lr=0\.1'"):
        gather([str(tmp_path / "lr=0.1")] * 2)


def test_seeds_that_answered_other_queries_are_refused(evaluated, tmp_path):
    places = [evaluated(tmp_path / name, 10) for name in "ab"]
    results = json.loads((places[1] / "results.json").read_text())
    results["rows"][0]["queries"] = 5
    (places[1] / "results.json").write_text(json.dumps(results))
    with pytest.raises(BadData, match="cannot be two seeds of 'ours'"):
        gather([f"ours={places[0]},{places[1]}"])


def test_a_method_that_finds_nothing_counts_nothing(evaluated, tmp_path):
    place = evaluated(tmp_path / "ours", 10)
    (place / "runs" / "toys_task1_test.global.generative.trec").write_text("")
    lines = tables(report(gather([str(place)]), data=None, progress=Silent()))["significance"].cells()
    assert lines[0][:4] == ["ours: generative", "ours: exact-fused", "R@1", "−100.0"]


def test_encoders_alone_are_tested_against_each_other(evaluated, tmp_path):
    for name, right in (("clip", 10), ("blip", 4)):
        evaluated(tmp_path / name, right, ("dense-exact",))
    sources = [str(tmp_path / name) for name in ("clip", "blip")]
    found = tables(report(gather(sources), data=None, progress=Silent()))
    assert {tuple(line[:2]) for line in found["significance"].cells()} == {
        ("blip: dense-exact", "clip: dense-exact")
    }


def test_qrels_without_a_right_answer_are_refused(runs, tmp_path):
    write_qrels(tmp_path / "none.txt", {"q0": {"d0": 0}})
    with pytest.raises(BadData, match=r"none\.txt has no query with a right answer"):
        report_runs(runs, tmp_path / "none.txt", progress=Silent())


def test_a_file_in_the_reports_place_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "report").touch()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report")]) == 2
    assert "is a file; give a folder" in capsys.readouterr().err


def test_pictures_of_another_data_set_are_refused(trained):
    features = Features.open(
        trained.model / "features" / "candidates"
    )  # of training, and those of test are others
    groups = group_by_code(np.zeros((len(features), 2), np.int16), np.ones(len(features), bool), first=0)
    with pytest.raises(BadData, match=r"has no candidate \S+, which was evaluated"):
        read_items(MBeir(trained.data), "test", features, groups)


def test_a_folder_without_anything_is_said_to_be(tmp_path):
    with pytest.raises(ArtifactMissing, match=r"holds no results\.json"):
        gather([str(tmp_path)])


def test_the_control_is_tested_against_each_rival(evaluated, tmp_path):
    for kind in ("genius", "irgen", "nci"):
        evaluated(tmp_path / kind, 10, (kind,))
    found = tables(
        report(
            gather([str(tmp_path / kind) for kind in ("genius", "irgen", "nci")]),
            data=None,
            progress=Silent(),
        )
    )
    assert {tuple(line[:2]) for line in found["significance"].cells()} == {
        ("genius: genius", "irgen: irgen"),
        ("genius: genius", "nci: nci"),
    }
