"""The drawn world: which products can exist, which belong to which split, what is true of each.

A product is a combination of five attributes. Size, rotation and position are not part of it: they are
how the same thing is drawn otherwise.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int, UInt8
from numpy import ndarray

from genius.data.catalogue_words import BACKGROUND_WORDS, COLOUR_WORDS, FILL_WORDS, FRAME_WORDS, SHAPES

Attribute = Literal["shape", "colour", "fill", "background", "frame"]
ATTRIBUTES: Final[tuple[Attribute, ...]] = get_args(Attribute)
Split = Literal["train", "val", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
FactKind = Literal["price", "origin", "material", "weight", "maker"]
FACT_KINDS: Final[tuple[FactKind, ...]] = get_args(FactKind)

RGB = tuple[int, int, int]
COLOURS: Final[dict[str, RGB]] = {
    "red": (214, 30, 40),
    "orange": (250, 125, 10),
    "yellow": (248, 208, 0),
    "lime": (150, 215, 30),
    "green": (15, 125, 50),
    "turquoise": (10, 170, 175),
    "blue": (30, 80, 215),
    "purple": (125, 40, 175),
    "pink": (245, 75, 165),
    "brown": (125, 70, 25),
    "black": (15, 15, 18),
    "grey": (130, 132, 136),
}
BACKGROUNDS: Final[dict[str, tuple[RGB, RGB]]] = {
    "white": ((255, 255, 255), (255, 255, 255)),
    "cream": ((250, 234, 190), (250, 234, 190)),
    "sky": ((180, 216, 250), (180, 216, 250)),
    "mint": ((182, 238, 202), (182, 238, 202)),
    "rose": ((250, 196, 208), (250, 196, 208)),
    "lilac": ((208, 190, 250), (208, 190, 250)),
    "charcoal": ((52, 52, 58), (52, 52, 58)),
    "navy": ((16, 26, 84), (16, 26, 84)),
    "forest": ((12, 62, 40), (12, 62, 40)),
    "sunset": ((255, 222, 120), (255, 140, 150)),
}
"""Colour at the top and at the bottom; the same twice where it is not a gradient."""
FILLS: Final = tuple(FILL_WORDS)
FRAMES: Final = tuple(FRAME_WORDS)
NOUNS: Final = tuple(shape.nouns[0] for shape in SHAPES)

VALUES: Final[dict[Attribute, tuple[str, ...]]] = {
    "shape": NOUNS,
    "colour": tuple(COLOUR_WORDS),
    "fill": FILLS,
    "background": tuple(BACKGROUND_WORDS),
    "frame": FRAMES,
}
SIZES: Final = tuple(len(VALUES[attribute]) for attribute in ATTRIBUTES)
NUM_CODES: Final = math.prod(SIZES)

CLASH_DISTANCE: Final = 132.0
"""A colour nearer than this to its background could not be seen."""
SHARES: Final[dict[Split, float]] = {"train": 0.22, "val": 0.04, "test": 0.74}
"""Shares of all possible products; the test share holds the 200,000 products of a million candidates."""
SIBLING_SHARE: Final = 0.5
"""How often a sampled product brings a sibling that differs in one attribute."""


class Product(NamedTuple):
    """One thing of the world: an index into ``VALUES`` for each attribute."""

    shape: int
    colour: int
    fill: int
    background: int
    frame: int

    @property
    def code(self) -> int:
        """Its number among all combinations."""
        return int(np.ravel_multi_index(self, SIZES))

    @staticmethod
    def of(code: int) -> Product:
        """The product with that number."""
        indices = []
        for size in reversed(SIZES):
            code, index = divmod(code, size)
            indices.append(index)
        return Product._make(reversed(indices))

    def words(self) -> dict[str, str]:
        """Its attributes by their canonical names."""
        return {name: VALUES[name][index] for name, index in zip(ATTRIBUTES, self, strict=True)}


class Change(NamedTuple):
    """A product that differs from another one in exactly this attribute."""

    attribute: Attribute
    code: int


class Fact(NamedTuple):
    """Something true of a product that no picture shows."""

    kind: FactKind
    value: str


@cache
def possible_products() -> Bool[ndarray, " codes"]:
    """Which combinations can be drawn: those whose colour stands out from the background."""
    colours = np.array([COLOURS[name] for name in VALUES["colour"]], dtype=float)
    ends = np.array([BACKGROUNDS[name] for name in VALUES["background"]], dtype=float)
    distance = np.linalg.norm(colours[:, None, None] - ends[None], axis=-1).min(axis=-1)
    visible = (distance >= CLASH_DISTANCE)[None, :, None, :, None]
    return np.broadcast_to(visible, SIZES).reshape(-1)


def split_of_products(seed: int) -> UInt8[ndarray, " codes"]:
    """To which split each combination may belong (index in ``SPLITS``; 255: cannot be drawn).

    The parts are disjoint, so what a test query shows or wants was never seen in training.
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
    """Products of ``within`` that differ in one attribute, in random order, attributes taking turns."""
    for attribute in rng.sample(ATTRIBUTES, len(ATTRIBUTES)):
        position = ATTRIBUTES.index(attribute)
        stride = math.prod(SIZES[position + 1 :])
        lowest = code - code // stride % SIZES[position] * stride
        neighbours = (
            lowest + np.flatnonzero(within[lowest : lowest + SIZES[position] * stride : stride]) * stride
        )
        others = [other for other in neighbours.tolist() if other != code]
        if others:
            yield Change(attribute, rng.choice(others))


def sample_products(
    split: Split, count: int, *, splits: UInt8[ndarray, " codes"], seed: int
) -> Int[ndarray, " products"]:
    """Draw products of a split without repetition; many bring a sibling, so details matter."""
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


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ORIGINS: Final = _words("""
    Lisbon Oslo Kyoto Lima Dakar Ghent Tartu Perth Quito Turin Leeds Bergen Malmo Seville Krakow Cusco
    Nairobi Hanoi Zagreb Toledo Fargo Boston Galway Utrecht Bremen Porto Riga Cairo Osaka Izmir Tunis Havana
""")
_MATERIALS: Final = _words("""
    oak pine walnut bamboo cork wool felt linen cotton silk leather paper wax clay glass marble granite steel
    copper brass tin pewter rubber resin
""")
_MAKERS: Final = tuple(
    f"{head}{tail}"
    for head in _words("Bel Cor Dan Fen Hol Jar Lum Mar Nor Pel")
    for tail in _words("vik dale mont ello")
)
_ORDERS: Final = tuple(permutations(range(len(FACT_KINDS))))


def facts_of(code: int, *, seed: int) -> tuple[Fact, ...]:
    """What is true of a product, one fact of each kind in its own order, the same wherever told."""
    digest = hashlib.blake2b(f"{seed} facts {code}".encode(), digest_size=24).digest()
    price, origin, material, weight, maker, order = struct.unpack("<6I", digest)
    facts = (
        Fact("price", f"{price % 19_000 / 100 + 5:.2f} euros"),
        Fact("origin", _ORIGINS[origin % len(_ORIGINS)]),
        Fact("material", _MATERIALS[material % len(_MATERIALS)]),
        Fact("weight", f"{weight % 196 * 10 + 40} grams"),
        Fact("maker", _MAKERS[maker % len(_MAKERS)]),
    )
    return tuple(facts[index] for index in _ORDERS[order % len(_ORDERS)])
