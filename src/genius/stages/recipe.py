"""The rows of a sweep as a file says them (TOML): which commands make each, with which flags and seeds.

A row fits a model and evaluates it, or evaluates the model of an earlier row, or runs any other command::

    [flags]
    fit = "--preset small"
    evaluate = "--pools global"

    [[row]]
    name = "paper"
    title = "as in the paper"
    table = "systems"
    seeds = [0, 1, 2]
    fit = "--generator.guide none"

    [[row]]
    name = "beam-1"
    table = "beam"
    model = "paper"
    evaluate = "--beam 1"
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from annotated_types import Ge
from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius.artifact import fingerprint_of
from genius.errors import BadData, UsageError

MODEL_FOLDER: Final = "model"
EVALUATION: Final = "evaluation"
"""Folders in a row's own."""
DATA: Final = "{data}"
ENCODER: Final = "{encoder}"
MODEL: Final = "{model}"
OUT: Final = "{out}"
ROW: Final = "{row}"
EVALUATED: Final = "{evaluation}"
SEED: Final = "{seed}"
SEED_FLAGS: Final = ("--quantizer.training.seed", SEED, "--generator.training.seed", SEED)
"""What a seed changes of a model; the encoder, whose features the rows share, keeps its own."""
TableName = Literal["systems", "ablations", "beam", "decoder", "codes", "costs"]
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of every row's commands; a row's own come behind them and win."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    fit: str = ""
    """Of `genius fit`."""

    evaluate: str = ""
    """Of `genius evaluate`."""


@dataclass(frozen=True, kw_only=True)
class Quick(Flags):
    """What is different where everything is to be over in minutes: flags behind all others, fewer seeds."""

    seeds: tuple[Annotated[int, Ge(0)], ...] = (0,)
    """Rows are made with those of their seeds that are here."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the paper's tables."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    """Of its folder; small letters, digits, full stops, plus and minus signs."""

    title: str = ""
    """In tables; the name if it is left out."""

    table: TableName
    """Which table it stands in."""

    seeds: tuple[Annotated[int, Ge(0)], ...] = (0,)
    """The row is made once with each."""

    like: str = ""
    """An earlier row: its flags of `genius fit` and `genius evaluate` (with those of the row that it is like
    itself) come before this row's own. In tables of changes it is the row that this one is compared with."""

    fit: str | None = None
    """Flags of `genius fit`; the row has a model of its own."""

    model: str = ""
    """An earlier row whose model of the same seed is taken, instead of fitting one."""

    evaluate: str | None = None
    """Flags of `genius evaluate`. Left out, a row with a model is evaluated with the flags of every row."""

    run: tuple[str, ...] = ()
    """Other commands in place of evaluating: `bench quality {data} --model {model} --out {out}`. {row} is the
    row's own folder, {out} the evaluation/ in it, {evaluation} that of the row whose model is taken."""

    quick: tuple[str, ...] = ()
    """The same, where everything is to be over in minutes."""

    alone: bool = False
    """Made after all others and by itself, since it measures time."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rows."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: tuple[Row, ...]
    flags: Flags = Flags()
    quick: Quick = Quick()


class Job(NamedTuple):
    """A row with one seed: what is run, and where."""

    row: Row
    seed: int
    place: str
    """Its folder inside the sweep's: ``paper/seed-0``."""
    model: str
    """Folder of its model inside the sweep's; empty when it has none."""
    commands: tuple[tuple[str, ...], ...]
    """Words behind ``genius``, with ``{data}``, ``{model}`` and so on for the folders."""
    encoder: str
    """As `genius fit` is told."""
    plan: str
    """Fingerprint of the commands, the data and what they build on: done once is done, until it changes."""

    @property
    def quantizer(self) -> tuple[str, ...]:
        """What decides its quantizer: the words of `genius fit` but those of the generator; empty without."""
        words = self.commands[0]
        if words[0] != "fit":
            return ()
        deciding: list[str] = []
        is_generators = False
        for word in words:
            if word.startswith("--"):
                is_generators = word.startswith("--generator.")
            if not is_generators:
                deciding.append(word)
        return tuple(deciding)

    def shown(self, data: Path) -> list[str]:
        """The commands as a person types them, of folders only the last name."""
        kind, colon, place = self.encoder.partition(":")
        encoder = f"{kind}{colon}{Path(place).name}"
        return [f"genius {shlex.join(words)}" for words in self._filled(data.name, encoder, "")]

    def filled(self, data: Path, root: Path) -> list[list[str]]:
        """The commands' words with the real folders."""
        return self._filled(str(data), self.encoder, f"{root}/")

    def _filled(self, data: str, encoder: str, root: str) -> list[list[str]]:
        names = {
            DATA: data,
            ENCODER: encoder,
            MODEL: f"{root}{self.model}",
            OUT: f"{root}{self.place}/{EVALUATION}",
            ROW: f"{root}{self.place}",
            EVALUATED: f"{root}{self.model.removesuffix(MODEL_FOLDER)}{EVALUATION}",
        }
        return [_filled(words, names) for words in self.commands]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe, strictly.

    Raises
    ------
    BadData
        it cannot be read, a field is unknown or wrong, or a row builds on one that is not before it.
    """
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        recipe = TypeAdapter(Recipe).validate_python(found)
    except FileNotFoundError:
        raise BadData(f"{path}: there is no such recipe") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; expected a file of rows (TOML)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadData(f"{path}: {where}: {first['msg'].lower()}") from None
    problem = _problem(recipe)
    if problem:
        raise BadData(f"{path}: {problem}")
    return recipe


def jobs_of(
    recipe: Recipe,
    *,
    encoder: str = "small",
    data: str = "",
    quick: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> list[Job]:
    """Every row with each of its seeds: the first seed of all rows first, so that tables fill evenly.

    ``data`` is the data set's fingerprint: with another, rows have to be made anew. ``only`` names rows; what
    they build on comes along. ``skip`` names rows that are left out.

    Raises
    ------
    UsageError
        a row is named that is not there, nothing is left, or what is left builds on a row that is skipped.
    """
    names = [row.name for row in recipe.row]
    unknown = [name for name in (*only, *skip) if name not in names]
    if unknown:
        raise UsageError(f"the recipe has no row {unknown[0]!r}; it has: {', '.join(names)}")
    by_name = {row.name: row for row in recipe.row}
    wanted = set(only or names) - set(skip)
    if not wanted:
        raise UsageError("every row is skipped")
    for name in sorted(wanted, key=names.index):
        if by_name[name].model in skip:
            raise UsageError(f"row {name!r} builds on {by_name[name].model!r}, which is skipped")
    wanted |= {by_name[name].model for name in wanted}
    jobs: dict[tuple[str, int], Job] = {}
    for seed in sorted({seed for row in recipe.row for seed in row.seeds}):
        for row in recipe.row:
            if row.name in wanted and seed in row.seeds and (not quick or seed in recipe.quick.seeds):
                jobs[row.name, seed] = _job(row, seed, by_name, recipe, jobs, encoder, data, quick=quick)
    if not jobs:
        raise UsageError(
            f"--quick makes rows with seeds {list(recipe.quick.seeds)} only, and no row here has one of "
            "them; give [quick] in the recipe other seeds"
        )
    return list(jobs.values())


def _job(
    row: Row,
    seed: int,
    by_name: Mapping[str, Row],
    recipe: Recipe,
    earlier: Mapping[tuple[str, int], Job],
    encoder: str,
    data: str,
    *,
    quick: bool,
) -> Job:
    place = f"{row.name}/seed-{seed}"
    base = earlier[row.model, seed] if row.model else None
    model = f"{place}/{MODEL_FOLDER}" if row.fit is not None else base.model if base else ""
    line = _line(row, by_name)
    commands = []
    if row.fit is not None:
        words = [
            *_words(recipe.flags.fit, *(one.fit for one in line)),
            *SEED_FLAGS,
            *(_words(recipe.quick.fit) if quick else ()),
        ]
        commands.append(("fit", DATA, "--encoder", ENCODER, "--out", MODEL, *words))
    if row.run:
        commands += [_words(command) for command in (quick and row.quick) or row.run]
    elif model:
        words = [*_words(recipe.flags.evaluate, *(one.evaluate for one in line))]
        words += _words(recipe.quick.evaluate) if quick else ()
        commands.append(("evaluate", DATA, "--model", MODEL, "--out", OUT, *words))
    filled = tuple(tuple(_filled(words, {SEED: str(seed)})) for words in commands)
    plan = fingerprint_of([filled, encoder, data, base.plan if base else None])
    return Job(row, seed, place, model, filled, encoder, plan)


def _line(row: Row, by_name: Mapping[str, Row]) -> list[Row]:
    """The row behind what it is like, and what that is like in turn."""
    line = [row]
    while line[0].like:
        line.insert(0, by_name[line[0].like])
    return line


def _words(*texts: str | None) -> tuple[str, ...]:
    return tuple(word for text in texts for word in shlex.split(text or ""))


def _filled(words: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Words with names put in; a name may be a part of a word."""
    filled = list(words)
    for name, value in names.items():
        filled = [word.replace(name, value) for word in filled]
    return filled


def _problem(recipe: Recipe) -> str | None:
    """Why these rows cannot be made one after the other, or nothing."""
    for section, flags in (("flags", recipe.flags), ("quick", recipe.quick)):
        wrong = _unreadable(flags.fit, flags.evaluate)
        if wrong is not None:
            return f"[{section}]: {wrong}"
    before: dict[str, Row] = {}
    for row in recipe.row:
        wrong = next(_wrong(row, before), None)
        if wrong is not None:
            return f"row {row.name!r}: {wrong}"
        before[row.name] = row
    return None


def _unreadable(*texts: str | None) -> str | None:
    """Which of these texts a shell could not read."""
    for text in texts:
        try:
            shlex.split(text or "")
        except ValueError as error:
            return f"{text!r} cannot be split into words: {str(error).lower()}"
    return None


def _wrong_words(row: Row) -> Iterator[str]:
    unreadable = _unreadable(row.fit, row.evaluate, *row.run, *row.quick)
    if unreadable is not None:
        yield unreadable
    elif not all(map(_words, (*row.run, *row.quick))):
        yield "a command of run or quick is empty"


def _wrong(row: Row, before: Mapping[str, Row]) -> Iterator[str]:
    """What is wrong with a row that comes after these."""
    if not _NAME.fullmatch(row.name):
        yield "a name is small letters, digits, full stops, plus and minus signs"
    if row.name in before:
        yield "it is there twice"
    yield from _wrong_words(row)
    for field, other in (("like", row.like), ("model", row.model)):
        if other and other not in before:
            yield f"{field} is {other!r}, which is not the name of a row before it"
    if row.fit is None and not row.model and not row.run:
        yield "it does nothing; give it fit, model or run"
    if not row.model:
        return
    base = before[row.model]
    if row.fit is not None:
        yield "it has both a model of its own (fit) and another row's (model)"
    if base.fit is None:
        yield f"{row.model!r} fits no model"
    if not set(row.seeds) <= set(base.seeds):
        yield f"its seeds are {list(row.seeds)}, and {row.model!r} has only {list(base.seeds)}"
