"""``genius data check``: find what is wrong with a data set."""

from __future__ import annotations

import dataclasses

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
