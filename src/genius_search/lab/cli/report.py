"""``genius report``: tables and figures from what is on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.terminal import TerminalProgress, print_json


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make the paper's tables and figures from runs on disk, with intervals and paired tests.

    Writes report.md, tables/ (CSV, LaTeX) and figures/ (PNG, SVG). A source is the folder of a sweep, of an
    evaluation, of a model that was evaluated, or of `genius bench speed` or `quality`; NAME=FOLDER,FOLDER
    are evaluations that differ in their seed. Or give --runs and --qrels: anybody's TREC files.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = ()
    """Folders, or NAME=FOLDER,FOLDER."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the report."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """The data set, for pictures of the items that share codes."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """The model behind the first evaluation, where it does not lie in its folder."""

    runs: tuple[Path, ...] = ()
    """TREC runs, in place of sources."""

    qrels: Path | None = None
    """Right answers of the runs."""

    json: bool = False
    """Print the files that were written as JSON: {"files": [...]}."""

    def run(self) -> None:
        """Gather, measure and write."""
        from genius_search.data.mbeir import MBeir
        from genius_search.errors import UsageError
        from genius_search.lab.report.evaluated import gather
        from genius_search.lab.report.report import report, report_runs, write

        if bool(self.sources) == bool(self.runs) or bool(self.runs) != (self.qrels is not None):
            raise UsageError("give folders to report on, or --runs together with --qrels")
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file; give a folder, which need not exist")
        with TerminalProgress() as progress:
            if self.qrels is not None:
                found = report_runs(self.runs, self.qrels, progress=progress)
            else:
                data = None if self.data is None else MBeir(self.data)
                found = report(gather(self.sources, model=self.model), data=data, progress=progress)
            files = write(self.out, found)
            progress.say(f"{len(files)} files; begin with {files[0]}")
        if self.json:
            print_json({"files": [str(path.relative_to(self.out)) for path in files]})
