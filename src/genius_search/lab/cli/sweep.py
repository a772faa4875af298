"""``genius sweep``: run every row of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import JsonOption, command, split_names
from genius_search.cli.terminal import TerminalProgress, print_json


@command
class Sweep(JsonOption):
    """Run every row of a recipe (ablations, baselines, beams, sizes, seeds); `genius report` shows them.

    If interrupted, run it again to continue: finished rows are skipped; failed rows, and rows whose flags or
    data have changed, run again. Rows share the encoder and its features. Exit status 1 if a row failed.
    """

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """File of rows, such as recipes/paper.toml."""

    data: Path
    """Folder of the data set, in M-BEIR's layout."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder with a subfolder for each row and seed: its model, evaluation, log and row.json."""

    encoder: str = "small"
    """Encoder of all rows, as for `genius fit`: small, clip:NAME, precomputed:PATH, …"""

    encoder_of: Annotated[Path | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """Model whose encoder and features are used where they fit, instead of training and embedding."""

    only: str = ""
    """Rows to run, with the rows that they build on; separated by commas."""

    skip: str = ""
    """Rows to leave out, such as those that need missing pictures; separated by commas."""

    quick: bool = False
    """Use the recipe's flags for a run of minutes, to check that everything works."""

    json: bool = False
    """Print JSON: [{"row", "seed", "state", "error", "seconds", "commands"}, …]."""

    def run(self) -> int:
        """Run the rows."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.bench.measure import describe_machine
        from genius_search.lab.sweep import jobs_of, read_recipe, records_of, sweep

        jobs = jobs_of(
            read_recipe(self.recipe),
            encoder=self.encoder,
            data=records_of(MBeir(self.data)),  # a wrong folder is reported at once, not by every row
            quick=self.quick,
            only=split_names(self.only),
            skip=split_names(self.skip),
        )
        with TerminalProgress() as progress:
            made = sweep(
                jobs,
                self.data,
                self.out,
                machine=describe_machine(),
                progress=progress,
                encoder_of=self.encoder_of,
            )
            failed = [job.place for job, row in made if row.state == "failed"]
            progress.say(f"{len(made) - len(failed)} rows are done; failed: {', '.join(failed) or 'none'}")
            progress.say_next("genius", "report", self.out, "--out", "REPORT")
        if self.json:
            shown = ("title", "table", "seed", "state", "error", "seconds", "commands")
            print_json([{"row": row.name, **{name: getattr(row, name) for name in shown}} for _, row in made])
        return 1 if failed else 0
