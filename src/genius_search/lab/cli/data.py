"""``genius data``: published captions and synthetic data sets in M-BEIR's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalInt, command
from genius_search.cli.terminal import print_facts, print_table


@command
class SyntheticOptions(JsonOption):
    """A command that writes a synthetic data set."""

    out: Path
    """Folder of the new data set."""

    seed: int = 0
    """Seed of the random numbers."""

    json: bool = False
    """Print the sizes as JSON."""


@command
class Catalogue(SyntheticOptions):
    """Generate a world of products with all eight tasks, offline, in M-BEIR's layout.

    The same seed and sizes give the same bytes.
    """

    items: int
    """Candidates in the global test pool, 1,000 to 1,000,000."""

    train_products: OptionalInt = None
    """Products in the training split; default: as many as items, between 2,000 and 12,000."""

    queries_per_task: int = 1000
    """Test queries of each task."""

    def run(self) -> None:
        """Generate the data set."""
        from genius_search.lab.synth.catalogue import draw_catalogue

        summary = draw_catalogue(
            self.out,
            items=self.items,
            seed=self.seed,
            train_products=self.train_products,
            queries_per_task=self.queries_per_task,
        )
        print_facts(summary, as_json=self.json)


@command
class Karpathy:
    """Convert Karpathy's JSON of COCO or Flickr30K into M-BEIR's layout (text to image and back)."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """dataset_coco.json or dataset_flickr30k.json."""

    images: Path
    """Folder of the pictures; they are linked, not copied."""

    out: Path
    """Folder of the new data set."""

    dataset_id: int = 10
    """Number of the data set in ids: 9 for COCO, 10 for Flickr30K."""

    dataset_name: str = "flickr30k"
    """Name of the data set in file names."""

    def run(self) -> None:
        """Convert the file and print the sizes of the splits."""
        from genius_search.lab.karpathy import convert_karpathy

        splits = convert_karpathy(
            self.file, self.images, self.out, dataset_id=self.dataset_id, dataset_name=self.dataset_name
        )
        print_table(splits[0]._fields, [list(map(str, split)) for split in splits])
