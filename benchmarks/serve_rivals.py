"""Compare the service with others: searches by vector over HTTP, one core for each server.

Usage: python benchmarks/serve_rivals.py VECTORS.npy TEXTS --query-vectors QUERIES.npy
       --python rivals/bin/python [--answers ANSWERS.npy] [--services genius chroma …]

VECTORS has a row for each line of TEXTS, a text file. Each service holds the same items and is
started on core 0; the clients run on core 1, keep their connections open, and send one search for
ten hits after the other. Chroma has a server; `rival_app.py` serves the local mode of
qdrant-client, LanceDB and pgvector. All have their default settings. PYTHON is the interpreter of
an environment with their packages::

    pip install chromadb lancedb qdrant-client asyncpg uvicorn httptools uvloop

pgvector also needs an installation of PostgreSQL and pgvector.

*Of the ten* is the share of exact search's first ten hits that are found; R@5 is the share of
queries with a right answer (a row of VECTORS in ANSWERS, −1 for none) among five hits. Memory is
that of all processes of the server, with shared pages counted once; disk is the size of the files.
The last columns are measured while 16 clients search: the time to add 1,000 items, 100 in a
request, which are the first items with a little noise, and the slowest searches meanwhile. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from serve import PROGRAM, cpu_seconds, percentile, processes
from serve_rate import Answers, Client, print_table, send

from genius_search import Index, __version__

SERVER_CORE, CLIENT_CORE = 0, 1
HITS = 10
SERVICES = ["genius", "chroma", "qdrant", "lancedb", "lancedb-index", "pgvector"]
ADDED, ADDED_PER_REQUEST = 1_000, 100
LOADED_PER_REQUEST = 1_000


class Batch(NamedTuple):
    """Items to add in one request."""

    ids: list[str]
    vectors: list[list[float]]
    texts: list[str]


class Items(NamedTuple):
    """Items to load; their ids are numbers."""

    vectors: np.ndarray
    texts: list[str]

    def batches(self, size: int, first_id: int = 0) -> Iterator[Batch]:
        """Yield the items of each request."""
        for start in range(0, len(self.texts), size):
            vectors = as_lists(self.vectors[start : start + size])
            ids = [str(first_id + start + row) for row in range(len(vectors))]
            yield Batch(ids, vectors, self.texts[start : start + size])


def as_lists(vectors: np.ndarray) -> list[list[float]]:
    """Return rows as lists of numbers with six digits."""
    return [[round(number, 6) for number in row] for row in vectors.astype(float).tolist()]


class Service:
    """A server and its requests."""

    name: str
    search_path = "/search"
    environment: Mapping[str, str] = MappingProxyType({})

    def prepare(self, folder: Path, items: Items) -> None:
        """Prepare an empty folder before the server starts."""

    def command(self, folder: Path, port: int) -> list[str]:
        """Return the command that starts the server."""
        raise NotImplementedError

    async def load(self, client: Client, items: Items) -> None:
        """Add the items before anything is measured."""
        for batch in items.batches(LOADED_PER_REQUEST):
            await client.post(*self.addition(batch))

    def addition(self, batch: Batch) -> tuple[bytes, str]:
        """Return the body and the path of a request to add items."""
        return json.dumps(batch._asdict()).encode(), "/add"

    def search_body(self, vector: list[float]) -> dict[str, Any]:
        return {"vector": vector, "k": HITS}

    def read_ids(self, answer: Any) -> list[str]:
        return [hit["id"] for hit in answer["hits"]]


class Genius(Service):
    """`genius serve` with an index that is created before."""

    name = f"GENIUS {__version__}"
    search_path = "/v1/search"

    def prepare(self, folder: Path, items: Items) -> None:
        ids = [*map(str, range(len(items.texts)))]
        Index.from_vectors(folder / "items.index", items.vectors, ids=ids, texts=items.texts)

    def command(self, folder: Path, port: int) -> list[str]:
        index = str(folder / "items.index")
        return [sys.executable, "-c", PROGRAM, "serve", index, "--port", str(port)]

    async def load(self, client: Client, items: Items) -> None:
        """Add nothing: the index has all items."""

    def addition(self, batch: Batch) -> tuple[bytes, str]:
        rows = zip(*batch, strict=True)
        items = [{"id": item_id, "vector": vector, "text": text} for item_id, vector, text in rows]
        return json.dumps({"items": items}).encode(), "/v1/items"


def package_version(python: Path, package: str) -> str:
    """Return the version of a package of an environment."""
    program = f"from importlib.metadata import version; print(version('{package}'))"
    return output_of(str(python), "-c", program)


def output_of(*command: str) -> str:
    """Return the standard output of a command."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Chroma(Service):
    """Chroma's own server."""

    def __init__(self, python: Path) -> None:
        self.name = f"chroma {package_version(python, 'chromadb')}"
        self._program = str(python.with_name("chroma"))
        self._path = "/api/v2/tenants/default_tenant/databases/default_database/collections"

    def command(self, folder: Path, port: int) -> list[str]:
        return [self._program, "run", "--path", str(folder), "--port", str(port)]

    async def load(self, client: Client, items: Items) -> None:
        body = {"name": "items", "configuration": {"hnsw": {"space": "cosine"}}}
        created = json.loads(await client.post(json.dumps(body).encode(), self._path))
        self._path += f"/{created['id']}"
        self.search_path = f"{self._path}/query"
        await super().load(client, items)

    def addition(self, batch: Batch) -> tuple[bytes, str]:
        body = {"ids": batch.ids, "embeddings": batch.vectors, "documents": batch.texts}
        return json.dumps(body).encode(), f"{self._path}/add"

    def search_body(self, vector: list[float]) -> dict[str, Any]:
        include = ["documents", "distances"]
        return {"query_embeddings": [vector], "n_results": HITS, "include": include}

    def read_ids(self, answer: Any) -> list[str]:
        return list(answer["ids"][0])


class Library(Service):
    """A library that `rival_app.py` serves, with one of its indexes."""

    def __init__(self, python: Path, name: str, library: str, index: str = "") -> None:
        self.name = name
        self._python = python
        # LanceDB needs two threads to build an index.
        self.environment = {"RIVAL": library, "INDEX": index, "LANCE_CPU_THREADS": "2"}

    def prepare(self, folder: Path, items: Items) -> None:
        dim = items.vectors.shape[1]
        self.environment = {**self.environment, "FOLDER": str(folder), "DIM": str(dim)}

    def command(self, folder: Path, port: int) -> list[str]:  # noqa: ARG002  it is in FOLDER
        application = f"rival_app:application --app-dir {Path(__file__).parent}"
        options = f"--loop uvloop --http httptools --log-level error --port {port}"
        return [str(self._python), "-m", "uvicorn", *application.split(), *options.split()]

    async def load(self, client: Client, items: Items) -> None:
        await super().load(client, items)
        await client.post(b"{}", "/finish")


def pgvector_version() -> str:
    """Return the versions of the installed pgvector and PostgreSQL."""
    folder = Path(output_of("pg_config", "--sharedir"), "extension")
    (version,) = re.findall(r"default_version = '(.*)'", (folder / "vector.control").read_text())
    return f"{version}, {output_of('pg_config', '--version').partition(' (')[0]}"


def make_service(name: str, python: Path) -> Service:
    """Return a service by its name."""
    if name == "genius":
        return Genius()
    if name == "chroma":
        return Chroma(python)
    if name == "qdrant":
        version = package_version(python, "qdrant-client")
        return Library(python, f"qdrant-client {version}, local mode", "qdrant")
    if name == "pgvector":
        return Library(python, f"pgvector {pgvector_version()}", "pgvector")
    version = package_version(python, "lancedb")
    index = "" if name == "lancedb" else "HnswSq"
    return Library(python, f"lancedb {version}, {index or 'no index'}", "lancedb", index)


@contextmanager
def running(service: Service, folder: Path) -> Iterator[tuple[int, str]]:
    """Start a server on its core; return its process id and address. It is killed in the end."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(SERVER_CORE), *service.command(folder, port)],  # noqa: S607
        env={**os.environ, **service.environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{service.name} did not start")
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            for pid in reversed(processes(process.pid)):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def proportional_megabytes(pid: int) -> float:
    """Return the memory of a process, with a proportional share of shared pages."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)
    return int(kilobytes) / 1024


def disk_megabytes(folder: Path) -> float:
    """Return the size of the files in a folder, as they are stored."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e6


async def find(service: Service, address: str, bodies: list[bytes]) -> list[list[str]]:
    """Return the ids of the hits of each search."""
    client = Client(address)
    answers = [json.loads(await client.post(body, service.search_path)) for body in bodies]
    client.close()
    return [service.read_ids(answer) for answer in answers]


async def add_while_searching(
    service: Service, address: str, bodies: list[bytes], items: Items, first_id: int
) -> tuple[float, Answers]:
    """Return the seconds to add items while 16 clients search, and the answers to these."""
    additions = [service.addition(batch) for batch in items.batches(ADDED_PER_REQUEST, first_id)]
    searching = asyncio.create_task(send(address, bodies, 16, 3_600, service.search_path))
    await asyncio.sleep(1)
    client = Client(address)
    began = time.monotonic()
    for addition in additions:
        await client.post(*addition)
    seconds = time.monotonic() - began
    client.close()
    searching.cancel()
    return seconds, await searching


def measure(
    service: Service, items: Items, queries: np.ndarray, answers: np.ndarray | None, seconds: float
) -> dict[str, object]:
    """Return the row of a service in the table."""
    bodies = [json.dumps(service.search_body(row)).encode() for row in as_lists(queries)]
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=0.01, size=(ADDED, items.vectors.shape[1]))
    new = Items(items.vectors[:ADDED] + noise, items.texts[:ADDED])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's user reads it
        service.prepare(folder, items)
        with running(service, folder) as (pid, address):
            asyncio.run(load(service, address, items))
            hits = asyncio.run(find(service, address, bodies))
            row: dict[str, object] = {
                "": service.name,
                "of the ten": f"{share_of_exact(hits, exact_search(items.vectors, queries)):.3f}",
            }
            if answers is not None:
                row["R@5"] = f"{recall(hits, answers):.3f}"
            for clients in (1, 16):
                cpu_began = sum(map(cpu_seconds, processes(pid)))
                times = asyncio.run(
                    send(address, bodies, clients, seconds, service.search_path)
                ).seconds
                cpu = sum(map(cpu_seconds, processes(pid))) - cpu_began
                row |= {
                    f"{clients} clients: searches/CPU-s": f"{len(times) / cpu:,.0f}",
                    f"p50, p99 ms, {clients}": (
                        f"{percentile(times, 50):.1f}, {percentile(times, 99):.1f}"
                    ),
                }
            row["memory MB"] = f"{sum(map(proportional_megabytes, processes(pid))):,.0f}"
            row["disk MB"] = f"{disk_megabytes(folder):,.0f}"
            add_seconds, searches = asyncio.run(
                add_while_searching(service, address, bodies, new, len(items.texts))
            )
            row["add 1,000, s"] = f"{add_seconds:.2f}"
            row["p99 ms meanwhile"] = f"{percentile(searches.seconds, 99):.0f}"
    return row


async def load(service: Service, address: str, items: Items) -> None:
    """Load the items over HTTP."""
    client = Client(address)
    await service.load(client, items)
    client.close()


def exact_search(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the rows of the nearest ten items by cosine."""
    lengths = np.linalg.norm(vectors, axis=1)
    return np.argsort(-(queries @ vectors.T) / lengths, axis=1)[:, :HITS]


def share_of_exact(hits: list[list[str]], nearest: np.ndarray) -> float:
    """Return the share of the nearest ten items that are hits."""
    pairs = zip(hits, nearest, strict=True)
    return float(np.mean([len({*ids} & {*map(str, rows)}) / HITS for ids, rows in pairs]))


def recall(hits: list[list[str]], answers: np.ndarray) -> float:
    """Return the share of queries with a right answer among the first five hits.

    Queries without a right answer do not count.
    """
    is_right = []
    for ids, rows in zip(hits, answers.reshape(len(hits), -1), strict=True):
        answer_ids = {str(row) for row in rows if row >= 0}
        if answer_ids:
            is_right.append(bool(answer_ids & {*ids[:5]}))
    return float(np.mean(is_right))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("vectors", type=Path, help="a .npy file with the vector of each item")
    parser.add_argument("texts", type=Path, help="a text file with a line for each item")
    parser.add_argument("--query-vectors", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help="a .npy file: rows of right items, or −1")
    parser.add_argument("--python", type=Path, help="of the environment of the others")
    parser.add_argument("--services", nargs="*", default=SERVICES)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    items = Items(np.load(arguments.vectors), arguments.texts.read_text().splitlines())
    queries = np.load(arguments.query_vectors)
    answers = None if arguments.answers is None else np.load(arguments.answers)
    os.sched_setaffinity(0, {CLIENT_CORE})
    rows = []
    for name in arguments.services:
        service = make_service(name, arguments.python.absolute())
        rows.append(measure(service, items, queries, answers, arguments.seconds))
    print_table(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
