"""``genius repro``: what reproducing a published number needs, and the reproduction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from genius.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius.stages.repro import Reproduction, ReproPlan
    from genius.stages.repro_checks import Check
    from genius.stages.repro_needs import NeededFile


@dataclass(frozen=True, kw_only=True)
class Repro:
    """Reproduce a published row: says what it needs and what of it is there; `--run` evaluates and compares.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    when exact search differs from the released CLIP_SF by more than 0.3 points, 4 when files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")] = ""
    """A row's name, all, flickr30k or coco."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Of M-BEIR, or of the converted captions; default: M-BEIR, or flickr30k or coco for these rows."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the model: the published checkpoints, imported."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where features and runs go; default: evaluation/ in the model's folder."""

    run_it: Annotated[bool, tyro.conf.arg(name="run")] = False
    """Evaluate, in every pool whose files are there."""

    device: str = "cpu"
    """Or cuda."""

    list: bool = False
    """Every published number instead, as Markdown."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Tell, or reproduce."""
        from genius.errors import UsageError
        from genius.evaluation.published_page import page, to_json
        from genius.stages.repro import CAPTION_SETS, NAMES, plan

        if self.list:
            if self.json:
                print_json(to_json())
            else:
                print(page(), end="")
            return 0
        if not self.row:
            raise UsageError(f"give the row to reproduce: {', '.join(NAMES)}; or --list")
        data = self.data or Path(self.row if self.row in CAPTION_SETS else "M-BEIR")
        needed = plan(self.row, data, self.model)
        if self.run_it:
            return self._reproduce(needed)
        looked = _checks(needed)
        if self.json:
            print_json(_plan_json(needed, looked))
        else:
            _print_plan(needed, looked)
        return 0

    def _reproduce(self, needed: ReproPlan) -> int:
        from genius.errors import UsageError
        from genius.evaluation.published import PAPER_BEAM
        from genius.evaluation.tables import to_json
        from genius.model import Genius
        from genius.stages.repro import reproduce

        if self.model is None:
            raise UsageError("--run needs --model")
        with TerminalProgress() as progress:
            needed.require()
            looked = _checks(needed)
            for check in looked:
                if not check.ok:
                    progress.say(f"{check.what}: {check.found}, expected {check.expected}")
            model = Genius.open(self.model, device=self.device)
            result = reproduce(needed, model, self.out or self.model / "evaluation", progress=progress)
        if self.json:
            verdicts = [
                {**verdict._asdict(), "references": [one._asdict() for one in verdict.references]}
                for verdict in result.verdicts
            ]
            print_json(
                {**to_json(result.rows), "verdicts": verdicts, "checks": [one._asdict() for one in looked]}
            )
        elif needed.captions:
            _print_captions(needed, result)
        else:
            from genius.cli.evaluate import print_tables

            print_tables(result.rows, beam=PAPER_BEAM)
            _print_verdicts(result)
        return 1 if any(verdict.ok is False for verdict in result.verdicts) else 0


def _checks(needed: ReproPlan) -> list[Check]:
    from genius.stages.repro_checks import checks

    layout = all((needed.data / name).is_dir() for name in ("query", "cand_pool"))
    pools = [work.pool for work in needed.work]
    return checks(needed.data, needed.rows, pools=pools) if layout else []


def _plan_json(needed: ReproPlan, looked: list[Check]) -> dict[str, Any]:
    from genius.stages.repro_needs import MACHINES

    return {
        "name": needed.name,
        "rows": needed.rows,
        "pools": needed.pools,
        "files": [file._asdict() for file in needed.files],
        "global_files": [file._asdict() for file in needed.global_files],
        "archive_gigabytes": needed.archive_gigabytes,
        "work": [
            {**work._asdict(), "hours": {machine.name: work.hours(machine) for machine in MACHINES}}
            for work in needed.work
        ],
        "commands": needed.commands,
        "mteb": needed.mteb,
        "checks": [one._asdict() for one in looked],
        "published": [{**one._asdict(), "reference": one.reference._asdict()} for one in needed.published],
        "captions": [one._asdict() for one in needed.captions],
    }


def _print_plan(needed: ReproPlan, looked: list[Check]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _print_files(console, needed)
    _print_work(console, needed)
    console.print("\nCommands:")
    for command in needed.commands:
        console.print(f"  {command}")
    if looked:
        console.print("\nA first look at what is there:")
    for check in looked:
        mark = "[OK]" if check.ok else "[DIFFERS]"
        console.print(f"  {mark} {check.what}: {check.found} (expected {check.expected})")
    _print_targets(console, needed)
    if needed.missing:
        console.print(f"\n{len(needed.missing)} of {len(needed.files)} files for the local pool are missing.")
    else:
        console.print(f"\nAll is there for: {', '.join(needed.pools)}. Add --run.")


def _print_files(console: Console, needed: ReproPlan) -> None:
    console.print(f"Files, looked for in {needed.data}:")
    for file in needed.files:
        console.print(_file_line(file))
    if needed.global_files:
        console.print("For the global pool besides:")
    for file in needed.global_files:
        console.print(_file_line(file))
    if needed.archive_gigabytes:
        console.print(f"The archive of all pictures has {needed.archive_gigabytes:g} GB, in four parts.")
    if needed.mteb:
        console.print("Cheaper, local pool only: mteb's copies, a repository for each row, pictures inside:")
    for repository in needed.mteb:
        console.print(f"  {repository}")


def _print_work(console: Console, needed: ReproPlan) -> None:
    from genius.stages.repro_needs import MACHINES

    console.print("\nWork; what one pool encodes the other does not encode again:")
    for work in needed.work:
        console.print(
            f"  {work.pool} pool: {work.queries:,} queries, {work.candidates:,} candidates; "
            f"{work.images:,} pictures and {work.texts:,} texts to encode"
        )
        for machine in MACHINES:
            console.print(f"    estimate for a {machine.name}: {_hours(work.hours(machine))}")
    for machine in MACHINES:
        console.print(f"  The estimate for a {machine.name} assumes {machine.basis}.")


def _print_targets(console: Console, needed: ReproPlan) -> None:
    from genius.evaluation.published import TOLERANCE

    console.print(
        "\nIt will be compared with"
        + ("" if needed.captions else f" (exact-raw: within {TOLERANCE} of the released weights)")
        + ":"
    )
    for one in needed.published:
        reference = one.reference
        misprint = f"; {reference.misprint}" if reference.misprint else ""
        console.print(
            f"  {one.row}, {one.pool}, {one.method}: {reference.value:g} "
            f"({reference.system}, {reference.weights}{misprint})"
        )
    for caption in needed.captions:
        recalls = " / ".join(f"{recall:g}" for recall in caption.recalls)
        console.print(f"  R@1/5/10 {recalls} ({caption.system}, trained on {caption.trained_on})")


def _print_verdicts(result: Reproduction) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for verdict in result.verdicts:
        said = ", ".join(
            f"{one.weights} {one.value:g} ({verdict.score - one.value:+.2f})" for one in verdict.references
        )
        mark = {True: "[OK]", False: "[DIFFERS]", None: "[-]"}[verdict.ok]
        console.print(
            f"{mark} {verdict.row}, {verdict.pool}, {verdict.method}: {verdict.score:.2f}; "
            + (said or "nothing published for these queries and this pool")
        )


def _print_captions(needed: ReproPlan, result: Reproduction) -> None:
    table = Table("system", "trained on", "R@1", "R@5", "R@10", box=None)
    for row in result.rows:
        recalls = (f"{100 * row.measures[f'R@{k}']:.1f}" for k in (1, 5, 10))
        table.add_row(row.method, "(this model)", *recalls, style="bold")
    for one in needed.captions:
        table.add_row(one.system, one.trained_on, *(f"{recall:.1f}" for recall in one.recalls))
    Console().print(table)


def _file_line(file: NeededFile) -> str:
    size = "" if file.gigabytes is None else f", {_size(file.gigabytes)}"
    return f"  {'there  ' if file.found else 'missing'}  {file.path}  ({file.why}{size})"


def _size(gigabytes: float) -> str:
    return f"{gigabytes:g} GB" if gigabytes >= 0.01 else f"{gigabytes * 1e6:.2f} kB"


def _hours(hours: float) -> str:
    return f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 0.1 else f"{60 * hours:.0f} min"
