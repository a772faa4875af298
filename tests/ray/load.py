"""Three clients that search a served cluster until stdin is closed; a line on stdout after each call.

A call has many queries, so that a copy is in the middle of one whenever it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from genius_search.cluster.serve import connect, connect_searcher
from genius_search.index.request import SearchRequest


def search_on(searcher, expected, ended) -> None:
    texts = list(expected) * 20
    while not ended.is_set():
        try:
            found = searcher.search([SearchRequest(text=text) for text in texts])
            shown = [[[hit.id, round(hit.score, 4)] for hit in hits] for hits in found]
            said = "right" if shown == [expected[text] for text in texts] else f"failed: {shown}"
        except Exception as error:  # noqa: BLE001  counted
            said = f"failed: {error!r}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


def main() -> None:
    folder, address, expected = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ended = threading.Event()
    with connect(address):
        searcher = connect_searcher(folder)
        threads = [
            threading.Thread(target=search_on, args=(searcher, expected, ended)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
