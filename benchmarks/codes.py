"""What a look inside the codes costs: CPU time of the tree, of shared codes and of an explanation.

Usage: python benchmarks/codes.py INDEX [QUERY]

Prints a table in Markdown: medians over calls in turns in this process, on one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from genius_search.index.index import Index
from research.bench.measure import time_rounds, use_one_thread

CALLS = 20


def main() -> None:
    """Measure and print."""
    use_one_thread()
    index = Index.open(sys.argv[1])
    query = " ".join(sys.argv[2:]) or "a red kite"
    top = max(index.tree().children, key=lambda child: child.items)
    item = index.search(query)[0].id
    calls: dict[str, Callable[[], object]] = {
        "the root": index.tree,
        f"its largest node, {top.items:,} items, four examples each": lambda: index.tree((top.code,)),
        "the same without examples": lambda: index.tree((top.code,), examples=0),
        "groups that share the whole ID": index.collisions,
        "groups that share all but four codes": lambda: index.near_duplicates(4),
        "a search": lambda: index.search(query),
        "an explanation": lambda: index.explain(item, query),
    }
    print(f"{index.info().items:,} items; CPU-milliseconds, median of {CALLS} calls\n")
    print("| call | CPU-ms |\n|---|---:|")
    for name, milliseconds in time_rounds(calls, rounds=CALLS).items():
        print(f"| {name} | {milliseconds:.1f} |")


if __name__ == "__main__":
    main()
