"""Three clients that search a served cluster until stdin is closed, with a line for each call.

A call has many queries, so that a copy works on one at any moment at which it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from genius_search.cluster.serve import connect, connect_searcher
from genius_search.index.request import SearchRequest


def search_until(ended, searcher, expected) -> None:
    texts = list(expected) * 20
    while not ended.is_set():
        try:
            answers = searcher.search([SearchRequest(text=text) for text in texts])
            hits = [[[hit.id, round(hit.score, 4)] for hit in answer] for answer in answers]
            outcome = "right" if hits == [expected[text] for text in texts] else f"failed: {hits}"
        except Exception as error:  # noqa: BLE001  counted
            outcome = f"failed: {error!r}"
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    expected = json.loads(sys.argv[3])
    ended = threading.Event()
    with connect(address):
        searcher = connect_searcher(folder)
        threads = [
            threading.Thread(target=search_until, args=(ended, searcher, expected))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
