"""A recipe from its file to the report: rows that fit, rows that use them, baselines, figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.errors import BadData, UsageError
from research.report import main as report
from research.report import report_runs
from research.sweep import fit_settings, link_shared_folders, main, read_recipe

ROOT = Path(__file__).parents[2]
RECIPE = """
[[row]]
name = "paper"
table = "systems"
fit.quantizer = { levels = 2, codebook_size = 8, level0 = "learned" }

[[row]]
name = "dsi"
table = "systems"
model = "paper"
baseline = { kind = "dsi", epochs = 0.1 }

[[row]]
name = "no-alignment"
table = "ablations"
like = "paper"
fit.quantizer.alignment_weight = 0.0

[[row]]
name = "beam-1"
table = "beam"
model = "paper"
evaluate.beam = 1

[[row]]
name = "beam-5"
table = "beam"
model = "paper"
evaluate.beam = 5

[quick]
fit.encoder.training = { max_steps = 2, warmup_steps = 1 }
fit.quantizer.training = { max_steps = 3, batch_size = 32 }
fit.quantizer.codebook_start = 1
fit.generator.training = { max_steps = 3, batch_size = 32, warmup_steps = 1 }
fit.generator.contrasted = 0
evaluate.pools = ["global"]
evaluate.rows = ["catalogue_task0", "catalogue_task3"]
evaluate.methods = ["exact-raw", "exact-fused", "generative"]
evaluate.max_queries = 3
"""


def test_settings_of_every_row_of_the_papers_recipe_exist():
    recipe = read_recipe(ROOT / "recipes" / "paper.toml")
    rows = {row.name: row for row in recipe.row}
    assert {"grace-structured", "irgen", "dsi", "nci"} < set(rows)
    assert {"no-contrastive", "beam-10", "codes-64x6"} < set(rows)
    for row in recipe.row:
        config = fit_settings(row, 2, recipe.quick)
        assert config.quantizer.training.seed == config.generator.training.seed == 2
    assert fit_settings(rows["codes-64x6"], 0, {}).quantizer.codebook_size == 64
    assert fit_settings(rows["codes-64x6"], 0, {}).quantizer.levels == 6  # of the row in `like`


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[row]]\nname = 1", BadData),
        ('[[row]]\nname = "a"\ntable = "systems"\nlike = "b"', UsageError),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(tmp_path, text, error):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(error):
        read_recipe(tmp_path / "recipe.toml")


@pytest.mark.slow
def test_a_recipe_becomes_a_report(trained, tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows, out = tmp_path / "rows", tmp_path / "report"
    words = [
        str(tmp_path / "recipe.toml"),
        "--data",
        str(trained.data),
        "--out",
        str(rows),
        "--quick",
    ]
    assert main(words) == 0, capsys.readouterr().err
    times = {file: file.stat().st_mtime_ns for file in rows.glob("*/*/row.json")}
    names = {file.parent.parent.name for file in times}
    assert names == {"paper", "dsi", "no-alignment", "beam-1", "beam-5"}
    assert main(words) == 0
    assert times == {file: file.stat().st_mtime_ns for file in rows.glob("*/*/row.json")}
    assert report([str(rows), "--out", str(out), "--data", str(trained.data)]) == 0
    text = (out / "report.md").read_text()
    for part in ("exact-raw", "dsi", "no-alignment", "Paired tests", "figures/beam.png"):
        assert part in text, part
    figures = {file.name for file in (out / "figures").iterdir()}
    assert figures == {"beam.png", "codes.png", "embeddings.png"}
    tables = {file.name for file in (out / "tables").iterdir()}
    assert {"recall-global.csv", "ablations.csv"} < tables


def test_a_shared_folder_whose_copy_is_incomplete_is_copied_again(tmp_path, monkeypatch):
    first, folder = tmp_path / "first", tmp_path / "second"
    features = first / "evaluation" / "candidates" / "features"
    features.mkdir(parents=True)
    for name in ("a.npy", "manifest.json"):
        (features / name).write_text(name)
    links = []

    def link(source, target):
        links.append(target)
        if len(links) == 2:
            raise KeyboardInterrupt
        Path(target).hardlink_to(source)

    with monkeypatch.context() as patch:
        patch.setattr("os.link", link)
        with pytest.raises(KeyboardInterrupt):
            link_shared_folders(first, folder)
    shared = folder / features.relative_to(first)
    assert not shared.exists()
    link_shared_folders(first, folder)
    assert {file.name for file in shared.iterdir()} == {"a.npy", "manifest.json"}


def test_two_runs_of_the_same_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.trec").write_text("q0 Q0 d0 1 1.0 run\n")
    (tmp_path / "qrels.txt").write_text("q0 0 d0 1\n")
    runs = [tmp_path / "a" / "run.trec", tmp_path / "b" / "run.trec"]
    with pytest.raises(UsageError, match="two runs have the name run"):
        report_runs(runs, tmp_path / "qrels.txt")


def test_runs_of_other_systems_are_reported_with_tests(tmp_path):
    qrels, out = tmp_path / "qrels.txt", tmp_path / "out"
    qrels.write_text("".join(f"q{n} 0 d{n} 1\n" for n in range(20)))
    for name, shift in (("good", 0), ("bad", 1)):
        lines = (f"q{n} Q0 d{n + shift * (n % 2)} 1 1.0 {name}\n" for n in range(20))
        (tmp_path / f"{name}.trec").write_text("".join(lines))
    runs = [str(tmp_path / "good.trec"), str(tmp_path / "bad.trec")]
    assert report(["--runs", *runs, "--qrels", str(qrels), "--out", str(out)]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "+50.0" in text
