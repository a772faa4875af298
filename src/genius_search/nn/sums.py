"""Sums of code vectors, one of each level, that approximate vectors: a beam search over the levels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genius_search.native.library import count_cores, open_library

MAX_COMPILED: Final = 256
"""Largest codebook of the compiled search, whose codes are bytes."""
ITEMS_PER_LEVEL: Final = 20
"""Fewest vectors for each level that the compiled search is worth its products of code vectors for."""
ITEMS_AT_ONCE: Final = 1 << 14
DISTANCES_AT_ONCE: Final = 1 << 24
"""Distances in memory at once: 64 MiB."""


def nearest_sums(
    vectors: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], *, beam: int
) -> Int[Tensor, "items levels"]:
    """Approximate each vector by a sum of code vectors, one from each table; return their codes.

    This is a beam search over the levels that keeps ``beam`` partial sums; 1 is the greedy choice. It is
    compiled for beams of several sums of many vectors on the CPU, and codebooks of one size up to 256.
    """
    sizes = {len(table) for table in tables}
    library = None
    if (
        beam > 1
        and vectors.device.type == "cpu"
        and vectors.dtype == torch.float32
        and len(vectors) >= ITEMS_PER_LEVEL * len(tables)
        and len(sizes) == 1
        and max(sizes) <= MAX_COMPILED
    ):
        library = open_library()
    if library is not None:
        parts = [_find_compiled(library, part, tables, beam) for part in vectors.split(ITEMS_AT_ONCE)]
    else:
        at_once = max(1, DISTANCES_AT_ONCE // (beam * max(sizes)))
        parts = [_find(part, tables, beam) for part in vectors.split(at_once)]
    return torch.cat(parts)


def _find(
    vectors: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], beam: int
) -> Int[Tensor, "items levels"]:
    items, dim = vectors.shape
    remaining = vectors[:, None]  # one row for each partial sum
    half_errors = vectors.square().sum(dim=1, keepdim=True) / 2  # half the squared norm of ``remaining``
    codes = torch.zeros(items, 1, 0, dtype=torch.int64, device=vectors.device)
    for table in tables:
        width = remaining.shape[1]
        change = torch.addmm(table.square().sum(dim=1) / 2, remaining.flatten(0, 1), table.T, alpha=-1)
        errors = change.view(items, width, len(table)).add_(half_errors[..., None])
        half_errors, best = errors.flatten(1).topk(min(beam, width * len(table)), dim=1, largest=False)
        parent, chosen = best // len(table), best % len(table)
        remaining = remaining.gather(1, parent[..., None].expand(-1, -1, dim)) - table[chosen]
        codes = codes.gather(1, parent[..., None].expand(-1, -1, codes.shape[2]))
        codes = torch.cat([codes, chosen[..., None]], dim=2)
    return codes[:, 0]


def _find_compiled(
    library: ctypes.CDLL,
    vectors: Float[Tensor, "items dim"],
    tables: Sequence[Float[Tensor, "codes dim"]],
    beam: int,
) -> Int[Tensor, "items levels"]:
    """Find the same without what remains of each vector: products of code vectors give the errors."""
    items, levels, size = len(vectors), len(tables), len(tables[0])
    codes = torch.zeros(items, beam, levels, dtype=torch.uint8)
    half_errors = torch.zeros(items, beam)  # without half the squared norm of the vector
    threads = count_cores()
    starts = [items * number // threads for number in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for level, table in enumerate(tables):
            change = torch.addmm(table.square().sum(dim=1) / 2, vectors, table.T, alpha=-1)
            gram = torch.cat([table[:0], *tables[:level]]) @ table.T
            width = min(beam, size**level)
            calls = [
                pool.submit(
                    library.extend_sums,
                    *(rows[start:].data_ptr() for rows in (change, codes, half_errors)),
                    gram.data_ptr(),
                    *(end - start, size, level, levels, width, beam),
                )
                for start, end in pairwise(starts)
            ]
            if any(call.result() < 0 for call in calls):
                raise MemoryError
    return codes[:, 0].long()
