"""``python -m research.sweep``: the rows of a recipe, one after the other: fit, train a rival, evaluate.

A row is a table of a TOML file: settings over the preset ``small``, a rival's kind, or an earlier row's model
searched otherwise. All rows share the encoder and its features. A sweep that is run again goes on where it
stopped: finished rows are skipped unless their settings have changed.
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
EVALUATION: Final = "evaluation"
"""Folders in a row's own."""
ROW_FILE: Final = "row.json"
_SHARED: Final = (
    "model/encoder",
    "model/features",
    "evaluation/candidates*/features",
    "evaluation/features-*",
)
"""In a row's folder, what depends on the encoder and the data only. Its readers check that it fits."""

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the paper's tables."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    """Name of its folder."""
    title: str = ""
    """In tables; the name if it is left out."""
    table: str
    """The table it stands in: systems, ablations, decoder, codes or beam."""
    seeds: tuple[int, ...] = (0,)
    """The row is run once with each."""
    like: str = ""
    """An earlier row, whose settings come before this row's own; it is compared with that one."""
    fit: Settings | None = None
    """Settings of `genius fit` over the preset small; the row has a model of its own."""
    model: str = ""
    """An earlier row whose model of the same seed is used, instead of fitting one."""
    evaluate: Settings = field(default_factory=dict)
    """Settings of the evaluation."""
    baseline: Settings | None = None
    """Settings of a rival that writes IDs (research.baselines.generative), trained on ``model``."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rows; ``quick`` has settings that are laid over those of every row, for a run of minutes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: tuple[Row, ...]
    quick: Settings = field(default_factory=dict)


def read_recipe(file: Path) -> Recipe:
    """Read a recipe; rows that are like others get their settings.

    Raises
    ------
    BadData
        The file is not a recipe.
    UsageError
        A row builds on one that does not come before it.
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
                    f"{file}: row {row.name!r} builds on {name!r}, which is no row before it"
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


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    """Lay nested settings over others.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    return {**under} | {
        name: merge(under[name], value)
        if isinstance(value, Mapping) and isinstance(under.get(name), Mapping)
        else value
        for name, value in over.items()
    }


def settings_of(row: Row, seed: int, quick: Mapping[str, Any]) -> FitConfig:
    """Return the settings of a row's model; all rows have the same encoder."""
    seeded = {part: {"training": {"seed": seed}} for part in ("quantizer", "generator")}
    given = merge(
        merge(merge(to_json(preset("small")), row.fit or {}), quick.get("fit", {})), seeded
    )
    return from_json(FitConfig, given)


def make_row(
    row: Row,
    seed: int,
    data: MBeir,
    encoder: str,
    out: Path,
    quick: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Run one row: fit what it fits, and evaluate it into the folder ``evaluation``."""
    folder = out / row.name / f"seed-{seed}"
    model_folder = (out / row.model / f"seed-{seed}" if row.model else folder) / MODEL
    place = model_folder.parent / EVALUATION
    if row.fit is not None:
        fit(data, encoder, model_folder, settings_of(row, seed, quick), progress=progress)
    config = from_json(
        EvaluationConfig, {"seed": 0, **merge(row.evaluate, quick.get("evaluate", {}))}
    )
    model = Genius.open(model_folder)
    if row.baseline is None:
        evaluate(data, model, config, folder / EVALUATION, evaluation=place, progress=progress)
        return
    rival = from_json(BaselineConfig, {**row.baseline, "seed": seed, **quick.get("baseline", {})})
    evaluate_baseline(
        data, model, rival, config, folder / EVALUATION, evaluation=place, progress=progress
    )


def share(first: Path, folder: Path) -> None:
    """Link what depends on the encoder and the data only from another row's folder."""
    for pattern in _SHARED:
        for place in first.glob(pattern):
            target = folder / place.relative_to(first)
            if not target.exists():
                # A folder that a killed sweep has half copied must not look like a finished one.
                with new_folder(target) as partial:
                    shutil.copytree(place, partial, copy_function=os.link, dirs_exist_ok=True)


@command
class Sweep:
    """Run every row of a recipe (ablations, rivals, beams, sizes, seeds); `research.report` shows them.

    If interrupted, run it again to continue. Exit status 1 if a row failed.
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
    """Rows to leave out, such as those that need missing pictures."""

    quick: bool = False
    """Use the recipe's settings for a run of minutes, to check that everything works."""

    def run(self) -> int:
        """Run the rows that are not done yet."""
        recipe, data = read_recipe(self.recipe), MBeir(self.data)
        names = [row.name for row in recipe.row]
        if unknown := {*self.only, *self.skip}.difference(names):
            raise UsageError(f"the recipe has no rows {', '.join(sorted(unknown))}")
        models = (row.model for row in recipe.row if row.name in self.only)
        needed = {*(self.only or names), *models}.difference(self.skip)
        changes = recipe.quick if self.quick else {}
        failed = []
        first: Path | None = None
        with TerminalProgress() as progress:
            for row in (one for one in recipe.row if one.name in needed):
                for seed in row.seeds[:1] if self.quick else row.seeds:
                    folder = self.out / row.name / f"seed-{seed}"
                    plan = fingerprint_of(
                        [asdict(row), seed, changes, self.encoder, str(data.root.resolve())]
                    )
                    if first is not None and row.fit is not None:
                        share(first, folder)
                    done = folder / ROW_FILE
                    if done.exists() and json.loads(done.read_text())["plan"] == plan:
                        first = first or folder
                        continue
                    progress.say(f"{row.name}, seed {seed}")
                    began = time.monotonic()
                    try:
                        make_row(row, seed, data, self.encoder, self.out, changes, progress)
                    except GeniusError as error:
                        failed.append(f"{row.name}, seed {seed}: {error}")
                        progress.say(failed[-1])
                        continue
                    first = first or folder
                    record = {
                        **asdict(row),
                        "seed": seed,
                        "plan": plan,
                        "place": names.index(row.name),
                    }
                    write_json(done, {**record, "seconds": round(time.monotonic() - began)})
            progress.say(f"failed: {'; '.join(failed) or 'none'}")
        return 1 if failed else 0


main = partial(run, Sweep, "sweep")


if __name__ == "__main__":
    sys.exit(main())
