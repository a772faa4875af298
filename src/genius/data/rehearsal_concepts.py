"""What the things of a rehearsal are called and how they look: products of the drawn catalogue."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import NamedTuple

import numpy as np

from genius.data.catalogue_words import FILL_WORDS, FRAME_WORDS
from genius.data.catalogue_world import Fact, Product, facts_of, possible_products


class Told(NamedTuple):
    """A concept in words."""

    noun: str
    thing: str
    """``striped red anchor``."""
    surroundings: str
    """``in a ring, on navy``."""
    changed: str
    """All but the noun, as a wish."""
    facts: tuple[Fact, ...]


class Concepts:
    """Things that a picture shows and a text names."""

    def __init__(self, count: int, *, seed: int) -> None:
        codes = np.flatnonzero(possible_products())
        np.random.default_rng((seed, 3)).shuffle(codes)
        self._codes = [int(code) for code in codes[:count]]
        self._seed = seed
        self._alike: dict[int, list[int]] = defaultdict(list)
        for number, code in enumerate(self._codes):
            self._alike[Product.of(code).shape].append(number)
        self.told = cache(self._tell)

    def __len__(self) -> int:
        return len(self._codes)

    def product(self, concept: int) -> Product:
        """What is drawn."""
        return Product.of(self._codes[concept])

    def lookalike(self, concept: int) -> int:
        """Another concept of the same shape, if there is any."""
        alike = self._alike[self.product(concept).shape]
        return alike[(alike.index(concept) + 1) % len(alike)]

    def _tell(self, concept: int) -> Told:
        product = self.product(concept)
        words = product.words()
        fill = FILL_WORDS[words["fill"]].adjectives[0]
        frame = FRAME_WORDS[words["frame"]][0]
        return Told(
            noun=words["shape"],
            thing=f"{fill} {words['colour']} {words['shape']}",
            surroundings=f"{frame}, on {words['background']}",
            changed=f"{fill} {words['colour']} {frame} and stands on {words['background']}",
            facts=facts_of(product.code, seed=self._seed),
        )
