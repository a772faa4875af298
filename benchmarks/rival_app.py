"""ASGI routes for libraries that `serve_rivals.py` measures; it runs in their environment.

Run by ``uvicorn rival_app:application``. The environment variable RIVAL names the library, and
FOLDER the folder of its data. Each route takes and returns JSON::

    POST /add     {"ids": [...], "vectors": [...], "texts": [...]}
    POST /finish  {}, after the first items; builds an index, if the library has one
    POST /search  {"vector": [...], "k": 10}; answers with ids, scores and texts
"""

# ruff: noqa: PLC0415, S607  (only the measured library is imported; programs are found by name)

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

COLUMNS = ("id", "score", "text")


class Rival(Protocol):
    """A library that holds vectors with ids and texts."""

    async def open(self) -> None: ...
    async def add(self, ids: list[str], vectors: list[Any], texts: list[str]) -> None: ...
    async def finish(self) -> None: ...
    async def search(self, vector: list[float], k: int) -> list[tuple[str, float, str]]: ...


class QdrantLocal:
    """The local mode of qdrant-client: exact search with NumPy; points are stored in SQLite."""

    async def open(self) -> None:
        from qdrant_client import QdrantClient
        from qdrant_client.models import Distance, PointStruct, VectorParams

        self._point = PointStruct
        self._client = QdrantClient(path=os.environ["FOLDER"])
        self._vectors = VectorParams(size=int(os.environ["DIM"]), distance=Distance.COSINE)
        self._client.create_collection("items", vectors_config=self._vectors)

    async def add(self, ids: list[str], vectors: list[Any], texts: list[str]) -> None:
        rows = zip(ids, vectors, texts, strict=True)
        self._client.upsert(
            "items",
            [
                self._point(id=int(id_), vector=row, payload={"text": text})
                for id_, row, text in rows
            ],
        )

    async def finish(self) -> None:
        """Do nothing: a search is exact."""

    async def search(self, vector: list[float], k: int) -> list[tuple[str, float, str]]:
        points = self._client.query_points("items", query=vector, limit=k).points
        return [(str(point.id), point.score, point.payload["text"]) for point in points]


class LanceDB:
    """LanceDB: exact search without an index, or the kind of index that INDEX names."""

    async def open(self) -> None:
        import lancedb
        import pyarrow as pa

        self._pyarrow = pa
        fields = [("id", pa.string()), ("text", pa.string())]
        vector = pa.list_(pa.float32(), int(os.environ["DIM"]))
        self._schema = pa.schema([*fields, ("vector", vector)])
        database = await lancedb.connect_async(os.environ["FOLDER"])
        self._table = await database.create_table("items", schema=self._schema)

    async def add(self, ids: list[str], vectors: list[Any], texts: list[str]) -> None:
        columns = {"id": ids, "text": texts, "vector": vectors}
        await self._table.add(self._pyarrow.table(columns, schema=self._schema))

    async def finish(self) -> None:
        from lancedb import index

        if os.environ["INDEX"]:
            config = getattr(index, os.environ["INDEX"])(distance_type="cosine")
            await self._table.create_index("vector", config=config)
        await self._table.optimize()

    async def search(self, vector: list[float], k: int) -> list[tuple[str, float, str]]:
        query = self._table.query().nearest_to(vector).distance_type("cosine").limit(k)
        rows = await query.select(["id", "text", "_distance"]).to_list()
        return [(row["id"], 1 - row["_distance"], row["text"]) for row in rows]


class PgVector:
    """PostgreSQL with pgvector's HNSW index, asked by asyncpg over four connections."""

    async def open(self) -> None:
        import asyncpg

        folder = Path(os.environ["FOLDER"])
        start_postgres(folder)
        connect = {"host": str(folder), "user": "postgres", "database": "postgres"}
        while True:
            try:
                connection = await asyncpg.connect(**connect)
                break
            except (OSError, asyncpg.CannotConnectNowError):
                await asyncio.sleep(0.1)
        await connection.execute("CREATE EXTENSION vector")
        columns = f"id text PRIMARY KEY, text text, embedding vector({os.environ['DIM']})"
        await connection.execute(f"CREATE TABLE items ({columns})")
        await connection.close()
        self._pool = await asyncpg.create_pool(**connect, min_size=4, max_size=4)

    async def add(self, ids: list[str], vectors: list[Any], texts: list[str]) -> None:
        rows = zip(ids, texts, map(str, vectors), strict=True)
        statement = "INSERT INTO items VALUES ($1, $2, $3::text::vector)"
        await self._pool.executemany(statement, rows)

    async def finish(self) -> None:
        statement = "CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)"
        await self._pool.execute(statement, timeout=3_600)
        await self._pool.execute("ANALYZE items")

    async def search(self, vector: list[float], k: int) -> list[tuple[str, float, str]]:
        statement = (
            "SELECT id, 1 - (embedding <=> $1::text::vector), text FROM items "
            "ORDER BY embedding <=> $1::text::vector LIMIT $2"
        )
        return [tuple(row) for row in await self._pool.fetch(statement, str(vector), k)]


def start_postgres(folder: Path) -> None:
    """Create a cluster of PostgreSQL in a folder, and start it with a socket there."""
    config = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True, text=True)
    programs, data = Path(config.stdout.strip()), folder / "data"
    as_user: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    create = [*as_user, programs / "initdb", "-D", data, "--auth=trust", "--username=postgres"]
    subprocess.run(create, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    options = ["-c", "listen_addresses=", "-c", "shared_buffers=256MB", "-k", folder]
    subprocess.Popen([*as_user, programs / "postgres", "-D", data, *options], cwd=folder)


RIVALS = {"qdrant": QdrantLocal, "lancedb": LanceDB, "pgvector": PgVector}
rival: Rival = RIVALS[os.environ["RIVAL"]]()


async def read_json(receive: Any) -> dict[str, Any]:
    """Return the body of a request."""
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return json.loads(body)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request."""
    if scope["type"] == "lifespan":
        await receive()
        await rival.open()
        await send({"type": "lifespan.startup.complete"})
        return
    body = await read_json(receive)
    answer: Any = {}
    if scope["path"] == "/search":
        answer = {
            "hits": [dict(zip(COLUMNS, hit, strict=True)) for hit in await rival.search(**body)]
        }
    elif scope["path"] == "/add":
        await rival.add(**body)
    elif scope["path"] == "/finish":
        await rival.finish()
    encoded = json.dumps(answer).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(encoded)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": encoded})
