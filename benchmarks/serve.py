"""The service under load: clients that send a mix of requests over HTTP without a pause.

Usage: python benchmarks/serve.py INDEX DATA [--clients 50] [--requests 20063] [--only KIND]

Starts `genius serve` on a copy of an index of a data set in M-BEIR's layout and sends its test queries, as texts and
pictures, with and without conditions; asks for items, pictures and explanations; adds items, which must be found as
soon as they are acknowledged, and deletes them, after which they must not be found. Which requests these are follows
from their number alone. Prints two tables in Markdown; exits with 1 if an answer was wrong.
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
"""Kinds of requests, in percent. A change adds an item, searches for it, deletes it and searches again: four requests."""
PROGRAM = "from genius_search.cli import main; raise SystemExit(main())"


def read_lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Read the records of files of JSON lines."""
    return [
        json.loads(line)
        for path in sorted(folder.glob(pattern))
        for line in path.read_text().splitlines()
    ]


class Load:
    """A mix of requests, each with a check of its answer, and how long they took."""

    def __init__(self, client: httpx.AsyncClient, data: Path, only: str | None) -> None:
        self._client, self._data = client, data
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
        """Send requests one after the other, as long as there are some that no other client has sent."""
        for number in requests:
            draw = random.Random(number)
            (kind,) = draw.choices([*self._shares], [*self._shares.values()])
            try:
                is_right = await getattr(self, f"send_{kind}")(draw, number, requests)
            except (httpx.HTTPError, KeyError) as error:
                is_right = False
                print(f"{kind} {number}: {error!r}", file=sys.stderr)
            if not is_right:
                self.wrong.append(f"{kind} {number}")

    async def send(self, kind: str, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request until it is not refused for load."""
        began = time.monotonic()
        while True:
            answer = await self._client.request(method, path, **request)
            if answer.status_code != 429:
                break
            await asyncio.sleep(float(answer.headers["Retry-After"]))
        answer.raise_for_status()
        self.seconds[kind].append(time.monotonic() - began)
        return answer

    async def search(self, kind: str, **body: Any) -> list[dict[str, Any]]:
        return (await self.send(kind, "POST", "/v1/search", json={"k": 10, **body})).json()["hits"]

    async def send_text(self, draw: random.Random, *_: Any) -> bool:
        return len(await self.search("text", text=draw.choice(self._texts))) == 10

    async def send_picture(self, draw: random.Random, *_: Any) -> bool:
        line = draw.choice(self._pictures)
        body = json.dumps({"k": 10, "text": line["query_txt"], "image": "picture"})
        files = {
            "json": (None, body),
            "picture": (self._data / line["query_img_path"]).read_bytes(),
        }
        return (
            len((await self.send("picture", "POST", "/v1/search", files=files)).json()["hits"])
            == 10
        )

    async def send_filtered(self, draw: random.Random, *_: Any) -> bool:
        kind = draw.choice(["image", "caption", "card", "fact"])
        hits = await self.search("filtered", text=draw.choice(self._texts), where=[f"kind={kind}"])
        return len(hits) == 10 and {hit["fields"]["kind"] for hit in hits} == {kind}

    async def send_similar(self, draw: random.Random, *_: Any) -> bool:
        return len(await self.search("similar", parts=[{"id": draw.choice(self._ids)}])) == 10

    async def send_item(self, draw: random.Random, *_: Any) -> bool:
        name = draw.choice(self._ids)
        return (await self.send("item", "GET", "/v1/items", params={"id": name})).json()[
            "id"
        ] == name

    async def send_thumbnail(self, draw: random.Random, *_: Any) -> bool:
        query = {"id": draw.choice(self._with_pictures)}
        answer = await self.send("thumbnail", "GET", "/v1/items/picture", params=query)
        return answer.content.startswith(b"\xff\xd8")

    async def send_explain(self, draw: random.Random, *_: Any) -> bool:
        name, text = draw.choice(self._ids), draw.choice(self._texts)
        answer = await self.send("explain", "POST", "/v1/explain", json={"id": name, "text": text})
        return answer.json()["item"]["id"] == name

    async def send_change(self, draw: random.Random, number: int, requests: Iterator[int]) -> bool:
        word = f"lot{number}x"
        item = {"id": word, "text": f"{draw.choice(self._texts)} {word}", "fields": {"kind": "new"}}
        await self.send("add", "POST", "/v1/items", json={"items": [item]})
        found = [[hit["id"] for hit in await self.search("match", text=word, match=word)]]
        await self.send("delete", "DELETE", "/v1/items", params={"id": word})
        found.append([hit["id"] for hit in await self.search("match", text=word, match=word)])
        for _ in zip(range(3), requests, strict=False):
            pass  # the four requests are four of those that were asked for
        return found == [[word], []]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes(pid: int) -> list[int]:
    """Return a process and all processes that it started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *itertools.chain.from_iterable(processes(int(child)) for child in started)]


def megabytes(pid: int, name: str) -> float:
    """Return a size that the kernel reports of a process, such as VmRSS."""
    (found,) = re.findall(
        rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
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
    pid, limits = server.process.pid, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
        load = Load(client, arguments.data, arguments.only)
        await load.search("text", text="a first search")
        load.seconds.clear()
        began, cpu, at_rest = time.monotonic(), cpu_seconds(pid), megabytes(pid, "VmRSS")
        requests = iter(range(arguments.requests))
        await asyncio.gather(*(load.run(requests) for _ in range(arguments.clients)))
    seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
    times = list(itertools.chain.from_iterable(load.seconds.values()))
    row = {
        "requests": len(times),
        "requests/s": f"{len(times) / seconds:.1f}",
        "requests/CPU-s": f"{len(times) / cpu:.1f}",
        "p50 ms": f"{percentile(times, 50):.0f}",
        "p99 ms": f"{percentile(times, 99):.0f}",
        "wrong": len(load.wrong),
        "RSS MB": f"{at_rest:.0f}",
        "RSS MB after": f"{megabytes(pid, 'VmRSS'):.0f}",
        "peak MB": f"{megabytes(pid, 'VmHWM'):.0f}",
    }
    print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |\n")
    print("| kind | requests | p50 ms | p99 ms |\n|---|---|---|---|")
    for kind, own in sorted(load.seconds.items()):
        print(f"| {kind} | {len(own)} | {percentile(own, 50):.0f} | {percentile(own, 99):.0f} |")
    print(*load.wrong[:20], sep="\n", end="", file=sys.stderr)
    return not load.wrong


def percentile(seconds: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * sorted(seconds)[len(seconds) * percent // 100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("index", type=Path, help="copied first, so it stays as it is")
    parser.add_argument("data", type=Path, help="the data set that it was made of")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=20_063)
    parser.add_argument("--only", choices=SHARES, help="requests of one kind")
    arguments = parser.parse_args()
    with serving(arguments.index) as server:
        return 0 if asyncio.run(run(arguments, server)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
