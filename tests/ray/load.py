"""Three clients that search a served cluster until stdin is closed; a line on stdout after each search."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from genius_search.cluster.serve import connect, connect_searcher


def search_on(searcher, expected, ended, first: int) -> None:
    queries, turn = list(expected), first
    while not ended.is_set():
        text = queries[turn % len(queries)]
        turn += 1
        try:
            found = [[hit.id, round(hit.score, 4)] for hit in searcher.search(text)]
            said = "right" if found == expected[text] else f"failed: {text}: {found}"
        except Exception as error:  # noqa: BLE001  counted
            said = f"failed: {text}: {error!r}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


def main() -> None:
    folder, address, expected = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ended = threading.Event()
    with connect(address):
        searcher = connect_searcher(folder)
        threads = [
            threading.Thread(target=search_on, args=(searcher, expected, ended, first)) for first in range(3)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
