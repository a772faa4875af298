"""``python -m research.bench``: speed, memory and recall of search, and of other packages."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DataArgument, OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_text
from research.command import limit_threads, run

MIN_TABLE_WIDTH = 120
"""Columns that a table may use even in a narrower terminal."""


@command
class BenchSearch:
    """Compare search with nine other packages (listed at --packages) that are installed.

    By effort: the share of exact search's first ten hits, recall, and the time of a single query,
    as a table and as two figures, by time and by bytes. Then: searches with conditions, and the
    costs to create, add, delete and compact. Indexes stay in the folder, and are not built again.
    """

    data: DataArgument
    """A data set in M-BEIR's layout, with features in DATA/features/text_features.npy or
    image_features.npy; a folder of `python -m research.texts`; or one .npy file with a vector for
    each item."""

    query_vectors: OptionalFile = None
    """If DATA is a .npy file: another one, of queries. Without it, some items become queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item, -1 for none; or
    with several such columns. R@k is measured only with this file."""

    invent: int = 0
    """Invent items between the real ones, up to this number in all, and compare their distances."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of results.json, results.md and the indexes."""

    pictures: OptionalFolder = None
    """Folder of the two figures; default: FOLDER."""

    queries: int = 1000
    """Maximum number of queries, of a data set or of the items."""

    timed: int = 100
    """Number of queries that are timed one by one."""

    rivals: bool = True
    """Build and measure the other packages, too."""

    packages: tuple[str, ...] = ()
    """Measure only these packages: faiss-cpu, hnswlib, lancedb, rabitqlib, scalable-vs, scann,
    turbovec, usearch, zvec. Default: all that are installed."""

    def run(self) -> None:
        """Build, measure, write, draw and print."""
        limit_threads()
        from research.bench.data import invent_items, read_data
        from research.bench.measure import describe_run, use_one_thread
        from research.bench.report import write_report
        from research.bench.search import bench_search

        use_one_thread()
        self.out.mkdir(parents=True, exist_ok=True)
        with TerminalProgress() as progress:
            data = read_data(
                self.data,
                self.out,
                max_queries=self.queries,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
            data, distances = invent_items(data, self.invent) if self.invent else (data, [])
            rows = bench_search(
                data,
                self.out,
                num_timed=self.timed,
                with_rivals=self.rivals,
                packages=self.packages,
                progress=progress,
            )
        rows |= {"distances": distances} if distances else {}
        tables = write_report(rows, self.out, self.pictures or self.out, describe_run(sys.argv[1:]))
        width = max(shutil.get_terminal_size().columns, MIN_TABLE_WIDTH)
        for table in tables:
            print_text(table.text(width))


main = partial(run, BenchSearch, "bench")


if __name__ == "__main__":
    sys.exit(main())
