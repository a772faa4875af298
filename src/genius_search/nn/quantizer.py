"""Fusion of features, and modality-decoupled residual quantization into IDs (paper, section 4.2).

Level 0 encodes the modality, the later levels encode meaning from coarse to fine. With e_l the
chosen code vector of level l, level l quantizes the residual r_l of an embedding x:

    r_0 = x,    e_l = the nearest code vector to r_l,    r_{l+1} = r_l − e_l,    x ≈ e_0 + e_1 + … +
    e_L

Codebooks are initialised by k-means and updated by exponential moving averages; they receive no
gradients.
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
"""Added to each code's count when a moving average is divided by it, so that no count is 0."""


class Fusion(nn.Module):
    """Fuses features: h(x, y) = λ·text + (1−λ)·image + MLP([text; image]), then L2-normalised.

    λ is the output of an MLP with a sigmoid (paper, section 4.2.1). An absent modality is a zero
    vector, for which the projection returns its bias; so the network recognises absence. Layer
    names follow the released checkpoint (specification, section 7).
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
        """Return unit embeddings; rows of an absent modality must be zero."""
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
    """Sum of the chosen code vectors; its gradient passes straight through to the embedding."""
    loss: Float[Tensor, ""]
    """L_rq = mean over levels l of ‖r_l − e_l‖² / dim, averaged over the items."""
    residuals: Float[Tensor, "levels items dim"]
    """The residuals r_l that each level quantizes, detached, for the moving averages."""


class Codebook(nn.Module):
    """Code vectors of a level, and the moving averages that define them.

    ``embed`` holds the code vectors, ``cluster_size`` the average number of residuals per batch
    that choose each code, and ``embed_avg`` the average sum of those residuals. The names are those
    of the released checkpoint.
    """

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
        """Initialise code vectors and averages from centroids and their counts of items."""
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
        """Update the moving averages and code vectors with the residuals assigned to each code."""
        # With n the counts, s the sums of residuals and d the decay:
        #     cluster_size ← d · cluster_size + (1 − d) · n
        #     embed_avg    ← d · embed_avg + (1 − d) · s
        #     embed        ← embed_avg / smoothed cluster_size
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
        """Move codes with an average count below ``below`` to random residuals; return how many."""
        dead = self.cluster_size < below
        num_dead = int(dead.sum())
        if num_dead:
            # Drawn on the CPU, so that they do not depend on the device.
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

        Parameters
        ----------
        modalities
            the modality of each item or the target modality of each query: 0 image, 1 text, 2
            image-text. Required if level 0 is ``assigned``, and ignored otherwise.
        """
        residual = embeddings
        vectors = torch.zeros_like(embeddings)
        codes: list[Tensor] = []
        residuals: list[Tensor] = []
        losses: list[Tensor] = []
        for level, book in enumerate(self.books):
            chosen = self._choose_codes(level, embeddings, residual, modalities)
            code_vectors = book.embed[chosen]
            residuals.append(residual.detach())
            # Deviation 3: a mean over elements and levels, as in the released code; the paper sums.
            losses.append(F.mse_loss(residual, code_vectors))
            codes.append(chosen)
            vectors = vectors + code_vectors
            residual = residual - code_vectors
        # Straight-through: the value is the sum of code vectors, the gradient that of the
        # embedding. Deviation 4: one identity for the sum of the levels; the authors' library gave
        # one per level.
        identities = 1 if self.config.gradient == "once" else len(self.books)
        through = embeddings * identities
        return Quantized(
            codes=torch.stack(codes, dim=1),
            vectors=through + (vectors - through).detach(),
            loss=torch.stack(losses).mean(),
            residuals=torch.stack(residuals),
        )

    def to_codebooks(self, statistics: Mapping[str, np.ndarray] | None = None) -> Codebooks:
        """Return a copy in NumPy that encodes items; ``statistics`` were measured of items."""
        weights = {name: as_array(weight).copy() for name, weight in self.state_dict().items()}
        # A learned level 0 is unsupervised, so its modalities are measured on candidates after
        # training.
        codes_are_modalities = self.config.level0 in ("assigned", "classifier")
        level0_modality = [0, 1, 2] if codes_are_modalities else [-1] * NUM_MODALITIES
        weights["level0_modality"] = np.array(level0_modality)
        for name, shape in statistic_shapes(self.dim, self.config).items():
            weights[name] = np.full(shape, name == "residual_weights", dtype=np.float32)
        weights |= statistics or {}
        needed = weight_shapes(self.dim, self.config)
        return Codebooks(self.dim, self.config, {name: weights[name] for name in needed})

    @torch.no_grad()
    def initialise_codebooks(
        self,
        embeddings: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
        *,
        batch_size: int,
        random: np.random.Generator,
    ) -> None:
        """Initialise the codebooks by k-means, level by level (paper, section 4.2.2).

        Counts of items are scaled to a batch of pairs, which has 2 · ``batch_size`` embeddings.
        """
        books = self.books
        level0_is_given = self.config.level0 in ("assigned", "classifier")
        # A shared codebook is the book of several levels; it is initialised at the first of them.
        is_new = [level == 0 or book is not books[level - 1] for level, book in enumerate(books)]
        clusters = residual_kmeans(
            as_floats(embeddings),
            as_array(modalities) if level0_is_given else None,
            [len(book.embed) for book in books],
            iterations=[self.config.kmeans_iterations if new else None for new in is_new],
            random=random,
        )
        scale = 2 * batch_size / len(embeddings)
        for book, new, (vectors, codes) in zip(books, is_new, clusters, strict=True):
            if new:
                counts = np.bincount(codes, minlength=len(vectors)) * scale
                book.initialise(torch.from_numpy(vectors), torch.from_numpy(counts))

    @torch.no_grad()
    def update_averages(self, quantized: Quantized, *, generator: torch.Generator) -> int:
        """Update all codebooks with a batch; return the number of revived codes.

        The batch holds queries, then candidates. All ranks stay identical: sums are taken over
        ranks, and dead codes move to gathered residuals, drawn with a generator that is seeded
        alike on every rank.
        """
        config = self.config
        revived = 0
        for level, book in enumerate(self.books):
            residuals = quantized.residuals[level]
            codes = quantized.codes[:, level]
            book.update_averages(residuals, codes, decay=config.decay)
            if config.dead_below > 0 and not (level == 0 and self.has_modality_level):
                gathered = torch.cat([parallel.gather(half) for half in residuals.chunk(2)])
                revived += book.revive_dead_codes(
                    gathered, below=config.dead_below, generator=generator
                )
        return revived

    def classify(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items modalities"]:
        """Return the logits of modalities; level 0 must be a classifier."""
        logits: Tensor = self.classifier(embeddings)  # type: ignore[misc]
        return logits

    def _choose_codes(
        self, level: int, embeddings: Tensor, residual: Tensor, modalities: Tensor | None
    ) -> Tensor:
        """Return the code of each item at a level, from its embedding and its residual there."""
        if level == 0 and self.config.level0 == "assigned":
            if modalities is None:
                raise ValueError("level 0 is assigned, so quantize() needs the modalities")
            return modalities
        if level == 0 and self.classifier is not None:
            return self.classify(embeddings.detach()).argmax(dim=1)
        vectors = self.books[level].embed
        if vectors.device.type == "cpu":
            return torch.from_numpy(assign(as_floats(residual), as_floats(vectors)))
        # bfloat16 is too coarse to distinguish near neighbours.
        with torch.autocast(vectors.device.type, enabled=False):
            # argmin_c |r − e_c|² = argmin_c (|e_c|²/2 − r·e_c)
            halves = vectors.square().sum(dim=1) / 2
            return torch.addmm(halves, residual.detach().float(), vectors.T, alpha=-1).argmin(dim=1)
