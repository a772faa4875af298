"""Texts about drawn products can be read back: whatever the wording, they fit exactly one product."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from research.synth import wordings
from research.synth.world import (
    ATTRIBUTES,
    FACT_KINDS,
    NUM_CODES,
    SHAPES,
    WORDS,
    Product,
    facts_of,
)

PHRASES: dict[str, tuple[str, str]] = {
    **{noun.lower(): ("shape", nouns[0]) for _, nouns in SHAPES for noun in nouns},
    **{word: ("colour", name) for name, colour in WORDS["colours"].items() for word in colour["words"]},
    **{
        word: ("fill", name)
        for name, fill in WORDS["fills"].items()
        for word in (*fill["adjectives"], *fill["phrases"])
    },
    **{
        phrase.format(word): ("background", name)
        for name, ground in WORDS["backgrounds"].items()
        for word in ground["words"]
        for phrase in ("{} background", "{} backdrop", "against {}")
    },
    **{word: ("frame", name) for name, words in WORDS["frames"].items() for word in words},
}
LONGEST_FIRST = re.compile(
    r"(?<![\w-])("
    + "|".join(re.escape(phrase) for phrase in sorted(PHRASES, key=len, reverse=True))
    + r")(?![\w-])"
)

products = st.integers(0, NUM_CODES - 1).map(Product.of)
seeds = st.integers(0, 10_000)


def read_back(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in ATTRIBUTES}
    for phrase in LONGEST_FIRST.findall(text[0].lower() + text[1:].replace(". ", ", ").lower()):
        attribute, value = PHRASES[phrase]
        found[attribute].add(value)
    return found


@given(product=products, seed=seeds, kind=st.sampled_from(FACT_KINDS))
def test_every_text_names_all_attributes_of_its_product_and_no_other(product, seed, kind):
    rng = random.Random(seed)
    fact = next(fact for fact in facts_of(product.code, seed=seed) if fact.kind == kind)
    texts = [
        wordings.caption(product, rng),
        wordings.description(product, rng),
        wordings.card_text(product, number="0001-01", price="7.00 euros", rng=rng),
        wordings.question(product, kind, rng),
        wordings.fact_text(product, fact, rng),
    ]
    for text in texts:
        assert read_back(text) == {name: {value} for name, value in product.words().items()}, text


@given(product=products, seed=seeds, attribute=st.sampled_from(ATTRIBUTES))
def test_an_edit_names_the_new_value_of_the_changed_attribute_and_nothing_else(product, seed, attribute):
    for way in (wordings.edit, wordings.changed_card_request):
        found = read_back(way(product, attribute, random.Random(seed)))
        others = {name: values for name, values in found.items() if name != attribute}
        assert not any(others.values())
        assert found[attribute] <= {product.words()[attribute]}
        assert found[attribute] or attribute == "background"
