"""Texts about drawn products: captions, descriptions, cards, questions, edits.

Every text names all five attributes, each by one of its synonyms and in one of several orders, so that it
fits exactly one product however it is worded.
"""

from __future__ import annotations

import random

from research.synth.world import SHAPES, WORDS, Attribute, Fact, FactKind, Product

_TEXTS: dict[str, list[str]] = WORDS["texts"]


def caption(product: Product, rng: random.Random) -> str:
    """Describe a picture of the product."""
    words = _description(product, rng)
    words["ground"] = rng.choice(_TEXTS["grounds"]).format(**words)
    return _capital(rng.choice(_TEXTS["captions"]).format(**words))


def description(product: Product, rng: random.Random) -> str:
    """Describe the product as a customer who wants its card."""
    words = _description(product, rng)
    return _capital(rng.choice(_TEXTS["descriptions"]).format(**words))


def card_text(product: Product, *, number: str, price: str, rng: random.Random) -> str:
    """Compose the text beside the picture on a card."""
    words = _words(product, rng)
    look = [words["colour"], words["adjective"], f"{words['background']} backdrop", words["frame"]]
    rng.shuffle(look)
    return f"{_capital(words['noun'])}. {_capital(', '.join(look))}. Item {number}, {price}."


def question(product: Product | None, kind: FactKind, rng: random.Random) -> str:
    """Ask about a product named in words, or without one about the product in a picture."""
    template = _template("questions", kind, rng)
    return template.format(x=_named(product, rng) if product else rng.choice(_TEXTS["these"]))


def fact_text(product: Product, fact: Fact, rng: random.Random) -> str:
    """State a fact in a sentence that names its product."""
    return _capital(
        _template("statements", fact.kind, rng).format(x=_named(product, rng), v=fact.value)
    )


def edit(target: Product, changed: Attribute, rng: random.Random) -> str:
    """Say how the wanted product differs from the one in the picture."""
    words = _words(target, rng)
    match changed:
        case "shape":
            value = f"{_article(words, words['noun'])} {words['noun']}"
        case "fill":
            value = rng.choice((words["adjective"], words["pattern"]))
        case "background":
            value = f"{words['a']} {words['background']} background"
        case _:
            value = words[changed]
    return _template("edits", changed, rng).format(x=value)


def changed_card_request(target: Product, changed: Attribute, rng: random.Random) -> str:
    """Request the card of a product that differs from the one in the picture."""
    return f"{edit(target, changed, rng)}, {rng.choice(WORDS['card_tails'])}"


def _words(product: Product, rng: random.Random) -> dict[str, str]:
    """Choose words for each attribute."""
    names = product.words()
    fill = WORDS["fills"][names["fill"]]
    words = {
        "noun": rng.choice(SHAPES[product.shape][1]),
        "colour": rng.choice(WORDS["colours"][names["colour"]]["words"]),
        "adjective": rng.choice(fill["adjectives"]),
        "pattern": rng.choice(fill["phrases"]),
        "background": rng.choice(WORDS["backgrounds"][names["background"]]["words"]),
        "frame": rng.choice(WORDS["frames"][names["frame"]]),
    }
    return words | {"a": _indefinite(words["background"])}


def _description(product: Product, rng: random.Random) -> dict[str, str]:
    """Choose words, and combine those of the thing, and those of background and frame."""
    words = _words(product, rng)
    thing = rng.choice(_TEXTS["things"]).format(**words)
    around = [rng.choice(_TEXTS["grounds"]).format(**words), words["frame"]]
    rng.shuffle(around)
    joined = rng.choice((", ", " and ")).join(around)
    return words | {"thing": thing, "around": joined, "article": _article(words, thing)}


def _named(product: Product, rng: random.Random) -> str:
    return "the {thing} {around}".format(**_description(product, rng))


def _template(table: str, row: str, rng: random.Random) -> str:
    templates: list[str] = WORDS[table][row]
    return rng.choice(templates)


def _article(words: dict[str, str], following: str) -> str:
    return "some" if words["noun"] in WORDS["plurals"] else _indefinite(following)


def _indefinite(following: str) -> str:
    return "an" if following[0] in "aeiou" and not following.startswith("euro") else "a"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
