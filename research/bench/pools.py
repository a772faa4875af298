"""Models and pools of drawn codes to measure speed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Int16, Integer, UInt64
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import GeneratorConfig
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.records import NUM_MODALITIES
from genius_search.search.decoder import Decoder, T5Decoder
from genius_search.search.rank import CodeRanker
from genius_search.search.table import IdTable

DIM: Final = 768
"""Width of the embeddings of CLIP's large model, which the paper uses."""
LEVELS: Final = 8
"""Semantic ones; the modality's is on top."""
REFERENCE_SIZES: Final = (NUM_MODALITIES, *[4096] * LEVELS)
TINY_SIZES: Final = (NUM_MODALITIES, *[256] * LEVELS)
TINY: Final = GeneratorConfig(
    layers=1, width=128, feedforward=256, heads=4, head_width=32, prefixes=8, dropout=0.0
)


class Searcher(NamedTuple):
    """The parts of a model that a search needs."""

    name: str
    generator: Generator | None
    """None for a model without training; its decoder is geometry."""
    decoder: Decoder
    ranker: CodeRanker
    dim: int


def synthetic_searcher(
    name: Literal["reference", "tiny"], *, seed: int, sizes: tuple[int, ...] | None = None
) -> Searcher:
    """Return a decoder with drawn weights, of the paper's size (T5-small's) or of one narrow layer."""
    sizes = sizes or (REFERENCE_SIZES if name == "reference" else TINY_SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(DIM, sizes, GeneratorConfig() if name == "reference" else TINY).eval()
        tables = [torch.randn(size, DIM) * (0.5 / DIM**0.5) * 0.7**level for level, size in enumerate(sizes)]
    return Searcher(name, generator, T5Decoder(generator), CodeRanker(tables), DIM)


def searcher_of(model: Genius) -> Searcher:
    """Return the parts of a trained model."""
    name = f"model {model.fingerprint[:12]}"
    return Searcher(name, model.generator, model.decoder, model.ranker, model.dim)


def random_queries(count: int, dim: int, *, seed: int) -> Float[Tensor, "queries dim"]:
    """Return random unit vectors."""
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=random), dim=-1)


BLOCK: Final = 65_536
"""Items drawn at a time."""
NEAR_SHARE: Final = 0.10
"""Share of a skewed pool's items that are like an earlier one up to the last levels."""
COPY_SHARE: Final = 0.02
"""Share of a skewed pool's items that have the ID of an earlier one."""
OWN_LEVELS: Final = 2
"""Levels at the end in which near-duplicates go their own way."""
STEPS: Final = 1 << 16
"""Codes are drawn through a table of so many places, one for each number of 16 bits."""


class Block(NamedTuple):
    """Neighbouring items."""

    codes: Int16[np.ndarray, "items levels"]
    code_cosine: Float16[np.ndarray, " items"]


@dataclass(frozen=True, kw_only=True)
class NumberedPool:
    """Items whose IDs are their numbers, digit by digit: GRACE's numeric IDs."""

    items: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ten digits in each place."""
        return (10,) * len(str(self.items - 1))

    def blocks(self) -> Iterator[Block]:
        """Yield all items, in order."""
        places = 10 ** np.arange(len(self.sizes))[::-1]
        for start in range(0, self.items, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, self.items))
            codes = (numbers[:, None] // places % 10).astype(np.int16)
            yield Block(codes, np.ones(len(codes), dtype=np.float16))


@dataclass(frozen=True, kw_only=True)
class SyntheticPool:
    """A pool of drawn codes, skewed as real ones are.

    At each level few codes hold most items (Zipf), which codes depends on the prefix, and some items are
    near-duplicates or exact copies of earlier ones.
    """

    items: int
    sizes: tuple[int, ...]
    """Codes at each level."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.items < 1 or not self.sizes or min(self.sizes) < 1 or max(self.sizes) > 32_768:
            raise UsageError(
                f"a pool of {self.items} items with {self.sizes} codes a level; expected 1 item or more, and "
                "levels of 1 to 32,768 codes"
            )

    def blocks(self) -> Iterator[Block]:
        """Yield all items, in order."""
        for number, start in enumerate(range(0, self.items, BLOCK)):
            random = np.random.default_rng([self.seed, number])
            codes = self._codes(random)
            code_cosine = (0.5 + 0.5 * random.random(BLOCK, dtype=np.float32)).astype(np.float16)
            count = min(BLOCK, self.items - start)
            yield Block(codes[:count], code_cosine[:count])

    def _codes(self, random: np.random.Generator) -> Int16[np.ndarray, "items levels"]:
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
            prefix = _hash_prefix(prefix, drawn)
        return codes


def invent_ids(
    table: IdTable, items: int, random: np.random.Generator
) -> Integer[np.ndarray, "items levels"]:
    """Return invented IDs: three codes of one, the rest of another that shares the first two."""
    codes = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
    bounds = np.append(np.unique(codes[:, :2], axis=0, return_index=True)[1], len(codes))
    first = random.integers(0, len(codes), items)
    group = bounds.searchsorted(first, side="right") - 1
    other = random.integers(bounds[group], bounds[group + 1])
    return np.concatenate([codes[first, :3], codes[other, 3:]], axis=1)


def _zipf(size: int) -> UInt64[np.ndarray, " places"]:
    """Return the code of each place, so that the share of code c is in proportion to 1 / (c + 1)."""
    shares = 1 / np.arange(1, size + 1)
    places = (np.arange(STEPS) + 0.5) / STEPS
    found: np.ndarray = np.searchsorted(np.cumsum(shares) / shares.sum(), places).clip(max=size - 1)
    return found.astype(np.uint64)


def _hash_prefix(prefix: UInt64[np.ndarray, " items"], codes: np.ndarray) -> UInt64[np.ndarray, " items"]:
    """Return a number for each prefix with one more code: equal prefixes stay equal, others differ."""
    mixed: np.ndarray = (prefix ^ (codes.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed
