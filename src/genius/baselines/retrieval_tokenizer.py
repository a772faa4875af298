"""IRGen's tokenizer: residual codes of an embedding that is trained so that every prefix of them retrieves.

IRGen's encoder is supervised by class, on its feature and on what each number of levels makes of it.
Retrieval data has no classes: which target of the batch answers a query takes their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius.models.kmeans import assign, kmeans
from genius.models.losses import contrastive_loss
from genius.models.quantizer import Codebook

LEVELS: Final = 4
CODES: Final = 256
TEMPERATURE: Final = 0.05
COMMITMENT: Final = 10.0
"""Weight of the distance to the code vectors, a mean over elements."""
DECAY: Final = 0.98
DEAD_BELOW: Final = 0.25
ITERATIONS: Final = 25
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
            begun = kmeans(residual, len(book.embed), iterations=ITERATIONS, generator=generator)
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
