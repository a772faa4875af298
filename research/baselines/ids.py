"""ID schemes of other papers: GRACE's four (numeric, string, semantic, structured), DSI's, NCI's and IRGen's.

``research.baselines.generative`` compares them under equal conditions. docs/lab/paper.md says how they
are adapted.
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
    found, exists = rows_of_ids(numbers, wanted)
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
    """What an ID scheme is made from."""

    candidates: Candidates
    """All items that get IDs: the training pool's, then others that will be searched."""
    num_training: int
    """How many of them are of the training pool."""
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


class Ids(NamedTuple):
    """The IDs of items, by one scheme."""

    codes: Int16[np.ndarray, "items levels"]
    sizes: tuple[int, ...]
    """Number of codes at each level."""
    common_vocabulary: bool = False
    """Whether all levels share one vocabulary."""
    tables: list[Float[Tensor, "_ dim"]] | None = None
    """The code vectors of each level, where codes have any."""


def fit_code_vectors(
    embeddings: Float[Tensor, "items dim"],
    codes: Int16[np.ndarray, "items levels"],
    sizes: Sequence[int],
) -> list[Float[Tensor, "_ dim"]]:
    """Return code vectors for IDs that came without any.

    The vector of a code is the mean of what the codes of earlier levels leave of the embeddings of its items;
    a code without items has a vector of zeros.
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
    """Return IDs of different lengths, filled up with the end code to the longest, or to a number of levels.

    An ID that takes all levels has no end code and needs none. ``end`` is one more than the largest other
    code.

    >>> spell([[3], [1, 2]], end=5).codes.tolist()
    [[3, 5], [1, 2]]
    """
    longest = max((len(row) for row in rows), default=1)
    codes = np.full((len(rows), levels or max(1, longest)), end, dtype=np.int16)
    for row, given in zip(codes, rows, strict=True):
        row[: len(given)] = given
    return Ids(codes, (end + 1,) * codes.shape[1], common_vocabulary)


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


def _shuffled_numbers(data: TrainingSet) -> list[int]:
    generator = torch.Generator().manual_seed(data.training.seed)
    return torch.randperm(len(data.candidates.numbers), generator=generator).tolist()


def grace_numeric(data: TrainingSet) -> Ids:
    """Number the items in an order that the seed decides, and spell the numbers digit by digit."""
    return spell([spell_digits(number) for number in _shuffled_numbers(data)], end=DIGITS)


def grace_string(data: TrainingSet) -> Ids:
    """Cut the same numbers into pieces of three digits, as language models do."""
    return spell([spell_pieces(number) for number in _shuffled_numbers(data)], end=PIECES)


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


def grace_semantic(data: TrainingSet) -> Ids:
    """Take the words of an item's text, or of the nearest training query for an item without one.

    Raises BadData: there is no word, or no query's text for the items without one.
    """
    found = [data.query_texts.get(number) for number in data.query_numbers.tolist()]
    _, first = np.unique(data.query_numbers, return_index=True)  # each under its first instruction
    rows = [row for row in first.tolist() if found[row]]
    texts, queries = (
        [found[row] or "" for row in rows],
        data.queries[torch.tensor(rows, dtype=torch.int64)],
    )
    items, own = data.candidates, list(data.candidates.texts)
    counts = Counter(
        word for text in [*own, *texts] if text for word in _WORD.findall(text.lower())
    )
    if not counts:
        raise BadData(
            "no training text has a word, so there are no captions to make IDs of; take another scheme"
        )
    vocabulary = {word: code for code, (word, _) in enumerate(counts.most_common(MAX_WORDS))}
    without = [row for row, text in enumerate(own) if text is None]
    if without and not texts:
        raise BadData(
            f"{len(without):,} items have no text of their own and no training query has one that they "
            "could take over; take another scheme"
        )
    for start in range(0, len(without), BATCH):
        some = without[start : start + BATCH]
        nearest = (items.embeddings[some] @ queries.float().T).argmax(dim=1)
        for row, place in zip(some, nearest.tolist(), strict=True):
            own[row] = texts[place]
    codes = [encode_words(text or "", vocabulary) for text in own]
    return spell(codes, end=len(vocabulary), levels=CAPTION_WORDS)


KMEANS_ITERATIONS: Final = 25
TreePath: TypeAlias = tuple[int, ...]
"""A code for each cluster on the way to an item, and one of the item within its leaf."""


def tree_paths(
    items: Float[Tensor, "items dim"], *, branches: int, leaf: int, generator: torch.Generator
) -> list[TreePath]:
    """Divide items into ``branches`` clusters until at most ``leaf`` are together; return each item's path.

    Where k-means cannot tell items apart, they are dealt out in their order.
    """
    paths: list[TreePath] = [()] * len(items)
    queue: list[tuple[TreePath, Tensor]] = [((), torch.arange(len(items)))]
    for node, rows in queue:  # level by level: the queue grows meanwhile
        if len(rows) <= leaf:
            for code, row in enumerate(rows.tolist()):
                paths[row] = (*node, code)
        else:
            inside = items[rows]
            chosen = _assign(inside, _kmeans(inside, branches, generator)).unique(
                return_inverse=True
            )[1]
            if not chosen.any():
                chosen = torch.arange(len(rows)) // -(-len(rows) // branches)
            queue += [
                ((*node, code), rows[chosen == code]) for code in range(int(chosen.max()) + 1)
            ]
    return paths


def _kmeans(items: Tensor, size: int, generator: torch.Generator) -> Tensor:
    random = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
    found = kmeans.kmeans(as_floats(items), size, iterations=KMEANS_ITERATIONS, random=random)
    return torch.from_numpy(found.centroids).to(items.device)


def _assign(items: Tensor, centroids: Tensor) -> Tensor:
    return torch.from_numpy(kmeans.assign(as_floats(items), as_floats(centroids))).to(items.device)


def grace_structured(data: TrainingSet) -> Ids:
    """Return paths down a tree of clusters; NCI's are the same, for a decoder with a head for each level."""
    generator = torch.Generator().manual_seed(data.training.seed)
    paths = tree_paths(data.candidates.embeddings, branches=30, leaf=30, generator=generator)
    return spell(paths, end=30, common_vocabulary=False)


def dsi(data: TrainingSet) -> Ids:
    """Return paths down a tree, with the number within the leaf digit by digit."""
    generator = torch.Generator().manual_seed(data.training.seed)
    paths = tree_paths(data.candidates.embeddings, branches=DIGITS, leaf=100, generator=generator)
    return spell([(*path[:-1], *spell_digits(path[-1])) for path in paths], end=DIGITS)


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
            book.initialise(centroids, torch.bincount(chosen, minlength=size).float())
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
            contrastive_loss(
                asked, vectors, false_negatives, temperature=self.temperature, direction="query"
            )
            for vectors in (targets, *F.normalize(prefixes.sums, dim=-1))
        ]
        return torch.stack(
            retrieval
        ).mean() + self.commitment_weight * prefixes.commitment, prefixes

    @torch.no_grad()
    def update_codebooks(self, prefixes: Prefixes, *, generator: torch.Generator) -> None:
        """Let the codebooks follow a batch of targets, and move dead codes."""
        for level, book in enumerate(self._books()):
            residuals = prefixes.residuals[level]
            book.update_averages(residuals, prefixes.codes[:, level], decay=0.98)
            book.revive_dead_codes(residuals, below=0.25, generator=generator)

    @torch.no_grad()
    def encode(self, embeddings: Float[Tensor, "items dim"]) -> Int64[Tensor, "items levels"]:
        """Return the IDs of items."""
        return torch.cat([self.prefixes(self(chunk)).codes for chunk in embeddings.split(BATCH)])

    def _books(self) -> list[Codebook]:
        return [book for book in self.codebooks if isinstance(book, Codebook)]


IRGEN_EPOCHS: Final = 3.0
IRGEN_LEARNING_RATE: Final = 1e-3
IRGEN_START_ITEMS: Final = 8192
"""Items that k-means starts from."""


def irgen(data: TrainingSet) -> Ids:
    """Train a tokenizer to retrieve by every prefix of its codes, on pairs; return the items' codes."""
    training = dataclasses.replace(
        data.training, epochs=IRGEN_EPOCHS, learning_rate=IRGEN_LEARNING_RATE, precision="fp32"
    )
    embeddings = data.candidates.embeddings[: data.num_training]
    torch.manual_seed(training.seed)
    tokenizer = RetrievalTokenizer(embeddings.shape[1])
    random = random_for(training.seed, -1)
    sample = torch.randperm(len(embeddings), generator=random)[:IRGEN_START_ITEMS]
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
"""Schemes by their names; ``genius`` is the model's own IDs, and ``file`` those of a file."""
