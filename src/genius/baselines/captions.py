"""The words of an item's caption as its ID (GRACE's semantic IDs).

Items without a text of their own take over the words of the nearest text that training knows, where GRACE
asks a captioning model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from genius.errors import BadData

WORDS: Final = 2047
"""Words with a code, the most frequent ones; others are left out of an ID."""
LONGEST: Final = 10
"""Words of an ID."""
CHUNK: Final = 4096
_WORD: Final = re.compile(r"\w+")


class Vocabulary:
    """Words and their codes, the most frequent word first.

    >>> words = Vocabulary.of(["a dog", "a red dog runs", "a cat"])
    >>> words.codes("A dog!")
    [0, 1]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._codes = {word: code for code, word in enumerate(self.words)}

    @staticmethod
    def of(texts: Iterable[str]) -> Vocabulary:
        """The most frequent words of texts; of equally frequent ones those that come first.

        Raises
        ------
        BadData
            there is no word.
        """
        counts = Counter(word for text in texts for word in _words(text))
        if not counts:
            raise BadData(
                "no training text has a word, so there are no captions to make IDs of; take another kind"
            )
        return Vocabulary([word for word, _ in counts.most_common(WORDS)])

    def __len__(self) -> int:
        return len(self.words)

    def codes(self, text: str) -> list[int]:
        """Codes of a text's first known words."""
        known = [self._codes[word] for word in _words(text) if word in self._codes]
        return known[:LONGEST]


@torch.no_grad()
def nearest(items: Float[Tensor, "items dim"], known: Float[Tensor, "texts dim"]) -> Tensor:
    """For each item the known text whose embedding has the largest inner product.

    Raises
    ------
    BadData
        no text is known.
    """
    if not len(items):
        return torch.zeros(0, dtype=torch.int64)
    if not len(known):
        raise BadData(
            f"{len(items):,} items have no text of their own and no training query has one that they could "
            "take over; take another kind of ID"
        )
    return torch.cat([(chunk @ known.T).argmax(dim=1) for chunk in items.split(CHUNK)])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
