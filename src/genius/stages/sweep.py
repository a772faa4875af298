"""``genius sweep``: the rows of a recipe, one after the other, each kept with its commands, seed and machine.

Every command runs in a process of its own, so that a row that fails, or is killed, takes no other with it.
A row is finished when its ``row.json`` says so. Run again, finished rows are passed over; one that was cut
off goes on where its stages stopped; one whose commands have changed since is made anew.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius.artifact import write_json
from genius.errors import BadData
from genius.stages.progress import Progress
from genius.stages.recipe import EVALUATION, MODEL_FOLDER, Job

ROW: Final = "row.json"
LOG: Final = "log.txt"
SHARED: Final = {MODEL_FOLDER: ("encoder", "features"), EVALUATION: ("candidates*/features", "queries-*")}
"""In a row's folders, what depends on the encoder and the data only. Whoever opens it checks that it fits."""
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


def sweep(
    jobs: Sequence[Job],
    data: Path,
    root: Path,
    *,
    machine: str,
    progress: Progress,
    encoder_of: Path | None = None,
) -> list[tuple[Job, MadeRow]]:
    """Make every row that is not made yet; what failed is in the answer, and nothing is raised for it.

    Parameters
    ----------
    machine
        that does it, in words.
    root
        receives a folder for each row and seed.
    encoder_of
        a model whose encoder and features are taken where they fit, instead of making them.
    """
    root.mkdir(parents=True, exist_ok=True)
    made = []
    progress.begin("sweep", len(jobs))
    for number, job in enumerate(jobs, start=1):
        row = _made(root / job.place, job)
        if row is None:
            progress.say(f"{number}/{len(jobs)} {job.place}: {job.row.title or job.row.name}")
            for other in jobs:
                _share(root / other.place / MODEL_FOLDER, root / other.place / EVALUATION, root / job.place)
            if encoder_of is not None:
                _share(encoder_of, encoder_of / EVALUATION, root / job.place)
            row = _make(job, data, root, machine)
            verdict = f"failed: {row.error}; see {root / job.place / LOG}" if row.error else "done"
            progress.say(f"{number}/{len(jobs)} {job.place}: {verdict} ({row.seconds:.0f} s)")
        made.append((job, row))
        progress.advance(number, {})
    return made


def read_rows(root: Path) -> list[tuple[Path, MadeRow]]:
    """The rows of a sweep that were made, or failed, with their folders; oldest first.

    Raises
    ------
    BadData
        a row's file is not what a sweep writes.
    """
    found = []
    for path in sorted(root.glob(f"*/*/{ROW}"), key=lambda path: path.stat().st_mtime_ns):
        try:
            row = TypeAdapter(MadeRow).validate_python(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, ValidationError) as error:
            raise BadData(f"{path} is not what `genius sweep` writes: {error}") from None
        found.append((path.parent, row))
    return found


def _made(folder: Path, job: Job) -> MadeRow | None:
    """The finished row, if it was made by these very commands."""
    try:
        row = TypeAdapter(MadeRow).validate_python(json.loads((folder / ROW).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None
    return row if row.state == "done" and row.plan == job.plan else None


def _make(job: Job, data: Path, root: Path, machine: str) -> MadeRow:
    folder = root / job.place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROW).unlink(missing_ok=True)
    started = time.monotonic()
    error = ""
    with (folder / LOG).open("w", encoding="utf-8") as log:
        for words in job.filled(data, root):
            status = _run(words, log.fileno())
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
    )
    write_json(folder / ROW, asdict(row))
    return row


def _run(words: Sequence[str], log: int) -> int:
    """One command in a process of its own; it is stopped with this one."""
    process = subprocess.Popen(  # noqa: S603  our own interpreter and our own command
        [sys.executable, "-c", START, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _share(model: Path, evaluation: Path, here: Path) -> None:
    """Link what another row has made with the encoder, where this one has none of it.

    Nobody writes into such folders: a stage that needs another replaces the whole folder.
    """
    for name, there in ((MODEL_FOLDER, model), (EVALUATION, evaluation)):
        for source in (path for pattern in SHARED[name] for path in sorted(there.glob(pattern))):
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
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][-LAST_WORDS:] if lines else ""
