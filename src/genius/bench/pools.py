"""Invented pools of IDs, of any size, for measuring what no trained model has made yet.

A pool is drawn in blocks, each from a seed of its own: it takes no memory, it does not depend on how it is
read, and a smaller pool of the same seed is the beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, assert_never, runtime_checkable

import numpy as np
from jaxtyping import Float16, Int16, UInt64

from genius.errors import UsageError

BLOCK: Final = 65_536
"""Items drawn at a time."""
NEAR_SHARE: Final = 0.10
"""Of a skewed pool's items: like an earlier one up to the last levels."""
COPY_SHARE: Final = 0.02
"""Of a skewed pool's items: the same ID as an earlier one."""
OWN_LEVELS: Final = 2
"""Levels at the end in which near-duplicates go their own way."""
STEPS: Final = 1 << 16
"""Codes are drawn through a table of so many places, one for each number of 16 bits."""

PoolKind = Literal["uniform", "skewed"]


class Block(NamedTuple):
    """Neighbouring items."""

    codes: Int16[np.ndarray, "items levels"]
    typicality: Float16[np.ndarray, " items"]


@runtime_checkable
class Pool(Protocol):
    """Items that are drawn block by block."""

    @property
    def items(self) -> int:
        """How many."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""

    def blocks(self) -> Iterator[Block]:
        """All items, in order."""


@dataclass(frozen=True, kw_only=True)
class NumberedPool:
    """Items whose IDs are their numbers, digit by digit: GRACE's numeric IDs."""

    items: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ten digits in each place."""
        return (10,) * len(str(self.items - 1))

    def blocks(self) -> Iterator[Block]:
        """All items, in order."""
        places = 10 ** np.arange(len(self.sizes))[::-1]
        for start in range(0, self.items, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, self.items))
            codes = (numbers[:, None] // places % 10).astype(np.int16)
            yield Block(codes, np.ones(len(codes), dtype=np.float16))


@dataclass(frozen=True, kw_only=True)
class SyntheticPool:
    """A pool that nobody embedded.

    ``uniform``: every code of a level is as likely as any other, whatever stands before it. ``skewed``, which
    is more like real pools: at each level few codes hold most items (Zipf), which codes depends on the
    prefix, and some items are near-duplicates or exact copies of earlier ones.
    """

    items: int
    sizes: tuple[int, ...]
    """Codes at each level."""
    kind: PoolKind = "skewed"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.items < 1 or not self.sizes or min(self.sizes) < 1 or max(self.sizes) > 32_768:
            raise UsageError(
                f"a pool of {self.items} items with {self.sizes} codes a level; expected 1 item or more, and "
                "levels of 1 to 32,768 codes"
            )

    def blocks(self) -> Iterator[Block]:
        """All items, in order."""
        for number, start in enumerate(range(0, self.items, BLOCK)):
            random = np.random.default_rng([self.seed, number])
            codes = self._codes(random)
            typicality = (0.5 + 0.5 * random.random(BLOCK, dtype=np.float32)).astype(np.float16)
            count = min(BLOCK, self.items - start)
            yield Block(codes[:count], typicality[:count])

    def _codes(self, random: np.random.Generator) -> Int16[np.ndarray, "items levels"]:
        match self.kind:
            case "uniform":
                return np.stack([random.integers(size, size=BLOCK) for size in self.sizes], axis=1).astype(
                    np.int16
                )
            case "skewed":
                return self._skewed(random)
            case _:
                assert_never(self.kind)

    def _skewed(self, random: np.random.Generator) -> Int16[np.ndarray, "items levels"]:
        codes = np.empty((BLOCK, len(self.sizes)), dtype=np.int16)
        copied = random.random(BLOCK) < NEAR_SHARE + COPY_SHARE
        is_near = random.random(BLOCK) < NEAR_SHARE / (NEAR_SHARE + COPY_SHARE)
        source = np.where(
            copied, (random.random(BLOCK) * np.arange(BLOCK)).astype(np.int64), np.arange(BLOCK)
        )
        prefix = np.zeros(BLOCK, dtype=np.uint64)
        for level, size in enumerate(self.sizes):
            rank = _zipf(size)[random.integers(STEPS, size=BLOCK, dtype=np.uint16)]
            drawn = (rank + prefix % np.uint64(size)).astype(np.int64) % size
            if level < len(self.sizes) - OWN_LEVELS:
                drawn = drawn[source]
            else:
                drawn = np.where(is_near, drawn, drawn[source])
            codes[:, level] = drawn
            prefix = _mixed(prefix, drawn)
        return codes


def _zipf(size: int) -> UInt64[np.ndarray, " places"]:
    """The code of each place, so that code c has a share in proportion to 1 / (c + 1)."""
    shares = 1 / np.arange(1, size + 1)
    places = (np.arange(STEPS) + 0.5) / STEPS
    found: np.ndarray = np.searchsorted(np.cumsum(shares) / shares.sum(), places).clip(max=size - 1)
    return found.astype(np.uint64)


def _mixed(prefix: UInt64[np.ndarray, " items"], codes: np.ndarray) -> UInt64[np.ndarray, " items"]:
    """A number for each prefix with one code more: equal prefixes stay equal, others part."""
    mixed: np.ndarray = (prefix ^ (codes.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed
