"""``genius repro``: what reproducing a published number needs, and the reproduction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.lab.cli.repro_plan import asks, plain_console, print_plan

if TYPE_CHECKING:
    from genius_search.lab.repro import Check, Reproduction, ReproPlan


@dataclass(frozen=True, kw_only=True)
class Repro:
    """Reproduce a published row: says what it needs and what of it is there; `--run` evaluates and compares.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    when exact search differs from the released CLIP_SF by more than 0.3 points, or when the data has other
    sizes than the published numbers are for, so that nothing was compared; 4 when files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")] = ""
    """A row's name, all, flickr30k or coco."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Of M-BEIR, or of the converted captions; default: M-BEIR, or flickr30k or coco for these rows."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the model: the published checkpoints, imported."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where features and runs go; default: evaluation/ in the model's folder."""

    pools: str = ""
    """local, global, or local,global; default: every pool whose files are there."""

    run_it: Annotated[bool, tyro.conf.arg(name="run")] = False
    """Evaluate."""

    device: str = "cpu"
    """Or cuda."""

    list: bool = False
    """Every published number instead, as Markdown."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Tell, or reproduce."""
        from genius_search.errors import UsageError
        from genius_search.lab.cli.evaluate import pools_of
        from genius_search.lab.published_numbers import page, to_json
        from genius_search.lab.repro import CAPTION_SETS, NAMES, named, plan

        if self.list:
            if self.json:
                print_json(to_json())
            else:
                print(page(), end="")
            return 0
        if not self.row:
            raise UsageError(f"give the row to reproduce: {', '.join(NAMES)}; or --list")
        name = named(self.row)
        data = self.data or Path(name if name in CAPTION_SETS else "M-BEIR")
        needed = plan(name, data, self.model, pools=pools_of(self.pools) if self.pools else ())
        if self.run_it:
            return self._reproduce(needed)
        looked = _checks(needed)
        if self.json:
            print_json(_plan_json(needed, looked))
        else:
            print_plan(needed, looked)
        return 0

    def _reproduce(self, needed: ReproPlan) -> int:
        from genius_search.errors import UsageError

        if self.model is None:
            raise UsageError("--run needs --model")
        needed.require()

        from genius_search.lab.cli.evaluate import print_tables
        from genius_search.lab.published_numbers import PAPER_BEAM
        from genius_search.lab.repro import INSTRUCTION_CHOICE, SCORES, nothing_compared, reproduce
        from genius_search.lab.results import to_json
        from genius_search.model import Genius

        with TerminalProgress() as progress:
            looked = _checks(needed)
            for check in looked:
                if not check.ok:
                    progress.say(f"{check.what}: {check.found}, expected {check.expected}")
            model = Genius.open(self.model, device=self.device)
            result = reproduce(needed, model, self.out or self.model / "evaluation", progress=progress)
            why_nothing = nothing_compared(needed, result.rows)
            if self.json and why_nothing:
                progress.say(why_nothing)
        if self.json:
            verdicts = [
                {**verdict._asdict(), "references": [one._asdict() for one in verdict.references]}
                for verdict in result.verdicts
            ]
            print_json(
                {
                    **to_json(result.rows),
                    "verdicts": verdicts,
                    "checks": [one._asdict() for one in looked],
                    "compared": why_nothing is None,
                }
            )
        else:
            console = plain_console()
            console.print(asks())
            if needed.captions:
                _print_captions(needed, result, beside=why_nothing is None)
            else:
                print_tables(result.rows, beam=PAPER_BEAM, scores=SCORES, instructions=INSTRUCTION_CHOICE)
                _print_verdicts(console, result)
            if why_nothing:
                console.print(why_nothing)
        differs = any(verdict.ok is False for verdict in result.verdicts)
        return 1 if differs or why_nothing else 0


def _checks(needed: ReproPlan) -> list[Check]:
    if not all((needed.data / name).is_dir() for name in ("query", "cand_pool")):
        return []
    from genius_search.lab.repro import checks

    return checks(needed.data, needed.rows, pools=[work.pool for work in needed.work])


def _plan_json(needed: ReproPlan, looked: list[Check]) -> dict[str, Any]:
    from genius_search.lab.published_numbers import PAPER_BEAM
    from genius_search.lab.repro import INSTRUCTION_CHOICE, MACHINES, SCORES

    return {
        "name": needed.name,
        "rows": needed.rows,
        "asks": {"instructions": INSTRUCTION_CHOICE, "scores": SCORES, "beam": PAPER_BEAM},
        "pools": needed.pools,
        "files": [file._asdict() for file in needed.files],
        "global_files": [file._asdict() for file in needed.global_files],
        "gigabytes": {
            "archive": needed.download_gigabytes,
            "unpacked": needed.unpacked_gigabytes,
            "files": needed.file_gigabytes,
            "features": needed.feature_gigabytes,
        },
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


def _print_verdicts(console: Console, result: Reproduction) -> None:
    from genius_search.lab.published_numbers import shown

    for verdict in result.verdicts:
        said = ", ".join(
            f"{one.weights} {shown(one.value)} ({verdict.score - one.value:+.2f})"
            for one in verdict.references
        )
        mark = {True: "[OK]", False: "[DIFFERS]", None: "[-]"}[verdict.ok]
        console.print(
            f"{mark} {verdict.row}, {verdict.pool}, {verdict.method}: {verdict.score:.2f}; "
            + (said or "nothing published for these queries and this pool")
        )


def _print_captions(needed: ReproPlan, result: Reproduction, *, beside: bool) -> None:
    """Ours, and the published ones where they are for the same captions and pictures."""
    from genius_search.lab.published_numbers import shown

    table = Table("system", "trained on", "R@1", "R@5", "R@10", box=None)
    for row in result.rows:
        recalls = (f"{100 * row.measures[f'R@{k}']:.1f}" for k in (1, 5, 10))
        table.add_row(row.method, "(this model)", *recalls, style="bold")
    for one in needed.captions if beside else ():
        table.add_row(one.system, one.trained_on, *(shown(recall) for recall in one.recalls))
    Console().print(table)
