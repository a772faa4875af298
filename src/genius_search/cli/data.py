"""``genius data``: draw, check and convert data sets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import print_json


@dataclass(frozen=True, kw_only=True)
class Check:
    """Validate a data set in M-BEIR's layout before hours are spent on it. Exit status 6 on errors."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set."""

    skip_images: bool = False
    """Do not decode pictures, only look whether they are there; without a folder
    mbeir_images, not even that."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Check and print what was found."""
        from genius_search.data.check import QueryCount, check

        report = check(self.data, decode_images=not self.skip_images)
        status = 0 if report.ok else 6
        if self.json:
            print_json({"ok": report.ok, **dataclasses.asdict(report)})
            return status
        console = Console()
        queries = Table(*(field.name.replace("_", " ") for field in dataclasses.fields(QueryCount)))
        for count in report.queries:
            queries.add_row(*(str(value) for value in dataclasses.astuple(count)))
        console.print(queries)
        for finding in report.findings:
            examples = "; ".join(finding.examples)
            console.print(
                f"{finding.severity}: {finding.kind}: {finding.count}: {examples}",
                highlight=False,
                markup=False,
                emoji=False,
                soft_wrap=True,
            )
        console.print("no errors" if report.ok else "there are errors")
        return status


@dataclass(frozen=True, kw_only=True)
class Karpathy:
    """Convert Karpathy's JSON of COCO or Flickr30K into M-BEIR's layout (text to image and back)."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """dataset_coco.json or dataset_flickr30k.json."""

    images: Path
    """Folder of the pictures; they are linked, not copied."""

    out: Path
    """Folder of the new data set."""

    dataset_id: int = 10
    """Number in ids: 9 for COCO, 10 for Flickr30K."""

    dataset_name: str = "flickr30k"
    """Name in file names."""

    def run(self) -> None:
        """Convert."""
        from genius_search.data.captions import convert_karpathy

        table = Table(show_header=True, box=None)
        for number, split in enumerate(
            convert_karpathy(
                self.file, self.images, self.out, dataset_id=self.dataset_id, dataset_name=self.dataset_name
            )
        ):
            fields = dataclasses.asdict(split) if dataclasses.is_dataclass(split) else split._asdict()
            if number == 0:
                for name in fields:
                    table.add_column(name)
            table.add_row(*(str(value) for value in fields.values()))
        Console().print(table)
