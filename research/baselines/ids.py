"""ID schemes of other papers: DSI's, NCI's, IRGen's, and GRACE's four.

GRACE's are numeric, string, semantic and structured. ``research.baselines.generative`` compares the
schemes under equal conditions. docs/lab/paper.md explains how they are adapted.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int16, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.data.features import Pairs, rows_of_ids
from genius_search.errors import BadData
from genius_search.nn import kmeans
from genius_search.nn.codebooks import as_floats
from genius_search.nn.losses import contrastive_loss
from genius_search.nn.quantizer import Codebook
from genius_search.progress import Progress
from genius_search.recipe import TrainingConfig
from genius_search.training.loop import Step, StepResult, num_steps, random_for, train

IdKind = Literal[
    "grace-numeric",
    "grace-string",
    "grace-semantic",
    "grace-structured",
    "dsi",
    "nci",
    "irgen",
    "genius",
    "file",
]
BATCH_ITEMS: Final = 4096
"""Items that are compared or encoded at once."""


def find_rows(
    requested: Int64[np.ndarray, " requested"], numbers: Int64[np.ndarray, " rows"]
) -> Int64[np.ndarray, " requested"]:
    """Return the row of each requested number in ``numbers``, or −1.

    >>> find_rows(np.array([7, 4]), np.array([9, 7]))
    array([ 1, -1])
    """
    if not len(numbers):
        return np.full(len(requested), -1)
    rows, exists = rows_of_ids(numbers, requested)
    return np.where(exists, rows, -1)


class Candidates(NamedTuple):
    """Items that get IDs."""

    embeddings: Float[Tensor, "items dim"]
    """Fused unit vectors, on the CPU."""
    codes: Int16[np.ndarray, "items levels"]
    """IDs by the model's quantizer."""
    numbers: Int64[np.ndarray, " items"]
    """M-BEIR candidate ids as whole numbers."""
    texts: Sequence[str | None]
    """Texts of the items; None for an item without text."""

    def select(self, rows: Int64[np.ndarray, " rows"]) -> Candidates:
        """Return the candidates in the given rows."""
        texts = [self.texts[row] for row in rows.tolist()]
        return Candidates(
            self.embeddings[torch.from_numpy(rows)], self.codes[rows], self.numbers[rows], texts
        )


class TrainingSet(NamedTuple):
    """Input of an ID scheme."""

    candidates: Candidates
    """All items that get IDs: the training pool, then the other items of the searched pool."""
    num_training: int
    """Number of items in the training pool."""
    queries: Float[Tensor, "queries dim"]
    """Embeddings of the training queries, 16-bit floats, in the order of their features."""
    query_numbers: Int64[np.ndarray, " queries"]
    """The query of each row; a query has a row for each of its instructions."""
    query_texts: Mapping[int, str]
    """Query number -> text, for the queries that have a text."""
    pairs: Pairs
    """Draws batches of matching rows of queries and candidates."""
    training: TrainingConfig
    """Settings for schemes that are trained with gradients; ``training.seed`` seeds every
    scheme."""
    folder: Path
    """Folder for checkpoints and logs."""
    progress: Progress


class Ids(NamedTuple):
    """The IDs that a scheme assigned to items."""

    codes: Int16[np.ndarray, "items levels"]
    sizes: tuple[int, ...]
    """Number of codes at each level."""
    common_vocabulary: bool = False
    """Whether all levels share one vocabulary."""
    tables: list[Float[Tensor, "_ dim"]] | None = None
    """The code vectors of each level, if codes have any."""


def fit_code_vectors(
    embeddings: Float[Tensor, "items dim"],
    codes: Int16[np.ndarray, "items levels"],
    sizes: Sequence[int],
) -> list[Float[Tensor, "_ dim"]]:
    """Return code vectors that are fitted to the embeddings of items with the given IDs.

    The vector of a code is the mean residual of its items: their embeddings minus the vectors of
    their codes at earlier levels. A code without items has a vector of zeros.
    """
    residuals = embeddings.clone()
    tables = []
    for level, size in enumerate(sizes):
        level_codes = torch.from_numpy(codes[:, level]).long()
        counts = torch.bincount(level_codes, minlength=size).clamp(min=1)
        sums = torch.zeros(size, embeddings.shape[1]).index_add_(0, level_codes, residuals)
        tables.append(sums / counts[:, None])
        residuals -= tables[-1][level_codes]
    return tables


def spell(
    rows: Sequence[Sequence[int]], *, end: int, common_vocabulary: bool = True, levels: int = 0
) -> Ids:
    """Return IDs of different lengths, padded with the end code.

    They are padded to the number of levels, or to the longest ID if ``levels`` is 0. An ID that has
    a code at every level needs no end code. ``end`` is one more than the largest other code.

    >>> spell([[3], [1, 2]], end=5).codes.tolist()
    [[3, 5], [1, 2]]
    """
    longest = max((len(row) for row in rows), default=1)
    codes = np.full((len(rows), levels or max(1, longest)), end, dtype=np.int16)
    for padded, row in zip(codes, rows, strict=True):
        padded[: len(row)] = row
    return Ids(codes, (end + 1,) * codes.shape[1], common_vocabulary)


DIGITS: Final = 10
PIECE_DIGITS: Final = 3
"""Maximum number of digits in a token of a language model."""
PIECES: Final = sum(DIGITS**length for length in range(1, PIECE_DIGITS + 1))
"""Number of pieces of one to three digits; ``7``, ``07`` and ``007`` are different pieces."""


def spell_digits(number: int) -> list[int]:
    """Return a number's decimal digits."""
    return [int(digit) for digit in str(number)]


def spell_pieces(number: int) -> list[int]:
    """Return codes of a number that is cut from the left into pieces of three digits.

    Pieces of different length have different codes, even if they are equal as numbers.

    >>> spell_pieces(1000), spell_pieces(7)
    ([210, 0], [7])
    """
    text = str(number)
    parts = [text[start : start + PIECE_DIGITS] for start in range(0, len(text), PIECE_DIGITS)]
    return [sum(DIGITS**shorter for shorter in range(1, len(part))) + int(part) for part in parts]


def _shuffled_numbers(data: TrainingSet) -> list[int]:
    generator = torch.Generator().manual_seed(data.training.seed)
    return torch.randperm(len(data.candidates.numbers), generator=generator).tolist()


def grace_numeric(data: TrainingSet) -> Ids:
    """Number the items in an order that depends on the seed; spell the numbers digit by digit."""
    return spell([spell_digits(number) for number in _shuffled_numbers(data)], end=DIGITS)


def grace_string(data: TrainingSet) -> Ids:
    """Cut the numbers of :func:`grace_numeric` into pieces of three digits."""
    return spell([spell_pieces(number) for number in _shuffled_numbers(data)], end=PIECES)


MAX_VOCABULARY_WORDS: Final = 2047
"""Number of words that have a code, the most frequent ones; IDs omit other words."""
MAX_ID_WORDS: Final = 10
_WORD: Final = re.compile(r"\w+")


def encode_words(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Return the codes of a text's first words that are in the vocabulary.

    >>> encode_words("A dog!", {"a": 0, "dog": 1})
    [0, 1]
    """
    words = _WORD.findall(text.lower())
    return [vocabulary[word] for word in words if word in vocabulary][:MAX_ID_WORDS]


def grace_semantic(data: TrainingSet) -> Ids:
    """Take the words of each item's text; without text, those of the nearest training query.

    Raises
    ------
    BadData
        No text has a word, or items have no text and no training query has one either.
    """
    texts = list(data.candidates.texts)
    query_texts, queries = _queries_with_texts(data)
    counts: Counter[str] = Counter()
    for text in [*texts, *query_texts]:
        counts.update(_WORD.findall((text or "").lower()))
    if not counts:
        raise BadData(
            "IDs of words need a text with words, and neither items nor training queries have one; "
            "choose another scheme"
        )
    textless = [row for row, text in enumerate(texts) if text is None]
    if textless and not query_texts:
        raise BadData(
            f"{len(textless):,} items have no text, and no training query has one that "
            "could replace it; choose another scheme"
        )
    for start in range(0, len(textless), BATCH_ITEMS):
        batch = textless[start : start + BATCH_ITEMS]
        nearest = (data.candidates.embeddings[batch] @ queries.float().T).argmax(dim=1)
        for row, query in zip(batch, nearest.tolist(), strict=True):
            texts[row] = query_texts[query]
    most_common = counts.most_common(MAX_VOCABULARY_WORDS)
    vocabulary = {word: code for code, (word, _) in enumerate(most_common)}
    codes = [encode_words(text or "", vocabulary) for text in texts]
    return spell(codes, end=len(vocabulary), levels=MAX_ID_WORDS)


def _queries_with_texts(data: TrainingSet) -> tuple[list[str], Float[Tensor, "queries dim"]]:
    """Return texts and embeddings of the queries that have a text, with their first instruction."""
    texts, rows = [], []
    numbers, first_rows = np.unique(data.query_numbers, return_index=True)
    for number, row in zip(numbers.tolist(), first_rows.tolist(), strict=True):
        if text := data.query_texts.get(number):
            texts.append(text)
            rows.append(row)
    return texts, data.queries[torch.tensor(rows, dtype=torch.int64)]


KMEANS_ITERATIONS: Final = 25
TreePath: TypeAlias = tuple[int, ...]
"""A code for each cluster on the way to an item, and the item's number within its leaf."""


def tree_paths(
    items: Float[Tensor, "items dim"], *, branches: int, leaf: int, generator: torch.Generator
) -> list[TreePath]:
    """Divide items into ``branches`` clusters until they have at most ``leaf`` items; return paths.

    Items that k-means does not separate are divided in their order into parts of equal size.
    """
    paths: list[TreePath] = [()] * len(items)
    queue: list[tuple[TreePath, Tensor]] = [((), torch.arange(len(items)))]
    for node, rows in queue:  # level by level: the queue grows during the loop
        if len(rows) <= leaf:
            for code, row in enumerate(rows.tolist()):
                paths[row] = (*node, code)
            continue
        centroids = _kmeans(items[rows], branches, generator)
        clusters = _assign(items[rows], centroids).unique(return_inverse=True)[1]
        if not clusters.any():
            clusters = torch.arange(len(rows)) // -(-len(rows) // branches)
        num_clusters = int(clusters.max()) + 1
        queue += [((*node, code), rows[clusters == code]) for code in range(num_clusters)]
    return paths


def _kmeans(items: Tensor, size: int, generator: torch.Generator) -> Tensor:
    random = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
    clusters = kmeans.kmeans(as_floats(items), size, iterations=KMEANS_ITERATIONS, random=random)
    return torch.from_numpy(clusters.centroids).to(items.device)


def _assign(items: Tensor, centroids: Tensor) -> Tensor:
    return torch.from_numpy(kmeans.assign(as_floats(items), as_floats(centroids))).to(items.device)


def grace_structured(data: TrainingSet) -> Ids:
    """Return paths in a tree of clusters.

    NCI has the same IDs, but a decoder with separate output weights for each level.
    """
    generator = torch.Generator().manual_seed(data.training.seed)
    paths = tree_paths(data.candidates.embeddings, branches=30, leaf=30, generator=generator)
    return spell(paths, end=30, common_vocabulary=False)


def dsi(data: TrainingSet) -> Ids:
    """Return paths in a tree; the number within the leaf is spelled digit by digit."""
    generator = torch.Generator().manual_seed(data.training.seed)
    paths = tree_paths(data.candidates.embeddings, branches=DIGITS, leaf=100, generator=generator)
    return spell([(*path[:-1], *spell_digits(path[-1])) for path in paths], end=DIGITS)


class Prefixes(NamedTuple):
    """Codes of embeddings, and vectors of every prefix of the codes."""

    codes: Int64[Tensor, "items levels"]
    sums: Float[Tensor, "levels items dim"]
    """Sum of the code vectors up to each level, with a straight-through gradient."""
    residuals: Float[Tensor, "levels items dim"]
    """Input of each level, detached."""
    commitment: Float[Tensor, ""]
    """Mean squared distance to the code vectors."""


class RetrievalTokenizer(nn.Module):
    """IRGen's tokenizer: a network on frozen embeddings, and residual codebooks.

    The network starts as the identity.
    """

    levels: Final = 4
    num_codes: Final = 256
    temperature: Final = 0.05
    commitment_weight: Final = 10.0

    def __init__(self, dim: int, *, levels: int = levels, codes: int = num_codes) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.codebooks = nn.ModuleList(Codebook(codes, dim) for _ in range(levels))

    def forward(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
        """Return the unit vectors that are quantized."""
        change: Tensor = self.down(torch.relu(self.up(embeddings)))
        return F.normalize(embeddings + change, dim=-1)

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
            codes = _assign(residual, centroids)
            book.initialise(centroids, torch.bincount(codes, minlength=size).float())
            residual = residual - centroids[codes]

    def prefixes(self, vectors: Float[Tensor, "items dim"]) -> Prefixes:
        """Return codes, and the sum of the code vectors of every prefix."""
        residual = vectors
        codes: list[Tensor] = []
        sums: list[Tensor] = []
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for book in self._books():
            residuals.append(residual.detach())
            level_codes = _assign(residual.detach(), book.embed)
            distances.append(F.mse_loss(residual, book.embed[level_codes]))
            residual = residual - book.embed[level_codes]
            codes.append(level_codes)
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
        """Return the loss of a batch: retrieval by every prefix of the codes, and commitment.

        Queries are not quantized, because only items are stored as codes.
        """
        query_vectors, targets = self(queries), self(candidates)
        prefixes = self.prefixes(targets)
        losses = [
            contrastive_loss(
                query_vectors,
                vectors,
                false_negatives,
                temperature=self.temperature,
                direction="query",
            )
            for vectors in (targets, *F.normalize(prefixes.sums, dim=-1))
        ]
        loss = torch.stack(losses).mean() + self.commitment_weight * prefixes.commitment
        return loss, prefixes

    @torch.no_grad()
    def update_codebooks(self, prefixes: Prefixes, *, generator: torch.Generator) -> None:
        """Update the codebooks' moving averages with a batch of targets, and move dead codes."""
        for level, book in enumerate(self._books()):
            residuals = prefixes.residuals[level]
            book.update_averages(residuals, prefixes.codes[:, level], decay=0.98)
            book.revive_dead_codes(residuals, below=0.25, generator=generator)

    @torch.no_grad()
    def encode(self, embeddings: Float[Tensor, "items dim"]) -> Int64[Tensor, "items levels"]:
        """Return the IDs of items."""
        batches = embeddings.split(BATCH_ITEMS)
        return torch.cat([self.prefixes(self(batch)).codes for batch in batches])

    def _books(self) -> list[Codebook]:
        return [book for book in self.codebooks if isinstance(book, Codebook)]


IRGEN_EPOCHS: Final = 3.0
IRGEN_LEARNING_RATE: Final = 1e-3
IRGEN_KMEANS_ITEMS: Final = 8192
"""Number of items for the k-means that initialises the codebooks."""


def irgen(data: TrainingSet) -> Ids:
    """Train a tokenizer on pairs, to retrieve by every prefix of its codes; return its codes."""
    training = dataclasses.replace(
        data.training, epochs=IRGEN_EPOCHS, learning_rate=IRGEN_LEARNING_RATE, precision="fp32"
    )
    embeddings = data.candidates.embeddings[: data.num_training]
    torch.manual_seed(training.seed)
    tokenizer = RetrievalTokenizer(embeddings.shape[1])
    random = random_for(training.seed, -1)
    sample = torch.randperm(len(embeddings), generator=random)[:IRGEN_KMEANS_ITEMS]
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
    codes = tokenizer.encode(data.candidates.embeddings).short().numpy()
    tables = tokenizer.tables()
    return Ids(codes, tuple(map(len, tables)), tables=tables)


SCHEMES: Final[Mapping[IdKind, Callable[[TrainingSet], Ids]]] = {
    "grace-numeric": grace_numeric,
    "grace-string": grace_string,
    "grace-semantic": grace_semantic,
    "grace-structured": grace_structured,
    "dsi": dsi,
    "nci": grace_structured,
    "irgen": irgen,
}
"""Schemes by kind, except ``genius``, the model's IDs, and ``file``, IDs read from a file."""
