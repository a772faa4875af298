"""Modality-decoupled residual quantization: an embedding becomes an ID (paper, section 4.2.2).

Level 0 stands for the modality, the others for meaning, coarse to fine. Codebooks start by k-means and
follow by exponential moving average; no gradient reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int, Int16, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.config import QuantizerConfig
from genius_search.nn import parallel
from genius_search.nn.density import Marker
from genius_search.nn.fusion import Fusion

CHUNK = 16_384
"""Items compared with all centroids at a time, which bounds memory."""


class Clusters(NamedTuple):
    """Centroids and how many samples each stands for."""

    centroids: Float[Tensor, "codes dim"]
    counts: Float[Tensor, " codes"]


def assign(
    samples: Float[Tensor, "items dim"], centroids: Float[Tensor, "codes dim"]
) -> Int[Tensor, " items"]:
    """Index of the nearest centroid (squared Euclidean); the lowest index wins a tie.

    In full precision even while training in bfloat16, which cannot tell near neighbours apart.
    """
    bias = centroids.square().sum(dim=1) / 2
    with torch.autocast(samples.device.type, enabled=False):
        parts = [
            torch.addmm(bias, chunk, centroids.T, alpha=-1).argmin(dim=1) for chunk in samples.split(CHUNK)
        ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=samples.device)


def kmeans(
    samples: Float[Tensor, "items dim"], size: int, *, iterations: int, generator: torch.Generator
) -> Clusters:
    """Lloyd's algorithm until nothing moves or ``iterations`` are done.

    With fewer samples than clusters, samples are drawn with replacement as seeds.
    """
    order = torch.randperm(len(samples), generator=generator)
    if len(samples) < size:
        order = torch.randint(len(samples), (size,), generator=generator)
    centroids = samples[order[:size].to(samples.device)].clone()
    chosen = assign(samples, centroids)
    counts = torch.bincount(chosen, minlength=size)
    for _ in range(iterations):
        sums = torch.zeros_like(centroids).index_add_(0, chosen, samples)
        means = sums / counts.clamp(min=1)[:, None]
        centroids = torch.where((counts > 0)[:, None], means, centroids)
        moved = assign(samples, centroids)
        if torch.equal(moved, chosen):
            break
        chosen = moved
        counts = torch.bincount(chosen, minlength=size)
    return Clusters(centroids=centroids, counts=counts.to(samples.dtype))


DISTANCES_AT_ONCE: Final = 1 << 24
"""Distances in memory at once: 64 MiB."""


def nearest_sums(
    residuals: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], *, beam: int
) -> Int[Tensor, "items levels"]:
    """Codes whose vectors add up to something near each residual, keeping ``beam`` partial IDs a level.

    With a beam of one these are the greedy choices.
    """
    largest = max(len(table) for table in tables)
    at_once = max(1, DISTANCES_AT_ONCE // (beam * largest))
    parts = [_nearest(chunk, tables, beam) for chunk in residuals.split(at_once)]
    return torch.cat(parts)


def _nearest(
    residuals: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], beam: int
) -> Int[Tensor, "items levels"]:
    items, dim = residuals.shape
    left = residuals[:, None]  # of each partial ID
    halves = residuals.square().sum(dim=1, keepdim=True) / 2  # of the squared length of what is left
    codes = torch.zeros(items, 1, 0, dtype=torch.int64, device=residuals.device)
    for table in tables:
        width = left.shape[1]
        nearer = torch.addmm(table.square().sum(dim=1) / 2, left.flatten(0, 1), table.T, alpha=-1)
        grown = nearer.view(items, width, len(table)).add_(halves[..., None])
        kept = min(beam, width * len(table))
        halves, best = grown.flatten(1).topk(kept, dim=1, largest=False)
        came_from, chosen = best // len(table), best % len(table)
        left = left.gather(1, came_from[..., None].expand(-1, -1, dim)) - table[chosen]
        codes = codes.gather(1, came_from[..., None].expand(-1, -1, codes.shape[2]))
        codes = torch.cat([codes, chosen[..., None]], dim=2)
    return codes[:, 0]


NUM_MODALITIES = 3


class Quantized(NamedTuple):
    """What quantization gives for a batch of embeddings."""

    codes: Int[Tensor, "items levels"]
    vectors: Float[Tensor, "items dim"]
    """Sum of the chosen code vectors; its gradient goes straight through to the embedding."""
    loss: Float[Tensor, ""]
    """L_rq: mean squared distance of each residual to its code vector, over elements and levels."""
    residuals: Float[Tensor, "levels items dim"]
    """What each level was given; detached. The moving average learns from it."""


class EncodedItems(NamedTuple):
    """Items as an index keeps them."""

    embeddings: Float[Tensor, "items dim"]
    """Unit vectors: the fused embeddings that IDs are made from."""
    codes: Int[Tensor, "items levels"]
    typicality: Float[Tensor, " items"]
    """Cosine between an embedding and the vector of its ID; orders items that share one."""
    marks: Int16[Tensor, "items marks"]
    """What follows from the codes and ranking needs: half norm and density (:mod:`genius_search.nn.density`)."""

    @property
    def kept(self) -> Int16[Tensor, "items columns"]:
        """What a table of IDs keeps: the codes, then their marks."""
        return torch.cat([self.codes.short(), self.marks], dim=1)


class Codebook(nn.Module):
    """The code vectors of one level and the running averages they follow."""

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(size, dim))
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed_avg", torch.zeros(size, dim))

    @torch.no_grad()
    def start(self, vectors: Float[Tensor, "codes dim"], counts: Float[Tensor, " codes"]) -> None:
        """Begin from these vectors, each standing for that many items."""
        self.embed.copy_(vectors)
        self.cluster_size.copy_(counts)
        self.embed_avg.copy_(vectors * counts[:, None])

    @torch.no_grad()
    def follow(
        self,
        residuals: Float[Tensor, "items dim"],
        codes: Int[Tensor, " items"],
        *,
        decay: float,
        laplace: float,
    ) -> None:
        """One step of the moving average towards the residuals that chose each code."""
        size = len(self.embed)
        counts = torch.zeros_like(self.cluster_size).index_add_(
            0, codes, torch.ones_like(codes, dtype=self.cluster_size.dtype)
        )
        sums = torch.zeros_like(self.embed_avg).index_add_(0, codes, residuals.to(self.embed_avg.dtype))
        parallel.sum_over_ranks([counts, sums])
        self.cluster_size.lerp_(counts, 1 - decay)
        self.embed_avg.lerp_(sums, 1 - decay)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + laplace) / (total + size * laplace) * total
        self.embed.copy_(self.embed_avg / smoothed[:, None])

    @torch.no_grad()
    def revive(
        self, residuals: Float[Tensor, "items dim"], *, below: float, generator: torch.Generator
    ) -> int:
        """Move every code with an average count under ``below`` to a random residual; how many moved."""
        dead = self.cluster_size < below
        num_dead = int(dead.sum())
        if num_dead == 0 or len(residuals) == 0:
            return 0
        chosen = torch.randint(len(residuals), (num_dead,), generator=generator)
        vectors = residuals[chosen.to(residuals.device)].to(self.embed.dtype)
        self.embed[dead] = vectors
        self.cluster_size[dead] = below
        self.embed_avg[dead] = vectors * below
        return num_dead


class Quantizer(nn.Module):
    """Fusion and codebooks: features in, unit embeddings and IDs out."""

    level0_modality: Tensor
    pool_sample: Int16[Tensor, "sampled levels"]
    """Different IDs of the pool that the codebooks were refitted to; empty where they were not. Says how
    crowded it is around an ID (:mod:`genius_search.nn.density`)."""

    def __init__(self, dim: int, config: QuantizerConfig) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.fusion = Fusion(dim, config.fusion)
        modality = [] if config.level0 == "none" else [Codebook(NUM_MODALITIES, dim)]
        if config.shared_codebook:
            shared = Codebook(config.codebook_size, dim)
            semantic = [shared] * config.levels
        else:
            semantic = [Codebook(config.codebook_size, dim) for _ in range(config.levels)]
        self.codebooks = nn.ModuleList([*modality, *semantic])
        self.classifier = nn.Linear(dim, NUM_MODALITIES) if config.level0 == "classifier" else None
        # Deviation 5: level 0 may be assigned, classified or absent; the paper's is learned.
        # What each level-0 code stands for (0 image, 1 text, 2 image-text); −1 while unknown. Nothing
        # supervises a learned level 0, so this is measured on candidates after training.
        known = config.level0 in ("assigned", "classifier")
        self.register_buffer(
            "level0_modality", torch.arange(3) if known else torch.full((NUM_MODALITIES,), -1)
        )
        # No buffer, since its length is no setting; on the CPU, also where the weights come later ("meta").
        self.pool_sample = torch.empty(0, self.num_levels, dtype=torch.int16, device="cpu")
        self._marker: Marker | None = None

    @property
    def has_modality_level(self) -> bool:
        """Whether an ID's first code stands for the modality."""
        return self.config.level0 != "none"

    @property
    def device(self) -> torch.device:
        """Where the codebooks are."""
        return self._books()[0].embed.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""
        return tuple(len(book.embed) for book in self._books())

    @property
    def num_levels(self) -> int:
        """Codes in an ID, the modality code included."""
        return len(self.codebooks)

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """The code vectors of each level."""
        return [book.embed for book in self._books()]

    def quantize(
        self, embeddings: Float[Tensor, "items dim"], modalities: Int[Tensor, " items"] | None = None
    ) -> Quantized:
        """IDs of unit embeddings (equations 4 to 6).

        ``modalities`` (0 image, 1 text, 2 image-text; of the item itself, or for a query of what it wants)
        is used when level 0 is ``assigned`` and required then; the other kinds of level 0 ignore it.
        """
        residual = embeddings
        vectors = torch.zeros_like(embeddings)
        codes: list[Tensor] = []
        residuals: list[Tensor] = []
        losses: list[Tensor] = []
        for level, book in enumerate(self._books()):
            chosen = self._choose(level, book, embeddings, residual, modalities)
            code_vectors = book.embed[chosen]
            residuals.append(residual.detach())
            # Deviation 3: a mean over elements and levels, as in the released code; the paper sums.
            losses.append(F.mse_loss(residual, code_vectors))
            codes.append(chosen)
            vectors = vectors + code_vectors
            residual = residual - code_vectors
        # Deviation 4: one identity for the sum of the levels; the authors' library gave one per level.
        identities = 1 if self.config.gradient == "once" else self.num_levels
        through = embeddings * identities
        return Quantized(
            codes=torch.stack(codes, dim=1),
            vectors=through + (vectors - through).detach(),
            loss=torch.stack(losses).mean(),
            residuals=torch.stack(residuals),
        )

    def decode(self, codes: Int[Tensor, "items levels"]) -> Float[Tensor, "items dim"]:
        """The vector an ID stands for: the sum of its code vectors."""
        codes = codes.to(self.device)
        total = torch.zeros(len(codes), self.dim, device=self.device)
        for level, book in enumerate(self._books()):
            total = total + book.embed[codes[:, level]]
        return total

    def marks(self, codes: Int[Tensor, "items levels"]) -> Int16[Tensor, "items marks"]:
        """What follows from IDs and ranking needs, a byte each: half norm and density."""
        return self._known_marker().marks(codes)

    def crowding(
        self, embeddings: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
    ) -> UInt8[Tensor, " items"]:
        """How crowded it is around items themselves, for who ranks by embeddings: a byte each."""
        return self._known_marker().crowding(embeddings, codes)

    def keep_sample(self, ids: Int[Tensor, "sampled levels"]) -> None:
        """Let these IDs, all different, say how crowded it is around others."""
        self.pool_sample = ids.to("cpu", torch.int16)
        self._marker = None

    @torch.no_grad()
    def encode_items(
        self,
        image: Float[Tensor, "items dim"],
        text: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
    ) -> EncodedItems:
        """Embeddings and IDs of items, on the CPU; features are zero where a modality is absent."""
        embeddings = self.fusion(image.to(self.device), text.to(self.device))
        codes = self._encode(embeddings, modalities.to(self.device))
        typicality = F.cosine_similarity(embeddings, self.decode(codes), dim=-1)
        return EncodedItems(embeddings.cpu(), codes.cpu(), typicality.cpu(), self.marks(codes).cpu())

    @torch.no_grad()
    def start_codebooks(
        self,
        embeddings: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
        *,
        batch_size: int,
        generator: torch.Generator,
    ) -> None:
        """K-means, level by level on the residuals; counts are scaled to one batch of queries and targets."""
        self._marker = None
        residual = embeddings
        scale = 2 * batch_size / len(embeddings)
        seen: set[int] = set()
        for level, book in enumerate(self._books()):
            if level == 0 and self.config.level0 in ("assigned", "classifier"):
                chosen = modalities
                counts = torch.bincount(chosen, minlength=NUM_MODALITIES).float()
                sums = torch.zeros_like(book.embed).index_add_(0, chosen, residual)
                book.start(sums / counts.clamp(min=1)[:, None], counts * scale)
            else:
                if id(book) not in seen:
                    started = kmeans(
                        residual,
                        len(book.embed),
                        iterations=self.config.kmeans_iterations,
                        generator=generator,
                    )
                    book.start(started.centroids, started.counts * scale)
                chosen = assign(residual, book.embed)
            seen.add(id(book))
            residual = residual - book.embed[chosen]

    @torch.no_grad()
    def follow(self, quantized: Quantized, *, generator: torch.Generator) -> int:
        """One moving-average step after a batch of queries, then their candidates; how many codes revived.

        All ranks do the same: sums are over ranks and revival draws from the gathered residuals with a
        generator that every rank seeds alike.
        """
        self._marker = None
        revived = 0
        for level, book in enumerate(self._books()):
            residuals = quantized.residuals[level]
            book.follow(
                residuals, quantized.codes[:, level], decay=self.config.decay, laplace=self.config.laplace
            )
            is_modality = level == 0 and self.has_modality_level
            if not is_modality and self.config.dead_below > 0:
                everyone = parallel.gather_pairs(residuals)
                revived += book.revive(everyone, below=self.config.dead_below, generator=generator)
        return revived

    def classify(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items modalities"]:
        """Logits of the modality, when level 0 is a classifier."""
        if self.classifier is None:
            raise ValueError("this quantizer has no modality classifier")
        logits: Tensor = self.classifier(embeddings)
        return logits

    def _known_marker(self) -> Marker:
        if self._marker is None:
            self._marker = Marker(
                self.tables(), has_modality_level=self.has_modality_level, sample=self.pool_sample
            )
        return self._marker

    def _books(self) -> list[Codebook]:
        return [book for book in self.codebooks if isinstance(book, Codebook)]

    def _encode(
        self, embeddings: Float[Tensor, "items dim"], modalities: Int[Tensor, " items"]
    ) -> Int[Tensor, "items levels"]:
        """The IDs that items keep: semantic codes are chosen together (deviation 30)."""
        beam = self.config.encoding_beam
        if beam == 1:
            return self.quantize(embeddings, modalities).codes
        tables = self.tables()
        if not self.has_modality_level:
            return nearest_sums(embeddings, tables, beam=beam)
        first = self._choose(0, self._books()[0], embeddings, embeddings, modalities)
        found = nearest_sums(embeddings - tables[0][first], tables[1:], beam=beam)
        return torch.cat([first[:, None], found], dim=1)

    def _choose(
        self,
        level: int,
        book: Codebook,
        embeddings: Tensor,
        residual: Tensor,
        modalities: Tensor | None,
    ) -> Tensor:
        if level == 0 and self.config.level0 == "assigned":
            if modalities is None:
                raise ValueError("level 0 is assigned, so quantize needs the modalities")
            return modalities
        if level == 0 and self.classifier is not None:
            return self.classify(embeddings.detach()).argmax(dim=1)
        return assign(residual.detach(), book.embed)
