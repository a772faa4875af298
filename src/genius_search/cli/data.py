"""``genius data``: check and convert data sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DataArgument, JsonOption, command
from genius_search.cli.terminal import print_json, print_table, print_text


@command
class Check(JsonOption):
    """Check a data set in M-BEIR's layout before hours are spent on it. Exit status 6 on errors."""

    data: DataArgument
    """Folder of the data set."""

    skip_images: bool = False
    """Do not decode images, only check that they exist; not even that if there is no folder mbeir_images."""

    def run(self) -> int:
        """Check the data set and print the findings."""
        from genius_search.data.check import QueryCount, check

        report = check(self.data, decode_images=not self.skip_images)
        status = 0 if report.ok else 6
        if self.json:
            print_json({"ok": report.ok, **dataclasses.asdict(report)})
            return status
        columns = [field.name.replace("_", " ") for field in dataclasses.fields(QueryCount)]
        print_table(columns, [list(map(str, dataclasses.astuple(count))) for count in report.queries])
        for finding in report.findings:
            print_text(f"{finding.severity}: {finding.kind}: {finding.count}: {'; '.join(finding.examples)}")
        print("no errors" if report.ok else "there are errors")
        return status


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
        from genius_search.data.captions import convert_karpathy

        splits = convert_karpathy(
            self.file, self.images, self.out, dataset_id=self.dataset_id, dataset_name=self.dataset_name
        )
        print_table(splits[0]._fields, [list(map(str, split)) for split in splits])
