"""The paper's dense rivals by name, with sizes that follow from the pool and from the bytes of an item.

Codes take at least as many bytes as they are given: residual codes exactly so many, one of them for the norm,
PQ the next number of parts that divides a vector.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal, assert_never, get_args

from genius.baselines.kinds import NORM_BYTES, SMALL_BITS, Flat, Hnsw, IvfPq, Kind, Residual
from genius.errors import UsageError

DenseName = Literal["exact", "hnsw", "ivf-pq", "ivf-rq"]

ITEMS_A_LIST: Final = 32
MOST_LISTS: Final = 1024
WIDTH: Final = 4
"""Codes that the residual quantizer tries side by side for each level of an item."""
CODE_BITS: Final = 8


def kinds_of(text: str) -> tuple[DenseName, ...]:
    """``exact,hnsw`` as a tuple; ``all`` is every kind.

    Raises
    ------
    UsageError
        a name is no kind, or stands there twice.
    """
    known: tuple[DenseName, ...] = get_args(DenseName)
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",")]
    kinds = tuple(kind for name in names for kind in known if kind == name)
    if len(kinds) < len(names) or len(set(kinds)) < len(kinds):
        raise UsageError(
            f"--kinds {text!r}: expected some of {', '.join(known)}, each once with commas between, or all"
        )
    return kinds


def dense_kind(
    name: DenseName, *, num_items: int, num_training: int, dim: int, code_bytes: int, effort: int
) -> Kind:
    """The kind of this name for a pool of so many items.

    Parameters
    ----------
    num_training
        vectors that there are to learn from: no more lists, and no more codes, can be learned.
    code_bytes
        of an item, where codes are kept. Exact search and HNSW keep vectors in 16 bits, as features are.
    effort
        nodes that HNSW keeps in view, lists of the others that are looked through.
    """
    match name:
        case "exact":
            return Flat(stored="float16")
        case "hnsw":
            return Hnsw(stored="float16", effort=effort)
        case "ivf-pq":
            product = pq_of(num_items=num_items, dim=dim, code_bytes=code_bytes, effort=effort)
            return replace(
                product, lists=min(product.lists, num_training), bits=_fewer(product, num_training)
            )
        case "ivf-rq":
            residual = residual_of(num_items=num_items, code_bytes=code_bytes, effort=effort)
            lists = min(num_lists(num_items), num_training)
            return replace(residual, lists=lists, bits=_fewer(residual, num_training))
        case _:
            assert_never(name)


def pq_of(*, num_items: int, dim: int, code_bytes: int, effort: int = IvfPq.effort) -> IvfPq:
    """IVF-PQ of so many bytes or a few more."""
    parts = next((count for count in range(code_bytes, dim) if dim % count == 0), dim)
    return IvfPq(lists=num_lists(num_items), parts=parts, bits=_bits(num_items), effort=effort)


def residual_of(
    *, num_items: int, code_bytes: int, effort: int = Residual.effort, is_fast: bool = False
) -> Residual:
    """IVF with residual codes and a norm, together of so many bytes.

    Codes of 8 bits find most, and are slow to search in faiss; ``is_fast`` takes twice as many of 4 bits,
    which are compared in registers.

    Raises
    ------
    UsageError
        there is no room for a code beside the norm.
    """
    codebooks = code_bytes - NORM_BYTES
    if codebooks < 1:
        raise UsageError(
            f"{code_bytes} bytes hold no residual code, since {NORM_BYTES} is the norm's; give at least "
            f"{NORM_BYTES + 1}"
        )
    return Residual(
        codebooks=2 * codebooks if is_fast else codebooks,
        bits=SMALL_BITS if is_fast else _bits(num_items),
        lists=num_lists(num_items),
        effort=effort,
        width=WIDTH,
    )


def num_lists(num_items: int) -> int:
    """Lists for so many items."""
    return min(MOST_LISTS, max(1, num_items // ITEMS_A_LIST))


def _bits(num_items: int) -> int:
    """Of a tiny pool not so many codes can be learned."""
    return min(CODE_BITS, max(1, int(math.log2(max(1, num_items)))))


def _fewer(kind: IvfPq | Residual, num_training: int) -> int:
    return min(kind.bits, _bits(num_training))
