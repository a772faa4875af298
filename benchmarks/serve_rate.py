"""Measure the searches per CPU-second of the service when clients keep their connections open.

Usage: python benchmarks/serve_rate.py INDEX QUERIES [--clients 16] [--seconds 10] [--writes 500]
       [--items-per-request 10] [--kinds text vector] [-- flags of genius serve]

Starts `genius serve` on a copy of INDEX, and sends the lines of QUERIES, a text file, as texts and
as vectors of the index's encoder. Each client sends one search after the other and waits for the
hits. The CPU time is that of the server and its workers, so other programs have little effect on
it; the times of answers include waiting for a core. With --writes, items are also added at this
rate per second, one request after the other; a table without writes is printed before, for
comparison. The last table is the CPU time of `Index.search` without a server, with all hits read.
Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import NamedTuple

from serve import cpu_seconds, percentile, processes, serving

from genius_search import Index

WARM_UP_SECONDS = 1.0


class Answers(NamedTuple):
    """Seconds of each answer, and the number of connections that were opened."""

    seconds: list[float]
    connections: int


class Client:
    """One client, with one connection for as long as the server keeps it open."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._host, self._port = host, int(port)
        self._writer: asyncio.StreamWriter | None = None
        self.connections = 0

    async def post(self, body: bytes, path: str = "/v1/search") -> bytes:
        """Send a request, and return the body of the answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
            self.connections += 1
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer_head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if answer_head[9:10] != b"2":
            raise SystemExit((answer_head + await self._reader.read(2_000)).decode())
        length = int(answer_head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await self._reader.readexactly(length)
        if b"connection: close" in answer_head:
            self.close()
        return answer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def send(
    address: str, bodies: list[bytes], clients: int, seconds: float, path: str = "/v1/search"
) -> Answers:
    """Send searches from several clients at once, for some time or until this is cancelled."""
    times: list[float] = []
    number = 0
    until = time.monotonic() + seconds

    async def run(client: Client) -> None:
        nonlocal number
        while (began := time.monotonic()) < until:
            number += 1
            await client.post(bodies[number % len(bodies)], path)
            times.append(time.monotonic() - began)
        client.close()

    all_clients = [Client(address) for _ in range(clients)]
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*map(run, all_clients))
    return Answers(times, sum(client.connections for client in all_clients))


async def write(
    address: str, items_per_second: int, items_per_request: int, written: list[int]
) -> None:
    """Add items at a rate until this is cancelled; append the size of each request to a list."""
    client = Client(address)
    began = time.monotonic()
    for number in itertools.count():
        await asyncio.sleep(
            began + number * items_per_request / items_per_second - time.monotonic()
        )
        items = [
            {"id": f"new {number % 50}-{row}", "text": f"a new kite {number} {row}"}
            for row in range(items_per_request)
        ]
        await client.post(json.dumps({"items": items}).encode(), "/v1/items")
        written.append(items_per_request)


async def send_while_writing(
    address: str, bodies: list[bytes], arguments: argparse.Namespace, written: list[int]
) -> Answers:
    """Send searches; add items meanwhile if ``arguments.writes`` is positive."""
    writer = None
    if arguments.writes:
        writer = asyncio.create_task(
            write(address, arguments.writes, arguments.items_per_request, written)
        )
    answers = await send(address, bodies, arguments.clients, arguments.seconds)
    if writer is not None:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
    return answers


def measure_served(
    index: Path, bodies: dict[str, list[bytes]], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Return a row of the table for each kind of search."""
    rows: list[dict[str, object]] = []
    with serving(index, *arguments.flags) as server:
        for query_type, sent in bodies.items():
            asyncio.run(send(server.address, sent, arguments.clients, WARM_UP_SECONDS))
            pids = processes(server.process.pid)
            began, cpu_began = time.monotonic(), sum(map(cpu_seconds, pids))
            written: list[int] = []
            answers = asyncio.run(send_while_writing(server.address, sent, arguments, written))
            cpu = sum(map(cpu_seconds, pids)) - cpu_began
            seconds = time.monotonic() - began
            count = len(answers.seconds)
            rows.append(
                {
                    "kind": query_type,
                    "searches": count,
                    "searches/CPU-s": f"{count / cpu:.0f}",
                    "searches/s": f"{count / seconds:.0f}",
                    "p50 ms": f"{percentile(answers.seconds, 50):.1f}",
                    "p99 ms": f"{percentile(answers.seconds, 99):.1f}",
                    "connections": answers.connections,
                    "writes/s": f"{sum(written) / seconds:.0f}",
                }
            )
    return rows


def measure_alone(
    index: Index, queries: dict[str, list[dict[str, object]]], seconds: float
) -> list[dict[str, object]]:
    """Return the CPU time of `Index.search` for each kind of search, in this process."""
    rows: list[dict[str, object]] = []
    for query_type, options in queries.items():
        index.search(**options[0])  # type: ignore[call-overload]
        count, began = 0, time.process_time()
        while time.process_time() - began < seconds:
            hits = index.search(**options[count % len(options)])  # type: ignore[call-overload]
            _ = hits[0].text  # reads all hits
            count += 1
        cpu = time.process_time() - began
        rows.append({"Index.search": query_type, "searches/CPU-s": f"{count / cpu:.0f}"})
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("queries", type=Path, help="a text file with a query in each line")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--writes", type=int, default=0, help="items to add in a second")
    parser.add_argument("--items-per-request", type=int, default=10, help="of the added items")
    parser.add_argument("--kinds", nargs="*", default=["text", "vector"])
    parser.add_argument("--k", type=int, default=10)
    arguments, flags = parser.parse_known_args()
    arguments.flags = [flag for flag in flags if flag != "--"]
    texts = arguments.queries.read_text().splitlines()
    index = Index.open(arguments.index)
    vectors = index.model.encoder.text_features(texts)
    queries: dict[str, list[dict[str, object]]] = {
        "text": [{"query": text, "k": arguments.k} for text in texts],
        "vector": [{"vector": vector, "k": arguments.k} for vector in vectors],
    }
    bodies = {
        "text": [encode_body(text=text, k=arguments.k) for text in texts],
        "vector": [
            encode_body(vector=[round(float(x), 6) for x in vector], k=arguments.k)
            for vector in vectors
        ],
    }
    chosen_bodies = {name: bodies[name] for name in arguments.kinds}
    chosen_queries = {name: queries[name] for name in arguments.kinds}
    if arguments.writes:
        quiet = argparse.Namespace(**{**vars(arguments), "writes": 0})
        print_table(measure_served(arguments.index, chosen_bodies, quiet))
    print_table(measure_served(arguments.index, chosen_bodies, arguments))
    print_table(measure_alone(index, chosen_queries, 3.0))
    return 0


def encode_body(**query: object) -> bytes:
    return json.dumps(query).encode()


if __name__ == "__main__":
    raise SystemExit(main())
