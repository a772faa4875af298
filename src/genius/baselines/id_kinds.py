"""The kinds of ID that rivals generate: how known items get theirs, and later ones, if they can.

GRACE's four (numeric, string, semantic, structured), the trees of DSI and NCI, IRGen's residual codes; and
our own, as the control. What is faithful and what is adapted: docs/baselines.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor

from genius.baselines.captions import LONGEST, Vocabulary, nearest
from genius.baselines.cluster_tree import ClusterTree
from genius.baselines.retrieval_tokenizer import RetrievalTokenizer
from genius.baselines.spelled import DIGITS, PIECES, digits_of, numbers, padded, pieces_of
from genius.errors import UsageError

Kind = Literal[
    "grace-numeric", "grace-string", "grace-semantic", "grace-structured", "dsi", "nci", "irgen", "genius"
]


class Items(NamedTuple):
    """What IDs are made of."""

    numbers: Int64[np.ndarray, " items"]
    """Candidate ids as whole numbers."""
    embeddings: Float[Tensor, "items dim"]
    texts: Sequence[str | None]
    codes: Int16[np.ndarray, "items levels"] | None = None
    """Their IDs by the model's own quantizer, where those are wanted."""


class KnownTexts(NamedTuple):
    """Training texts, for items that have none."""

    texts: Sequence[str]
    embeddings: Float[Tensor, "texts dim"]


class State(NamedTuple):
    """What a way of giving IDs is made of, to be stored."""

    tensors: Mapping[str, Tensor]
    words: Sequence[str]


@runtime_checkable
class Giver(Protocol):
    """Gives IDs to items that were not there when it was made."""

    def give(self, items: Items) -> Int16[np.ndarray, "items levels"]:
        """Their IDs."""

    def state(self) -> State:
        """What it is made of."""


class Made(NamedTuple):
    """IDs of known items, and how later ones get theirs."""

    codes: Int16[np.ndarray, "items levels"]
    sizes: tuple[int, ...]
    """Codes at each level."""
    giver: Giver | None
    """None where an ID says nothing of its item, so that a later one can have none."""


class Traits(NamedTuple):
    """What else differs between kinds."""

    shares_codes: bool
    """One alphabet for all levels, as in text, instead of one for each."""
    head: Literal["tied", "per-level"] = "tied"
    needs: Literal["nothing", "texts", "tokenizer", "codes"] = "nothing"


TRAITS: Final[Mapping[Kind, Traits]] = {
    "grace-numeric": Traits(shares_codes=True),
    "grace-string": Traits(shares_codes=True),
    "grace-semantic": Traits(shares_codes=True, needs="texts"),
    "grace-structured": Traits(shares_codes=False),
    "dsi": Traits(shares_codes=True),
    "nci": Traits(shares_codes=False, head="per-level"),
    "irgen": Traits(shares_codes=False, needs="tokenizer"),
    "genius": Traits(shares_codes=False, needs="codes"),
}
NUMBERED: Final = frozenset({"grace-numeric", "grace-string"})
"""Kinds whose IDs say nothing of the item."""


class TreeShape(NamedTuple):
    """How a tree divides items, and how the number in the leaf is written."""

    branches: int
    leaf: int
    is_spelled: bool
    """Digit by digit, or as one code."""

    def row(self, path: Sequence[int]) -> list[int]:
        """A path as codes."""
        return [*path[:-1], *digits_of(path[-1])] if self.is_spelled else list(path)

    @property
    def end(self) -> int:
        """The end code."""
        return max(self.branches, DIGITS) if self.is_spelled else max(self.branches, self.leaf)


TREES: Final[Mapping[str, TreeShape]] = {
    "grace-structured": TreeShape(30, 30, is_spelled=False),
    "dsi": TreeShape(10, 100, is_spelled=True),
    "nci": TreeShape(30, 30, is_spelled=False),
}


class TreeGiver(NamedTuple):
    """Down the tree, always to the nearest."""

    tree: ClusterTree
    shape: TreeShape
    levels: int

    def give(self, items: Items) -> Int16[np.ndarray, "items levels"]:
        """Their IDs: each is that of a known item."""
        rows = [self.shape.row(path) for path in self.tree.paths(items.embeddings)]
        return padded(rows, end=self.shape.end, levels=self.levels)

    def state(self) -> State:
        """The tree."""
        return State(self.tree.tensors(), ())


class CaptionGiver(NamedTuple):
    """The words of its own text, else of the nearest that training knows."""

    vocabulary: Vocabulary
    known: KnownTexts

    def give(self, items: Items) -> Int16[np.ndarray, "items levels"]:
        """Their IDs."""
        texts = list(items.texts)
        silent = [row for row, text in enumerate(texts) if text is None]
        found = nearest(items.embeddings[silent], self.known.embeddings).tolist()
        for row, place in zip(silent, found, strict=True):
            texts[row] = self.known.texts[place]
        rows = [self.vocabulary.codes(text) for text in texts if text is not None]
        return padded(rows, end=len(self.vocabulary), levels=LONGEST)

    def state(self) -> State:
        """Words, and the known texts with their embeddings."""
        words = [str(len(self.vocabulary)), *self.vocabulary.words, *self.known.texts]
        return State({"embeddings": self.known.embeddings}, words)

    @staticmethod
    def of(state: State) -> CaptionGiver:
        """From what :meth:`state` gave."""
        split = 1 + int(state.words[0])
        known = KnownTexts(list(state.words[split:]), state.tensors["embeddings"])
        return CaptionGiver(Vocabulary(state.words[1:split]), known)


class TokenizerGiver(NamedTuple):
    """Residual codes of IRGen's kind."""

    tokenizer: RetrievalTokenizer

    def give(self, items: Items) -> Int16[np.ndarray, "items levels"]:
        """Their IDs."""
        return self.tokenizer.encode(items.embeddings).short().numpy()

    def state(self) -> State:
        """Its weights."""
        return State(self.tokenizer.state_dict(), ())


class OwnGiver(NamedTuple):
    """The model's own quantizer, which has already been asked."""

    def give(self, items: Items) -> Int16[np.ndarray, "items levels"]:
        """Their IDs.

        Raises
        ------
        UsageError
            the items came without.
        """
        if items.codes is None:
            raise UsageError("these items came without the IDs of the model's own quantizer")
        return items.codes

    def state(self) -> State:
        """Nothing."""
        return State({}, ())


def make_ids(
    kind: Kind,
    items: Items,
    *,
    seed: int,
    texts: KnownTexts | None = None,
    tokenizer: RetrievalTokenizer | None = None,
    own_sizes: tuple[int, ...] = (),
) -> Made:
    """Give IDs to all items that are known now.

    Parameters
    ----------
    texts, tokenizer, own_sizes
        for the kinds that need them (:data:`TRAITS`).

    Raises
    ------
    UsageError
        the kind needs something that was not given.
    """
    match kind:
        case "grace-numeric":
            return _numbered(len(items.numbers), digits_of, DIGITS, seed)
        case "grace-string":
            return _numbered(len(items.numbers), pieces_of, PIECES, seed)
        case "grace-semantic":
            if texts is None:
                raise UsageError("captions as IDs need training texts")
            spoken = (text for text in [*items.texts, *texts.texts] if text is not None)
            captions = CaptionGiver(Vocabulary.of(spoken), texts)
            return Made(captions.give(items), _alike(len(captions.vocabulary), LONGEST), captions)
        case "grace-structured" | "dsi" | "nci":
            shape = TREES[kind]
            generator = torch.Generator().manual_seed(seed)
            tree, paths = ClusterTree.build(
                items.embeddings, branches=shape.branches, leaf=shape.leaf, generator=generator
            )
            codes = padded([shape.row(path) for path in paths], end=shape.end)
            return Made(codes, _alike(shape.end, codes.shape[1]), TreeGiver(tree, shape, codes.shape[1]))
        case "irgen":
            if tokenizer is None:
                raise UsageError("IRGen's IDs need its tokenizer, which is trained first")
            learned = TokenizerGiver(tokenizer)
            return Made(learned.give(items), tuple(len(table) for table in tokenizer.tables()), learned)
        case "genius":
            return Made(OwnGiver().give(items), own_sizes, OwnGiver())


def giver_of(kind: Kind, state: State, *, levels: int) -> Giver | None:
    """How later items get IDs, from what was stored of it."""
    match kind:
        case "grace-semantic":
            return CaptionGiver.of(state)
        case "grace-structured" | "dsi" | "nci":
            return TreeGiver(ClusterTree.of(state.tensors), TREES[kind], levels)
        case "irgen":
            return TokenizerGiver(RetrievalTokenizer.of(state.tensors))
        case "genius":
            return OwnGiver()
        case "grace-numeric" | "grace-string":
            return None


def _numbered(count: int, spell: Callable[[int], list[int]], end: int, seed: int) -> Made:
    codes = padded([spell(number) for number in numbers(count, seed=seed)], end=end)
    return Made(codes, _alike(end, codes.shape[1]), None)


def _alike(end: int, levels: int) -> tuple[int, ...]:
    """As many codes at each level, the end code among them."""
    return (end + 1,) * levels
