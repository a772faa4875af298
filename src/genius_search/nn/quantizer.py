"""Fusion of features, and modality-decoupled residual quantization into IDs (paper, section 4.2).

Level 0 encodes the modality, the later levels encode meaning from coarse to fine. Codebooks are initialised
by k-means and updated by exponential moving averages; they receive no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.config import FusionConfig
from genius_search.nn import parallel
from genius_search.nn.codebooks import (
    Codebooks,
    as_array,
    as_floats,
    statistic_shapes,
    weight_shapes,
)
from genius_search.nn.kmeans import assign, residual_kmeans
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES

LAPLACE: Final = 1e-5
"""Smooths the counts in a codebook's moving average."""


class Fusion(nn.Module):
    """Fuses features: h(x, y) = λ·text + (1−λ)·image + MLP([text; image]), then L2-normalised.

    λ is the output of an MLP with a sigmoid. An absent modality is a zero vector, of which the projection
    passes on only its bias; this is how the network recognises absence. Layer names follow the released
    checkpoint (specification, section 7).
    """

    def __init__(self, dim: int, config: FusionConfig) -> None:
        super().__init__()
        joint = 2 * config.hidden
        self.text_projection_layer = nn.Linear(dim, config.hidden)
        self.image_projection_layer = nn.Linear(dim, config.hidden)
        self.combiner_layer = nn.Linear(joint, joint)
        self.output_layer = nn.Linear(joint, dim)
        self.dynamic_scalar = nn.Sequential(
            nn.Linear(joint, joint), nn.ReLU(), nn.Identity(), nn.Linear(joint, 1), nn.Sigmoid()
        )
        self.dropout = nn.Dropout(config.dropout)
        if config.start == "sum":
            nn.init.zeros_(self.output_layer.weight)
            nn.init.zeros_(self.output_layer.bias)

    def forward(
        self, image: Float[Tensor, "items dim"], text: Float[Tensor, "items dim"]
    ) -> Float[Tensor, "items dim"]:
        """Return unit embeddings. Rows of an absent modality must be zero."""
        joint = torch.cat(
            [
                torch.relu(self.text_projection_layer(self.dropout(text))),
                torch.relu(self.image_projection_layer(self.dropout(image))),
            ],
            dim=-1,
        )
        joint = self.dropout(joint)
        mixed = self.output_layer(self.dropout(torch.relu(self.combiner_layer(joint))))
        text_share = self.dynamic_scalar(joint)
        fused = mixed + text_share * text + (1 - text_share) * image
        return F.normalize(fused.float(), dim=-1)


class Quantized(NamedTuple):
    """Result of quantizing a batch of embeddings."""

    codes: Int[Tensor, "items levels"]
    vectors: Float[Tensor, "items dim"]
    """Sum of the chosen code vectors; its gradient goes straight through to the embedding."""
    loss: Float[Tensor, ""]
    """L_rq: mean squared distance of each residual to its code vector, over elements and levels."""
    residuals: Float[Tensor, "levels items dim"]
    """Input of each level, detached, for the moving averages."""


class Codebook(nn.Module):
    """Code vectors of one level, and the moving averages that define them."""

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(size, dim))
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed_avg", torch.zeros(size, dim))

    @torch.no_grad()
    def initialise(
        self, vectors: Float[Tensor, "codes dim"], counts: Float[Tensor, " codes"]
    ) -> None:
        """Initialise code vectors and averages from centroids and their numbers of items."""
        self.embed.copy_(vectors)
        self.cluster_size.copy_(counts)
        self.embed_avg.copy_(vectors * counts[:, None])

    @torch.no_grad()
    def update_averages(
        self,
        residuals: Float[Tensor, "items dim"],
        codes: Int[Tensor, " items"],
        *,
        decay: float,
    ) -> None:
        """Update the moving averages with the residuals that were assigned to each code."""
        size = len(self.embed)
        counts = torch.bincount(codes, minlength=size).to(self.cluster_size)
        sums = torch.zeros_like(self.embed_avg).index_add_(0, codes, residuals.to(self.embed_avg))
        parallel.sum_over_ranks([counts, sums])
        self.cluster_size.lerp_(counts, 1 - decay)
        self.embed_avg.lerp_(sums, 1 - decay)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + LAPLACE) / (total + size * LAPLACE) * total
        self.embed.copy_(self.embed_avg / smoothed[:, None])

    @torch.no_grad()
    def revive_dead_codes(
        self, residuals: Float[Tensor, "items dim"], *, below: float, generator: torch.Generator
    ) -> int:
        """Move each code whose average count is below ``below`` to a random residual; return their number."""
        dead = self.cluster_size < below
        num_dead = int(dead.sum())
        if num_dead:
            chosen = torch.randint(len(residuals), (num_dead,), generator=generator)
            self.embed[dead] = residuals[chosen.to(residuals.device)].to(self.embed)
            self.cluster_size[dead] = below
            self.embed_avg[dead] = self.embed[dead] * below
        return num_dead


class Quantizer(nn.Module):
    """Fusion and codebooks in training: turns features into unit embeddings and IDs."""

    def __init__(self, dim: int, config: QuantizerConfig) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.fusion = Fusion(dim, config.fusion)
        modality = [] if config.level0 == "none" else [Codebook(NUM_MODALITIES, dim)]
        if config.shared_codebook:
            semantic = [Codebook(config.codebook_size, dim)] * config.levels
        else:
            semantic = [Codebook(config.codebook_size, dim) for _ in range(config.levels)]
        self.codebooks = nn.ModuleList([*modality, *semantic])
        self.classifier = nn.Linear(dim, NUM_MODALITIES) if config.level0 == "classifier" else None
        # Deviation 5: level 0 may be assigned, classified or absent; the paper's is learned.

    @property
    def books(self) -> list[Codebook]:
        """The codebook of each level."""
        return [book for book in self.codebooks if isinstance(book, Codebook)]

    @property
    def has_modality_level(self) -> bool:
        """Whether the first code of an ID encodes the modality."""
        return self.config.level0 != "none"

    def quantize(
        self,
        embeddings: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"] | None = None,
    ) -> Quantized:
        """Assign IDs to unit embeddings, greedily level by level (equations 4 to 6).

        ``modalities`` (0 image, 1 text, 2 image-text) is the modality of each item, or the target modality of
        each query. It is required if level 0 is ``assigned``, and ignored otherwise.
        """
        residual = embeddings
        vectors = torch.zeros_like(embeddings)
        codes: list[Tensor] = []
        residuals: list[Tensor] = []
        losses: list[Tensor] = []
        for level, book in enumerate(self.books):
            chosen = self._choose(level, embeddings, residual, modalities)
            code_vectors = book.embed[chosen]
            residuals.append(residual.detach())
            # Deviation 3: a mean over elements and levels, as in the released code; the paper sums.
            losses.append(F.mse_loss(residual, code_vectors))
            codes.append(chosen)
            vectors = vectors + code_vectors
            residual = residual - code_vectors
        # Deviation 4: one identity for the sum of the levels; the authors' library gave one per level.
        identities = 1 if self.config.gradient == "once" else len(self.books)
        through = embeddings * identities
        return Quantized(
            codes=torch.stack(codes, dim=1),
            vectors=through + (vectors - through).detach(),
            loss=torch.stack(losses).mean(),
            residuals=torch.stack(residuals),
        )

    def to_codebooks(self, measured: Mapping[str, np.ndarray] | None = None) -> Codebooks:
        """Return a copy that encodes items, and holds what was ``measured`` of them."""
        given = {name: as_array(weight).copy() for name, weight in self.state_dict().items()}
        # A learned level 0 is unsupervised, so its modalities are measured on candidates after training.
        is_known = self.config.level0 in ("assigned", "classifier")
        given["level0_modality"] = np.array([0, 1, 2] if is_known else [-1] * NUM_MODALITIES)
        for name, shape in statistic_shapes(self.dim, self.config).items():
            given[name] = np.full(shape, name == "residual_weights", dtype=np.float32)
        given |= measured or {}
        return Codebooks(
            self.dim,
            self.config,
            {name: given[name] for name in weight_shapes(self.dim, self.config)},
        )

    @torch.no_grad()
    def initialise_codebooks(
        self,
        embeddings: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
        *,
        batch_size: int,
        random: np.random.Generator,
    ) -> None:
        """Initialise the codebooks by k-means, level by level; counts are scaled to one batch of pairs."""
        books, is_known = self.books, self.config.level0 in ("assigned", "classifier")
        is_new = [level == 0 or book is not books[level - 1] for level, book in enumerate(books)]
        started = residual_kmeans(
            as_floats(embeddings),
            as_array(modalities) if is_known else None,
            [len(book.embed) for book in books],
            iterations=[
                self.config.kmeans_iterations if new else None for new in is_new
            ],  # shared ones start once
            random=random,
        )
        for book, new, (vectors, chosen) in zip(books, is_new, started, strict=True):
            if new:
                counts = np.bincount(chosen, minlength=len(vectors)) * (
                    2 * batch_size / len(embeddings)
                )
                book.initialise(torch.from_numpy(vectors), torch.from_numpy(counts))

    @torch.no_grad()
    def update_averages(self, quantized: Quantized, *, generator: torch.Generator) -> int:
        """Update all codebooks with a batch (queries, then candidates); return the number of revived codes.

        All ranks stay identical: sums are taken over ranks, and dead codes are redrawn from the gathered
        residuals with a generator that is seeded alike on every rank.
        """
        config, revived = self.config, 0
        for level, book in enumerate(self.books):
            residuals, codes = quantized.residuals[level], quantized.codes[:, level]
            book.update_averages(residuals, codes, decay=config.decay)
            if config.dead_below > 0 and not (level == 0 and self.has_modality_level):
                gathered = torch.cat([parallel.gather(half) for half in residuals.chunk(2)])
                revived += book.revive_dead_codes(
                    gathered, below=config.dead_below, generator=generator
                )
        return revived

    def classify(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items modalities"]:
        """Return modality logits; only for a quantizer whose level 0 is a classifier."""
        logits: Tensor = self.classifier(embeddings)  # type: ignore[misc]
        return logits

    def _choose(
        self, level: int, embeddings: Tensor, residual: Tensor, modalities: Tensor | None
    ) -> Tensor:
        if level == 0 and self.config.level0 == "assigned":
            if modalities is None:
                raise ValueError("level 0 is assigned, so quantize needs the modalities")
            return modalities
        if level == 0 and self.classifier is not None:
            return self.classify(embeddings.detach()).argmax(dim=1)
        vectors = self.books[level].embed
        if vectors.device.type == "cpu":
            return torch.from_numpy(assign(as_floats(residual), as_floats(vectors)))
        with torch.autocast(
            vectors.device.type, enabled=False
        ):  # bfloat16 cannot tell near neighbours apart
            halves = vectors.square().sum(dim=1) / 2
            return torch.addmm(halves, residual.detach().float(), vectors.T, alpha=-1).argmin(dim=1)
