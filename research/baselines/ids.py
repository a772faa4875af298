"""ID schemes of other papers: GRACE's four (numeric, string, semantic, structured), DSI's, NCI's and IRGen's.

``research.baselines.generative`` compares them under equal conditions. docs/lab/baselines.md says where they
are faithful to the papers and where they are adapted.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int16, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.data.features import Pairs, look_up
from genius_search.errors import BadData, UsageError
from genius_search.nn import kmeans
from genius_search.nn.codebooks import Codebooks, as_floats
from genius_search.nn.losses import contrastive_loss
from genius_search.nn.quantizer import Codebook
from genius_search.progress import Progress
from genius_search.recipe import TrainingConfig
from genius_search.training.loop import Step, StepResult, num_steps, random_for, train

IdKind = Literal[
    "grace-numeric", "grace-string", "grace-semantic", "grace-structured", "dsi", "nci", "irgen", "genius"
]
BATCH: Final = 4096


def find_rows(
    wanted: Int64[np.ndarray, " wanted"], numbers: Int64[np.ndarray, " known"]
) -> Int64[np.ndarray, " wanted"]:
    """Return the place of each wanted number among others; −1 for one that is not among them.

    >>> find_rows(np.array([7, 4]), np.array([9, 7]))
    array([ 1, -1])
    """
    if not len(numbers):
        return np.full(len(wanted), -1)
    found, exists = look_up(numbers, wanted)
    return np.where(exists, found, -1)


class Candidates(NamedTuple):
    """Items that get IDs."""

    embeddings: Float[Tensor, "items dim"]
    """Fused unit vectors, on the CPU."""
    codes: Int16[np.ndarray, "items levels"]
    """IDs by the model's quantizer."""
    numbers: Int64[np.ndarray, " items"]
    """M-BEIR candidate ids as whole numbers, or −1."""
    texts: Sequence[str | None]
    """Texts of the items; None for an item without one."""

    def select(self, rows: Int64[np.ndarray, " rows"]) -> Candidates:
        """Return some of the candidates."""
        texts = [self.texts[row] for row in rows.tolist()]
        return Candidates(
            self.embeddings[torch.from_numpy(rows)], self.codes[rows], self.numbers[rows], texts
        )


class TrainingSet(NamedTuple):
    """Training data of an ID scheme."""

    candidates: Candidates
    queries: Float[Tensor, "queries dim"]
    """Embeddings of the training queries, 16-bit floats, in the order of their features."""
    query_numbers: Int64[np.ndarray, " queries"]
    """The query of each row; a query has a row for each of its instructions."""
    query_texts: Mapping[int, str]
    """Texts by number, of the queries that have one."""
    pairs: Pairs
    """Draws batches of rows of queries and candidates that belong together."""
    training: TrainingConfig
    """Settings for schemes that are trained by gradients; ``training.seed`` seeds every scheme."""
    folder: Path
    """For checkpoints and logs."""
    progress: Progress


class ResidualIds:
    """The model's own IDs, which its quantizer gave: the control."""

    shares_codes = False

    def __init__(self, quantizer: Codebooks) -> None:
        self._quantizer = quantizer
        self.sizes = quantizer.sizes

    def assign(self, candidates: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the quantizer's codes."""
        return candidates.codes

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the codebooks."""
        return [torch.from_numpy(table) for table in self._quantizer.tables()]


def pad(rows: Sequence[Sequence[int]], *, end: int, levels: int = 0) -> Int16[np.ndarray, "items levels"]:
    """Return rows of codes, filled up with the end code to the longest, or to a number of levels.

    A row that takes all levels has no end code and needs none.

    >>> pad([[3], [1, 2]], end=5).tolist()
    [[3, 5], [1, 2]]
    """
    longest = max((len(row) for row in rows), default=1)
    codes = np.full((len(rows), levels or max(1, longest)), end, dtype=np.int16)
    for row, given in zip(codes, rows, strict=True):
        row[: len(given)] = given
    return codes


class SpelledIds(ABC):
    """IDs of different lengths, padded with an end code; items that were there in training keep theirs.

    They are recognised by their M-BEIR ids, which must stand for the same items ever after.

    Parameters
    ----------
    end
        the end code, one more than the largest other code.
    numbers, codes
        M-BEIR's numbers of the known items, and their IDs.
    """

    shares_codes = True

    def __init__(
        self, end: int, numbers: Int64[np.ndarray, " known"], codes: Int16[np.ndarray, "known levels"]
    ) -> None:
        self.end = end
        self.sizes = (end + 1,) * codes.shape[1]
        self._numbers, self._codes = numbers, codes

    @classmethod
    @abstractmethod
    def fit(cls, data: TrainingSet) -> SpelledIds:
        """Learn a scheme from training data."""

    def assign(self, candidates: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the IDs of items; those of new items are computed from their embeddings or texts."""
        places = find_rows(candidates.numbers, self._numbers)
        codes = np.empty((len(places), len(self.sizes)), dtype=np.int16)
        codes[places >= 0] = self._codes[places[places >= 0]]
        new = np.flatnonzero(places < 0)
        if len(new):
            codes[new] = self._assign_new(candidates.select(new))
        return codes

    @abstractmethod
    def _assign_new(self, items: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the IDs of items that training did not see."""

    def tables(self) -> list[Float[Tensor, "_ dim"]] | None:
        """Return None: the codes have no vectors."""
        return None


DIGITS: Final = 10
PIECE_DIGITS: Final = 3
"""Digits that a language model's tokenizer takes together."""
PIECES: Final = sum(DIGITS**length for length in range(1, PIECE_DIGITS + 1))
"""Different pieces of one to three digits, leading zeros counting: ``7``, ``07`` and ``007`` are three."""


def spell_digits(number: int) -> list[int]:
    """Return a number's decimal digits."""
    return [int(digit) for digit in str(number)]


def spell_pieces(number: int) -> list[int]:
    """Return codes of a number that is cut from the left into pieces of three digits.

    A code tells the length of its piece too: as many digits, leading zeros included.

    >>> spell_pieces(1000), spell_pieces(7)
    ([210, 0], [7])
    """
    text = str(number)
    parts = [text[start : start + PIECE_DIGITS] for start in range(0, len(text), PIECE_DIGITS)]
    return [sum(DIGITS**shorter for shorter in range(1, len(part))) + int(part) for part in parts]


class GraceNumeric(SpelledIds):
    """Random numbers, spelled digit by digit (GRACE's numeric IDs). New items cannot get one."""

    alphabet: ClassVar[int] = DIGITS
    spell: ClassVar[staticmethod[[int], list[int]]] = staticmethod(spell_digits)

    @classmethod
    def fit(cls, data: TrainingSet) -> GraceNumeric:
        """Number the candidates in an order that the seed decides."""
        numbers = data.candidates.numbers
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(data.training.seed))
        return cls(cls.alphabet, numbers, pad([cls.spell(n) for n in order.tolist()], end=cls.alphabet))

    def _assign_new(self, items: Candidates) -> Int16[np.ndarray, "items levels"]:
        raise UsageError(
            f"{len(items.embeddings):,} items have no ID: these IDs are numbers that were given to the "
            f"{len(self._numbers):,} items known in training and cannot be computed from an item"
        )


class GraceString(GraceNumeric):
    """Random numbers in pieces of three digits, as language models cut them (GRACE's string IDs)."""

    alphabet = PIECES
    spell = staticmethod(spell_pieces)


MAX_WORDS: Final = 2047
"""Words with a code, the most frequent ones; others are left out of an ID."""
CAPTION_WORDS: Final = 10
"""Words of an ID."""
_WORD: Final = re.compile(r"\w+")


def encode_words(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Return the codes of a text's first known words.

    >>> encode_words("A dog!", {"a": 0, "dog": 1})
    [0, 1]
    """
    words = _WORD.findall(text.lower())
    return [vocabulary[word] for word in words if word in vocabulary][:CAPTION_WORDS]


class GraceSemantic(SpelledIds):
    """The words of an item's text, or of the nearest training query for an item without (GRACE's captions).

    Parameters
    ----------
    words
        words with a code, by their codes.
    texts, embeddings
        texts and embeddings of the training queries.
    """

    def __init__(
        self,
        end: int,
        numbers: Int64[np.ndarray, " known"],
        codes: Int16[np.ndarray, "known levels"],
        words: Sequence[str],
        texts: Sequence[str],
        embeddings: Float[Tensor, "texts dim"],
    ) -> None:
        super().__init__(end, numbers, codes)
        self.words, self._texts, self._embeddings = words, texts, embeddings
        self._vocabulary = {word: code for code, word in enumerate(words)}

    @classmethod
    def fit(cls, data: TrainingSet) -> GraceSemantic:
        """Collect the most frequent words of the candidates and the training queries.

        Raises BadData: there is no word.
        """
        found = [data.query_texts.get(number) for number in data.query_numbers.tolist()]
        _, first = np.unique(data.query_numbers, return_index=True)  # each under its first instruction
        rows = [row for row in first.tolist() if found[row]]
        texts = [found[row] or "" for row in rows]
        items = data.candidates
        counts = Counter(
            word for text in [*items.texts, *texts] if text for word in _WORD.findall(text.lower())
        )
        if not counts:
            raise BadData(
                "no training text has a word, so there are no captions to make IDs of; take another scheme"
            )
        words = [word for word, _ in counts.most_common(MAX_WORDS)]
        parts = (words, texts, data.queries[torch.tensor(rows, dtype=torch.int64)].float())
        unknown = np.zeros((0, CAPTION_WORDS), dtype=np.int16)
        codes = cls(len(words), np.zeros(0, dtype=np.int64), unknown, *parts).assign(items)
        return cls(len(words), items.numbers, codes, *parts)

    def _assign_new(self, items: Candidates) -> Int16[np.ndarray, "items levels"]:
        texts = list(items.texts)
        without = [row for row, text in enumerate(texts) if text is None]
        if without and not self._texts:
            raise BadData(
                f"{len(without):,} items have no text of their own and no training query has one that they "
                "could take over; take another scheme"
            )
        for start in range(0, len(without), BATCH):
            rows = without[start : start + BATCH]
            nearest = (items.embeddings[rows] @ self._embeddings.T).argmax(dim=1)
            for row, place in zip(rows, nearest.tolist(), strict=True):
                texts[row] = self._texts[place]
        codes = [encode_words(text or "", self._vocabulary) for text in texts]
        return pad(codes, end=self.end, levels=CAPTION_WORDS)


KMEANS_ITERATIONS: Final = 25
TreePath: TypeAlias = tuple[int, ...]
"""A code for each cluster on the way to an item, and one of the item within its leaf."""


class ClusterTree:
    """Clusters of clusters, and in the leaves items.

    Parameters
    ----------
    entries
        of each node, by the path to it: the centroids of its clusters, or in a leaf the items' embeddings.
    """

    def __init__(self, entries: Mapping[TreePath, Float[Tensor, "entries dim"]]) -> None:
        self.entries = entries

    @classmethod
    def build(
        cls, items: Float[Tensor, "items dim"], *, branches: int, leaf: int, generator: torch.Generator
    ) -> tuple[ClusterTree, list[TreePath]]:
        """Divide items into ``branches`` clusters until at most ``leaf`` are together.

        Where k-means cannot tell items apart, they are dealt out in their order. Returns the tree, and the
        path of each item.

        Raises BadData: there are no items.
        """
        if not len(items):
            raise BadData("a tree needs items to divide; these are none")
        entries: dict[TreePath, Tensor] = {}
        paths: list[TreePath] = [()] * len(items)
        queue: list[tuple[TreePath, Tensor]] = [((), torch.arange(len(items)))]
        for node, rows in queue:  # level by level: the queue grows meanwhile
            if len(rows) <= leaf:
                entries[node] = items[rows]
                for code, row in enumerate(rows.tolist()):
                    paths[row] = (*node, code)
            else:
                chosen, entries[node] = _divide(items[rows], branches, generator)
                queue += [((*node, code), rows[chosen == code]) for code in range(len(entries[node]))]
        return cls(entries), paths

    def paths(self, items: Float[Tensor, "items dim"]) -> list[TreePath]:
        """Return the way of each item down the tree, always to the nearest entry."""
        paths: list[TreePath] = [()] * len(items)
        queue: list[tuple[TreePath, Tensor]] = [((), torch.arange(len(items)))]
        for node, rows in queue:
            chosen = _assign(items[rows], self.entries[node])
            for code in chosen.unique().tolist():
                following, own = (*node, code), rows[chosen == code]
                if following in self.entries:
                    queue.append((following, own))
                else:
                    for row in own.tolist():
                        paths[row] = following
        return paths


def _kmeans(items: Tensor, size: int, generator: torch.Generator) -> Tensor:
    random = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
    found = kmeans.kmeans(as_floats(items), size, iterations=KMEANS_ITERATIONS, random=random)
    return torch.from_numpy(found.centroids).to(items.device)


def _assign(items: Tensor, centroids: Tensor) -> Tensor:
    return torch.from_numpy(kmeans.assign(as_floats(items), as_floats(centroids))).to(items.device)


def _divide(items: Tensor, branches: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the cluster of each item, and the centroids of the clusters that have any."""
    centroids = _kmeans(items, branches, generator)
    used, chosen = _assign(items, centroids).unique(return_inverse=True)
    if len(used) > 1:
        return chosen, centroids[used]
    dealt = torch.arange(len(items)) // -(-len(items) // branches)
    return dealt, centroids[used].expand(int(dealt[-1]) + 1, -1)


class TreeIds(SpelledIds):
    """Paths down a tree of clusters; a new item takes over the ID of the item it is led to."""

    branches: ClassVar[int] = 30
    leaf: ClassVar[int] = 30
    is_spelled: ClassVar[bool] = False
    """Whether the number within the leaf is written digit by digit."""

    def __init__(
        self,
        end: int,
        numbers: Int64[np.ndarray, " known"],
        codes: Int16[np.ndarray, "known levels"],
        tree: ClusterTree,
    ) -> None:
        super().__init__(end, numbers, codes)
        self.tree = tree

    @classmethod
    def fit(cls, data: TrainingSet) -> TreeIds:
        """Cluster the candidates."""
        generator = torch.Generator().manual_seed(data.training.seed)
        tree, paths = ClusterTree.build(
            data.candidates.embeddings, branches=cls.branches, leaf=cls.leaf, generator=generator
        )
        end = max(cls.branches, DIGITS if cls.is_spelled else cls.leaf)
        return cls(end, data.candidates.numbers, pad([cls._row(path) for path in paths], end=end), tree)

    @classmethod
    def _row(cls, path: TreePath) -> TreePath:
        return (*path[:-1], *spell_digits(path[-1])) if cls.is_spelled else path

    def _assign_new(self, items: Candidates) -> Int16[np.ndarray, "items levels"]:
        rows = [self._row(path) for path in self.tree.paths(items.embeddings)]
        return pad(rows, end=self.end, levels=len(self.sizes))


class GraceStructured(TreeIds):
    """GRACE's structured IDs."""

    shares_codes = False


class Nci(TreeIds):
    """NCI's IDs; its decoder has a head for each level (``--generator.head per-level``)."""

    shares_codes = False


class Dsi(TreeIds):
    """DSI's semantically structured IDs."""

    branches = 10
    leaf = 100
    is_spelled = True


class Prefixes(NamedTuple):
    """Codes of embeddings, and the vectors of the first codes, level by level."""

    codes: Int64[Tensor, "items levels"]
    sums: Float[Tensor, "levels items dim"]
    """Sums of the code vectors up to each level; the gradient goes straight through to the embedding."""
    residuals: Float[Tensor, "levels items dim"]
    """Input of each level, detached."""
    commitment: Float[Tensor, ""]


class RetrievalTokenizer(nn.Module):
    """IRGen's tokenizer: a network on frozen embeddings, at first the identity, and residual codebooks."""

    levels: Final = 4
    num_codes: Final = 256
    temperature: Final = 0.05
    commitment_weight: Final = 10.0
    """Weight of the distance to the code vectors, a mean over elements."""

    def __init__(self, dim: int, *, levels: int = levels, codes: int = num_codes) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.codebooks = nn.ModuleList(Codebook(codes, dim) for _ in range(levels))

    def forward(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
        """Return the unit vectors that are quantized."""
        learned: Tensor = self.down(torch.relu(self.up(embeddings)))
        return F.normalize(embeddings + learned, dim=-1)

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the code vectors of each level."""
        return [book.embed for book in self._books()]

    @torch.no_grad()
    def start(self, embeddings: Float[Tensor, "items dim"], *, generator: torch.Generator) -> None:
        """Initialise the codebooks by k-means, level by level on the residuals."""
        residual = self(embeddings)
        for book in self._books():
            size = len(book.embed)
            centroids = _kmeans(residual, size, generator)
            chosen = _assign(residual, centroids)
            book.start(centroids, torch.bincount(chosen, minlength=size).float())
            residual = residual - centroids[chosen]

    def prefixes(self, vectors: Float[Tensor, "items dim"]) -> Prefixes:
        """Return codes, and the sum of the code vectors of every prefix."""
        residual = vectors
        codes: list[Tensor] = []
        sums: list[Tensor] = []
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for book in self._books():
            residuals.append(residual.detach())
            chosen = _assign(residual.detach(), book.embed)
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
        """Return the loss of a batch: retrieval by every prefix of the targets' codes, and commitment.

        Queries are not quantized, as only items are stored as codes.
        """
        asked, targets = self(queries), self(candidates)
        prefixes = self.prefixes(targets)
        retrieval = [
            contrastive_loss(asked, vectors, false_negatives, temperature=self.temperature, direction="query")
            for vectors in (targets, *F.normalize(prefixes.sums, dim=-1))
        ]
        return torch.stack(retrieval).mean() + self.commitment_weight * prefixes.commitment, prefixes

    @torch.no_grad()
    def update_codebooks(self, prefixes: Prefixes, *, generator: torch.Generator) -> None:
        """Let the codebooks follow a batch of targets, and move dead codes."""
        for level, book in enumerate(self._books()):
            residuals = prefixes.residuals[level]
            book.follow(residuals, prefixes.codes[:, level], decay=0.98, laplace=1e-5)
            book.revive(residuals, below=0.25, generator=generator)

    @torch.no_grad()
    def encode(self, embeddings: Float[Tensor, "items dim"]) -> Int64[Tensor, "items levels"]:
        """Return the IDs of items."""
        return torch.cat([self.prefixes(self(chunk)).codes for chunk in embeddings.split(BATCH)])

    def _books(self) -> list[Codebook]:
        return [book for book in self.codebooks if isinstance(book, Codebook)]


class Irgen:
    """IRGen's IDs: residual codes of a tokenizer that is trained to retrieve by every prefix of them."""

    epochs: Final = 3.0
    learning_rate: Final = 1e-3
    start_items: Final = 8192
    """Items that k-means starts from."""

    shares_codes = False

    def __init__(self, tokenizer: RetrievalTokenizer) -> None:
        self.tokenizer = tokenizer
        self.sizes = tuple(map(len, tokenizer.tables()))

    @classmethod
    def fit(cls, data: TrainingSet) -> Irgen:
        """Train the tokenizer on pairs of queries and candidates."""
        training = dataclasses.replace(
            data.training, epochs=cls.epochs, learning_rate=cls.learning_rate, precision="fp32"
        )
        embeddings = data.candidates.embeddings
        torch.manual_seed(training.seed)
        tokenizer = RetrievalTokenizer(embeddings.shape[1])
        random = random_for(training.seed, -1)
        sample = torch.randperm(len(embeddings), generator=random)[: cls.start_items]
        tokenizer.start(embeddings[sample].float(), generator=random)

        def take_step(step: Step) -> StepResult:
            batch = data.pairs.draw(step.number, training.batch_size, seed=training.seed)
            loss, prefixes = tokenizer.loss(
                data.queries[torch.from_numpy(batch.query_rows)].float(),
                embeddings[torch.from_numpy(batch.candidate_rows)].float(),
                torch.as_tensor(batch.false_negatives),
            )
            tokenizer.update_codebooks(prefixes, generator=step.generator)
            return StepResult(loss, {"commitment": prefixes.commitment.detach()})

        train(
            tokenizer,
            take_step,
            total=num_steps(len(data.pairs), training),
            config=training,
            folder=data.folder,
            progress=data.progress,
            name="train tokenizer",
        )
        return cls(tokenizer)

    def assign(self, candidates: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the IDs of items."""
        return self.tokenizer.encode(candidates.embeddings).short().numpy()

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the codebooks."""
        return self.tokenizer.tables()


SCHEMES: Final[Mapping[IdKind, type[SpelledIds | Irgen]]] = {
    "grace-numeric": GraceNumeric,
    "grace-string": GraceString,
    "grace-semantic": GraceSemantic,
    "grace-structured": GraceStructured,
    "dsi": Dsi,
    "nci": Nci,
    "irgen": Irgen,
}
"""Schemes by their names; ``genius`` is the model's own."""
IdScheme: TypeAlias = ResidualIds | SpelledIds | Irgen
