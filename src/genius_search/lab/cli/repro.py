"""``genius repro``: reproduce a published number."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table
from genius_search.errors import UsageError

if TYPE_CHECKING:
    from genius_search.lab.published.repro import Reproduction
    from genius_search.lab.results import ResultRow


@command
class Repro(JsonOption):
    """Reproduce a published row: list the files it needs; `--run` evaluates and compares.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    if exact search differs from the released CLIP_SF by more than 0.3 points, or if nothing was compared
    because the data has other sizes than the published numbers are for; 4 if files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")] = ""
    """Name of a row, all, flickr30k or coco."""

    data: OptionalFolder = None
    """M-BEIR, or the converted captions; default: M-BEIR, or flickr30k or coco for these rows."""

    model: OptionalFolder = None
    """Folder of the model: the published checkpoints, imported."""

    out: OptionalFolder = None
    """Folder for features and runs; default: evaluation/ in the model's folder."""

    pools: str = ""
    """local, global, or local,global; default: every pool whose files exist."""

    run_it: Annotated[bool, tyro.conf.arg(name="run")] = False
    """Evaluate and compare."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    list: bool = False
    """Print every published number instead, as Markdown."""

    def run(self) -> int:
        """List what a reproduction needs, or reproduce."""
        from genius_search.lab.published.numbers import page, to_json
        from genius_search.lab.published.repro import CAPTION_SETS, NAMES, plan
        from genius_search.lab.settings import POOLS, choose

        if self.list:
            if self.json:
                print_json(to_json())
            else:
                print(page(), end="")
            return 0
        if not self.row:
            raise UsageError(f"no row given: expected {', '.join(NAMES)}; or --list")
        data = self.data or Path(self.row if self.row in CAPTION_SETS else "M-BEIR")
        needed = plan(
            self.row, data, self.model, pools=choose("--pools", self.pools, POOLS) if self.pools else ()
        )
        if self.run_it:
            return self._reproduce(needed)
        if self.json:
            print_json(
                {
                    **{
                        name: getattr(needed, name)
                        for name in ("name", "rows", "pools", "has_model", "commands")
                    },
                    "files": [{"path": path, "found": path not in needed.missing} for path in needed.files],
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
        from genius_search.lab.cli.evaluate import print_results
        from genius_search.lab.published.numbers import PAPER_BEAM, format_percent
        from genius_search.lab.published.repro import (
            INSTRUCTION_CHOICE,
            SCORES,
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
            print_results(rows, beam=PAPER_BEAM, scores=SCORES, instructions=INSTRUCTION_CHOICE)
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
    from genius_search.lab.published.numbers import TOLERANCE, format_percent

    print(f"Files in {needed.data} for the {' and the '.join(needed.pools)} pool:")
    for path in needed.files:
        print(f"  {'missing' if path in needed.missing else 'there  '}  {path}")
    if needed.model is not None and not needed.has_model:
        print(f"  no model at {needed.model}; it is imported from the published checkpoints")
    if any("mbeir_images" in path for path in needed.missing):
        print("Local pools can be had without the 169 GB of pictures: mteb's copies (docs/lab/mteb.md)")
    print("\nCommands:", *needed.commands, sep="\n  ")
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
    """Print our recalls, and the published ones if they are for the same captions and pictures."""
    from genius_search.lab.published.numbers import format_percent

    ours = [
        (row.method, "(this model)", *(f"{100 * row.measures[f'R@{k}']:.1f}" for k in (1, 5, 10)))
        for row in rows
    ]
    published = [
        (one.system, one.trained_on, *map(format_percent, one.recalls)) for one in needed.caption_targets
    ]
    columns = ("system", "trained on", "R@1", "R@5", "R@10")
    print_table(columns, ours + (published if beside else []), left=columns[:2])
