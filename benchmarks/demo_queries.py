"""Short queries on a finished demo: what words, few words and "the same in COLOUR" find among its pictures.

Usage: python benchmarks/demo_queries.py DEMO
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from genius_search.config import USUAL_SEARCH
from genius_search.data.mbeir import MBeir
from genius_search.lab import short_queries
from genius_search.model import Genius
from genius_search.progress import Silent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("demo", type=Path, help="folder that `genius demo` wrote")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data, model = MBeir(given.demo / "catalogue"), Genius.open(given.demo / "model")
    results = short_queries.measure(
        data, model, given.demo / "model" / "evaluation", USUAL_SEARCH, seed=given.seed, progress=Silent()
    )
    Console().print(short_queries.to_rich(results))


if __name__ == "__main__":
    main()
