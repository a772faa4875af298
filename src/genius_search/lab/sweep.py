"""``genius sweep``: the rows of a recipe, run one after the other; each keeps its commands and machine.

Every command runs in a process of its own, so that a row that fails, or is killed, affects no other. A row is
finished when its ``row.json`` says so. A sweep that is run again skips finished rows, continues one that was
interrupted where its stages stopped, and repeats one whose commands or data have changed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from annotated_types import Ge
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.progress import Progress
from genius_search.writing import write_json

MODEL_FOLDER: Final = "model"
EVALUATION: Final = "evaluation"
"""Folders in a row's own."""
SWEEP_ROW: Final = "row.json"
LOG: Final = "log.txt"
_SHARED: Final = (
    "model/encoder",
    "model/features",
    "evaluation/candidates*/features",
    "evaluation/queries-*",
)
"""In a row's folder, what depends on the encoder and the data only. Its readers check that it fits."""
_RECORDS: Final = ("query", "cand_pool", "qrels", "instructions")
"""Folders of a data set."""
_SEED_FLAGS: Final = "--quantizer.training.seed {seed} --generator.training.seed {seed}"
"""The seeds of a model; the encoder, whose features the rows share, keeps its own."""
_MAX_ERROR: Final = 300
"""Characters of a failed command's last line that are kept."""
START: Final = "from genius_search.cli import main; raise SystemExit(main())"

TableName = Literal["systems", "ablations", "beam", "decoder", "codes", "costs"]
Seeds = tuple[Annotated[int, Ge(0)], ...]


def _splittable(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words: {error}") from None
    return text


Words = Annotated[str, AfterValidator(_splittable)]
Command = Annotated[Words, Field(pattern=r"\S")]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of every row's `genius fit` and `genius evaluate`; a row's own come after them and win."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    fit: Words = ""
    evaluate: Words = ""


@dataclass(frozen=True, kw_only=True)
class Quick(Flags):
    """Changes for a run of minutes: flags after all others, and fewer seeds."""

    seeds: Seeds = (0,)
    """Rows are run with those of their seeds that are listed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the paper's tables."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")]
    """Name of its folder; small letters, digits, full stops, plus and minus signs."""
    title: str = ""
    """In tables; the name if it is left out."""
    table: TableName
    seeds: Seeds = (0,)
    """The row is run once with each."""
    like: str = ""
    """An earlier row: its flags of `genius fit` and `genius evaluate` (with those of the row that it is like
    itself) come before this row's own; a row without any of its own has that one's other commands. In tables
    of changes it is the row that this one is compared with."""
    fit: Words | None = None
    """Flags of `genius fit`; the row has a model of its own."""
    model: str = ""
    """An earlier row whose model of the same seed is used, instead of fitting one."""
    evaluate: Words | None = None
    """Flags of `genius evaluate`. Left out, a row with a model is evaluated with the flags of every row."""
    run: tuple[Command, ...] = ()
    """Other commands in place of evaluating: `bench quality {data} --model {model} --out {out}`. {row} is the
    row's own folder, {out} the evaluation/ in it, {evaluation} that of the row whose model is used, {name}
    the row's name."""
    quick: tuple[Command, ...] = ()
    """The same, for a run of minutes."""


def _in_order(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Refuse rows that cannot be run one after the other; fill in the commands of those like others."""
    before: dict[str, Row] = {}
    for given in rows:
        like = before.get(given.like)
        has_own = given.fit is not None or given.run
        row = given if like is None or has_own else replace(given, run=like.run, quick=like.quick)
        problem, base = "", before.get(row.model)
        if row.name in before:
            problem = "it is there twice"
        elif unknown := [name for name in (row.like, row.model) if name and name not in before]:
            problem = f"it builds on {unknown[0]!r}, which is not the name of a row before it"
        elif row.fit is None and not row.model and not row.run:
            problem = "it does nothing; give it fit, model or run"
        elif base is not None and row.fit is not None:
            problem = "it has both a model of its own (fit) and another row's (model)"
        elif base is not None and base.fit is None:
            problem = f"{row.model!r} fits no model"
        elif base is not None and not set(row.seeds) <= set(base.seeds):
            problem = f"its seeds are {list(row.seeds)}, and {row.model!r} has only {list(base.seeds)}"
        if problem:
            raise ValueError(f"row {row.name!r}: {problem}")
        before[row.name] = row
    return tuple(before.values())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rows."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    row: Annotated[tuple[Row, ...], AfterValidator(_in_order)]
    flags: Flags = Flags()
    quick: Quick = Quick()


class Job(NamedTuple):
    """A row with one seed."""

    row: Row
    seed: int
    place: str
    """Its folder inside the sweep's: ``paper/seed-0``."""
    model: str
    """Folder of its model inside the sweep's; empty when it has none."""
    commands: tuple[tuple[str, ...], ...]
    """Words after ``genius``, with ``{data}``, ``{model}`` and so on for the folders."""
    encoder: str
    """The encoder given to `genius fit`."""
    plan: str
    """Fingerprint of the commands, the data and what they build on: a row is run again when it changes."""

    @property
    def quantizer(self) -> tuple[str, ...]:
        """The words of `genius fit` that decide its quantizer, without the generator's."""
        words: list[str] = []
        is_generators = False
        for word in self.commands[0] if self.commands[0][0] == "fit" else ():
            if word.startswith("--"):
                is_generators = word.startswith("--generator.")
            if not is_generators:
                words.append(word)
        return tuple(words)

    def shown(self, data: Path) -> list[str]:
        """Return the commands as a person types them, of folders only the last name."""
        kind, colon, path = self.encoder.partition(":")
        encoder = f"{kind}{colon}{Path(path).name}"
        return [f"genius {shlex.join(words)}" for words in self._filled(data.name, encoder, "")]

    def filled(self, data: Path, root: Path) -> list[list[str]]:
        """Return the commands' words with the real folders."""
        return self._filled(str(data), self.encoder, f"{root}/")

    def _filled(self, data: str, encoder: str, root: str) -> list[list[str]]:
        names = {
            "data": data,
            "encoder": encoder,
            "model": f"{root}{self.model}",
            "out": f"{root}{self.place}/{EVALUATION}",
            "row": f"{root}{self.place}",
            "evaluation": f"{root}{self.model.removesuffix(MODEL_FOLDER)}{EVALUATION}",
        }
        return [_fill(words, **names) for words in self.commands]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe, strictly.

    Raises BadData: it cannot be read, a field is unknown or wrong, or a row builds on one that is not before
    it.
    """
    try:
        return TypeAdapter(Recipe).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; expected a file of rows (TOML)") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise BadData(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise BadData(f"{path} is not TOML: {error}") from None


def jobs_of(
    recipe: Recipe,
    *,
    encoder: str = "small",
    data: str = "",
    quick: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> list[Job]:
    """Return every row with each of its seeds, the first seed of all rows first, so that tables fill evenly.

    ``data`` is the data set's fingerprint: with another, rows have to be run again. ``only`` names rows; what
    they build on is added. ``skip`` names rows to leave out.

    Raises UsageError: there is no row of that name, nothing is left, or what is left builds on a row that is
    skipped.
    """
    by_name = {row.name: row for row in recipe.row}
    for name in (*only, *skip):
        if name not in by_name:
            raise UsageError(f"the recipe has no row {name!r}; it has: {', '.join(by_name)}")
    chosen = set(only or by_name) - set(skip)
    if not chosen:
        raise UsageError("every row is skipped")
    for name, row in by_name.items():
        if name in chosen and row.model in skip:
            raise UsageError(f"row {name!r} builds on {row.model!r}, which is skipped")
    chosen |= {by_name[name].model for name in chosen}
    jobs: dict[tuple[str, int], Job] = {}
    for seed in sorted({seed for row in recipe.row for seed in row.seeds}):
        for row in recipe.row:
            if row.name not in chosen or seed not in row.seeds or (quick and seed not in recipe.quick.seeds):
                continue
            place, base = f"{row.name}/seed-{seed}", jobs.get((row.model, seed))
            model = f"{place}/{MODEL_FOLDER}" if row.fit is not None else base.model if base else ""
            texts = _commands(row, recipe, quick=quick)
            commands = tuple(tuple(_fill(shlex.split(text), seed=str(seed), name=row.name)) for text in texts)
            plan = fingerprint_of([commands, encoder, data, base.plan if base else None])
            jobs[row.name, seed] = Job(row, seed, place, model, commands, encoder, plan)
    if not jobs:
        raise UsageError(
            f"--quick runs rows with seeds {list(recipe.quick.seeds)} only, and no row left has one of them; "
            "give [quick] in the recipe other seeds"
        )
    return list(jobs.values())


def _commands(row: Row, recipe: Recipe, *, quick: bool) -> Iterator[str]:
    """Yield the row's commands, with names in braces for folders and seed."""
    line = [row]
    while line[0].like:
        line.insert(0, next(one for one in recipe.row if one.name == line[0].like))
    last = recipe.quick if quick else Flags()
    if row.fit is not None:
        flags = [recipe.flags.fit, *(one.fit or "" for one in line), _SEED_FLAGS, last.fit]
        yield " ".join(("fit {data} --encoder {encoder} --out {model}", *flags))
    if row.run:
        yield from (quick and row.quick) or row.run
    elif row.fit is not None or row.model:
        flags = [recipe.flags.evaluate, *(one.evaluate or "" for one in line), last.evaluate]
        yield " ".join(("evaluate {data} --model {model} --out {out}", *flags))


def _fill(words: Sequence[str], **names: str) -> list[str]:
    """Replace names in braces, which may be a part of a word; other braces stay."""
    return [re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), word) for word in words]


@dataclass(frozen=True, kw_only=True)
class MadeRow:
    """The record beside a row's results."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    title: str
    table: str
    seed: int
    state: Literal["done", "failed"]
    error: str
    """The last line of the command that failed."""
    commands: tuple[str, ...]
    """Return the commands as a person types them, folders by their last names."""
    model: str
    """Its model's folder inside the sweep's; empty when it has none."""
    seconds: float
    machine: str
    date: str
    plan: str
    order: int = 0
    """Place in the recipe."""
    like: str = ""
    """The row that this one is a change of."""


def read_rows(root: Path) -> list[tuple[Path, MadeRow]]:
    """Read the rows of a sweep that were run, with their folders, in the recipe's order.

    Raises BadData: a row's file is not one that a sweep writes.
    """
    found = []
    for path in sorted(root.glob(f"*/*/{SWEEP_ROW}")):
        try:
            found.append((path.parent, _read_row(path)))
        except ValueError as error:
            raise BadData(f"{path} was not written by this version of `genius sweep`: {error}") from None
    return sorted(found, key=lambda one: one[1].order)


def _read_row(path: Path) -> MadeRow:
    return TypeAdapter(MadeRow).validate_json(path.read_bytes())


def records_of(data: MBeir) -> str:
    """Return the fingerprint of a data set's queries, pools, qrels and instructions, without its pictures."""
    files = [
        path
        for name in _RECORDS
        for path in sorted((data.root / name).rglob("[!.]*"))  # names with a dot are a file browser's
        if path.is_file()
    ]
    return fingerprint_of([[str(path.relative_to(data.root)), file_fingerprint(path)] for path in files])


def sweep(
    jobs: Sequence[Job],
    data: Path,
    root: Path,
    *,
    machine: str,
    progress: Progress,
    encoder_of: Path | None = None,
) -> list[tuple[Job, MadeRow]]:
    """Run every row that is not finished; failures are in the result, and nothing is raised for them.

    Rows use the encoder and features of those before them. A row whose flags differ from another's in the
    generator only uses that one's quantizer.

    Parameters
    ----------
    root
        receives a folder for each row and seed.
    machine
        a description of the machine.
    encoder_of
        a model whose encoder and features are used where they fit, instead of making them.
    """
    root.mkdir(parents=True, exist_ok=True)
    made = []
    progress.begin("sweep", len(jobs))
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the command that runs, too
    try:
        for order, job in enumerate(jobs):
            row = _finished(root, job, order)
            if row is None:
                title = f"{order + 1}/{len(jobs)} {job.place}"
                progress.say(f"{title}: {job.row.title or job.row.name}")
                _link_parts(root, jobs, job, encoder_of)
                row = _make(root, job, data, machine, order)
                log = root / job.place / LOG
                verdict = f"failed: {row.error}; see {log}" if row.error else "done"
                progress.say(f"{title}: {verdict} ({row.seconds:.0f} s)")
            made.append((job, row))
            progress.advance(len(made), {})
    finally:
        signal.signal(signal.SIGTERM, terminated)
    return made


def _finished(root: Path, job: Job, order: int) -> MadeRow | None:
    """Read a row that was made by these very commands; it takes its place in the recipe."""
    path = root / job.place / SWEEP_ROW
    with contextlib.suppress(OSError, ValueError):
        row = _read_row(path)
        if row.state == "done" and row.plan == job.plan:
            if row.order != order:
                row = replace(row, order=order)
                write_json(path, asdict(row))
            return row
    return None


def _link_parts(root: Path, jobs: Sequence[Job], job: Job, encoder_of: Path | None) -> None:
    """Link what this row can use of the others."""
    folder = root / job.place
    folder.mkdir(parents=True, exist_ok=True)
    for other in jobs:
        there = root / other.place
        is_alike = job.quantizer and job.quantizer == other.quantizer
        patterns = (*_SHARED, "model/quantizer") if is_alike else _SHARED
        _link_shared(there / MODEL_FOLDER, there / EVALUATION, folder, patterns)
    if encoder_of is not None:
        _link_shared(encoder_of, encoder_of / EVALUATION, folder, _SHARED)


def _make(root: Path, job: Job, data: Path, machine: str, order: int) -> MadeRow:
    """Run the commands of a row, and write its record."""
    folder = root / job.place
    (folder / SWEEP_ROW).unlink(missing_ok=True)
    started, error = time.monotonic(), ""
    with (folder / LOG).open("w", encoding="utf-8") as log:
        for words in job.filled(data, root):
            status = _run(words, log.fileno())
            if status:
                error = _last_line(folder / LOG) or f"exit status {status}"
                break
    row = MadeRow(
        name=job.row.name,
        title=job.row.title or job.row.name,
        table=job.row.table,
        seed=job.seed,
        state="failed" if error else "done",
        error=error,
        commands=tuple(job.shown(data)),
        model=job.model,
        seconds=round(time.monotonic() - started, 1),
        machine=machine,
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        plan=job.plan,
        order=order,
        like=job.row.like,
    )
    write_json(folder / SWEEP_ROW, asdict(row))
    return row


def _run(words: Sequence[str], log: int) -> int:
    """Run a command in a process of its own, which is terminated with this one."""
    command = [sys.executable, "-c", START, *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:  # noqa: S603
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _link_shared(model: Path, evaluation: Path, folder: Path, patterns: Sequence[str]) -> None:
    """Link the outputs of another row that this one lacks.

    Nobody writes into such folders: a stage that needs another replaces the whole folder.
    """
    for pattern in patterns:
        part, _, name = pattern.partition("/")
        there = model if part == MODEL_FOLDER else evaluation
        for source in sorted(there.glob(name)):
            target = folder / part / source.relative_to(there)
            if target.exists():
                continue
            partial = target.with_name(f".{target.name}.linking")
            shutil.rmtree(partial, ignore_errors=True)
            # Names with a dot are locks and the remains of a killed stage.
            shutil.copytree(source, partial, copy_function=_link, ignore=shutil.ignore_patterns(".*"))
            partial.rename(target)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the disk has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _last_line(log: Path) -> str:
    """Return the last line with words; a frame around errors has none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for raw in text.splitlines() if (line := raw.strip(" │╭╮╰╯─"))]
    return lines[-1][-_MAX_ERROR:] if lines else ""
