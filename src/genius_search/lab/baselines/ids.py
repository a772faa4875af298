"""The kinds of ID that rivals generate: how known items get theirs, and later ones, if they can.

GRACE's four (numeric, string, semantic, structured), the trees of DSI and NCI, IRGen's residual codes; and
our own, as the control. What is faithful and what is adapted: docs/baselines.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int16, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.errors import BadData, UsageError
from genius_search.nn.losses import contrastive_loss
from genius_search.nn.quantizer import Codebook, assign, kmeans
from genius_search.search.table import LARGEST_CODE

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


ITERATIONS: Final = 25
"""Of k-means at each node, at most."""
LEAF: Final = -1
"""In place of a node's number: an item."""


class Built(NamedTuple):
    """A tree, and the paths of the items it was made from."""

    tree: ClusterTree
    paths: list[list[int]]


class ClusterTree:
    """Entries of all nodes, one after the other; an entry is a cluster, or in a leaf an item.

    Parameters
    ----------
    vectors
        of each entry: a cluster's centroid, or an item's embedding.
    starts
        where the entries of each node begin; one more than nodes.
    below
        the node under each entry; −1 for an item.
    """

    def __init__(
        self,
        vectors: Float[Tensor, "entries dim"],
        starts: Int64[Tensor, " fences"],
        below: Int64[Tensor, " entries"],
    ) -> None:
        self.vectors = vectors
        self.starts = starts
        self.below = below

    @staticmethod
    def build(
        items: Float[Tensor, "items dim"], *, branches: int, leaf: int, generator: torch.Generator
    ) -> Built:
        """Divide items into ``branches`` clusters each time, until at most ``leaf`` are together.

        Where k-means cannot tell items apart, they are dealt out in their order.

        Raises
        ------
        BadData
            there are no items.
        UsageError
            fewer than two branches, or no room in a leaf.
        """
        if not len(items):
            raise BadData("a tree needs items to divide; these are none")
        if branches < 2 or leaf < 1:
            raise UsageError(
                f"{branches} branches and leaves of {leaf} items make no tree; take 2 and 1, or more"
            )
        paths: list[list[int]] = [[] for _ in range(len(items))]
        vectors: list[Tensor] = []
        below: list[int] = []
        starts = [0]
        waiting = [torch.arange(len(items))]
        for rows in waiting:  # it grows while it is gone through: level by level
            here = items[rows]
            if len(rows) <= leaf:
                chosen, centres = torch.arange(len(rows)), here
                below += [LEAF] * len(rows)
            else:
                chosen, centres = _divided(here, branches, generator)
                below += range(len(waiting), len(waiting) + len(centres))
                waiting += [rows[chosen == number] for number in range(len(centres))]
            for row, code in zip(rows.tolist(), chosen.tolist(), strict=True):
                paths[row].append(code)
            vectors.append(centres)
            starts.append(len(below))
        tree = ClusterTree(torch.cat(vectors), torch.tensor(starts), torch.tensor(below))
        return Built(tree, paths)

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> ClusterTree:
        """The tree that :meth:`tensors` gave away."""
        return ClusterTree(tensors["vectors"], tensors["starts"], tensors["below"])

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, to be stored."""
        return {"vectors": self.vectors, "starts": self.starts, "below": self.below}

    def paths(self, items: Float[Tensor, "items dim"]) -> list[list[int]]:
        """The way of each item down the tree, always to the nearest."""
        paths: list[list[int]] = [[] for _ in range(len(items))]
        waiting = [(0, np.arange(len(items)))]
        while waiting:
            node, rows = waiting.pop()
            entries = slice(int(self.starts[node]), int(self.starts[node + 1]))
            chosen = assign(items[torch.from_numpy(rows)], self.vectors[entries]).numpy()
            for row, code in zip(rows.tolist(), chosen.tolist(), strict=True):
                paths[row].append(code)
            for code in np.unique(chosen).tolist():
                under = int(self.below[entries.start + code])
                if under != LEAF:
                    waiting.append((under, rows[chosen == code]))
        return paths


def _divided(items: Tensor, branches: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The cluster of each item, and the centroids of those that have any."""
    centroids = kmeans(items, branches, iterations=ITERATIONS, generator=generator).centroids
    used, chosen = assign(items, centroids).unique(return_inverse=True)
    if len(used) > 1:
        return chosen, centroids[used]
    share = -(-len(items) // branches)
    dealt = torch.arange(len(items)) // share
    return dealt, centroids[used].expand(int(dealt[-1]) + 1, -1)


DIGITS: Final = 10
PIECE_DIGITS: Final = 3
"""Digits that a language model's tokenizer takes together."""
PIECES: Final = sum(DIGITS**length for length in range(1, PIECE_DIGITS + 1))
"""Different pieces of one to three digits, leading zeros counting: ``7``, ``07`` and ``007`` are three."""


def padded(rows: Sequence[Sequence[int]], *, end: int, levels: int = 0) -> Int16[np.ndarray, "items levels"]:
    """Rows of codes, filled up with the end code to the longest, or to so many levels.

    A row that takes all levels has no end code and needs none.

    Raises
    ------
    UsageError
        the end code, which is the largest, is more than a table holds; or a row is longer than ``levels``.
    """
    longest = max((len(row) for row in rows), default=0)
    if end > LARGEST_CODE:
        raise UsageError(f"{end} codes and an end code do not fit a table, which holds {LARGEST_CODE}")
    if levels and longest > levels:
        raise UsageError(f"an ID of {longest} codes does not fit {levels} levels")
    codes = np.full((len(rows), levels or max(1, longest)), end, dtype=np.int16)
    for row, given in zip(codes, rows, strict=True):
        row[: len(given)] = given
    return codes


def digits_of(number: int) -> list[int]:
    """A number's decimal digits: one code for each (GRACE's numeric IDs)."""
    return [int(digit) for digit in str(number)]


def pieces_of(number: int) -> list[int]:
    """A number cut from the left into pieces of three digits (GRACE's string IDs).

    A piece's code tells its length too: that many digits, leading zeros included.
    """
    text = str(number)
    parts = [text[start : start + PIECE_DIGITS] for start in range(0, len(text), PIECE_DIGITS)]
    return [sum(DIGITS**shorter for shorter in range(1, len(part))) + int(part) for part in parts]


def numbers(count: int, *, seed: int) -> list[int]:
    """A number for each item, dealt out at random: it says nothing of the item, nor of its neighbours."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [int(number) for number in order]


LEVELS: Final = 4
CODES: Final = 256
TEMPERATURE: Final = 0.05
COMMITMENT: Final = 10.0
"""Weight of the distance to the code vectors, a mean over elements."""
DECAY: Final = 0.98
DEAD_BELOW: Final = 0.25
RETRIEVAL_TOKENIZER_ITERATIONS: Final = 25
"""Of k-means, with which codebooks begin."""


class Prefixes(NamedTuple):
    """What the first codes of embeddings make of them, one level after the other."""

    codes: Int64[Tensor, "items levels"]
    sums: Float[Tensor, "levels items dim"]
    """Of the code vectors up to each level; the gradient goes straight through to the embedding."""
    residuals: Float[Tensor, "levels items dim"]
    """What each level was given; detached."""
    commitment: Float[Tensor, ""]


class RetrievalTokenizer(nn.Module):
    """A small network on frozen embeddings, which begins as nothing but them, and residual codebooks."""

    def __init__(self, dim: int, *, levels: int = LEVELS, codes: int = CODES) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.codebooks = nn.ModuleList(Codebook(codes, dim) for _ in range(levels))

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> RetrievalTokenizer:
        """The tokenizer that has these weights."""
        books = [name for name in tensors if name.endswith(".embed")]
        codes, dim = tensors[books[0]].shape
        found = RetrievalTokenizer(dim, levels=len(books), codes=codes)
        found.load_state_dict(dict(tensors))
        return found.eval()

    def forward(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
        """The unit vectors that are quantized."""
        learned: Tensor = self.down(torch.relu(self.up(embeddings)))
        return F.normalize(embeddings + learned, dim=-1)

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """The code vectors of each level."""
        return [book.embed for book in self._books()]

    @torch.no_grad()
    def start(self, embeddings: Float[Tensor, "items dim"], *, generator: torch.Generator) -> None:
        """K-means, level by level on what is left."""
        residual = self(embeddings)
        for book in self._books():
            begun = kmeans(
                residual, len(book.embed), iterations=RETRIEVAL_TOKENIZER_ITERATIONS, generator=generator
            )
            book.start(begun.centroids, begun.counts)
            residual = residual - book.embed[assign(residual, book.embed)]

    def prefixes(self, vectors: Float[Tensor, "items dim"]) -> Prefixes:
        """Codes, and what each number of them stands for."""
        residual = vectors
        codes: list[Tensor] = []
        sums: list[Tensor] = []
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for book in self._books():
            residuals.append(residual.detach())
            chosen = assign(residual.detach(), book.embed)
            distances.append(F.mse_loss(residual, book.embed[chosen]))
            residual = residual - book.embed[chosen]
            codes.append(chosen)
            sums.append(vectors - residual.detach())
        return Prefixes(
            torch.stack(codes, dim=1),
            torch.stack(sums),
            torch.stack(residuals),
            torch.stack(distances).mean(),
        )

    def loss(
        self,
        queries: Float[Tensor, "batch dim"],
        candidates: Float[Tensor, "batch dim"],
        false_negatives: Bool[Tensor, "batch batch"],
    ) -> tuple[Float[Tensor, ""], Prefixes]:
        """Retrieval by the vectors and by every prefix of the targets' codes, and nearness to code vectors.

        Queries stay whole: only what is stored is coded.
        """
        asked, wanted = self(queries), self(candidates)
        found = self.prefixes(wanted)
        retrieval = [
            contrastive_loss(asked, vectors, false_negatives, temperature=TEMPERATURE, direction="query")
            for vectors in (wanted, *F.normalize(found.sums, dim=-1))
        ]
        return torch.stack(retrieval).mean() + COMMITMENT * found.commitment, found

    @torch.no_grad()
    def follow(self, found: Prefixes, *, generator: torch.Generator) -> None:
        """Let the codebooks follow a batch of targets; dead codes move."""
        for level, book in enumerate(self._books()):
            residuals = found.residuals[level]
            book.follow(residuals, found.codes[:, level], decay=DECAY, laplace=1e-5)
            book.revive(residuals, below=DEAD_BELOW, generator=generator)

    @torch.no_grad()
    def encode(self, embeddings: Float[Tensor, "items dim"]) -> Int64[Tensor, "items levels"]:
        """IDs of items."""
        return torch.cat([self.prefixes(self(chunk)).codes for chunk in embeddings.split(4096)])

    def _books(self) -> list[Codebook]:
        return [book for book in self.codebooks if isinstance(book, Codebook)]


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
