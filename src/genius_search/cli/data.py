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
    """Do not look at images."""

    def run(self) -> int:
        """Check the data set and print the findings."""
        from genius_search.data.check import check

        report = check(self.data, images=not self.skip_images)
        status = 0 if report.ok else 6
        if self.json:
            print_json({"ok": report.ok, **dataclasses.asdict(report)})
            return status
        rows = [(file, f"{count:,}") for file, count in report.records.items()]
        print_table(("file", "records"), rows, left=("file",))
        for finding in report.findings:
            print_text(f"{finding.severity}: {finding.kind}: {finding.count}: {'; '.join(finding.examples)}")
        print("no errors" if report.ok else "there are errors")
        return status
