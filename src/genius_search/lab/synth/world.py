"""The products of the drawn catalogue: which can exist, to which split each belongs, facts about them.

A product is a combination of five attributes. Size, rotation and position only vary how it is drawn.
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


class Shape(NamedTuple):
    """A pictograph and its nouns; the first noun is its name."""

    glyph: str
    nouns: tuple[str, ...]


_SHAPES: Final = """
    ☀ sun, sunshine | ☁ cloud, cumulus | ☂ umbrella, parasol, brolly | ☃ snowman | ☕ coffee cup, mug, teacup
    ★ star, five-pointed star | ⚡ lightning bolt, flash | ☎ telephone, phone, desk phone
    ☘ shamrock, three-leaf clover | ☛ pointing hand, pointing finger | ☠ skull, skull and crossbones
    ☢ radiation sign, nuclear sign | ☣ biohazard sign | ☮ peace sign | ☯ yin and yang, yin-yang
    ☸ ship's wheel, helm | ☹ sad face, frowning face | ☻ smiley, smiling face | ☾ moon, crescent
    ♀ Venus sign, hand mirror | ♂ Mars sign | ♚ chess king | ♛ crown, tiara | ♜ castle tower, rook
    ♝ chess bishop | ♞ horse, chess knight | ♟ pawn | ♠ spade | ♥ heart | ♦ diamond, rhombus | ♣ club suit
    ♪ musical note, quaver | ♬ pair of notes, beamed notes | ♻ recycling sign | ♿ wheelchair
    ⚄ die, dice cube | ⚑ flag, banner | ⚒ hammer and pick, mining tools | ⚓ anchor, ship's anchor
    ⚔ crossed swords, pair of swords | ⚖ scales, balance | ⚗ distilling flask, alembic
    ⚘ tulip, budding flower | ⚙ gear, cogwheel, cog | ⚛ atom | ⚠ warning sign, hazard triangle
    ⚯ barbell, dumbbell | ⚱ vase, urn | ✂ scissors, shears | ✇ film reel, tape reel
    ✈ airplane, plane, aeroplane | ✉ envelope, letter | ✏ pencil, crayon | ✒ pen nib, fountain pen
    ✔ tick, check mark | ✘ cross mark, X mark | ✚ plus sign, plus | ✦ twinkle, four-pointed star
    ✪ star badge, sheriff's badge | ✱ asterisk | ✹ starburst | ✿ blossom, bloom | ❄ snowflake, ice crystal
    ❢ exclamation mark | ❦ ivy leaf, leafy vine | ➜ arrow | ➤ arrowhead, pointer | ➸ dart, feathered arrow
    ⌂ house, home, hut | ⌘ looped square, command key | ⏎ return key, enter key | ⏏ eject button
    ■ square, block | ● disc, ball | ▲ triangle | ⬟ pentagon | ⬢ hexagon, honeycomb cell
    ▬ rectangle, plank | ▰ parallelogram | ◎ target, bullseye | ◕ pie chart | ◢ wedge, ramp
    ◗ half disc, dome | ▦ grid, lattice | ⛃ coin stack, stack of coins | 🂡 playing card, ace
    🂓 domino, domino tile | 🐭 mouse, mouse head | 🐮 cow, cow head | 🐱 cat, kitten | 🐵 monkey, ape
    😎 face with sunglasses | ↻ reload sign, circular arrow | ⇄ swap arrows | ⚲ lollipop
    ♈ ram sign, ram's horns | ♏ scorpion sign, scorpion | ♓ fish sign, pair of fish | ∞ infinity sign
    Ω horseshoe, omega | & ampersand | @ at sign | ? question mark | # hash sign, hashtag | % percent sign
    $ dollar sign | € euro sign | ¶ paragraph sign, pilcrow
"""
SHAPES: Final = tuple(
    Shape(glyph, tuple(nouns.split(", ")))
    for glyph, _, nouns in (
        shape.strip().partition(" ") for line in _SHAPES.strip().split("\n") for shape in line.split(" | ")
    )
)
PLURALS: Final = frozenset(
    ("beamed notes", "mining tools", "crossed swords", "scales", "scissors", "shears", "swap arrows")
) | {"ram's horns"}
"""Nouns that take no article."""

COLOUR_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "red": ("red", "crimson", "scarlet"),
    "orange": ("orange", "tangerine"),
    "yellow": ("yellow", "lemon", "golden"),
    "lime": ("lime", "chartreuse"),
    "green": ("green", "emerald"),
    "turquoise": ("turquoise", "teal", "aqua"),
    "blue": ("blue", "cobalt", "sapphire"),
    "purple": ("purple", "violet", "plum"),
    "pink": ("pink", "magenta", "fuchsia"),
    "brown": ("brown", "chocolate", "chestnut"),
    "black": ("black", "coal", "ebony"),
    "grey": ("grey", "gray", "ash"),
}


class FillWords(NamedTuple):
    """A fill as adjectives (``striped``) and as phrases after the noun (``with stripes``)."""

    adjectives: tuple[str, ...]
    phrases: tuple[str, ...]


FILL_WORDS: Final[dict[str, FillWords]] = {
    "solid": FillWords(("solid", "plain"), ("in one flat tone", "without any pattern")),
    "outlined": FillWords(("outlined", "hollow"), ("drawn as an outline", "with only its contour inked")),
    "striped": FillWords(("striped", "banded"), ("with stripes", "covered in bands")),
    "dotted": FillWords(("dotted", "spotted", "polka-dot"), ("with dots", "covered in spots")),
    "checkered": FillWords(("checkered", "chequered"), ("with checks", "in a chessboard pattern")),
    "two-tone": FillWords(("two-tone", "half-and-half"), ("in two tones", "split into two shades")),
}

BACKGROUND_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "white": ("white", "snow"),
    "cream": ("cream", "ivory"),
    "sky": ("sky", "azure"),
    "mint": ("mint", "pistachio"),
    "rose": ("rose", "blush"),
    "lilac": ("lilac", "lavender"),
    "charcoal": ("charcoal", "graphite"),
    "navy": ("navy", "midnight"),
    "forest": ("forest", "spruce"),
    "sunset": ("sunset", "dusk"),
}

FRAME_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "none": ("without a frame", "unframed", "with no border"),
    "ring": ("in a round frame", "inside a ring", "encircled"),
    "box": ("in a rectangular frame", "boxed in", "inside a box"),
    "corners": ("with corner marks", "between four corners"),
    "bars": ("between two bars", "with a bar above and below"),
}


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
        indices = []
        for size in reversed(SIZES):
            code, index = divmod(code, size)
            indices.append(index)
        return Product._make(reversed(indices))

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
    colours = np.array([COLOURS[name] for name in VALUES["colour"]], dtype=float)
    ends = np.array([BACKGROUNDS[name] for name in VALUES["background"]], dtype=float)
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
        stride = math.prod(SIZES[position + 1 :])
        first = code - code // stride % SIZES[position] * stride
        neighbours = (
            first + np.flatnonzero(within[first : first + SIZES[position] * stride : stride]) * stride
        )
        others = [other for other in neighbours.tolist() if other != code]
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
    """Return a product's facts, one of each kind, in an order of its own."""
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
