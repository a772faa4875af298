"""The service under load: clients that search over HTTP without a pause, while items come and go.

Usage: python benchmarks/serve.py INDEX DATA [--clients 50] [--seconds 60] [--add 10000 --delete 1000]
                                  [-- flags of `genius serve`, for example --max-batch 1]

Starts `genius serve` on a copy of an index and sends the data set's test queries (texts, pictures, and both
together; a picture of the query goes along as base64) from this process, whose processor time is told apart.
With --add, items of the training pool are added meanwhile under new ids, each batch under a word of its own.
As soon as a batch is acknowledged it is searched for by that word: every item of it has to be found. The last
of them are deleted again, and then have to be gone. Prints a row of Markdown; exits with 1 if any request
failed or any acknowledged item was not found.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from genius_search.index.snapshot import Snapshot

ADDED_AT_ONCE = 50
ADDERS = 4
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = [sys.executable, "-c", "from genius_search.cli import main; raise SystemExit(main())", "serve"]


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after_seconds: float


@dataclass
class Seen:
    """What the clients saw."""

    milliseconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: int = 0
    added: int = 0
    deleted: int = 0
    not_found: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.failures or self.not_found)


class Connection:
    """One client: a connection that is kept, with as little work for this process as HTTP allows."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        return self

    async def ask(self, request: bytes) -> Answer:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await self._reader.readexactly(int(fields[b"content-length"]))
        return Answer(int(head.split(b" ", 2)[1]), body, float(fields.get(b"retry-after", 1)))

    async def close(self) -> None:
        self._writer.close()


def request(method: str, path: str, body: object = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def picture(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def queries(data: Path, *, most: int, seed: int) -> list[bytes]:
    """Test queries of all tasks, in a drawn order."""
    lines = [
        json.loads(line)
        for file in sorted((data / "query" / "test").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    random.Random(seed).shuffle(lines)
    asked = []
    for line in lines[:most]:
        body: dict[str, Any] = {"k": 10}
        if line["query_txt"]:
            body["text"] = line["query_txt"]
        if line["query_img_path"]:
            body["image"] = picture(data / line["query_img_path"])
        asked.append(request("POST", "/v1/search", body))
    return asked


def new_items(data: Path, *, count: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Items of the training pool in batches, each batch under a word that is nowhere else."""
    (pool,) = (data / "cand_pool" / "global").glob("*_train_*.jsonl")
    with pool.open() as file:
        lines = itertools.islice(itertools.cycle(map(json.loads, file)), count)
        numbers = itertools.count()
        while part := list(itertools.islice(lines, ADDED_AT_ONCE)):
            word = _word(next(numbers))
            items = []
            for place, line in enumerate(part):
                item = {"id": f"{word}/{place}", "text": f"{line['txt'] or 'a picture'} {word}"}
                if line["img_path"]:
                    item["image"] = picture(data / line["img_path"])
                items.append(item)
            yield word, items


async def search_on(port: int, asked: Sequence[bytes], seen: Seen, until: asyncio.Event) -> None:
    """One client: the next query as soon as the last is answered."""
    connection = await Connection(port).open()
    for query in itertools.cycle(asked):
        if until.is_set():
            break
        began = time.perf_counter()
        answer = await connection.ask(query)
        if answer.status == 429:
            seen.refused += 1
            await asyncio.sleep(answer.retry_after_seconds)
            continue
        seen.milliseconds.append(1000 * (time.perf_counter() - began))
        if answer.status != 200 or not json.loads(answer.body)["hits"]:
            seen.failures.append(f"search: {answer.status} {answer.body[:200]!r}")
    await connection.close()


async def change(
    port: int, lots: Iterator[tuple[str, list[dict[str, Any]]]], seen: Seen, to_delete: int
) -> None:
    """One client that adds batches, looks for each, and deletes again what there is to delete."""
    connection = await Connection(port).open()

    async def ask(path: str, body: object) -> dict[str, Any]:
        while (answer := await connection.ask(request("POST", path, body))).status == 429:
            seen.refused += 1
            await asyncio.sleep(answer.retry_after_seconds)
        if answer.status != 200:
            seen.failures.append(f"{path}: {answer.status} {answer.body[:200]!r}")
            return {}
        return dict(json.loads(answer.body))

    async def found(word: str, text: str) -> set[str]:
        body = {"text": text, "match": word, "k": 2 * ADDED_AT_ONCE}
        return {hit["id"] for hit in (await ask("/v1/search", body)).get("hits", ())}

    for word, items in lots:
        ids = {item["id"] for item in items}
        told = await ask("/v1/items", {"items": items})
        seen.added += told.get("added", 0)
        missed = ids - await found(word, items[0]["text"])
        seen.not_found += [f"{name} was acknowledged and is not found" for name in sorted(missed)]
        if seen.deleted < to_delete:
            seen.deleted += len(ids)
            await ask("/v1/items/delete", {"ids": sorted(ids)})
            still = await found(word, items[0]["text"])
            seen.not_found += [f"{name} was deleted and is found" for name in sorted(still)]
    await connection.close()


class Server:
    """`genius serve` in a process of its own."""

    def __init__(self, index: Path, flags: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the server
        self.process = subprocess.Popen(
            [*COMMAND, str(index), "--port", str(self.port), *flags], stdout=self._log, stderr=self._log
        )

    async def first_answer(self, asked: bytes) -> Answer:
        """Ask until there is an answer."""
        while self.process.poll() is None:
            try:
                connection = await Connection(self.port).open()
                return await connection.ask(asked)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.02)
        raise SystemExit(f"the server ended: {self.said()}")

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()[-3000:]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def megabytes(self, name: str) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(name))
        return int(line.split()[1]) / 1024

    async def measured(self) -> dict[str, float]:
        """What the server says of itself."""
        connection = await Connection(self.port).open()
        text = (await connection.ask(request("GET", "/metrics"))).body.decode()
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def stop(self) -> float:
        """Ask it to end; seconds until it has."""
        began = time.monotonic()
        self.process.terminate()
        self.process.wait(60)
        return time.monotonic() - began


async def run(arguments: argparse.Namespace, index: Path, flags: Sequence[str]) -> bool:
    asked = queries(arguments.data, most=2000, seed=arguments.seed)
    began = time.monotonic()
    server = Server(index, flags)
    try:
        first = await server.first_answer(asked[0])
        startup = time.monotonic() - began
        if first.status != 200:
            raise SystemExit(f"the first answer is {first.status}: {first.body!r}")
        at_rest = server.megabytes("VmRSS")
        seen = Seen()
        is_over = asyncio.Event()
        clients = [
            asyncio.create_task(search_on(server.port, asked[start:] + asked[:start], seen, is_over))
            for start in range(0, len(asked), -(-len(asked) // arguments.clients))
        ]
        cpu, own = server.cpu_seconds(), _own_cpu_seconds()
        began = time.monotonic()
        lots = new_items(arguments.data, count=arguments.add)
        adders = [
            asyncio.create_task(change(server.port, lots, seen, arguments.delete)) for _ in range(ADDERS)
        ]
        await asyncio.gather(asyncio.sleep(arguments.seconds), *adders)
        is_over.set()
        await asyncio.gather(*clients)
        seconds = time.monotonic() - began
        cpu, own = server.cpu_seconds() - cpu, _own_cpu_seconds() - own
        measured = await server.measured()
        peak = server.megabytes("VmHWM")
        stopping = server.stop()
        seen.not_found += _lost(index, seen, arguments)
        _report(arguments, flags, seen, measured, [seconds, startup, stopping, at_rest, peak, cpu, own])
        return seen.is_good and server.process.returncode in (0, -15)
    finally:
        if server.process.poll() is None:
            server.process.kill()
            sys.stderr.write(server.said())


def _lost(index: Path, seen: Seen, arguments: argparse.Namespace) -> list[str]:
    """Whether what was acknowledged is there when the server has ended."""
    names = [
        f"{_word(lot)}/{place}"
        for lot in range(-(-arguments.add // ADDED_AT_ONCE))
        for place in range(ADDED_AT_ONCE)
    ]
    there = len(Snapshot.open(index).stamps(names))
    expected = seen.added - seen.deleted
    return [] if there == expected else [f"{there} of {expected} acknowledged items are there at the end"]


def _word(lot: int) -> str:
    return f"lot{lot}x"


def _own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _report(
    arguments: argparse.Namespace,
    flags: Sequence[str],
    seen: Seen,
    measured: dict[str, float],
    figures: Sequence[float],
) -> None:
    seconds, startup, stopping, at_rest, peak, cpu, own = figures
    times = sorted(seen.milliseconds)
    batches = measured["genius_search_batch_size_count"]
    row = {
        "flags": " ".join(flags) or "defaults",
        "queries/s": f"{len(times) / seconds:.1f}",
        "p50 ms": f"{times[len(times) // 2]:.0f}",
        "p99 ms": f"{times[int(len(times) * 0.99)]:.0f}",
        "answered": f"{len(times):,}",
        "failed": len(seen.failures),
        "429": seen.refused,
        "batch": f"{measured['genius_search_batch_size_sum'] / batches:.1f}",
        "added": f"{seen.added:,}",
        "deleted": f"{seen.deleted:,}",
        "not found": len(seen.not_found),
        "compactions": f"{sum(n for name, n in measured.items() if 'compactions_total' in name):.0f}",
        "server CPU-ms/query": f"{1000 * cpu / len(times):.1f}",
        "server cores": f"{cpu / seconds:.2f}",
        "generator cores": f"{own / seconds:.2f}",
        "first answer s": f"{startup:.1f}",
        "shutdown s": f"{stopping:.1f}",
        "RSS MB": f"{at_rest:.0f}",
        "peak MB": f"{peak:.0f}",
    }
    if arguments.header:
        print("| " + " | ".join(row) + " |")
        print("|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    for problem in (*seen.failures[:5], *seen.not_found[:5]):
        sys.stderr.write(f"{problem}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="it is copied, and stays as it is")
    parser.add_argument("data", type=Path, help="data set in M-BEIR's layout: queries and new items")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--add", type=int, default=0, help="items to add meanwhile")
    parser.add_argument("--delete", type=int, default=0, help="of those, how many to delete again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--header", action="store_true", help="print the table's head too")
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / arguments.index.name
        shutil.copytree(arguments.index, copy)
        return 0 if asyncio.run(run(arguments, copy, flags)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
