"""What a cluster of a given size takes: bytes, hours, machines, queries per second, each with its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from genius_search.errors import UsageError

ROW_BYTES: Final = 4
"""Bytes of a row number in the table of a shard of fewer than 2³¹ items."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The size of a cluster, its machines, and the measured figures that a plan starts from."""

    items: float
    """Number of items, also as 1e9."""

    dim: int = 512
    """Width of embeddings."""

    levels: int = 12
    """Codes of an ID."""

    embedding_bits: int = 0
    """Bits of a number of a stored embedding: 0 stores none, otherwise 1, 2, 4, 8 or 16."""

    shards: int = 0
    """Number of shards; 0 takes as few as fit into three quarters of a machine's memory."""

    replicas: int = 2
    """Copies of each shard."""

    cores: int = 16
    """Cores of a machine."""

    memory_gb: float = 64.0
    """Memory of a machine in GB."""

    build_machines: int = 8
    """Machines that build."""

    batch: int = 32
    """Queries that are searched together."""

    encode_rate: float = 2_400.0
    """Measured: items that a core encodes and writes to partitions per second."""

    shard_rate: float = 60_000.0
    """Measured: items that a core writes to shards per second."""

    item_bytes: float = 225.0
    """Measured: bytes of an item's id, text and fields on disk, with their indexes."""

    search_ms: float = 2.0
    """Measured: CPU-milliseconds to encode, decode and rank a query, without calls between machines."""

    call_ms: float = 4.0
    """Measured: CPU-milliseconds of a call to a shard, on both sides."""

    def __post_init__(self) -> None:
        may_be_zero = ("shards", "embedding_bits")
        for name, value in vars(self).items():
            if (
                name in PlanSettings.__dataclass_fields__
                and name not in may_be_zero
                and not 0 < value < math.inf
            ):
                raise UsageError(f"{name} is {value}, expected a number above 0")
        if self.shards < 0 or self.embedding_bits not in (0, 1, 2, 4, 8, 16):
            raise UsageError("give 0 or more shards, and 0, 1, 2, 4, 8 or 16 bits a number")


class Figure(NamedTuple):
    """A number of a plan."""

    name: str
    value: float
    unit: str
    formula: str
    """How it follows from the figures above it."""


def plan_cluster(given: PlanSettings) -> list[Figure]:
    """Return the figures of a plan."""
    items, cores, batch = given.items, given.cores, given.batch
    usable = 0.75 * given.memory_gb * 1e9
    per_item = given.levels + 2 + 3 * ROW_BYTES + 2
    per_vector = -(-given.dim * given.embedding_bits // 8) + (3 if given.embedding_bits else 0)
    table, vectors, store = items * per_item, items * per_vector, items * given.item_bytes
    resident = table + vectors
    shards = given.shards or math.ceil(resident / usable)
    serving = math.ceil(given.replicas * resident / usable)
    cores_building = given.build_machines * cores
    rounds = math.ceil(shards / cores_building)
    asked = min(shards, batch)
    calls = 0.0 if shards == 1 else 2 * asked / batch * given.call_ms
    query = given.search_ms + calls
    why_query = f"{given.search_ms:g}, in one process"
    if shards > 1:
        why_query = (
            f"{given.search_ms:g} + 2 calls (children, ranking) × {asked} shards / {batch} queries × "
            f"{given.call_ms:g}"
        )
    rows = [
        (
            "ID tables",
            table,
            "bytes",
            f"items × ({given.levels} codes + 2 of norm and density + 3 rows × {ROW_BYTES} + 2 of cosine)",
        ),
        (
            "stored embeddings",
            vectors,
            "bytes",
            f"items × {per_vector}: {given.dim} × {given.embedding_bits} / 8, 3 of scale and density",
        ),
        ("texts and fields", store, "bytes", f"items × {given.item_bytes:g}"),
        ("on disk", resident + store, "bytes", "the sum of these; twice as much while it is built"),
        ("in memory", resident, "bytes", "ID tables + stored embeddings; texts are read from disk"),
        ("shards", shards, "", f"in memory / ({given.memory_gb:g} GB × 0.75), unless given"),
        ("a shard in memory", resident / shards, "bytes", "in memory / shards"),
        (
            "machines that serve",
            serving,
            "",
            f"in memory × {given.replicas} replicas / ({given.memory_gb:g} GB × 0.75)",
        ),
        (
            "encoding",
            items / given.encode_rate / cores_building / 3600,
            "hours",
            f"items / {given.encode_rate:g} a second / ({given.build_machines} machines × {cores} cores)",
        ),
        (
            "writing shards",
            items / shards * rounds / given.shard_rate / 3600,
            "hours",
            f"items / shards / {given.shard_rate:g} a second × {rounds}: each shard is written by one core",
        ),
        ("a query", query, "CPU-ms", why_query),
        (
            "queries a second",
            serving * cores * 1000 / query,
            "",
            f"{serving} machines × {cores} cores × 1000 / CPU-ms of a query",
        ),
    ]
    return [Figure(*row) for row in rows]
