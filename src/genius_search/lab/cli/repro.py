"""``genius repro``: reproduce a published number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.lab.repro import Reproduction
    from genius_search.lab.results import ResultRow


@dataclass(frozen=True, kw_only=True)
class Repro:
    """Reproduce a published row: list what it needs and what is there; `--run` evaluates and compares.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    when exact search differs from the released CLIP_SF by more than 0.3 points, or when the data has other
    sizes than the published numbers are for, so that nothing was compared; 4 when files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")] = ""
    """A row's name, all, flickr30k or coco."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """M-BEIR, or the converted captions; default: M-BEIR, or flickr30k or coco for these rows."""

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
    """Print every published number instead, as Markdown."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """List what is needed, or reproduce."""
        from genius_search.errors import UsageError
        from genius_search.lab.cli.evaluate import pools_of
        from genius_search.lab.published_numbers import page, to_json

        if self.list:
            if self.json:
                print_json(to_json())
            else:
                print(page(), end="")
            return 0

        from genius_search.lab.repro import CAPTION_SETS, NAMES, plan

        if not self.row:
            raise UsageError(f"give the row to reproduce: {', '.join(NAMES)}; or --list")
        data = self.data or Path(self.row if self.row in CAPTION_SETS else "M-BEIR")
        needed = plan(self.row, data, self.model, pools=pools_of(self.pools) if self.pools else ())
        if self.run_it:
            return self._reproduce(needed)
        if self.json:
            print_json(
                {
                    "name": needed.name,
                    "rows": needed.rows,
                    "pools": needed.pools,
                    "files": [{"path": path, "found": path not in needed.missing} for path in needed.files],
                    "has_model": needed.has_model,
                    "commands": needed.commands,
                    "mteb": needed.mteb_copies,
                    "published": [
                        {"row": row, "pool": pool, "method": method, "reference": reference._asdict()}
                        for row, pool, method, reference in needed.targets
                    ],
                    "captions": [one._asdict() for one in needed.caption_targets],
                }
            )
        else:
            _print_plan(needed)
        return 0

    def _reproduce(self, needed: Reproduction) -> int:
        from genius_search.errors import UsageError
        from genius_search.lab.cli.evaluate import print_tables
        from genius_search.lab.published_numbers import PAPER_BEAM, format_percent
        from genius_search.lab.repro import (
            INSTRUCTION_CHOICE,
            SCORES,
            check_sizes,
            reproduce,
            verdicts,
            why_not_compared,
        )
        from genius_search.lab.results import to_json
        from genius_search.model import Genius

        if self.model is None:
            raise UsageError("--run needs --model")
        needed.require()
        with TerminalProgress() as progress:
            for problem in check_sizes(needed):
                progress.say(problem)
            model = Genius.open(self.model, device=self.device)
            rows = reproduce(needed, model, self.out or self.model / "evaluation", progress=progress)
            reason = why_not_compared(needed, rows)
            if reason:
                progress.say(reason)
        judged = verdicts(rows)
        if self.json:
            written = [
                {**one._asdict(), "references": [each._asdict() for each in one.references]} for one in judged
            ]
            print_json({**to_json(rows), "verdicts": written, "compared": reason is None})
        elif needed.captions is not None:
            _print_captions(needed, rows, beside=reason is None)
        else:
            print_tables(rows, beam=PAPER_BEAM, scores=SCORES, instructions=INSTRUCTION_CHOICE)
            for one in judged:
                published = ", ".join(
                    f"{each.weights} {format_percent(each.value)} ({one.score - each.value:+.2f})"
                    for each in one.references
                )
                mark = {True: "[OK]", False: "[DIFFERS]", None: "[-]"}[one.ok]
                print(
                    f"{mark} {one.row}, {one.pool}, {one.method}: {one.score:.2f}; "
                    + (published or "nothing published for these queries and this pool")
                )
        return 1 if reason or any(one.ok is False for one in judged) else 0


def _print_plan(needed: Reproduction) -> None:
    from genius_search.lab.published_numbers import TOLERANCE, format_percent

    print(f"Files in {needed.data} for the {' and the '.join(needed.pools)} pool:")
    for path in needed.files:
        print(f"  {'missing' if path in needed.missing else 'there  '}  {path}")
    if needed.model is not None and not needed.has_model:
        print(f"  no model at {needed.model}; it is imported from the published checkpoints")
    if needed.missing and needed.mteb_copies:
        print("\nWithout the 169 GB of pictures, local pool only: mteb's copies (docs/mteb.md):")
        for repository in needed.mteb_copies:
            print(f"  {repository}")
    print("\nCommands:")
    for command in needed.commands:
        print(f"  {command}")
    print(f"\nPublished numbers (exact-raw has to lie within {TOLERANCE} of the released weights):")
    for row, pool, method, reference in needed.targets:
        misprint = f"; {reference.misprint}" if reference.misprint else ""
        print(
            f"  {row}, {pool}, {method}: {format_percent(reference.value)} "
            f"({reference.system}, {reference.weights}{misprint})"
        )
    for one in needed.caption_targets:
        recalls = " / ".join(map(format_percent, one.recalls))
        print(f"  R@1/5/10 {recalls} ({one.system}; trained on {one.trained_on})")


def _print_captions(needed: Reproduction, rows: list[ResultRow], *, beside: bool) -> None:
    """Print our recalls, and the published ones where they are for the same captions and pictures."""
    from genius_search.lab.published_numbers import format_percent

    table = Table("system", "trained on", "R@1", "R@5", "R@10", box=None)
    for row in rows:
        recalls = (f"{100 * row.measures[f'R@{k}']:.1f}" for k in (1, 5, 10))
        table.add_row(row.method, "(this model)", *recalls, style="bold")
    for one in needed.caption_targets if beside else ():
        table.add_row(one.system, one.trained_on, *map(format_percent, one.recalls))
    Console().print(table)
