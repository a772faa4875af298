"""The service under load: clients that search over HTTP without a pause, while items come and go.

Usage: python benchmarks/serve.py INDEX DATA [--clients 50] [--seconds 60] [--add 10000 --delete 1000]
                                  [-- flags of `genius serve`, for example --max-batch 1]

Starts `genius serve` on a copy of an index and sends the test queries of the data set (texts, pictures, and
both; pictures as base64) from this process, whose processor time is reported apart. With --add, items of
the training pool are added meanwhile under new ids, each batch with a word of its own. As soon as a batch is
acknowledged it is searched for by that word: every item must be found. Some of them are deleted again, and must
not be found any more. Prints a row of Markdown; exits with 1 if a request failed or an acknowledged item was
not found.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from genius_search.index.snapshot import Snapshot

BATCH_ITEMS = 50
ADDERS = 4
MAX_QUERIES = 2000
PROGRAM = "from genius_search.cli import main; raise SystemExit(main())"
JSON = {"Content-Type": "application/json"}


@dataclass
class Outcome:
    """What the clients observed."""

    milliseconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_found: list[str] = field(default_factory=list)
    refused: int = 0
    added: int = 0
    deleted: int = 0


def encode_picture(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def read_queries(data: Path, seed: int) -> list[bytes]:
    """Read test queries of all tasks in random order, as request bodies."""
    files = sorted((data / "query" / "test").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    random.Random(seed).shuffle(lines)
    bodies = []
    for line in lines[:MAX_QUERIES]:
        body: dict[str, Any] = {"k": 10, "text": line["query_txt"]}
        if line["query_img_path"]:
            body["image"] = encode_picture(data / line["query_img_path"])
        bodies.append(json.dumps(body).encode())
    return bodies


def read_new_items(data: Path, count: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield items of the training pool in batches, each with a word that occurs nowhere else."""
    (pool,) = (data / "cand_pool" / "global").glob("*_train_*.jsonl")
    with pool.open() as file:
        lines = itertools.islice(itertools.cycle(map(json.loads, file)), count)
        for batch in itertools.count():
            word = f"lot{batch}x"
            items = [
                {
                    "id": f"{word}/{place}",
                    "text": f"{line['txt'] or 'a picture'} {word}",
                    "image": encode_picture(data / line["img_path"]) if line["img_path"] else None,
                }
                for place, line in enumerate(itertools.islice(lines, BATCH_ITEMS))
            ]
            if not items:
                return
            yield word, items


async def post(client: httpx.AsyncClient, path: str, body: bytes, outcome: Outcome) -> dict[str, Any]:
    """Send a request until it is not refused for load; return the response, empty if it is an error."""
    while True:
        began = time.perf_counter()
        response = await client.post(path, content=body, headers=JSON)
        if response.status_code != 429:
            break
        outcome.refused += 1
        await asyncio.sleep(float(response.headers["Retry-After"]))
    if path == "/v1/search":
        outcome.milliseconds.append(1000 * (time.perf_counter() - began))
    if response.status_code != 200:
        outcome.failures.append(f"{path}: {response.status_code} {response.text[:200]!r}")
        return {}
    return dict(response.json())


async def search_repeatedly(
    client: httpx.AsyncClient, bodies: Sequence[bytes], outcome: Outcome, over: asyncio.Event
) -> None:
    """Send the next query as soon as the last one is answered."""
    for body in itertools.cycle(bodies):
        if over.is_set():
            return
        if (await post(client, "/v1/search", body, outcome)).get("hits") == []:
            outcome.failures.append("search: no hits")


async def watch(client: httpx.AsyncClient, over: asyncio.Event) -> float:
    """Ask for `/healthz` ten times a second; return how long the slowest answer took, in milliseconds."""
    worst = 0.0
    while not over.is_set():
        began = time.perf_counter()
        (await client.get("/healthz")).raise_for_status()
        worst = max(worst, 1000 * (time.perf_counter() - began))
        await asyncio.sleep(0.1)
    return worst


async def change_items(
    client: httpx.AsyncClient,
    batches: Iterator[tuple[str, list[dict[str, Any]]]],
    outcome: Outcome,
    num_deleted: int,
) -> None:
    """Add batches, look for each, and delete some again."""

    async def ids_with(word: str, text: str) -> set[str]:
        body = json.dumps({"text": text, "match": word, "k": 2 * BATCH_ITEMS}).encode()
        found = await client.post("/v1/search", content=body, headers=JSON)
        while found.status_code == 429:
            await asyncio.sleep(float(found.headers["Retry-After"]))
            found = await client.post("/v1/search", content=body, headers=JSON)
        return {hit["id"] for hit in found.json().get("hits", ())}

    for word, items in batches:
        ids = {str(item["id"]) for item in items}
        added = await post(client, "/v1/items", json.dumps({"items": items}).encode(), outcome)
        outcome.added += added.get("added", 0)
        missing = ids - await ids_with(word, items[0]["text"])
        outcome.not_found += [f"{name} was acknowledged and is not found" for name in sorted(missing)]
        if outcome.deleted < num_deleted:
            outcome.deleted += len(ids)
            await post(client, "/v1/items/delete", json.dumps({"ids": sorted(ids)}).encode(), outcome)
            left = await ids_with(word, items[0]["text"])
            outcome.not_found += [f"{name} was deleted and is found" for name in sorted(left)]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int, name: str) -> float:
    """Return a size that the kernel reports of a process, such as VmRSS."""
    (found,) = re.findall(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found) / 1024


class Server(NamedTuple):
    """A running service, and the copy of an index that it serves."""

    process: subprocess.Popen[str]
    address: str
    index: Path


@contextmanager
def serving(index: Path, *flags: str) -> Iterator[Server]:
    """Start `genius serve` on a copy of an index; it is killed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(index, Path(folder) / index.name))
        command = [sys.executable, "-c", PROGRAM, "serve", copy, "--port", "0", *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if address := re.search(r"http://\S+", line):
                    yield Server(process, address[0], copy)
                    return
            raise SystemExit("the server did not start")
        finally:
            process.kill()
            process.wait()


async def run(arguments: argparse.Namespace, server: Server, flags: Sequence[str], began: float) -> bool:
    bodies, process = read_queries(arguments.data, arguments.seed), server.process
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=None, limits=limits) as client:  # noqa: S113
        first = await client.post("/v1/search", content=bodies[0], headers=JSON)
        first.raise_for_status()
        startup, at_rest = time.monotonic() - began, megabytes(process.pid, "VmRSS")
        outcome, over = Outcome(), asyncio.Event()
        starts = range(0, len(bodies), -(-len(bodies) // arguments.clients))
        searches = [
            asyncio.create_task(search_repeatedly(client, bodies[start:] + bodies[:start], outcome, over))
            for start in starts
        ]
        began, cpu, own = time.monotonic(), cpu_seconds(process.pid), time.process_time()
        batches = read_new_items(arguments.data, arguments.add)
        changes = [change_items(client, batches, outcome, arguments.delete) for _ in range(ADDERS)]
        alive = asyncio.create_task(watch(client, over))
        await asyncio.gather(asyncio.sleep(arguments.seconds), *changes)
        over.set()
        await asyncio.gather(alive, *searches)
        seconds = time.monotonic() - began
        cpu, own = cpu_seconds(process.pid) - cpu, time.process_time() - own
        exported = (await client.get("/metrics")).text.splitlines()
    peak = megabytes(process.pid, "VmHWM")
    began = time.monotonic()
    process.terminate()
    process.wait(60)
    stopping = time.monotonic() - began
    pairs = (line.rpartition(" ") for line in exported if not line.startswith("#"))
    metrics = {name: float(value) for name, _, value in pairs}
    names = [f"lot{n // BATCH_ITEMS}x/{n % BATCH_ITEMS}" for n in range(arguments.add)]
    kept, expected = len(Snapshot.open(server.index).stamps(names)), outcome.added - outcome.deleted
    if kept != expected:
        outcome.not_found.append(f"{kept} of {expected} acknowledged items are stored at the end")
    times = sorted(outcome.milliseconds)
    batch = metrics["genius_search_batch_size_sum"] / metrics["genius_search_batch_size_count"]
    row = {
        "flags": " ".join(flags) or "defaults",
        "queries/s": f"{len(times) / seconds:.1f}",
        "p50 ms": f"{times[len(times) // 2]:.0f}",
        "p95 ms": f"{times[int(len(times) * 0.95)]:.0f}",
        "p99 ms": f"{times[int(len(times) * 0.99)]:.0f}",
        "/healthz worst ms": f"{alive.result():.0f}",
        "answered": f"{len(times):,}",
        "failed": len(outcome.failures),
        "429": outcome.refused,
        "batch": f"{batch:.1f}",
        "added": f"{outcome.added:,}",
        "deleted": f"{outcome.deleted:,}",
        "not found": len(outcome.not_found),
        "compactions": f"{sum(n for name, n in metrics.items() if 'compactions_total' in name):.0f}",
        "server CPU-ms/query": f"{1000 * cpu / len(times):.1f}",
        "server cores": f"{cpu / seconds:.2f}",
        "generator cores": f"{own / seconds:.2f}",
        "first answer s": f"{startup:.1f}",
        "shutdown s": f"{stopping:.1f}",
        "RSS MB": f"{at_rest:.0f}",
        "peak MB": f"{peak:.0f}",
    }
    if arguments.header:
        print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    problems = [*outcome.failures[:5], *outcome.not_found[:5]]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return not problems and process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("data", type=Path, help="data set in M-BEIR's layout: queries and new items")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--add", type=int, default=0, help="items to add meanwhile")
    parser.add_argument("--delete", type=int, default=0, help="how many of them to delete again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--header", action="store_true", help="print the head of the table too")
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    began = time.monotonic()
    with serving(arguments.index, *flags) as server:
        return 0 if asyncio.run(run(arguments, server, flags, began)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
