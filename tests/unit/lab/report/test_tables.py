"""The report's tables of small invented evaluations."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from genius_search.lab.report.analysis import first_hits, outcome, outcomes, separation, share_of_first
from genius_search.lab.report.evaluated import Benchmark, read_benchmark
from genius_search.lab.report.figures import beam_figure, misses_figure, reliability_figure, speed_figure
from genius_search.lab.report.statistics import Pair
from genius_search.lab.report.tables import (
    ablation_table,
    beam_table,
    first_table,
    kept_table,
    latency_table,
    misses_table,
    quality_table,
    reliability_table,
    significance_table,
    speed_table,
    storage_table,
    task_table,
)

RIGHT = [1, 1, 1, 1]
HALF = [1, 1, 6, 6]


def test_a_line_for_each_system_and_method_a_column_for_each_task(system):
    table = task_table([system("ours", {"exact-raw": RIGHT, "generative": HALF})], "global")
    assert table.headings == (
        "system", "method", "text -> image R@5", "text -> text R@5", "average", "95 % interval",
    )  # fmt: skip
    assert table.cells()[0] == ["ours", "exact-raw", "100.0", "100.0", "100.0", "100.0 to 100.0"]
    assert table.cells()[1][:5] == ["ours", "generative", "50.0", "50.0", "50.0"]
    assert "One seed" in table.note
    assert task_table([system("theirs", {"generative": HALF})], "local") is None


def test_the_first_hits_are_those_of_all_tasks_and_of_text_to_image_where_there_is_such_a_task(system):
    table = first_table([system("ours", {"generative": [1, 2, 6, 0]})], "global")
    assert table.cells() == [
        ["mean of 2 tasks", "ours", "generative", "25.0", "50.0", "75.0", "41.7", "49.7"],
        ["toys, text -> image", "ours", "generative", "25.0", "50.0", "75.0", "41.7", "49.7"],
    ]
    table = first_table([system("alone", {"generative": [1, 2, 6, 0]}, tasks=("toys_task0",))], "global")
    assert table.cells() == [
        ["toys, text -> image", "alone", "generative", "25.0", "50.0", "75.0", "41.7", "49.7"]
    ]
    table = first_table([system("other", {"generative": HALF}, tasks=("toys_task1",))], "global")
    assert table.cells()[0][0] == "toys, text -> text"


def test_the_best_of_a_column_is_bold_and_of_the_averages_all_that_are_not_significantly_below_it(system):
    rankings = {"exact-raw": [1] * 30, "generative+codes": [6, *[1] * 29], "generative": [6] * 30}
    ours = system("ours", rankings)
    table = task_table([ours], "global")
    assert sorted(table.bold) == [(0, 2), (0, 3), (0, 4), (2, 4)]
    assert table.markdown().count("**") == 2 * len(table.bold)
    assert r"\textbf{96.7}" in table.latex()
    assert "*" not in table.text(200)
    table = first_table([ours], "global")
    assert {row for row, column in table.bold if column == 3} == {0, 3}


def test_a_single_task_has_no_average(system):
    table = task_table([system("ours", {"generative": HALF}, tasks=("toys_task0",))], "global")
    assert table.headings[2:] == ("text -> image R@5", "95 % interval")
    assert table.cells()[0][2] == "50.0"


def test_what_is_kept_stands_beside_what_the_paper_keeps(system):
    table = kept_table([system("ours", {"exact-raw": RIGHT, "generative": HALF})], "global")
    assert table.cells()[0] == ["ours", "generative", "50.0", "100.0", "50.0"]
    assert table.cells()[1] == ["GENIUS on M-BEIR, published", "generative", "28.4", "48.9", "58.1"]


def test_an_ablation_is_compared_with_the_whole(system):
    whole = system("whole", {"generative": RIGHT}, {"generative": RIGHT})
    table = ablation_table("ablations", whole, [system("less", {"generative": HALF}, table="ablations")])
    assert [line[0] for line in table.cells()] == ["whole", "less"]
    assert table.cells()[0][1:4] == ["2", "100.0 ± 0.0", "100.0 ± 0.0"]
    # Four of eight queries are lost: signs drawn at random do that once in 8, and there is one comparison.
    assert table.cells()[1][-2:] == ["−50.0", "0.125"]
    assert ablation_table("codes", whole, []) is None


def test_without_the_whole_nothing_is_compared(system):
    table = ablation_table("ablations", None, [system("less", {"generative": HALF}, table="ablations")])
    assert [line[-2:] for line in table.cells()] == [["–", "–"]]
    assert "is missing" in table.note


def test_two_changes_of_one_title_are_two_lines(system):
    whole = system("whole", {"generative": RIGHT})
    less = [
        replace(system(name, {"generative": places}, table="ablations"), title="less")
        for name, places in (("a", [1, 1, 1, 6]), ("b", HALF))
    ]
    table = ablation_table("ablations", whole, less)
    assert [line[-2] for line in table.cells()[1:]] == ["−25.0", "−50.0"]


def test_a_system_of_other_tasks_has_no_average_beside_the_others(system):
    systems = [
        system("ours", {"generative": RIGHT}),
        system("theirs", {"generative": HALF}, tasks=("toys_task1",)),
    ]
    table = task_table(systems, "global")
    assert table.cells()[1][2:] == ["–", "50.0", "–", "–"]
    assert "not to be compared with it: theirs" in table.note
    means = [line for line in first_table(systems, "global").cells() if line[0] == "mean of 2 tasks"]
    assert [line[1] for line in means] == ["ours"]


def test_a_beam_without_a_method_of_the_others_leaves_it_out(system):
    every = ("exact-fused", "routing+codes", "generative", "generative+codes", "generative+embeddings",
             "generative+raw")  # fmt: skip
    wide = system("wide", dict.fromkeys(every, RIGHT), table="beam", beam=50)
    narrow = system("narrow", dict.fromkeys(every[:-1], HALF), table="beam", beam=1)
    table = beam_table([wide, narrow])
    assert not [heading for heading in table.headings if "raw" in heading or "exact" in heading]
    assert all("–" not in line for line in table.cells())
    assert beam_figure([wide, narrow, system("middle", dict.fromkeys(every, HALF), beam=5)]) is not None


def test_beams_stand_in_their_order_whatever_the_recipes(system):
    wide = system("wide", {"generative": RIGHT}, table="beam", beam=50)
    narrow = system("narrow", {"generative": HALF}, table="beam", beam=1)
    assert [line[0] for line in beam_table([wide, narrow]).cells()] == ["1", "50"]
    assert beam_figure([wide, narrow]).save("png").startswith(b"\x89PNG")
    assert beam_figure([wide]) is None


def test_pairs_are_corrected_together():
    first = {"task": {f"1:{number}": 1.0 for number in range(20)}}
    second = {"task": {f"1:{number}": float(number >= 6) for number in range(20)}}
    alone = significance_table([Pair("a", "b", "R@1", (first, second))], name="n", title="t")
    assert alone.cells()[0][3:] == ["+30.0", "6", "0", "0.031", "yes"]
    twice = significance_table([Pair("a", "b", "R@1", (first, second))] * 2, name="n", title="t")
    assert twice.cells()[0][3:] == ["+30.0", "6", "0", "0.062", "no"]
    assert significance_table([], name="n", title="t") is None


def test_systems_that_answered_other_queries_are_named_and_not_tested():
    first = {"task": {f"1:{number}": float(number % 2) for number in range(20)}}
    fewer = {"task": dict(list(first["task"].items())[:10])}
    table = significance_table(
        [Pair("a", "b", "R@1", (first, fewer)), Pair("a", "c", "R@1", (first, first))], name="n", title="t"
    )
    assert [line[:2] for line in table.cells()] == [["a", "c"]]
    assert "different queries: a against b." in table.note


MODALITIES = {f"7:{number}": 0 if number != 91 else 1 for number in range(100)}


@pytest.mark.parametrize(
    ("did", "kind"),
    [
        ("7:10", "right"),
        ("7:91", "wrong modality"),
        ("8:1", "wrong data set"),
        ("7:90", "right item further down"),
    ],
)
def test_a_first_hit_is_one_of_these(system, did, kind):
    one = system("ours", {"generative": [2, 0, 0, 0]}).seeds[0]
    run, qrels = one.run("global", "generative", "toys_task0"), one.qrels("global", "toys_task0")
    first = run.hits["7:0"][0]._replace(did=did)
    changed = type(run)(run.name, {"7:0": [first, *(hit for hit in run.hits["7:0"][1:] if hit.did != did)]})
    assert outcome(changed, qrels, "7:0", wanted=0, modalities={**MODALITIES, "8:1": 0}) == kind
    assert outcome(run, qrels, "7:1", wanted=0, modalities=MODALITIES) == "another item"
    assert outcome(type(run)("none", {}), qrels, "7:1", wanted=0, modalities=MODALITIES) == "nothing found"


def test_shares_of_the_first_hits_are_of_all_queries(system):
    modalities = {**MODALITIES, "7:90": 1}  # what stands first where the right answer does not
    found = outcomes(system("ours", {"generative": HALF}), "generative", "global", modalities)
    # Task 0 asks for images and gets a text twice; task 1 asks for texts, and its right answers are images.
    assert found["right"] == 0.5
    assert found["wrong modality"] == 0.25
    assert found["right item further down"] == 0.25
    assert found.sum() == 1.0
    assert misses_table(pd.DataFrame([found])).cells()[0][:3] == ["ours: generative", "50.0", "25.0"]
    assert misses_figure(pd.DataFrame([found])).save("svg").startswith(b"<?xml")


def test_a_system_that_was_not_evaluated_in_a_pool_has_no_line_there(system):
    ours = system("ours", {"exact-raw": RIGHT, "generative": HALF})
    assert kept_table([ours], "global") is not None
    assert ours.average("local", "exact-raw") is None
    assert kept_table([ours], "local") is None


def test_a_promise_is_the_share_of_the_first_among_what_was_kept(system):
    assert share_of_first([-700.0, -700.0]) == pytest.approx(0.5)
    answers = first_hits(system("ours", {"generative": HALF}), "global", "generative")
    assert len(answers.scores) == 8
    assert answers.right.mean() == 0.5
    assert answers.promised == pytest.approx([0.395] * 8, abs=1e-3)
    codes = first_hits(system("other", {"generative+codes": HALF}), "global", "generative+codes")
    assert codes.promised is None
    cells = reliability_table([answers, codes]).cells()
    assert cells[0][2:4] == ["50.0", "39.5"]
    assert cells[1][3:5] == ["–", "–"]
    assert reliability_figure([answers, codes]).save("png").startswith(b"\x89PNG")


def test_the_separation_of_a_known_case():
    scores = np.repeat([0.2, 0.8], 50)
    right = np.concatenate([np.arange(50) < 10, np.arange(50) < 40])
    assert separation(scores, right) == pytest.approx(0.8)
    assert separation(scores, np.ones(100, dtype=bool)) is None


def test_bytes_stand_beside_the_papers(system):
    table = storage_table([system("ours", {"generative": HALF})], "global")
    assert table.cells()[0] == ["ours", "generative", "12.25", "50.00"]
    assert table.cells()[1][2] == "12.25"
    assert table.cells()[2][2] == "3,072.00"


def benchmark(kind: str, *rows) -> Benchmark:
    return Benchmark(kind=kind, rows=pd.DataFrame(rows), origin="a machine")


def test_queries_per_second_follow_from_the_time_of_one():
    rows = [
        {"method": "full search", "batch": 1, "items": items, "cpu_ms": 4.0, "bytes_per_item": 30.0}
        for items in (1000, 10_000)
    ]  # fmt: skip
    found = benchmark("speed", *rows)
    assert speed_table(found).cells()[1] == ["full search", "1", "10,000", "250.00", "30.00"]
    assert speed_figure(found).save("png").startswith(b"\x89PNG")


def test_settings_that_something_cheaper_reaches_are_left_out(tmp_path):
    rows = [
        {"task": task, "line": "ours, by codes", "method": f"leaves {ms:.0f}", "recall_1": 0.1,
         "recall_5": recall, "code_bytes": 12.0, "stored_bytes": 30.0, "touched_share": 0.1,
         "cpu_ms": ms, "machine": "a machine", "command": "genius bench"}
        for task in ("a: text -> image", "mean")
        for ms, recall in ((1.0, 0.3), (2.0, 0.2), (3.0, 0.4))
    ]  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps({"methods": rows, "leaves": []}))
    assert [line[:2] for line in quality_table(read_benchmark(tmp_path)).cells()] == [
        ["mean", "leaves 1"],
        ["mean", "leaves 3"],
    ]


def test_so_much_time_buys_so_much_recall_of_each_kind():
    rows = [
        {"task": "mean", "line": line, "recall_5": recall, "cpu_ms": ms}
        for line, ms, recall in (("ours", 0.4, 0.9), ("ours", 0.9, 0.7), ("ours", 3.1, 0.95), ("HNSW", 0.1, 0.8))
    ]  # fmt: skip
    table = latency_table(benchmark("quality", *rows))
    assert table is not None
    assert table.headings == ("task", "CPU-ms", "ours", "HNSW")
    cells = {line[1]: line[2:] for line in table.lines}
    assert cells == {
        0.1: (None, 80), 0.2: (None, 80), 0.5: (90, 80), 1.0: (90, 80), 2.0: (90, 80), 5.0: (95, 80),
        10.0: (95, 80), 20.0: (95, 80),
    }  # fmt: skip
    assert latency_table(benchmark("quality", {**rows[0], "line": ""})) is None
