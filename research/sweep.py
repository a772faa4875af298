"""``python -m research.sweep``: fit and evaluate the rows of a recipe, one after the other.

A row is a table of a TOML file. It has settings that change the preset ``small``, a baseline, or
other settings to search an earlier row's model. All rows share the encoder and its features. Run an
interrupted sweep again to continue: finished rows are skipped unless their settings have changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius_search.artifact import fingerprint_of
from genius_search.cli.options import command
from genius_search.cli.terminal import TerminalProgress
from genius_search.config import from_json, to_json
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, GeniusError, UsageError
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.recipe import FitConfig, preset
from genius_search.training.fit import fit
from genius_search.writing import new_folder, write_json
from research.baselines.generative import BaselineConfig, evaluate_baseline
from research.command import run
from research.evaluate import evaluate
from research.settings import EvaluationConfig

MODEL: Final = "model"
"""Folder of the model in a row's folder."""
EVALUATION: Final = "evaluation"
"""Folder of the evaluation in a row's folder."""
ROW_FILE: Final = "row.json"
_SHARED_FOLDERS: Final = (
    "model/encoder",
    "model/features",
    "evaluation/candidates*/features",
    "evaluation/features-*",
)
"""Parts of a row's folder that depend only on the encoder and the data; their readers check it."""

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the paper's tables."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    """Name of the row's folder."""
    title: str = ""
    """Name in tables; default: the name."""
    table: str
    """Table of the row: systems, ablations, decoder, codes or beam."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; the row is run once with each."""
    like: str = ""
    """Earlier row whose settings this row changes, and with which it is compared."""
    fit: Settings | None = None
    """Settings of `genius fit` that change the preset small; the row fits a model."""
    model: str = ""
    """Earlier row whose model of the same seed is used, instead of fitting one."""
    evaluate: Settings = field(default_factory=dict)
    """Settings of the evaluation."""
    baseline: Settings | None = None
    """Settings of a baseline that writes IDs (research.baselines.generative), on ``model``."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rows of a sweep."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: tuple[Row, ...]
    quick: Settings = field(default_factory=dict)
    """Settings that change those of every row, for a run of minutes."""


def read_recipe(file: Path) -> Recipe:
    """Read a recipe; a row that is like an earlier row gets the settings of that row.

    Raises
    ------
    BadData
        The file is not a recipe.
    UsageError
        A row builds on a row that does not precede it.
    """
    try:
        recipe = TypeAdapter(Recipe).validate_python(
            tomllib.loads(file.read_text(encoding="utf-8"))
        )
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise BadData(f"{file} is not a recipe: {error}") from None
    rows: dict[str, Row] = {}
    for row in recipe.row:
        for name in filter(None, (row.like, row.model)):
            if name not in rows:
                raise UsageError(
                    f"{file}: row {row.name!r} builds on {name!r}, which is not an earlier row"
                )
        if row.like:
            base = rows[row.like]
            row = replace(  # noqa: PLW2901
                row,
                fit=None if row.fit is None else merge(base.fit or {}, row.fit),
                evaluate=merge(base.evaluate, row.evaluate),
            )
        rows[row.name] = row
    return replace(recipe, row=tuple(rows.values()))


def merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Return nested settings with changes.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    merged = dict(settings)
    for name, value in changes.items():
        before = settings.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[name] = merge(before, value)
        else:
            merged[name] = value
    return merged


def fit_settings(row: Row, seed: int, quick: Mapping[str, Any]) -> FitConfig:
    """Return the settings of a row's model; all rows have the same encoder."""
    settings = to_json(preset("small"))
    seeds = {part: {"training": {"seed": seed}} for part in ("quantizer", "generator")}
    for changes in (row.fit or {}, quick.get("fit", {}), seeds):
        settings = merge(settings, changes)
    return from_json(FitConfig, settings)


def run_row(
    row: Row,
    seed: int,
    data: MBeir,
    encoder: str,
    out: Path,
    quick: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Fit the model of a row, if it has one, and evaluate into the row's folder."""
    folder = out / row.name / f"seed-{seed}"
    model_row = out / row.model / f"seed-{seed}" if row.model else folder
    model_folder, feature_folder = model_row / MODEL, model_row / EVALUATION
    if row.fit is not None:
        fit(data, encoder, model_folder, fit_settings(row, seed, quick), progress=progress)
    config = from_json(
        EvaluationConfig, {"seed": 0, **merge(row.evaluate, quick.get("evaluate", {}))}
    )
    model = Genius.open(model_folder)
    if row.baseline is None:
        evaluate(
            data, model, config, folder / EVALUATION, evaluation=feature_folder, progress=progress
        )
        return
    settings = {**row.baseline, "seed": seed, **quick.get("baseline", {})}
    evaluate_baseline(
        data,
        model,
        from_json(BaselineConfig, settings),
        config,
        folder / EVALUATION,
        evaluation=feature_folder,
        progress=progress,
    )


def link_shared_folders(source: Path, folder: Path) -> None:
    """Link encoder and features of a row's folder to another row's folder."""
    for pattern in _SHARED_FOLDERS:
        for shared in source.glob(pattern):
            target = folder / shared.relative_to(source)
            if not target.exists():
                # A folder that a killed sweep has half copied must not look like a finished one.
                with new_folder(target) as partial:
                    shutil.copytree(shared, partial, copy_function=os.link, dirs_exist_ok=True)


@command
class Sweep:
    """Run every row of a recipe (ablations, baselines, beams, sizes, seeds) for `research.report`.

    If interrupted, run it again to continue. The exit status is 1 if a row failed.
    """

    recipe: Annotated[Path, tyro.conf.Positional]
    """File of rows, such as recipes/paper.toml."""

    data: Path
    """Folder of the data set, in M-BEIR's layout."""

    out: Path
    """Folder with a subfolder for each row and seed: its model, its evaluation and row.json."""

    encoder: str = "small"
    """Encoder of all rows, as for `genius fit`: small, clip:NAME, precomputed:PATH, …"""

    only: tuple[str, ...] = ()
    """Rows to run, with the rows whose models they use."""

    skip: tuple[str, ...] = ()
    """Rows to leave out, for example because pictures are missing."""

    quick: bool = False
    """Use the recipe's settings for a run of minutes, to check that everything works."""

    def run(self) -> int:
        """Run the rows that are not finished yet."""
        recipe, data = read_recipe(self.recipe), MBeir(self.data)
        quick = recipe.quick if self.quick else {}
        failures: list[str] = []
        shared: Path | None = None
        with TerminalProgress() as progress:
            for number, row in self._choose_rows(recipe):
                for seed in row.seeds[:1] if self.quick else row.seeds:
                    folder = self.out / row.name / f"seed-{seed}"
                    plan = [asdict(row), seed, quick, self.encoder, str(data.root.resolve())]
                    record = {**asdict(row), "seed": seed, "plan": fingerprint_of(plan)}
                    if shared is not None and row.fit is not None:
                        link_shared_folders(shared, folder)
                    if not _is_finished(folder / ROW_FILE, record["plan"]):
                        progress.say(f"{row.name}, seed {seed}")
                        began = time.monotonic()
                        try:
                            run_row(row, seed, data, self.encoder, self.out, quick, progress)
                        except GeniusError as error:
                            failures.append(f"{row.name}, seed {seed}: {error}")
                            progress.say(failures[-1])
                            continue
                        seconds = round(time.monotonic() - began)
                        write_json(
                            folder / ROW_FILE, {**record, "place": number, "seconds": seconds}
                        )
                    shared = shared or folder
            progress.say(f"failed: {'; '.join(failures) or 'none'}")
        return 1 if failures else 0

    def _choose_rows(self, recipe: Recipe) -> list[tuple[int, Row]]:
        """Return the rows to run and their positions in the recipe."""
        names = [row.name for row in recipe.row]
        if unknown := {*self.only, *self.skip}.difference(names):
            raise UsageError(f"the recipe has no rows {', '.join(sorted(unknown))}")
        models = (row.model for row in recipe.row if row.name in self.only)
        needed = {*(self.only or names), *models}.difference(self.skip)
        return [(number, row) for number, row in enumerate(recipe.row) if row.name in needed]


def _is_finished(row_file: Path, plan: str) -> bool:
    """Return whether a row was run with the same plan."""
    if not row_file.exists():
        return False
    return bool(json.loads(row_file.read_text(encoding="utf-8"))["plan"] == plan)


main = partial(run, Sweep, "sweep")


if __name__ == "__main__":
    sys.exit(main())
