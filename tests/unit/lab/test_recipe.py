from pathlib import Path

import pytest

from genius_search.errors import BadData, UsageError
from genius_search.lab.sweep import jobs_of, read_recipe

WHOLE = """
[flags]
fit = "--preset small"
evaluate = "--pools global"

[quick]
fit = "--generator.training.max-steps 5"
evaluate = "--max-queries 5"

[[row]]
name = "paper"
title = "as in the paper"
table = "systems"
seeds = [0, 1]
fit = "--generator.guide none"
evaluate = "--beam 50"

[[row]]
name = "no-l.cl"
table = "ablations"
like = "paper"
fit = "--quantizer.contrastive-weight 0"

[[row]]
name = "beam-1"
table = "beam"
seeds = [1]
model = "paper"
evaluate = "--beam 1"

[[row]]
name = "rival"
table = "systems"
model = "paper"
run = ["baseline fit {data} --model {model} --evaluation {evaluation} --out {row}/rival --seed {seed}"]
quick = ["baseline fit {data} --out {row}/rival --epochs 1"]
"""


def recipe(folder: Path, text: str = WHOLE):
    path = folder / "paper.toml"
    path.write_text(text)
    return read_recipe(path)


def commands(folder: Path, place: str, **settings) -> list[str]:
    (job,) = [job for job in jobs_of(recipe(folder), **settings) if job.place == place]
    return job.shown(Path("/somewhere/catalogue"))


def test_the_first_seed_of_all_rows_comes_first(tmp_path):
    places = [job.place for job in jobs_of(recipe(tmp_path))]
    assert places == ["paper/seed-0", "no-l.cl/seed-0", "rival/seed-0", "paper/seed-1", "beam-1/seed-1"]


def test_a_row_says_what_its_commands_are(tmp_path):
    fit, evaluate = commands(tmp_path, "paper/seed-1")
    assert fit == (
        "genius fit catalogue --encoder small --out paper/seed-1/model --preset small --generator.guide none "
        "--quantizer.training.seed 1 --generator.training.seed 1"
    )
    assert evaluate == (
        "genius evaluate catalogue --model paper/seed-1/model --out paper/seed-1/evaluation --pools global "
        "--beam 50"
    )


def test_an_ablation_adds_its_flag_to_those_of_the_row_it_is_like(tmp_path):
    fit, evaluate = commands(tmp_path, "no-l.cl/seed-0")
    assert "--generator.guide none --quantizer.contrastive-weight 0" in fit
    assert evaluate.endswith("--pools global --beam 50")


def test_what_is_like_a_change_keeps_that_change(tmp_path):
    further = f'{WHOLE}\n[[row]]\nname = "further"\ntable = "ablations"\nlike = "no-l.cl"\n'
    further += 'fit = "--generator.layers 3"\n'
    (job,) = [job for job in jobs_of(recipe(tmp_path, further)) if job.place == "further/seed-0"]
    fit, evaluate = job.shown(Path("catalogue"))
    assert "--generator.guide none --quantizer.contrastive-weight 0 --generator.layers 3" in fit
    assert evaluate.endswith("--pools global --beam 50")


def test_what_is_like_a_row_of_other_commands_has_them_with_its_own_name(tmp_path):
    other = '\n[[row]]\nname = "other"\ntable = "systems"\nmodel = "paper"\nlike = "rival"\n'
    text = WHOLE.replace("--out {row}/rival --seed", "--kind {name} --out {row}/rival --seed") + other
    (job,) = [job for job in jobs_of(recipe(tmp_path, text)) if job.place == "other/seed-0"]
    (fit,) = job.shown(Path("catalogue"))
    assert fit.endswith("--kind other --out other/seed-0/rival --seed 0")


def test_a_row_without_a_model_of_its_own_takes_that_of_the_same_seed(tmp_path):
    (evaluate,) = commands(tmp_path, "beam-1/seed-1")
    assert evaluate.startswith("genius evaluate catalogue --model paper/seed-1/model --out beam-1/seed-1/")


def test_other_commands_know_the_folders_too(tmp_path):
    (fit,) = commands(tmp_path, "rival/seed-0")
    assert fit == (
        "genius baseline fit catalogue --model paper/seed-0/model --evaluation paper/seed-0/evaluation "
        "--out rival/seed-0/rival --seed 0"
    )


def test_quick_flags_come_last_and_only_its_seeds_are_made(tmp_path):
    jobs = jobs_of(recipe(tmp_path), quick=True)
    assert {job.seed for job in jobs} == {0}
    fit, evaluate = jobs[0].shown(Path("catalogue"))
    assert fit.endswith("--generator.training.max-steps 5")
    assert evaluate.endswith("--max-queries 5")
    assert commands(tmp_path, "rival/seed-0", quick=True) == [
        "genius baseline fit catalogue --out rival/seed-0/rival --epochs 1"
    ]


def test_some_rows_bring_along_what_they_build_on(tmp_path):
    places = [job.place for job in jobs_of(recipe(tmp_path), only=["beam-1"])]
    assert places == ["paper/seed-0", "paper/seed-1", "beam-1/seed-1"]
    with pytest.raises(UsageError, match="no row 'beam-2'; it has: paper"):
        jobs_of(recipe(tmp_path), only=["beam-2"])


def test_rows_can_be_left_out_but_not_what_others_build_on(tmp_path):
    places = [job.place for job in jobs_of(recipe(tmp_path), skip=["beam-1", "no-l.cl"])]
    assert places == ["paper/seed-0", "rival/seed-0", "paper/seed-1"]
    for skip, problem in (
        (["beam-2"], "no row 'beam-2'; it has: paper"),
        (["paper"], "row 'beam-1' builds on 'paper', which is skipped"),
        (["paper", "no-l.cl", "beam-1", "rival"], "every row is skipped"),
    ):
        with pytest.raises(UsageError, match=problem):
            jobs_of(recipe(tmp_path), skip=skip)


def test_no_row_with_a_quick_seed_is_refused(tmp_path):
    late = '[[row]]\nname = "a"\ntable = "systems"\nseeds = [1, 2]\nfit = ""\n'
    with pytest.raises(UsageError, match=r"seeds \[0\]"):
        jobs_of(recipe(tmp_path, late), quick=True)


def test_other_data_change_every_plan(tmp_path):
    first, other = (jobs_of(recipe(tmp_path), data=data) for data in ("a", "b"))
    assert all(one.plan != two.plan for one, two in zip(first, other, strict=True))


def test_an_encoder_is_named_by_its_last_name_and_changes_the_plan(tmp_path):
    (first, *_), (other, *_) = (
        jobs_of(recipe(tmp_path), encoder=spec) for spec in ("small", "precomputed:/a/features.npy")
    )
    assert "--encoder precomputed:features.npy" in other.shown(Path("data"))[0]
    assert "precomputed:/a/features.npy" in other.filled(Path("data"), tmp_path)[0]
    assert first.plan != other.plan


def test_a_changed_row_changes_the_plans_of_those_that_build_on_it(tmp_path):
    before = {job.place: job.plan for job in jobs_of(recipe(tmp_path))}
    changed = WHOLE.replace("--generator.guide none", "--generator.guide geometry")
    after = {job.place: job.plan for job in jobs_of(recipe(tmp_path, changed))}
    assert all(before[place] != after[place] for place in before)
    other = {job.place: job.plan for job in jobs_of(recipe(tmp_path, WHOLE.replace("--beam 1", "--beam 2")))}
    assert [place for place in before if before[place] != other[place]] == ["beam-1/seed-1"]


A = '[[row]]\nname = "a"\ntable = "systems"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[row]\n", "is not TOML"),
        ('[[row]]\nname = "a"\n', "table: Field required"),
        (f'{A}fits = ""\n', "fits"),
        (A.replace("systems", "ablation"), "table: Input should be 'systems'"),
        (f'{A}fit = "--beam \\"3"\n', "cannot be split into words"),
        (f'[flags]\nfit = "it\'s"\n{A}fit = ""\n', "flags.fit: .*cannot be split"),
        (f'{A}run = [""]\n', r"row\.0\.run\.0: .*pattern"),
        (A.replace('"a"', '"A B"'), r"row\.0\.name: .*pattern"),
        (A, "does nothing"),
        (f'{A}model = "b"\n', "not the name of a row before it"),
        (f'{A}fit = ""\n' * 2, "there twice"),
        (f'{A}fit = ""\n' + A.replace('"a"', '"b"') + 'model = "a"\nseeds = [0, 1]\n', r"'a' has only \[0\]"),
    ],
)
def test_a_recipe_that_cannot_be_made_is_refused_at_once(tmp_path, text, problem):
    with pytest.raises(BadData, match=problem):
        recipe(tmp_path, text)


def test_what_is_no_text_file_is_no_recipe(tmp_path):
    with pytest.raises(BadData, match="cannot be read: Is a directory"):
        read_recipe(tmp_path)
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadData, match="is not TOML"):
        read_recipe(tmp_path / "recipe.toml")


def test_the_papers_recipe_can_be_read():
    found = read_recipe(Path(__file__).parents[3] / "recipes" / "paper.toml")
    assert {"systems", "ablations", "beam", "decoder", "codes", "costs"} == {row.table for row in found.row}
    assert jobs_of(found, quick=True)
