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
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius.artifact import file_fingerprint, fingerprint_of, write_json
from genius.data.mbeir import MBeir
from genius.errors import BadData
from genius.stages.progress import Progress
from genius.stages.recipe import EVALUATION, MODEL_FOLDER, Job

ROW: Final = "row.json"
LOG: Final = "log.txt"
SHARED: Final = {MODEL_FOLDER: ("encoder", "features"), EVALUATION: ("candidates*/features", "queries-*")}
"""In a row's folders, what depends on the encoder and the data only. Whoever opens it checks that it fits."""
WITH_QUANTIZER: Final = {**SHARED, MODEL_FOLDER: (*SHARED[MODEL_FOLDER], "quantizer")}
RECORDS: Final = ("query", "cand_pool", "qrels", "instructions")
"""Folders of a data set."""
LAST_WORDS: Final = 300
"""Characters of a failed command's last line that are kept."""
START: Final = "from genius.cli import main; raise SystemExit(main())"


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
    for path in sorted(root.glob(f"*/*/{ROW}")):
        try:
            row = TypeAdapter(MadeRow).validate_python(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, ValidationError) as error:
            raise BadData(f"{path} is not what `genius sweep` writes: {error}") from None
        found.append((path.parent, row))
    return sorted(found, key=lambda one: one[1].order)


def _made(folder: Path, job: Job, order: int) -> MadeRow | None:
    """The finished row, if it was made by these very commands; it takes its place in the recipe."""
    try:
        row = TypeAdapter(MadeRow).validate_python(json.loads((folder / ROW).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None
    if row.state != "done" or row.plan != job.plan:
        return None
    if row.order != order:
        row = replace(row, order=order)
        write_json(folder / ROW, asdict(row))
    return row


async def _make(
    job: Job, order: int, data: Path, root: Path, machine: str, environment: Mapping[str, str]
) -> MadeRow:
    folder = root / job.place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROW).unlink(missing_ok=True)
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
    write_json(folder / ROW, asdict(row))
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
