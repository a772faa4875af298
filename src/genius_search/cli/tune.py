"""``genius tune``: let an index choose its own search settings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from genius_search.cli.options import ValidationOptions, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table


@command
class Tune(ValidationOptions):
    """Choose beam, candidates and generator weight for an index with validation queries, and store them.

    The items of the index must be candidates of the data set, with their ids. The chosen settings become the
    defaults of every search of this index. Tune again when the index has grown much.
    """

    recall: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="")] = None
    """Choose the cheapest settings that reach this share of the R@5 of ranking every item; default: 0.97,
    unless --milliseconds is given."""

    milliseconds: Annotated[float | None, tyro.conf.arg(metavar="MS", help_behavior_hint="")] = None
    """Choose the best settings within this many CPU-milliseconds per query, without the encoder."""

    rerank: Literal["codes", "embeddings"] = "codes"
    """Rank the candidates by the codes' vectors, or by stored embeddings."""

    queries: int = 300
    """Queries of each row at most."""

    batch: int = 64
    """Queries searched together; 1 measures the time of single searches."""

    def run(self) -> None:
        """Measure, print and store the settings."""
        from genius_search.data.mbeir import MBeir
        from genius_search.tune import TuneConfig, tune

        config = TuneConfig(
            recall=0.97 if self.recall is None and self.milliseconds is None else self.recall,
            milliseconds=self.milliseconds,
            rerank=self.rerank,
            split=self.split,
            rows=self.rows,
            queries=self.queries,
            batch=self.batch,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            index = self.open_index()
            found = tune(index, MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_settings(found.best, wait_seconds=self.wait)
        best = found.best
        if self.json:
            print_json(
                {
                    "kept": not self.dry_run,
                    "best": dataclasses.asdict(best),
                    "ceiling": found.ceiling,
                    "left_out": found.left_out,
                    "tried": [dataclasses.asdict(one) for one in found.tried],
                }
            )
            return
        rows = [
            (
                "→" if one.search == best.search else "",
                f"{one.search.beam:,}",
                f"{one.search.candidates:,}" if one.search.candidates else "all levels",
                f"{one.touched:,.0f}",
                f"{one.recall:.3f}",
                f"{one.share:.3f}",
                f"{one.cpu_ms:.2f}",
            )
            for one in found.tried
        ]
        print_table(("", "beam", "candidates", "items ranked", "R@5", "share", "CPU-ms"), rows)
        print(
            f"{best.queries:,} queries of {best.data}; all {best.items:,} items ranked by "
            f"{best.search.rerank}: R@5 {found.ceiling:.3f}, to which the shares refer; "
            f"generator weight {best.search.generator_weight:g}. "
            + ("Nothing was changed." if self.dry_run else "Searches of this index use → from now on.")
        )
