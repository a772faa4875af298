"""Measure the service under load: clients send a mix of requests without pauses, and check answers.

Usage: python benchmarks/serve.py INDEX DATA [--clients 50] [--requests 20063] [--only KIND]

Starts `genius serve` on a copy of an index of a data set in M-BEIR's layout. The requests search
its test queries, as texts and pictures, with and without conditions; read items, pictures and
explanations; and add items, which must be found as soon as they are acknowledged, and delete them,
after which they must not be found. A request depends only on its number. Prints two tables in
Markdown; exits with 1 if an answer was wrong.
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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

SHARES = {
    "text": 42,
    "picture": 10,
    "filtered": 10,
    "similar": 6,
    "item": 10,
    "thumbnail": 16,
    "explain": 5,
    "change": 1,
}
"""Kinds of requests and their shares in percent.

A change is four requests: it adds an item, searches for it, deletes it and searches again.
"""
K = 10
"""Hits of a search."""
PROGRAM = "from genius_search.cli import main; raise SystemExit(main())"


def read_lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Read the records of files of JSON lines."""
    return [
        json.loads(line)
        for path in sorted(folder.glob(pattern))
        for line in path.read_text().splitlines()
    ]


class Load:
    """A mix of requests, each with a check of its answer, and the seconds that they took."""

    def __init__(self, client: httpx.AsyncClient, data: Path, only: str | None) -> None:
        self._client = client
        self._data = data
        lines = read_lines(data / "query" / "test", "*.jsonl")
        self._texts = [line["query_txt"] for line in lines if not line["query_img_path"]]
        self._pictures = [line for line in lines if line["query_img_path"]]
        pool = read_lines(data / "cand_pool" / "global", "*test*.jsonl")
        self._ids = [line["did"] for line in pool]
        self._with_pictures = [line["did"] for line in pool if line["img_path"]]
        self._shares = {only: 100} if only else SHARES
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []

    async def run(self, requests: Iterator[int]) -> None:
        """Send requests one after the other, until all clients together have sent all."""
        for number in requests:
            draws = random.Random(number)
            (name,) = draws.choices([*self._shares], [*self._shares.values()])
            try:
                is_right = await getattr(self, f"send_{name}")(draws, number, requests)
            except (httpx.HTTPError, KeyError) as error:
                is_right = False
                print(f"{name} {number}: {error!r}", file=sys.stderr)
            if not is_right:
                self.wrong.append(f"{name} {number}")

    async def send(self, name: str, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request, and repeat it while it is refused for load."""
        began = time.monotonic()
        while True:
            answer = await self._client.request(method, path, **request)
            if answer.status_code != 429:
                break
            await asyncio.sleep(float(answer.headers["Retry-After"]))
        answer.raise_for_status()
        self.seconds[name].append(time.monotonic() - began)
        return answer

    async def search(self, name: str, **body: Any) -> list[dict[str, Any]]:
        answer = await self.send(name, "POST", "/v1/search", json={"k": K, **body})
        return answer.json()["hits"]

    async def search_ids(self, word: str) -> list[str]:
        """Return the ids of the items that contain a word."""
        return [hit["id"] for hit in await self.search("match", text=word, match=word)]

    async def send_text(self, draws: random.Random, *_: Any) -> bool:
        return len(await self.search("text", text=draws.choice(self._texts))) == K

    async def send_picture(self, draws: random.Random, *_: Any) -> bool:
        line = draws.choice(self._pictures)
        body = json.dumps({"k": K, "text": line["query_txt"], "image": "picture"})
        picture = (self._data / line["query_img_path"]).read_bytes()
        files = {"json": (None, body), "picture": picture}
        answer = await self.send("picture", "POST", "/v1/search", files=files)
        return len(answer.json()["hits"]) == K

    async def send_filtered(self, draws: random.Random, *_: Any) -> bool:
        value = draws.choice(["image", "caption", "card", "fact"])
        text = draws.choice(self._texts)
        hits = await self.search("filtered", text=text, where=[f"kind={value}"])
        return len(hits) == K and {hit["fields"]["kind"] for hit in hits} == {value}

    async def send_similar(self, draws: random.Random, *_: Any) -> bool:
        return len(await self.search("similar", parts=[{"id": draws.choice(self._ids)}])) == K

    async def send_item(self, draws: random.Random, *_: Any) -> bool:
        item_id = draws.choice(self._ids)
        answer = await self.send("item", "GET", "/v1/items", params={"id": item_id})
        return answer.json()["id"] == item_id

    async def send_thumbnail(self, draws: random.Random, *_: Any) -> bool:
        query = {"id": draws.choice(self._with_pictures)}
        answer = await self.send("thumbnail", "GET", "/v1/items/picture", params=query)
        return answer.content.startswith(b"\xff\xd8")

    async def send_explain(self, draws: random.Random, *_: Any) -> bool:
        body = {"id": draws.choice(self._ids), "text": draws.choice(self._texts)}
        answer = await self.send("explain", "POST", "/v1/explain", json=body)
        return answer.json()["item"]["id"] == body["id"]

    async def send_change(self, draws: random.Random, number: int, requests: Iterator[int]) -> bool:
        word = f"lot{number}x"
        text = f"{draws.choice(self._texts)} {word}"
        item = {"id": word, "text": text, "fields": {"kind": "new"}}
        await self.send("add", "POST", "/v1/items", json={"items": [item]})
        ids_after_adding = await self.search_ids(word)
        await self.send("delete", "DELETE", "/v1/items", params={"id": word})
        ids_after_deleting = await self.search_ids(word)
        for _ in zip(range(3), requests, strict=False):
            pass  # a change counts as four requests
        return ids_after_adding == [word] and not ids_after_deleting


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes(pid: int) -> list[int]:
    """Return the ids of a process and of its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *itertools.chain.from_iterable(processes(int(child)) for child in children)]


def megabytes(pid: int, name: str) -> float:
    """Return a size from the kernel's status of a process, such as VmRSS."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return int(kilobytes) / 1024


class Server(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def serving(index: Path, *flags: str) -> Iterator[Server]:
    """Start `genius serve` on a copy of an index, and kill it in the end."""
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


async def measure(arguments: argparse.Namespace, server: Server) -> bool:
    """Send all requests, print the tables, and return whether all answers were right."""
    pid = server.process.pid
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
        load = Load(client, arguments.data, arguments.only)
        await load.search("text", text="a first search")
        load.seconds.clear()
        memory = megabytes(pid, "VmRSS")
        began, cpu_began = time.monotonic(), cpu_seconds(pid)
        requests = iter(range(arguments.requests))
        await asyncio.gather(*(load.run(requests) for _ in range(arguments.clients)))
    seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu_began
    times = list(itertools.chain.from_iterable(load.seconds.values()))
    row = {
        "requests": len(times),
        "requests/s": f"{len(times) / seconds:.1f}",
        "requests/CPU-s": f"{len(times) / cpu:.1f}",
        "p50 ms": f"{percentile(times, 50):.0f}",
        "p99 ms": f"{percentile(times, 99):.0f}",
        "wrong": len(load.wrong),
        "RSS MB": f"{memory:.0f}",
        "RSS MB after": f"{megabytes(pid, 'VmRSS'):.0f}",
        "peak MB": f"{megabytes(pid, 'VmHWM'):.0f}",
    }
    print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |\n")
    print("| kind | requests | p50 ms | p99 ms |\n|---|---|---|---|")
    for name, times in sorted(load.seconds.items()):
        p50, p99 = percentile(times, 50), percentile(times, 99)
        print(f"| {name} | {len(times)} | {p50:.0f} | {p99:.0f} |")
    print(*load.wrong[:20], sep="\n", end="", file=sys.stderr)
    return not load.wrong


def percentile(seconds: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * sorted(seconds)[len(seconds) * percent // 100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("data", type=Path, help="data set of the index, in M-BEIR's layout")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=20_063)
    parser.add_argument("--only", choices=SHARES, help="requests of one kind")
    arguments = parser.parse_args()
    with serving(arguments.index) as server:
        return 0 if asyncio.run(measure(arguments, server)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
