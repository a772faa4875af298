"""``genius calibrate``: probabilities in place of scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.calibrate import Calibrated


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Learn from validation queries what an index's scores are worth, and keep that with it.

    The index's items have to be candidates of the data set, with their ids. Hits then come with the
    probability that they answer the query, and a search can say that it has no good match. Half of the
    queries are fitted on and the other half measured. Calibrate again after `genius tune`, and when the index
    has grown much.
    """

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""

    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Of the first hits that are called good matches so many are to be right."""

    absent: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.2
    """Of the queries that people will ask, so many have no answer in the index, as you expect it."""

    split: str = "val"
    """Of the data set."""

    row: str = ""
    """Rows of the data set, as in its file names; commas between. Left out: all of them."""

    queries: int = 0
    """Of each row at most so many; 0 means all."""

    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw how far the probabilities can be believed, as .svg or .png; the numbers go beside it as .json."""

    dry_run: bool = False
    """Only measure and print; change nothing in the index."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """How long to wait while another process changes the index."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    seed: int = 0
    """Of the choice of instructions."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Fit, measure, print, keep."""
        from genius_search.calibrate import CalibrateConfig, calibrate
        from genius_search.data.mbeir import MBeir
        from genius_search.index.index import Index

        config = CalibrateConfig(
            precision=self.precision,
            absent=self.absent,
            split=self.split,
            rows=tuple(name.strip() for name in self.row.split(",")) if self.row else (),
            queries=self.queries,
            seed=self.seed,
        )
        if self.figure is not None:
            from genius_search.cli.reliability import check_figure_path

            check_figure_path(self.figure)
        with TerminalProgress() as progress:
            index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
            found = calibrate(index, MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_calibration(found.calibration, wait_seconds=self.wait)
        if self.figure is not None:
            _draw(found, self.figure)
        if self.json:
            print_json({"kept": not self.dry_run, "left_out": found.left_out, **_facts(found)})
        else:
            _print(found, is_kept=not self.dry_run)


def _facts(found: Calibrated) -> dict[str, Any]:
    from genius_search.index.settings import to_dict

    return to_dict(found.calibration)


def _draw(found: Calibrated, path: Path) -> None:
    """The figure, and its numbers beside it."""
    from genius_search.artifact import write_json
    from genius_search.cli.reliability import draw_reliability, reliability_facts

    draw_reliability(found.held_out, path, threshold=found.calibration.threshold)
    write_json(path.with_suffix(".json"), {**_facts(found), "figure": reliability_facts(found.held_out)})


def _print(found: Calibrated, *, is_kept: bool) -> None:
    """What was measured, for a person."""
    told, measured = found.calibration, found.calibration.held_out
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("probability", "right", "queries"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measured.bins:
        table.add_row(f"{one.predicted:.2f}", f"{one.observed:.2f}", f"{one.queries:,.0f}")
    console = Console()
    console.print(table)
    if told.threshold is None:
        matched = (
            f"No probability is high enough for {told.wanted_precision:.0%} right first hits, so no match is "
            "ever called good; ask for less with --precision. "
        )
    else:
        matched = (
            f"A first hit from {told.threshold:.2f} on is a good match: {measured.coverage:.0%} of the "
            f"queries have one, {measured.precision:.0%} of those are right, and of queries without their "
            f"answers {measured.refused:.0%} are said to have none. "
        )
    console.print(
        f"First hits of {measured.queries:,} queries of {told.data} that were not fitted on, each with and "
        f"without its answers among {told.items:,} items ({told.absent:.0%} without): calibration error "
        f"{measured.error:.3f}, Brier score {measured.brier:.3f} (a constant: {measured.base_brier:.3f}). "
        + matched
        + ("Kept: hits of this index have probabilities from now on." if is_kept else "Nothing was changed."),
        highlight=False,
    )
