"""The products of the drawn catalogue: which can exist, to which split each belongs, facts about them.

A product is a combination of five attributes. Size, rotation and position only vary how it is drawn.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int, UInt8
from numpy import ndarray

WORDS: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)


Attribute = Literal["shape", "colour", "fill", "background", "frame"]
ATTRIBUTES: Final[tuple[Attribute, ...]] = get_args(Attribute)
Split = Literal["train", "val", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
FactKind = Literal["price", "origin", "material", "weight", "maker"]

SHAPES: Final[tuple[tuple[str, list[str]], ...]] = tuple(WORDS["shapes"].items())
"""Pictographs and their nouns; the first noun is the name."""
VALUES: Final[dict[Attribute, tuple[str, ...]]] = {
    "shape": tuple(nouns[0] for _, nouns in SHAPES),
    **{name: tuple(WORDS[f"{name}s"]) for name in ATTRIBUTES[1:]},
}
SIZES: Final = tuple(len(VALUES[attribute]) for attribute in ATTRIBUTES)
NUM_CODES: Final = math.prod(SIZES)

CLASH_DISTANCE: Final = 132.0
"""A colour nearer than this to its background could not be seen."""
SHARES: Final[dict[Split, float]] = {"train": 0.22, "val": 0.04, "test": 0.74}
"""Shares of all possible products; the test share holds the 200,000 products of a million candidates."""
SIBLING_SHARE: Final = 0.5
"""Share of sampled products that bring a sibling, which differs in one attribute."""


class Product(NamedTuple):
    """A product: an index into ``VALUES`` for each attribute."""

    shape: int
    colour: int
    fill: int
    background: int
    frame: int

    @property
    def code(self) -> int:
        """Its number among all combinations of attributes."""
        return int(np.ravel_multi_index(self, SIZES))

    @staticmethod
    def of(code: int) -> Product:
        """Return the product with this number."""
        return Product(*map(int, np.unravel_index(code, SIZES)))

    def words(self) -> dict[str, str]:
        """Return its attributes by their canonical names."""
        return {name: VALUES[name][index] for name, index in zip(ATTRIBUTES, self, strict=True)}


class Change(NamedTuple):
    """A product that differs from another in exactly this attribute."""

    attribute: Attribute
    code: int


class Fact(NamedTuple):
    """A fact about a product that no picture shows."""

    kind: FactKind
    value: str


@cache
def possible_products() -> Bool[ndarray, " codes"]:
    """Return which combinations can be drawn: those whose colour stands out from the background."""
    colours = np.array([colour["rgb"] for colour in WORDS["colours"].values()], dtype=float)
    ends = np.array([ground["rgb"] for ground in WORDS["backgrounds"].values()], dtype=float)
    distance = np.linalg.norm(colours[:, None, None] - ends[None], axis=-1).min(axis=-1)
    visible = (distance >= CLASH_DISTANCE)[None, :, None, :, None]
    return np.broadcast_to(visible, SIZES).reshape(-1)


def split_of_products(seed: int) -> UInt8[ndarray, " codes"]:
    """Return the split of each combination (index in ``SPLITS``; 255: cannot be drawn).

    The splits are disjoint, so no product of a test query was seen in training.
    """
    codes = np.flatnonzero(possible_products())
    generator = np.random.default_rng((seed, 1))
    generator.shuffle(codes)
    splits = np.full(NUM_CODES, 255, dtype=np.uint8)
    ends = np.cumsum([round(SHARES[split] * len(codes)) for split in SPLITS[:-1]])
    for index, part in enumerate(np.split(codes, ends)):
        splits[part] = index
    return splits


def changes(code: int, *, within: Bool[ndarray, " codes"], rng: random.Random) -> Iterator[Change]:
    """Yield a product of ``within`` for each attribute that can change, attributes in random order."""
    for attribute in rng.sample(ATTRIBUTES, len(ATTRIBUTES)):
        position = ATTRIBUTES.index(attribute)
        size, stride = SIZES[position], math.prod(SIZES[position + 1 :])
        first = code - code // stride % size * stride
        neighbours = np.arange(first, first + size * stride, stride)
        others = [other for other in neighbours[within[neighbours]].tolist() if other != code]
        if others:
            yield Change(attribute, rng.choice(others))


def sample_products(
    split: Split, count: int, *, splits: UInt8[ndarray, " codes"], seed: int
) -> Int[ndarray, " products"]:
    """Sample products of a split without repetition; many bring a sibling, so that details matter."""
    allowed = splits == SPLITS.index(split)
    codes = np.flatnonzero(allowed)
    np.random.default_rng((seed, 2, SPLITS.index(split))).shuffle(codes)
    rng = random.Random(f"{seed} siblings {split}")
    chosen: list[int] = []
    for code in codes.tolist():
        if len(chosen) >= count:
            break
        if not allowed[code]:
            continue
        chosen.append(code)
        allowed[code] = False
        if len(chosen) < count and rng.random() < SIBLING_SHARE:
            sibling = next(changes(code, within=allowed, rng=rng), None)
            if sibling is not None:
                chosen.append(sibling.code)
                allowed[sibling.code] = False
    return np.array(chosen, dtype=np.int64)


def facts_of(code: int, *, seed: int) -> tuple[Fact, ...]:
    """Return a product's facts, one of each kind, in an order of its own."""
    digest = hashlib.blake2b(f"{seed} facts {code}".encode(), digest_size=24).digest()
    price, origin, material, weight, maker, order = struct.unpack("<6I", digest)
    origins, materials, makers = WORDS["facts"].values()
    facts = (
        Fact("price", f"{price % 19_000 / 100 + 5:.2f} euros"),
        Fact("origin", origins[origin % len(origins)]),
        Fact("material", materials[material % len(materials)]),
        Fact("weight", f"{weight % 196 * 10 + 40} grams"),
        Fact("maker", makers[maker % len(makers)]),
    )
    return next(islice(permutations(facts), order % math.factorial(len(facts)), None))
