"""The service under load: clients that search over HTTP without a pause, while items come and go.

Usage: python benchmarks/serve.py INDEX DATA [--clients 50] [--seconds 60] [--add 1000]

Starts `genius serve` on a copy of an index and sends the test queries of the data set (texts, pictures, and
both). With --add, texts are added meanwhile, each batch with a word of its own by which it must be found as soon
as it is acknowledged; every other batch is deleted again, and must not be found any more. Prints a row of
Markdown; exits with 1 if a request failed or an acknowledged item was not found.
"""

from __future__ import annotations

import argparse
import asyncio
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

BATCH_ITEMS = 50
PROGRAM = "from genius_search.cli import main; raise SystemExit(main())"


def read_queries(data: Path) -> list[dict[str, Any]]:
    """Read test queries of all tasks in random order, as arguments of a request."""
    files = sorted((data / "query" / "test").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    random.Random(0).shuffle(lines)
    queries: list[dict[str, Any]] = []
    for line in lines[:2_000]:
        body = {"k": 10, "text": line["query_txt"]}
        if line["query_img_path"]:
            form = {"json": (None, json.dumps({**body, "image": "picture"}))}
            queries.append({"files": {**form, "picture": (data / line["query_img_path"]).read_bytes()}})
        else:
            queries.append({"json": body})
    return queries


async def post(client: httpx.AsyncClient, path: str, **request: Any) -> dict[str, Any]:
    """Send a request until it is not refused for load."""
    while True:
        answer = await client.post(path, **request)
        if answer.status_code != 429:
            break
        await asyncio.sleep(float(answer.headers["Retry-After"]))
    answer.raise_for_status()
    return dict(answer.json())


async def search_repeatedly(
    client: httpx.AsyncClient, queries: list[dict[str, Any]], seconds: float
) -> list[float]:
    """Send the next query as soon as the last one is answered; return how long each took."""
    times, until = [], time.monotonic() + seconds
    for query in itertools.cycle(queries):
        began = time.monotonic()
        if began > until:
            return times
        assert (await post(client, "/v1/search", **query))["hits"]
        times.append(1000 * (time.monotonic() - began))
    return times


async def change_items(client: httpx.AsyncClient, count: int) -> int:
    """Add items, look for them, and delete half of them again; return how many were not as acknowledged."""
    wrong = 0
    for batch in range(count // BATCH_ITEMS):
        word = f"lot{batch}x"
        ids = {f"{word}/{place}" for place in range(BATCH_ITEMS)}
        items = [{"id": name, "text": f"a kite {word} {name}"} for name in sorted(ids)]
        await post(client, "/v1/items", json={"items": items})
        query = {"text": "a kite", "match": word, "k": 2 * BATCH_ITEMS}
        found = {hit["id"] for hit in (await post(client, "/v1/search", json=query))["hits"]}
        wrong += len(ids ^ found)
        if batch % 2:
            (await client.delete("/v1/items", params={"id": sorted(ids)})).raise_for_status()
            wrong += len((await post(client, "/v1/search", json=query))["hits"])
    return wrong


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int, name: str) -> float:
    """Return a size that the kernel reports of a process, such as VmRSS."""
    (found,) = re.findall(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found) / 1024


class Server(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    address: str


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
                    yield Server(process, address[0])
                    return
            raise SystemExit("the server did not start")
        finally:
            process.kill()
            process.wait()


async def run(arguments: argparse.Namespace, server: Server) -> bool:
    queries, pid = read_queries(arguments.data), server.process.pid
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
        await post(client, "/v1/search", **queries[0])
        began, cpu, at_rest = time.monotonic(), cpu_seconds(pid), megabytes(pid, "VmRSS")
        starts = range(0, len(queries), -(-len(queries) // arguments.clients))
        lists, wrong = await asyncio.gather(
            asyncio.gather(
                *(search_repeatedly(client, queries[n:] + queries[:n], arguments.seconds) for n in starts)
            ),
            change_items(client, arguments.add),
        )
    seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
    times = sorted(itertools.chain.from_iterable(lists))
    row = {
        "queries/s": f"{len(times) / seconds:.1f}",
        "p50 ms": f"{times[len(times) // 2]:.0f}",
        "p99 ms": f"{times[int(len(times) * 0.99)]:.0f}",
        "server CPU-ms/query": f"{1000 * cpu / len(times):.1f}",
        "wrong": wrong,
        "RSS MB": f"{at_rest:.0f}",
        "peak MB": f"{megabytes(pid, 'VmHWM'):.0f}",
    }
    print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |")
    return wrong == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("data", type=Path, help="data set in M-BEIR's layout, for its queries")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--add", type=int, default=0, help="items to add meanwhile")
    arguments = parser.parse_args()
    with serving(arguments.index) as server:
        return 0 if asyncio.run(run(arguments, server)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
