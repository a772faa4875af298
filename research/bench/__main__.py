"""``python -m research.bench``: what search costs and finds, beside the usual ways to search."""

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

MIN_WIDTH = 120
"""Columns of text that a table may take whatever the terminal."""


@command
class Search:
    """Measure search beside nine other packages (--packages names them), where they are installed.

    By effort: the share of exact search's ten, recall, and the time of a query alone, as a table and as two
    figures, by time and by bytes. Then searches with conditions; and what it costs to create, add, delete and
    compact. What is built stays in the folder, and is not built again.
    """

    data: DataArgument
    """A data set in M-BEIR's layout, with features in DATA/features/text_features.npy or image_features.npy;
    a folder of `python -m research.texts`; or one .npy file with a vector for each item."""

    query_vectors: OptionalFile = None
    """With DATA a .npy file: another one, of queries. Left out: some of the items become queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item, -1 for none; or with several
    columns of such rows. Only then is R@k known."""

    invent: int = 0
    """Invent items between the real ones until there are so many, and compare distances of both."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of results.json and results.md, and of what is built."""

    pictures: OptionalFolder = None
    """Folder of the two figures; by default FOLDER."""

    queries: int = 1000
    """Queries at most, of a data set or of the items."""

    timed: int = 100
    """Queries that are timed one by one."""

    rivals: bool = True
    """Build and measure rivals."""

    packages: tuple[str, ...] = ()
    """Measure only these: faiss-cpu, hnswlib, lancedb, rabitqlib, scalable-vs, scann, turbovec,
    usearch, zvec. Left out: all that are installed."""

    def run(self) -> None:
        """Build, measure, write, draw and print."""
        limit_threads()
        from research.bench.given import invent, read_given
        from research.bench.measure import about, use_one_thread
        from research.bench.search import bench_search, write

        use_one_thread()
        self.out.mkdir(parents=True, exist_ok=True)
        with TerminalProgress() as progress:
            given = read_given(
                self.data,
                self.out,
                most_queries=self.queries,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
            given, distances = invent(given, self.invent) if self.invent else (given, [])
            rows = bench_search(
                given,
                self.out,
                timed=self.timed,
                rivals=self.rivals,
                packages=self.packages,
                progress=progress,
            )
        rows |= {"distances": distances} if distances else {}
        for table in write(rows, self.out, self.pictures or self.out, about(sys.argv[1:])):
            print_text(table.text(max(shutil.get_terminal_size().columns, MIN_WIDTH)))


main = partial(run, Search, "bench")


if __name__ == "__main__":
    sys.exit(main())
