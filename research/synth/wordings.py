"""Texts about the products of the synthetic catalogue: captions, cards, questions, edits.

Every text names all five attributes, by random synonyms and in a random order, so that it describes
exactly one product.
"""

from __future__ import annotations

import random

from research.synth.world import SHAPES, WORDS, Attribute, Fact, Product, Topic

_TEXTS: dict[str, list[str]] = WORDS["texts"]


def caption(product: Product, rng: random.Random) -> str:
    """Return a description of a picture of the product."""
    words = _combined_words(product, rng)
    words["ground"] = rng.choice(_TEXTS["grounds"]).format(**words)
    return _capital(rng.choice(_TEXTS["captions"]).format(**words))


def description(product: Product, rng: random.Random) -> str:
    """Return the words of a customer who looks for the product's card."""
    words = _combined_words(product, rng)
    return _capital(rng.choice(_TEXTS["descriptions"]).format(**words))


def card_text(product: Product, *, number: str, price: str, rng: random.Random) -> str:
    """Return the text on a card, next to the picture."""
    words = _words(product, rng)
    look = [words["colour"], words["adjective"], f"{words['background']} backdrop", words["frame"]]
    rng.shuffle(look)
    return f"{_capital(words['noun'])}. {_capital(', '.join(look))}. Item {number}, {price}."


def question(product: Product | None, topic: Topic, rng: random.Random) -> str:
    """Return a question about a product, or about that in a picture if ``product`` is None."""
    template = _template("questions", topic, rng)
    return template.format(x=_noun_phrase(product, rng) if product else rng.choice(_TEXTS["these"]))


def fact_text(product: Product, fact: Fact, rng: random.Random) -> str:
    """Return a sentence that states a fact and names its product."""
    template = _template("statements", fact.topic, rng)
    return _capital(template.format(x=_noun_phrase(product, rng), v=fact.value))


def edit(target: Product, changed: Attribute, rng: random.Random) -> str:
    """Return how the target differs from the product in the picture."""
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
    """Return a request for the card of a product that differs from the one in the picture."""
    return f"{edit(target, changed, rng)}, {rng.choice(WORDS['card_tails'])}"


def _words(product: Product, rng: random.Random) -> dict[str, str]:
    """Return random words for each attribute."""
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


def _combined_words(product: Product, rng: random.Random) -> dict[str, str]:
    """Return random words, and phrases for the object and for background and frame."""
    words = _words(product, rng)
    subject = rng.choice(_TEXTS["things"]).format(**words)
    surroundings = [rng.choice(_TEXTS["grounds"]).format(**words), words["frame"]]
    rng.shuffle(surroundings)
    joined = rng.choice((", ", " and ")).join(surroundings)
    return words | {"thing": subject, "around": joined, "article": _article(words, subject)}


def _noun_phrase(product: Product, rng: random.Random) -> str:
    return "the {thing} {around}".format(**_combined_words(product, rng))


def _template(table: str, row: str, rng: random.Random) -> str:
    templates: list[str] = WORDS[table][row]
    return rng.choice(templates)


def _article(words: dict[str, str], following: str) -> str:
    return "some" if words["noun"] in WORDS["plurals"] else _indefinite(following)


def _indefinite(following: str) -> str:
    return "an" if following[0] in "aeiou" and not following.startswith("euro") else "a"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
