"""Which queries have no good match: nonsense, and words of the index's own texts.

Usage: python benchmarks/refused.py INDEX [--queries 300] [--modality image] [--texts POOL]

Nonsense is random letters, one to eight words of two to nine letters. The other queries are one word, three
words in their order, and the whole of texts drawn from the pool, by default the items of the index; words
that more than a quarter of the texts have are left out. Nothing says whether their first hit is right.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from genius_search.calibrate import common_words
from genius_search.index.index import Index
from genius_search.index.requests import SearchRequest
from genius_search.index.writer import alive_items


def make_nonsense(drawn: random.Random) -> str:
    """Return random letters."""
    return " ".join(
        "".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 9)))
        for _ in range(drawn.randint(1, 8))
    )


def shorten(texts: list[str], words: int) -> Callable[[random.Random], str]:
    """Return a function that draws some words of a text."""
    common = set(common_words(texts))

    def draw(drawn: random.Random) -> str:
        while True:
            own = [word for word in drawn.choice(texts).split() if word.lower() not in common]
            if len(own) >= words:
                return " ".join(own[place] for place in sorted(drawn.sample(range(len(own)), words)))

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("--queries", type=int, default=300, help="of each kind")
    parser.add_argument("--modality", help="search items of this modality")
    parser.add_argument("--texts", type=Path, help="a .jsonl file of candidates in M-BEIR's layout")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    index = Index.open(given.index)
    if given.texts is None:
        items = chain.from_iterable(map(alive_items, index.snapshot.segments))
        texts = [item.text for item in items if item.text]
    else:
        texts = [row["txt"] for row in map(json.loads, given.texts.open()) if row.get("txt")]
    kinds = {
        "nonsense": make_nonsense,
        "one word": shorten(texts, 1),
        "three words": shorten(texts, 3),
        "whole texts": lambda drawn: drawn.choice(texts),
    }
    table = Table("queries", "no good match", "unknown", "median relevance of the first hit")
    for name, draw in kinds.items():
        drawn = random.Random(given.seed)
        requests = [
            SearchRequest(text=draw(drawn), modality=given.modality, k=1) for _ in range(given.queries)
        ]
        hits = index.search_many(requests)
        good = [index.good_match(own) for own in hits]
        relevance = sorted(own[0].relevance or 0 for own in hits if own)
        table.add_row(
            f"{name}, {len(good)}",
            f"{sum(one is False for one in good) / len(good):.1%}",
            f"{sum(one is None for one in good) / len(good):.1%}",
            f"{relevance[len(relevance) // 2]:.2f}" if relevance else "-",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
