"""Texts about drawn products: captions, descriptions, cards, questions, edits.

Every text names all five attributes, each by one of its synonyms and in one of several orders, so that it
fits exactly one product however it is worded.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from genius_search.lab.synth.world import (
    BACKGROUND_WORDS,
    COLOUR_WORDS,
    FILL_WORDS,
    FILLS,
    FRAME_WORDS,
    FRAMES,
    SHAPES,
    VALUES,
    WORDS,
    Attribute,
    Fact,
    FactKind,
    Product,
)


class _Words(NamedTuple):
    """A choice of words for each attribute."""

    noun: str
    colour: str
    adjective: str
    pattern: str
    background: str
    frame: str

    @staticmethod
    def of(product: Product, rng: random.Random) -> _Words:
        fill = FILL_WORDS[FILLS[product.fill]]
        return _Words(
            noun=rng.choice(SHAPES[product.shape].nouns),
            colour=rng.choice(COLOUR_WORDS[VALUES["colour"][product.colour]]),
            adjective=rng.choice(fill.adjectives),
            pattern=rng.choice(fill.phrases),
            background=rng.choice(BACKGROUND_WORDS[VALUES["background"][product.background]]),
            frame=rng.choice(FRAME_WORDS[FRAMES[product.frame]]),
        )

    def thing(self, rng: random.Random) -> str:
        """Combine noun, colour and fill: ``striped crimson anchor``."""
        return rng.choice(
            (
                f"{self.adjective} {self.colour} {self.noun}",
                f"{self.colour} {self.adjective} {self.noun}",
                f"{self.colour} {self.noun} {self.pattern}",
            )
        )

    def ground(self, rng: random.Random) -> str:
        """Describe the background: ``on a mint background``."""
        return rng.choice(
            (
                f"on {_article(self.background)} {self.background} background",
                f"against {self.background}",
                f"with {_article(self.background)} {self.background} backdrop",
            )
        )

    def surroundings(self, rng: random.Random) -> str:
        """Describe background and frame, in either order."""
        parts = [self.ground(rng), self.frame]
        rng.shuffle(parts)
        return rng.choice((", ", " and ")).join(parts)


def caption(product: Product, rng: random.Random) -> str:
    """Describe a picture of the product."""
    words = _Words.of(product, rng)
    thing, around, ground = words.thing(rng), words.surroundings(rng), words.ground(rng)
    article = _article_for(words, thing)
    return rng.choice(
        (
            _sentence(f"{article} {thing} {around}"),
            _sentence(f"{ground}, {article} {thing}, {words.frame}"),
            _sentence(f"picture of {article} {thing}, {around}"),
            _sentence(f"{words.noun}, {words.colour}, {words.pattern}, {around}"),
            _sentence(f"{words.frame} and {ground} you see {article} {thing}"),
        )
    )


def description(product: Product, rng: random.Random) -> str:
    """Describe the product as a customer who wants its card."""
    words = _Words.of(product, rng)
    thing, around = words.thing(rng), words.surroundings(rng)
    article = _article_for(words, thing)
    return rng.choice(
        (
            f"I am looking for {article} {thing}, {around}.",
            f"Do you sell {article} {thing} {around}?",
            f"Wanted: {article} {thing}, {around}.",
            _sentence(f"{article} {words.noun} for the wall: {words.colour}, {words.adjective}, {around}"),
        )
    )


def card_text(product: Product, *, number: str, price: str, rng: random.Random) -> str:
    """Compose the text beside the picture on a card."""
    words = _Words.of(product, rng)
    look = [words.colour, words.adjective, f"{words.background} backdrop", words.frame]
    rng.shuffle(look)
    return f"{_capital(words.noun)}. {_capital(', '.join(look))}. Item {number}, {price}."


def question(product: Product, kind: FactKind, rng: random.Random) -> str:
    """Ask about a product named in words."""
    return _pick("questions", kind, rng).format(x=_named(product, rng))


def image_question(kind: FactKind, rng: random.Random) -> str:
    """Ask about the product in a picture."""
    return _pick("questions", kind, rng).format(
        x=rng.choice(("this", "this one", "the thing in the picture"))
    )


def fact_text(product: Product, fact: Fact, rng: random.Random) -> str:
    """State a fact in a sentence that names its product."""
    return _capital(_pick("statements", fact.kind, rng).format(x=_named(product, rng), v=fact.value))


def edit(target: Product, changed: Attribute, rng: random.Random) -> str:
    """Say how the wanted product differs from the one in the picture."""
    words = _Words.of(target, rng)
    match changed:
        case "shape":
            value = f"{_article_for(words, words.noun)} {words.noun}"
        case "colour":
            value = words.colour
        case "fill":
            value = rng.choice((words.adjective, words.pattern))
        case "background":
            value = f"{_article(words.background)} {words.background} background"
        case "frame":
            value = words.frame
    return _pick("edits", changed, rng).format(x=value)


def card_request(rng: random.Random) -> str:
    """Request the card of the product in the picture."""
    return str(rng.choice(WORDS["card_requests"]))


def changed_card_request(target: Product, changed: Attribute, rng: random.Random) -> str:
    """Request the card of a product that differs from the one in the picture."""
    return f"{edit(target, changed, rng)}, {rng.choice(WORDS['card_tails'])}"


def _pick(table: str, row: str, rng: random.Random) -> str:
    templates: list[str] = WORDS[table][row]
    return rng.choice(templates)


def _named(product: Product, rng: random.Random) -> str:
    words = _Words.of(product, rng)
    return f"the {words.thing(rng)} {words.surroundings(rng)}"


def _article(following: str) -> str:
    return "an" if following[0] in "aeiou" and not following.startswith("euro") else "a"


def _article_for(words: _Words, following: str) -> str:
    return "some" if words.noun in WORDS["plurals"] else _article(following)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _sentence(text: str) -> str:
    return _capital(text) + "."
