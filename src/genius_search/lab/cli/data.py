"""``genius data catalogue`` and ``genius data rehearsal``: synthetic data sets in M-BEIR's layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from genius_search.cli.terminal import print_facts


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Draw a product-like world with all eight tasks, offline, in M-BEIR's layout.

    The same seed and sizes give the same bytes.
    """

    items: int
    """Candidates in the global test pool, 1,000 to 1,000,000."""

    out: Path
    """Folder of the new data set."""

    seed: int = 0
    """Seed of everything that is drawn."""

    train_products: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Products in the training split; default: as many as items, between 2,000 and 12,000."""

    queries_per_task: int = 1000
    """Test queries of each task."""

    json: bool = False
    """Print the sizes as JSON."""

    def run(self) -> None:
        """Draw it."""
        from genius_search.lab.synth.catalogue import draw_catalogue

        summary = draw_catalogue(
            self.out,
            items=self.items,
            seed=self.seed,
            train_products=self.train_products,
            queries_per_task=self.queries_per_task,
        )
        print_facts(dataclasses.asdict(summary), as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Write a synthetic M-BEIR at a share of its size, to rehearse a run before downloading 169 GB.

    All 16 rows, splits and pools, in M-BEIR's files and field conventions. The same seed and share give the
    same bytes.
    """

    out: Path
    """Folder of the new data set."""

    share: float = 0.01
    """Share of M-BEIR's size: 0.01 has 56,000 candidates, 1 all 5,609,079."""

    seed: int = 0
    """Seed of everything that is drawn."""

    pictures: Annotated[int | Literal["none"] | None, tyro.conf.arg(metavar="INT|none")] = None
    """Different things to draw; the data set's files are links to the drawings. Default: 100,000 times the
    share. With none, paths are written and no files: only precomputed: encoders work then."""

    json: bool = False
    """Print the sizes as JSON."""

    def run(self) -> None:
        """Draw it."""
        from genius_search.lab.synth.mbeir import draw_synthetic_mbeir

        summary = draw_synthetic_mbeir(
            self.out,
            share=self.share,
            seed=self.seed,
            pictures=0 if self.pictures == "none" else self.pictures,
        )
        print_facts(dataclasses.asdict(summary), as_json=self.json)
