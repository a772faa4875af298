"""The products of the synthetic catalogue: possible products, their splits, and facts about them.

A product is a combination of five attributes. Drawings also differ in size, rotation and position.
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
Topic = Literal["price", "origin", "material", "weight", "maker"]

SHAPES: Final[tuple[tuple[str, list[str]], ...]] = tuple(WORDS["shapes"].items())
"""Pictographs and their nouns; the first noun is the canonical name."""
VALUES: Final[dict[Attribute, tuple[str, ...]]] = {
    "shape": tuple(nouns[0] for _, nouns in SHAPES),
    **{name: tuple(WORDS[f"{name}s"]) for name in ATTRIBUTES[1:]},
}
SIZES: Final = tuple(len(VALUES[attribute]) for attribute in ATTRIBUTES)
NUM_CODES: Final = math.prod(SIZES)

CLASH_DISTANCE: Final = 132.0
"""Minimum distance between a colour and its background, so that the shape is visible."""
SHARES: Final[dict[Split, float]] = {"train": 0.22, "val": 0.04, "test": 0.74}
"""Shares of all possible products; that of test has room for the 200,000 products of a million
candidates."""
SIBLING_SHARE: Final = 0.5
"""Share of sampled products for which a sibling is added, which differs in one attribute."""


class Product(NamedTuple):
    """A product: an index into ``VALUES`` for each attribute."""

    shape: int
    colour: int
    fill: int
    background: int
    frame: int

    @property
    def code(self) -> int:
        """Number among all combinations of attributes."""
        return int(np.ravel_multi_index(self, SIZES))

    @staticmethod
    def of(code: int) -> Product:
        """Return the product with a code."""
        return Product(*map(int, np.unravel_index(code, SIZES)))

    def words(self) -> dict[str, str]:
        """Return the canonical name of each attribute's value."""
        return {name: VALUES[name][index] for name, index in zip(ATTRIBUTES, self, strict=True)}


class Change(NamedTuple):
    """A product that differs from another one in a single attribute."""

    attribute: Attribute
    code: int


class Fact(NamedTuple):
    """A fact about a product that no picture shows."""

    topic: Topic
    value: str


@cache
def possible_products() -> Bool[ndarray, " codes"]:
    """Return whether the colour of each combination stands out from the background."""
    colours = np.array([colour["rgb"] for colour in WORDS["colours"].values()], dtype=float)
    # Backgrounds are gradients from one colour to another.
    ends = np.array([ground["rgb"] for ground in WORDS["backgrounds"].values()], dtype=float)
    distance = np.linalg.norm(colours[:, None, None] - ends[None], axis=-1).min(axis=-1)
    is_visible = (distance >= CLASH_DISTANCE)[None, :, None, :, None]
    return np.broadcast_to(is_visible, SIZES).reshape(-1)


def split_indices(seed: int) -> UInt8[ndarray, " codes"]:
    """Return the split of each combination, as an index into ``SPLITS``; 255 if it is impossible.

    The splits are disjoint, so that no product of a test query was seen in training.
    """
    codes = np.flatnonzero(possible_products())
    generator = np.random.default_rng((seed, 1))
    generator.shuffle(codes)
    split_of_code = np.full(NUM_CODES, 255, dtype=np.uint8)
    ends = np.cumsum([round(SHARES[split] * len(codes)) for split in SPLITS[:-1]])
    for index, split_codes in enumerate(np.split(codes, ends)):
        split_of_code[split_codes] = index
    return split_of_code


def draw_changes(
    code: int, *, is_allowed: Bool[ndarray, " codes"], rng: random.Random
) -> Iterator[Change]:
    """Yield an allowed product for each attribute that can change, in a random order."""
    for attribute in rng.sample(ATTRIBUTES, len(ATTRIBUTES)):
        position = ATTRIBUTES.index(attribute)
        size, stride = SIZES[position], math.prod(SIZES[position + 1 :])
        first = code - code // stride % size * stride
        siblings = np.arange(first, first + size * stride, stride)
        allowed = [
            sibling for sibling in siblings[is_allowed[siblings]].tolist() if sibling != code
        ]
        if allowed:
            yield Change(attribute, rng.choice(allowed))


def sample_products(
    split: Split, count: int, *, is_allowed: Bool[ndarray, " codes"], seed: int
) -> Int[ndarray, " products"]:
    """Sample allowed products without repetition, with siblings, so that details matter."""
    is_left = is_allowed.copy()
    codes = np.flatnonzero(is_left)
    np.random.default_rng((seed, 2, SPLITS.index(split))).shuffle(codes)
    rng = random.Random(f"{seed} siblings {split}")
    chosen: list[int] = []
    for code in codes.tolist():
        if len(chosen) >= count:
            break
        if not is_left[code]:
            continue
        chosen.append(code)
        is_left[code] = False
        if len(chosen) < count and rng.random() < SIBLING_SHARE:
            sibling = next(draw_changes(code, is_allowed=is_left, rng=rng), None)
            if sibling is not None:
                chosen.append(sibling.code)
                is_left[sibling.code] = False
    return np.array(chosen, dtype=np.int64)


def facts_of(code: int, *, seed: int) -> tuple[Fact, ...]:
    """Return a product's facts, one of each topic, in an order that depends on the product."""
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
