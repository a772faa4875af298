"""The drawn world's words: names of all attribute values with synonyms, and the glyphs they stand for."""

from __future__ import annotations

from typing import Final, NamedTuple


class Shape(NamedTuple):
    """A pictograph and what people call it; the first noun is its name."""

    glyph: str
    nouns: tuple[str, ...]


def _shapes(table: str) -> tuple[Shape, ...]:
    rows = (row.strip().partition(" ") for row in table.strip().split("\n"))
    return tuple(Shape(glyph, tuple(nouns.split(", "))) for glyph, _, nouns in rows)


SHAPES: Final = _shapes("""
    ☀ sun, sunshine
    ☁ cloud, cumulus
    ☂ umbrella, parasol, brolly
    ☃ snowman
    ☕ coffee cup, mug, teacup
    ★ star, five-pointed star
    ⚡ lightning bolt, flash
    ☎ telephone, phone, desk phone
    ☘ shamrock, three-leaf clover
    ☛ pointing hand, pointing finger
    ☠ skull, skull and crossbones
    ☢ radiation sign, nuclear sign
    ☣ biohazard sign
    ☮ peace sign
    ☯ yin and yang, yin-yang
    ☸ ship's wheel, helm
    ☹ sad face, frowning face
    ☻ smiley, smiling face
    ☾ moon, crescent
    ♀ Venus sign, hand mirror
    ♂ Mars sign
    ♚ chess king
    ♛ crown, tiara
    ♜ castle tower, rook
    ♝ chess bishop
    ♞ horse, chess knight
    ♟ pawn
    ♠ spade
    ♥ heart
    ♦ diamond, rhombus
    ♣ club suit
    ♪ musical note, quaver
    ♬ pair of notes, beamed notes
    ♻ recycling sign
    ♿ wheelchair
    ⚄ die, dice cube
    ⚑ flag, banner
    ⚒ hammer and pick, mining tools
    ⚓ anchor, ship's anchor
    ⚔ crossed swords, pair of swords
    ⚖ scales, balance
    ⚗ distilling flask, alembic
    ⚘ tulip, budding flower
    ⚙ gear, cogwheel, cog
    ⚛ atom
    ⚠ warning sign, hazard triangle
    ⚯ barbell, dumbbell
    ⚱ vase, urn
    ✂ scissors, shears
    ✇ film reel, tape reel
    ✈ airplane, plane, aeroplane
    ✉ envelope, letter
    ✏ pencil, crayon
    ✒ pen nib, fountain pen
    ✔ tick, check mark
    ✘ cross mark, X mark
    ✚ plus sign, plus
    ✦ twinkle, four-pointed star
    ✪ star badge, sheriff's badge
    ✱ asterisk
    ✹ starburst
    ✿ blossom, bloom
    ❄ snowflake, ice crystal
    ❢ exclamation mark
    ❦ ivy leaf, leafy vine
    ➜ arrow
    ➤ arrowhead, pointer
    ➸ dart, feathered arrow
    ⌂ house, home, hut
    ⌘ looped square, command key
    ⏎ return key, enter key
    ⏏ eject button
    ■ square, block
    ● disc, ball
    ▲ triangle
    ⬟ pentagon
    ⬢ hexagon, honeycomb cell
    ▬ rectangle, plank
    ▰ parallelogram
    ◎ target, bullseye
    ◕ pie chart
    ◢ wedge, ramp
    ◗ half disc, dome
    ▦ grid, lattice
    ⛃ coin stack, stack of coins
    🂡 playing card, ace
    🂓 domino, domino tile
    🐭 mouse, mouse head
    🐮 cow, cow head
    🐱 cat, kitten
    🐵 monkey, ape
    😎 face with sunglasses
    ↻ reload sign, circular arrow
    ⇄ swap arrows
    ⚲ lollipop
    ♈ ram sign, ram's horns
    ♏ scorpion sign, scorpion
    ♓ fish sign, pair of fish
    ∞ infinity sign
    Ω horseshoe, omega
    & ampersand
    @ at sign
    ? question mark
    # hash sign, hashtag
    % percent sign
    $ dollar sign
    € euro sign
    ¶ paragraph sign, pilcrow
""")

PLURALS: Final = frozenset(
    {
        "beamed notes",
        "mining tools",
        "crossed swords",
        "scales",
        "scissors",
        "shears",
        "swap arrows",
        "ram's horns",
    }
)
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
