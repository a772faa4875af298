"""``genius sweep``: a recipe's rows, one or a few at a time, each kept with its commands, seed and machine.

Every command runs in a process of its own, so that a row that fails, or is killed, takes no other with it.
A row is finished when its ``row.json`` says so. Run again, finished rows are passed over; one that was cut
off goes on where its stages stopped; one whose commands or data have changed since is made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from annotated_types import Ge
from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius_search.artifact import file_fingerprint, fingerprint_of, write_json
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.progress import Progress

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


SWEEP_ROW: Final = "row.json"
LOG: Final = "log.txt"
SHARED: Final = {MODEL_FOLDER: ("encoder", "features"), EVALUATION: ("candidates*/features", "queries-*")}
"""In a row's folders, what depends on the encoder and the data only. Whoever opens it checks that it fits."""
WITH_QUANTIZER: Final = {**SHARED, MODEL_FOLDER: (*SHARED[MODEL_FOLDER], "quantizer")}
RECORDS: Final = ("query", "cand_pool", "qrels", "instructions")
"""Folders of a data set."""
LAST_WORDS: Final = 300
"""Characters of a failed command's last line that are kept."""
START: Final = "from genius_search.cli import main; raise SystemExit(main())"


@dataclass(frozen=True, kw_only=True)
class MadeRow:
    """What is written beside a row's results."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    title: str
    table: str
    seed: int
    state: Literal["done", "failed"]
    error: str
    """The last line of the command that failed."""
    commands: tuple[str, ...]
    """As a person types them; of folders only the last names."""
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


def sweep(
    jobs: Sequence[Job],
    data: Path,
    root: Path,
    *,
    machine: str,
    progress: Progress,
    encoder_of: Path | None = None,
    at_once: int = 1,
) -> list[tuple[Job, MadeRow]]:
    """Make every row that is not made yet; what failed is in the answer, and nothing is raised for it.

    The first row is made by itself, unless there is a model to take them from, since the others take its
    encoder and features. So are, at the end, rows that measure time (``alone`` in the recipe). A row whose
    flags differ from another's in the generator only takes that one's quantizer.

    Parameters
    ----------
    machine
        that does it, in words.
    root
        receives a folder for each row and seed.
    encoder_of
        a model whose encoder and features are taken where they fit, instead of making them.
    at_once
        rows made at the same time, each with its share of the cores.
    """
    root.mkdir(parents=True, exist_ok=True)
    progress.begin("sweep", len(jobs))
    made = {
        job.place: row
        for order, job in enumerate(jobs)
        if (row := _made(root / job.place, job, order)) is not None
    }
    open_jobs = [job for job in jobs if job.place not in made]
    first = [] if made or encoder_of is not None else open_jobs[:1]
    among = [job for job in open_jobs if job not in first and not job.row.alone]
    alone = [job for job in open_jobs if job not in first and job.row.alone]
    running: set[str] = set()

    async def make(job: Job, environment: Mapping[str, str]) -> None:
        order = jobs.index(job)
        title = f"{order + 1}/{len(jobs)} {job.place}"
        progress.say(f"{title}: {job.row.title or job.row.name}")
        for other in jobs:
            if other.place not in running:  # what is being written is not lent
                is_alike = job.quantizer and job.quantizer == other.quantizer
                there, wanted = root / other.place, WITH_QUANTIZER if is_alike else SHARED
                _share(there / MODEL_FOLDER, there / EVALUATION, root / job.place, wanted)
        if encoder_of is not None:
            _share(encoder_of, encoder_of / EVALUATION, root / job.place, SHARED)
        running.add(job.place)
        row = await _make(job, order, data, root, machine, environment)
        running.discard(job.place)
        verdict = f"failed: {row.error}; see {root / job.place / LOG}" if row.error else "done"
        progress.say(f"{title}: {verdict} ({row.seconds:.0f} s)")
        made[job.place] = row
        progress.advance(len(made), {})

    async def make_all() -> None:
        task = asyncio.current_task()
        if task is not None:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        for job in first:
            await make(job, {})
        await _each(among, make, at_once)
        for job in alone:
            await make(job, {})

    progress.advance(len(made), {})
    try:
        asyncio.run(make_all())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # terminated: its commands were, too
    return [(job, made[job.place]) for job in jobs]


async def _each(
    jobs: Sequence[Job], make: Callable[[Job, Mapping[str, str]], Awaitable[None]], at_once: int
) -> None:
    """In this order as far as possible; a row waits for the one whose model it takes."""
    places = asyncio.Semaphore(at_once)
    ended = {job.place: asyncio.Event() for job in jobs}
    cores = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))} if at_once > 1 else {}

    async def one(job: Job) -> None:
        base = ended.get(str(Path(job.model).parent))
        if base is not None and base is not ended[job.place]:
            await base.wait()
        async with places:
            await make(job, cores)
        ended[job.place].set()

    await asyncio.gather(*map(one, jobs))


def records_of(data: MBeir) -> str:
    """Fingerprint of a data set's queries, pools, right answers and instructions; pictures are not read."""
    files = [
        path
        for name in RECORDS
        for path in sorted((data.root / name).rglob("[!.]*"))  # names with a dot are a file browser's
        if path.is_file()
    ]
    return fingerprint_of([[str(path.relative_to(data.root)), file_fingerprint(path)] for path in files])


def read_rows(root: Path) -> list[tuple[Path, MadeRow]]:
    """The rows of a sweep that were made, or failed, with their folders; in the recipe's order.

    Raises
    ------
    BadData
        a row's file is not what a sweep writes.
    """
    found = []
    for path in sorted(root.glob(f"*/*/{SWEEP_ROW}")):
        try:
            row = TypeAdapter(MadeRow).validate_python(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, ValidationError) as error:
            raise BadData(f"{path} is not what `genius sweep` writes: {error}") from None
        found.append((path.parent, row))
    return sorted(found, key=lambda one: one[1].order)


def _made(folder: Path, job: Job, order: int) -> MadeRow | None:
    """The finished row, if it was made by these very commands; it takes its place in the recipe."""
    try:
        row = TypeAdapter(MadeRow).validate_python(
            json.loads((folder / SWEEP_ROW).read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, ValidationError):
        return None
    if row.state != "done" or row.plan != job.plan:
        return None
    if row.order != order:
        row = replace(row, order=order)
        write_json(folder / SWEEP_ROW, asdict(row))
    return row


async def _make(
    job: Job, order: int, data: Path, root: Path, machine: str, environment: Mapping[str, str]
) -> MadeRow:
    folder = root / job.place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP_ROW).unlink(missing_ok=True)
    started = time.monotonic()
    error = ""
    with (folder / LOG).open("w", encoding="utf-8") as log:
        for words in job.filled(data, root):
            status = await _run(words, log.fileno(), environment)
            if status:
                error = _last_words(folder / LOG) or f"exit status {status}"
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


async def _run(words: Sequence[str], log: int, environment: Mapping[str, str]) -> int:
    """One command in a process of its own; it is stopped with this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        START,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**environment, **os.environ},
    )
    try:
        return await process.wait()
    except BaseException:
        process.terminate()
        await process.wait()
        raise


def _share(model: Path, evaluation: Path, here: Path, wanted: Mapping[str, Sequence[str]]) -> None:
    """Link what another row has made, where this one has none of it.

    Nobody writes into such folders: a stage that needs another replaces the whole folder.
    """
    for name, there in ((MODEL_FOLDER, model), (EVALUATION, evaluation)):
        for source in (path for pattern in wanted[name] for path in sorted(there.glob(pattern))):
            target = here / name / source.relative_to(there)
            if target.exists():
                continue
            partial = target.with_name(f".{target.name}.linking")
            shutil.rmtree(partial, ignore_errors=True)
            # Names with a dot are locks and what a killed stage left.
            shutil.copytree(
                source, partial, copy_function=_link, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True
            )
            partial.rename(target)


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the disk has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _last_words(log: Path) -> str:
    """The last line that says something; a frame around errors does not."""
    lines = (line.strip(" │╭╮╰╯─") for line in log.read_text(encoding="utf-8", errors="replace").splitlines())
    said = [line for line in lines if line]
    return said[-1][-LAST_WORDS:] if said else ""
