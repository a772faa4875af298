"""What a look inside the codes costs: CPU time of the tree, of shared codes and of an explanation.

Usage: python benchmarks/codes.py INDEX [QUERY]

Prints a table in Markdown: medians over calls in this process, on one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from genius_search.index.index import Index

CALLS = 20


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of a call, the median of some; the first is not counted."""
    took = []
    for _ in range(CALLS + 1):
        began = time.process_time()
        call()
        took.append(1000 * (time.process_time() - began))
    return statistics.median(took[1:])


def main() -> None:
    """Measure and print."""
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
    for name, call in calls.items():
        print(f"| {name} | {milliseconds(call):.1f} |")


if __name__ == "__main__":
    main()
