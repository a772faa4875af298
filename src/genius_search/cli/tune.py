"""``genius tune``: let an index choose its own search settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.tune import TuneResult


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Choose beam, candidates and generator weight for an index by validation queries, and keep them with it.

    The index's items have to be candidates of the data set, with their ids. What is chosen becomes the
    default of every search of this index; flags of a search still win. Tune again when the index has grown
    much.
    """

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""

    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    recall: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Take the cheapest settings that find so much of what ranking every item finds (R@5); 0.97 if neither
    this nor --milliseconds is given."""

    milliseconds: Annotated[float | None, tyro.conf.arg(metavar="MS")] = None
    """Take the best settings within so many CPU-milliseconds a query, the encoder's not counted."""

    rerank: Literal["codes", "embeddings"] = "codes"
    """What ranks the items that are found."""

    split: str = "val"
    """Of the data set."""

    row: str = ""
    """Rows of the data set, as in its file names; commas between. Left out: all of them."""

    queries: int = 300
    """Of each row at most so many."""

    batch: int = 64
    """Queries asked together; 1 measures what single searches take."""

    dry_run: bool = False
    """Only print; change nothing."""

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
        """Measure, print, keep."""
        from genius_search.data.mbeir import MBeir
        from genius_search.index.index import Index
        from genius_search.tune import TuneConfig, tune

        config = TuneConfig(
            recall=0.97 if self.recall is None and self.milliseconds is None else self.recall,
            milliseconds=self.milliseconds,
            rerank=self.rerank,
            split=self.split,
            rows=tuple(name.strip() for name in self.row.split(",")) if self.row else (),
            queries=self.queries,
            batch=self.batch,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
            found = tune(index, MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_settings(found.best, wait_seconds=self.wait)
        if self.json:
            print_json(
                {
                    "kept": not self.dry_run,
                    "best": dataclasses.asdict(found.best),
                    "ceiling": found.ceiling,
                    "left_out": found.left_out,
                    "tried": [dataclasses.asdict(one) for one in found.tried],
                }
            )
            return
        _print(found, is_kept=not self.dry_run)


def _print(found: TuneResult, *, is_kept: bool) -> None:
    """The grid, the chosen settings marked."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "beam", "candidates", "items ranked", "R@5", "share", "CPU-ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found.tried:
        search = one.search
        table.add_row(
            "→" if search == found.best.search else "",
            f"{search.beam:,}",
            f"{search.candidates:,}" if search.candidates else "all levels",
            f"{one.touched:,.0f}",
            f"{one.recall:.3f}",
            f"{one.share:.3f}",
            f"{one.cpu_ms:.2f}",
        )
    console = Console()
    console.print(table)
    best = found.best
    console.print(
        f"{best.queries:,} queries of {best.data}; all {best.items:,} items ranked by {best.search.rerank}: "
        f"R@5 {found.ceiling:.3f}, of which the shares are; "
        f"generator weight {best.search.generator_weight:g}. "
        + ("Kept: searches of this index use → from now on." if is_kept else "Nothing was changed."),
        highlight=False,
    )
