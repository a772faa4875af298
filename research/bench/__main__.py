"""``python -m research.bench``: what search costs and finds, beside the usual ways to search."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DataArgument, JsonOption, OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json
from research.bench.settings import SearchSettings
from research.command import run

MIN_WIDTH = 120
"""Columns of text that a table may take whatever the terminal."""


@command
class Search(JsonOption):
    """Measure search beside faiss, hnswlib and rabitqlib: plain and filtered.

    In the pool of a data set, and in larger ones with invented items: recall and the share of exact search
    that is kept, time of a query alone and in a batch, bytes and time to build. Rivals that are not installed
    are named. `--quick` tries it in a minute or two.
    """

    data: DataArgument
    """A data set in M-BEIR's layout, with features in DATA/features/text_features.npy or image_features.npy;
    or one .npy file with a vector for each item."""

    model: OptionalFolder = None
    """Folder of a trained model, whose embeddings all methods search. Left out: codebooks are fitted to the
    features without training."""

    query_vectors: OptionalFile = None
    """With DATA a .npy file: another one, of queries. Left out: some of the items become queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item, -1 for none; or with several
    columns of such rows. Only then is R@k known."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of results.json and results.md, and of what is embedded or built on the way."""

    options: Annotated[SearchSettings, tyro.conf.arg(name="")] = SearchSettings()

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> None:
        """Measure and print."""
        limit_threads()
        from genius_search.model import Genius
        from research.bench.given import read_given
        from research.bench.measure import about, use_one_thread
        from research.bench.search import bench_search, write

        use_one_thread()
        settings = self.options.resolved()
        self.out.mkdir(parents=True, exist_ok=True)
        with TerminalProgress() as progress:
            model = None if self.model is None else Genius.open(self.model, download=self.download)
            given = read_given(
                self.data,
                settings,
                model,
                self.out,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
            found = bench_search(given, settings, self.out, model=model, progress=progress)
        facts = about(settings.seed, sys.argv[1:])
        document = write(self.out, found, facts)
        if self.json:
            print_json(document)
            return
        for table in found.tables:
            print(table.text(max(shutil.get_terminal_size().columns, MIN_WIDTH)))
        print("{machine}; {date}; {command}".format_map(facts))
        print(f"all columns: results.md and results.json in {self.out}", file=sys.stderr)


def limit_threads() -> None:
    """Keep libraries to one thread; they read this when they are imported."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


main = partial(run, Search, "bench")


if __name__ == "__main__":
    sys.exit(main())
