"""Models and pools to measure speed with: synthetic ones of any size, and real ones padded with neighbours.

A neighbour is a real embedding with noise, encoded by the model's own quantizer. It is never a right answer:
recall on a padded pool says how well a method finds the same answers among more that look like them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int16, Int64, UInt64
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import GeneratorConfig
from genius_search.data.features import NUM_MODALITIES
from genius_search.errors import UsageError
from genius_search.lab.methods import PoolCandidates
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.records import did_of
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

    def fixed_bytes(self) -> int:
        """Return the bytes of the generator's weights and the code vectors."""
        weights = sum(weight.nbytes for weight in self.generator.parameters()) if self.generator else 0
        return weights + 4 * self.dim * sum(self.decoder.sizes)


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
"""Of a skewed pool's items: like an earlier one up to the last levels."""
COPY_SHARE: Final = 0.02
"""Of a skewed pool's items: the same ID as an earlier one."""
OWN_LEVELS: Final = 2
"""Levels at the end in which near-duplicates go their own way."""
STEPS: Final = 1 << 16
"""Codes are drawn through a table of so many places, one for each number of 16 bits."""


class Block(NamedTuple):
    """Neighbouring items."""

    codes: Int16[np.ndarray, "items levels"]
    typicality: Float16[np.ndarray, " items"]


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
    """A pool of drawn codes.

    ``uniform``: every code of a level is as likely as any other, whatever stands before it. ``skewed``, which
    is more like real pools: at each level few codes hold most items (Zipf), which codes depends on the
    prefix, and some items are near-duplicates or exact copies of earlier ones.
    """

    items: int
    sizes: tuple[int, ...]
    """Codes at each level."""
    kind: Literal["uniform", "skewed"] = "skewed"
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
            typicality = (0.5 + 0.5 * random.random(BLOCK, dtype=np.float32)).astype(np.float16)
            count = min(BLOCK, self.items - start)
            yield Block(codes[:count], typicality[:count])

    def _codes(self, random: np.random.Generator) -> Int16[np.ndarray, "items levels"]:
        if self.kind == "uniform":
            columns = [random.integers(size, size=BLOCK) for size in self.sizes]
            return np.stack(columns, axis=1).astype(np.int16)
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


PADDING_BLOCK: Final = 8_192
"""Neighbours encoded at a time."""
LEAST_NOISE: Final = 0.5
MOST_NOISE: Final = 1.0
"""Length of the noise added to a unit vector: cosines to the real one from 0.89 down to 0.71."""


class PaddedPool(NamedTuple):
    """Real candidates first, then their invented neighbours, each of its candidate's modality."""

    numbers: Int64[np.ndarray, " candidates"]
    """Ids of the real ones as integers."""
    vectors: Float32[np.ndarray, "items dim"]
    """Fused unit embeddings."""
    codes: Int16[np.ndarray, "items columns"]
    """Codes of the IDs, then half norms and densities."""
    table: IdTable

    def __len__(self) -> int:
        return len(self.vectors)

    def did(self, item: int) -> str:
        """Return the id of a candidate, or one that no candidate has."""
        return did_of(int(self.numbers[item])) if item < len(self.numbers) else f"padding {item}"


def padded(model: Genius, candidates: PoolCandidates, *, items: int, seed: int) -> PaddedPool:
    """Return a pool padded to so many items; with 0, or as many as there are, the real one."""
    real = len(candidates)
    if items and items < real:
        raise UsageError(f"the pool has {real:,} candidates already; it cannot be padded to {items:,}")
    size = max(items, real)
    vectors = np.empty((size, model.dim), dtype=np.float32)
    codes = np.empty((size, candidates.codes.shape[1]), dtype=np.int16)
    typicality = np.empty(size, dtype=np.float16)
    vectors[:real] = candidates.fused(slice(None)).numpy()
    codes[:real], typicality[:real] = candidates.codes, candidates.typicality
    modalities = candidates.modality.astype(np.int64)
    quantizer = model.quantizer
    for number, start in enumerate(range(real, size, PADDING_BLOCK)):
        block = slice(start, min(start + PADDING_BLOCK, size))
        random = np.random.default_rng([seed, number])
        source = random.integers(real, size=block.stop - block.start)
        noise = random.standard_normal((len(source), model.dim), dtype=np.float32)
        length = random.uniform(LEAST_NOISE, MOST_NOISE, size=(len(source), 1)).astype(np.float32)
        noise *= length / np.linalg.norm(noise, axis=1, keepdims=True)
        made = F.normalize(torch.from_numpy(vectors[source] + noise), dim=1)
        with torch.no_grad():
            own = torch.from_numpy(modalities[source]).to(quantizer.device)
            found = quantizer.quantize(made.to(quantizer.device), own).codes
            columns = torch.cat([found, quantizer.norm_and_density.columns(found)], dim=1)
            typicality[block] = F.cosine_similarity(made, quantizer.decode(found).cpu()).numpy()
        vectors[block], codes[block] = made.numpy(), columns.cpu().numpy()
    return PaddedPool(candidates.dids, vectors, codes, IdTable.build(codes, typicality))
