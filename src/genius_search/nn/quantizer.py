"""Modality-decoupled residual quantization of embeddings into IDs (paper, section 4.2.2).

Level 0 encodes the modality, the later levels encode meaning from coarse to fine. Codebooks are initialised
by k-means and updated by exponential moving averages; they receive no gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int16, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import open_artifact
from genius_search.data.features import Features
from genius_search.native.library import CODES, NO_MEMORY, open_library
from genius_search.nn import parallel
from genius_search.nn.codebooks import KIND, METRIC, WEIGHTS, Codebooks, StoredQuantizer, as_array, as_floats
from genius_search.nn.density import NormAndDensity
from genius_search.nn.fusion import make_fusion
from genius_search.nn.spread import BITS, COLUMNS, MOST_CONSTANT, Spread
from genius_search.nn.stored import dim_of, settings_of
from genius_search.nn.weights import load_weights, write_weights
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES
from genius_search.writing import ArtifactWriter

if TYPE_CHECKING:
    from ctypes import CDLL

    from genius_search.nn.health import Health

POOL_SAMPLE: Final = "pool_sample"
"""Name of the pool sample in the weights file; only those that were fitted to a pool have one."""
CHUNK: Final = 16_384
"""Items per block when assigning centroids, to bound memory."""
FUSE_BATCH: Final = 4096
ERRORS_AT_ONCE: Final = 1 << 20
"""Errors of sums in memory at once: 4 MiB, which stay in the cache of a processor."""
COARSE_LEVELS: Final = 3
"""The first semantic levels, whose k-means takes the most iterations."""
AT_ONCE: Final = 1024
"""Vectors whose products with all code vectors are in memory at once."""
SPREAD: Final = 0.3
"""How far k-means starts from the mean, as a share of the distance of drawn samples."""


def assign(
    samples: Float[Tensor, "items dim"], centroids: Float[Tensor, "codes dim"]
) -> Int[Tensor, " items"]:
    """Return the index of the nearest centroid (squared Euclidean); the lowest index wins a tie.

    Distances are computed in full precision even when training in bfloat16, which is too coarse to tell near
    neighbours apart.
    """
    bias = centroids.square().sum(dim=1) / 2
    parts = []
    with torch.autocast(samples.device.type, enabled=False):
        for chunk in samples.split(CHUNK):
            if (
                chunk.device.type == "cpu"
            ):  # by NumPy, whose product takes less time than that of PyTorch's MKL
                products = torch.from_numpy(as_array(chunk) @ as_array(centroids).T)
                parts.append(products.sub_(bias).argmax(dim=1))
            else:
                parts.append(torch.addmm(bias, chunk, centroids.T, alpha=-1).argmin(dim=1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=samples.device)


def kmeans(
    samples: Float[Tensor, "items dim"], size: int, *, iterations: int, generator: torch.Generator
) -> tuple[Float[Tensor, "codes dim"], Int[Tensor, " items"]]:
    """Run Lloyd's algorithm until assignments no longer change, for at most ``iterations`` iterations.

    Returns the centroids and the nearest one of each sample.

    The initial centroids are drawn samples, moved towards the mean of all: in many dimensions a sample is far
    from every other, and a centroid that starts there may keep few. With fewer samples than clusters they are
    drawn with replacement.
    """
    order = torch.randperm(len(samples), generator=generator)
    if len(samples) < size:
        order = torch.randint(len(samples), (size,), generator=generator)
    mean = samples.mean(dim=0)
    centroids = mean + SPREAD * (samples[order[:size].to(samples.device)] - mean)
    chosen = assign(samples, centroids)
    for _ in range(iterations):
        counts = torch.bincount(chosen, minlength=size)[:, None]
        sums = torch.zeros_like(centroids).index_add_(0, chosen, samples)
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
        before, chosen = chosen, assign(samples, centroids)
        if torch.equal(before, chosen):
            break
    return centroids, chosen


def nearest_sums(
    vectors: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], *, beam: int
) -> Int[Tensor, "items levels"]:
    """Approximate each vector by a sum of code vectors, one from each table; return their codes.

    This is a beam search over the levels that keeps ``beam`` partial sums; 1 is the greedy choice. The error
    of a sum follows from the products of its code vectors with the vector and with each other, so that what
    remains of the vector is never computed. On a CPU the compiled library does it, if there is one.
    """
    library = open_library() if vectors.device.type == "cpu" and max(map(len, tables)) <= CODES else None
    if library is not None:
        return torch.from_numpy(
            _compiled_nearest_sums(library, as_floats(vectors), [*map(as_floats, tables)], beam)
        )
    with torch.autocast(vectors.device.type, enabled=False):
        return nearest_sums_plain(vectors, tables, beam=beam)


def _compiled_nearest_sums(
    library: CDLL,
    vectors: Float32[np.ndarray, "items dim"],
    tables: Sequence[Float32[np.ndarray, "_ dim"]],
    beam: int,
) -> Int64[np.ndarray, "items levels"]:
    wide = np.zeros((len(tables), CODES, vectors.shape[1]), np.float32)
    halves = np.full((len(tables), CODES), np.inf, np.float32)
    for level, table in enumerate(tables):
        wide[level, : len(table)] = table
        halves[level, : len(table)] = np.square(table).sum(axis=1) / 2
    every = wide.reshape(-1, vectors.shape[1])
    crossed = np.concatenate([every[: CODES * level] @ wide[level].T for level in range(len(tables))])
    codes = np.empty((len(vectors), len(tables)), np.uint8)
    for start in range(0, len(vectors), AT_ONCE):
        products = vectors[start : start + AT_ONCE] @ every.T
        arrays = [array.ctypes.data for array in (products, halves, crossed)]
        status = library.nearest_sums(
            *arrays, len(products), len(tables), beam, codes[start : start + AT_ONCE].ctypes.data
        )
        if status == NO_MEMORY:
            raise MemoryError
    return codes.astype(np.int64)


def nearest_sums_plain(
    vectors: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], *, beam: int
) -> Int[Tensor, "items levels"]:
    """Do what :func:`nearest_sums` does, in PyTorch."""
    sizes = [len(table) for table in tables]
    starts = torch.tensor([0, *accumulate(sizes)], device=vectors.device)
    every = torch.cat(list(tables))
    parts = []
    products = [every[: starts[level]] @ table.T for level, table in enumerate(tables)]
    halves = [table.square().sum(dim=1) / 2 for table in tables]
    for part in vectors.split(max(1, ERRORS_AT_ONCE // (beam * max(sizes)))):
        codes = torch.zeros(len(part), 1, 0, dtype=torch.int64, device=vectors.device)
        errors = part.new_zeros(len(part), 1)  # half the squared ones, less half the squared vector
        for level, table in enumerate(tables):
            change = torch.addmm(halves[level], part, table.T, alpha=-1)
            longer = errors[..., None] + change[:, None]
            if level:
                earlier = (codes + starts[:level]).flatten(0, 1)
                longer += F.embedding_bag(earlier, products[level], mode="sum").view_as(longer)
            width = min(beam, longer.shape[1] * len(table))
            best = longer.flatten(1).topk(width, dim=1, largest=False)
            errors, parent = best.values, best.indices // len(table)
            codes = codes.gather(1, parent[..., None].expand(-1, -1, level))
            codes = torch.cat([codes, (best.indices % len(table))[..., None]], dim=2)
        parts.append(codes[:, 0])
    return torch.cat(parts)


class Quantized(NamedTuple):
    """Result of quantizing a batch of embeddings."""

    codes: Int[Tensor, "items levels"]
    vectors: Float[Tensor, "items dim"]
    """Sum of the chosen code vectors; its gradient goes straight through to the embedding."""
    loss: Float[Tensor, ""]
    """L_rq: mean squared distance of each residual to its code vector, over elements and levels."""
    residuals: Float[Tensor, "levels items dim"]
    """Input of each level, detached, for the moving averages."""


class EncodedItems(NamedTuple):
    """Items as an index stores them."""

    embeddings: Float[Tensor, "items dim"]
    """Fused embeddings, which the IDs are computed from; unit vectors."""
    codes: Int[Tensor, "items levels"]
    code_cosine: Float[Tensor, " items"]
    """Cosine between an item's embedding and the vector of its ID; ranks the items that share an ID."""
    columns: Int16[Tensor, "items columns"]
    """The rows that an ID table stores: codes, half norm and density (:mod:`genius_search.nn.density`)."""


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
    def start(self, vectors: Float[Tensor, "codes dim"], counts: Float[Tensor, " codes"]) -> None:
        """Initialise code vectors and averages from centroids and their numbers of items."""
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
        """Update the moving averages with the residuals that were assigned to each code."""
        size = len(self.embed)
        counts = torch.bincount(codes, minlength=size).to(self.cluster_size)
        sums = torch.zeros_like(self.embed_avg).index_add_(0, codes, residuals.to(self.embed_avg))
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
    """Fusion and codebooks: turns features into unit embeddings and IDs."""

    level0_modality: Tensor
    usage: Float[Tensor, "modalities codes"]
    """Number of items by their first code and that of the first semantic level; zeros if not measured."""
    spreads: Float[Tensor, "modalities 3"]
    """Of products and densities (:class:`genius_search.nn.spread.Spread`)."""
    residual_weights: Float[Tensor, "bits dim"]
    constant: Float[Tensor, "directions dim"]
    """Of stored residuals (:class:`genius_search.nn.spread.Residuals`); unused directions are zeros."""
    pool_sample: Int16[Tensor, "sampled levels"]
    """Distinct IDs of the pool that the codebooks were fitted to, used to measure densities; empty if they
    were trained."""

    def __init__(self, dim: int, config: QuantizerConfig) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.fusion = make_fusion(dim, config.fusion)
        modality = [] if config.level0 == "none" else [Codebook(NUM_MODALITIES, dim)]
        if config.shared_codebook:
            semantic = [Codebook(config.codebook_size, dim)] * config.levels
        else:
            semantic = [Codebook(config.codebook_size, dim) for _ in range(config.levels)]
        self.codebooks = nn.ModuleList([*modality, *semantic])
        self.classifier = nn.Linear(dim, NUM_MODALITIES) if config.level0 == "classifier" else None
        # Deviation 5: level 0 may be assigned, classified or absent; the paper's is learned.
        # Modality of each level-0 code (0 image, 1 text, 2 image-text), −1 while unknown. A learned level 0
        # is unsupervised, so its modalities are measured on candidates after training.
        known = config.level0 in ("assigned", "classifier")
        self.register_buffer("level0_modality", torch.tensor([0, 1, 2] if known else [-1] * NUM_MODALITIES))
        modalities = NUM_MODALITIES if self.has_modality_level else 1
        self.register_buffer("usage", torch.zeros(modalities, config.codebook_size))
        self.register_buffer("spreads", torch.zeros(modalities, COLUMNS))
        self.register_buffer("residual_weights", torch.ones(len(BITS), dim))
        self.register_buffer("constant", torch.zeros(MOST_CONSTANT, dim))
        # Not a buffer, since its length varies; on the CPU even if the weights are on "meta" to read a file.
        self.pool_sample = torch.empty(0, self.num_levels, dtype=torch.int16, device="cpu")
        self.metric: Float[Tensor, "dim dim"] | None = None
        """Symmetric matrix A: codes are chosen by the length of A times what they leave of an item. None for
        the identity. With :func:`genius_search.training.codebooks.query_metric` that is the error of queries'
        products."""
        self._norm_and_density: NormAndDensity | None = None

    @property
    def books(self) -> list[Codebook]:
        """The codebook of each level."""
        return [book for book in self.codebooks if isinstance(book, Codebook)]

    @property
    def has_modality_level(self) -> bool:
        """Whether the first code of an ID encodes the modality."""
        return self.config.level0 != "none"

    @property
    def device(self) -> torch.device:
        """Device of the codebooks."""
        return self.books[0].embed.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""
        return tuple(len(book.embed) for book in self.books)

    @property
    def num_levels(self) -> int:
        """Codes in an ID, the modality code included."""
        return len(self.codebooks)

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the code vectors of each level."""
        return [book.embed for book in self.books]

    def quantize(
        self, embeddings: Float[Tensor, "items dim"], modalities: Int[Tensor, " items"] | None = None
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
        identities = 1 if self.config.gradient == "once" else self.num_levels
        through = embeddings * identities
        return Quantized(
            codes=torch.stack(codes, dim=1),
            vectors=through + (vectors - through).detach(),
            loss=torch.stack(losses).mean(),
            residuals=torch.stack(residuals),
        )

    def decode(self, codes: Int[Tensor, "items levels"]) -> Float[Tensor, "items dim"]:
        """Return the vector of each ID: the sum of its code vectors."""
        levels = zip(self.tables(), codes.to(self.device).T, strict=False)
        nothing = torch.zeros(len(codes), self.dim, device=self.device)
        return sum((table[own] for table, own in levels), nothing)

    @property
    def norm_and_density(self) -> NormAndDensity:
        """Measures half norms and densities of IDs with the current code vectors and pool sample."""
        if self._norm_and_density is None:
            self._norm_and_density = NormAndDensity(
                self.tables(),
                has_modality_level=self.has_modality_level,
                norm_weight=self.config.norm_weight,
                sample=self.pool_sample,
            )
        return self._norm_and_density

    def set_pool_sample(self, ids: Int[Tensor, "sampled levels"]) -> None:
        """Set the IDs that densities are measured against; they must be distinct."""
        self.pool_sample = ids.to("cpu", torch.int16)
        self._norm_and_density = None

    def in_numpy(self) -> Codebooks:
        """Return a copy of what searching needs."""
        weights = {name: as_array(weight).copy() for name, weight in self.state_dict().items()}
        return Codebooks(self.dim, self.config, weights)

    @property
    def spread(self) -> Spread:
        """By how much products and densities differ; if it was not measured, queries are not scaled."""
        return self.in_numpy().spread

    @torch.no_grad()
    def encode_items(
        self,
        image: Float[Tensor, "items dim"],
        text: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
    ) -> EncodedItems:
        """Return embeddings and IDs of items, on the CPU; features are zero where a modality is absent."""
        embeddings = self.fusion(image.to(self.device), text.to(self.device))
        codes = self.assign_ids(embeddings, modalities.to(self.device))
        cosine = F.cosine_similarity(embeddings, self.decode(codes), dim=-1)
        columns = torch.cat([codes.short(), self.norm_and_density.columns(codes)], dim=1)
        return EncodedItems(embeddings.cpu(), codes.cpu(), cosine.cpu(), columns.cpu())

    @torch.no_grad()
    def start_codebooks(
        self,
        embeddings: Float[Tensor, "items dim"],
        modalities: Int[Tensor, " items"],
        *,
        batch_size: int,
        generator: torch.Generator,
        deep_iterations: int | None = None,
    ) -> None:
        """Initialise the codebooks by k-means, level by level; counts are scaled to one batch of pairs.

        ``deep_iterations`` are those of k-means below the third semantic level, by default as many as above.
        """
        self._norm_and_density = None
        residual = embeddings
        scale = 2 * batch_size / len(embeddings)
        for level, book in enumerate(self.books):
            if level == 0 and self.config.level0 in ("assigned", "classifier"):
                chosen = modalities
                counts = torch.bincount(chosen, minlength=NUM_MODALITIES).float()
                sums = torch.zeros_like(book.embed).index_add_(0, chosen, residual)
                book.start(sums / counts.clamp(min=1)[:, None], counts * scale)
            elif level > 0 and book is self.books[level - 1]:  # a shared codebook starts once
                chosen = assign(residual, book.embed)
            else:
                iterations, size = self.config.kmeans_iterations, len(book.embed)
                if deep_iterations is not None and level - self.has_modality_level >= COARSE_LEVELS:
                    iterations = deep_iterations
                centroids, chosen = kmeans(residual, size, iterations=iterations, generator=generator)
                book.start(centroids, torch.bincount(chosen, minlength=size).to(residual.dtype) * scale)
            residual = residual - book.embed[chosen]

    @torch.no_grad()
    def follow(self, quantized: Quantized, *, generator: torch.Generator) -> int:
        """Update all codebooks with a batch (queries, then candidates); return the number of revived codes.

        All ranks stay identical: sums are taken over ranks, and dead codes are redrawn from the gathered
        residuals with a generator that is seeded alike on every rank.
        """
        self._norm_and_density = None
        config, revived = self.config, 0
        for level, book in enumerate(self.books):
            residuals, codes = quantized.residuals[level], quantized.codes[:, level]
            book.follow(residuals, codes, decay=config.decay, laplace=config.laplace)
            if config.dead_below > 0 and not (level == 0 and self.has_modality_level):
                gathered = parallel.gather_pairs(residuals)
                revived += book.revive(gathered, below=config.dead_below, generator=generator)
        return revived

    def classify(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items modalities"]:
        """Return modality logits; only for a quantizer whose level 0 is a classifier."""
        logits: Tensor = self.classifier(embeddings)  # type: ignore[misc]
        return logits

    def assign_ids(
        self, embeddings: Float[Tensor, "items dim"], modalities: Int[Tensor, " items"]
    ) -> Int[Tensor, "items levels"]:
        """Return the IDs of unit embeddings; the semantic codes are chosen by beam search (deviation 30)."""
        tables, beam = self.tables(), self.config.encoding_beam
        if beam == 1:
            return self.quantize(embeddings, modalities).codes
        if not self.has_modality_level:
            return nearest_sums(embeddings, tables, beam=beam)
        first = self._choose(0, embeddings, embeddings, modalities)
        residuals, tables = embeddings - tables[0][first], tables[1:]
        if self.metric is not None:
            residuals, tables = residuals @ self.metric, [table @ self.metric for table in tables]
        semantic = nearest_sums(residuals, tables, beam=beam)
        return torch.cat([first[:, None], semantic], dim=1)

    def _choose(self, level: int, embeddings: Tensor, residual: Tensor, modalities: Tensor | None) -> Tensor:
        if level == 0 and self.config.level0 == "assigned":
            if modalities is None:
                raise ValueError("level 0 is assigned, so quantize needs the modalities")
            return modalities
        if level == 0 and self.classifier is not None:
            return self.classify(embeddings.detach()).argmax(dim=1)
        return assign(residual.detach(), self.books[level].embed)


def write_quantizer(writer: ArtifactWriter, quantizer: Quantizer, health: Health | None) -> StoredQuantizer:
    """Write weights and manifest of a quantizer; ``health`` is None if its IDs were not examined yet."""
    tensors = dict(quantizer.state_dict())
    if len(quantizer.pool_sample):
        tensors[POOL_SAMPLE] = quantizer.pool_sample
    if quantizer.metric is not None:
        tensors[METRIC] = quantizer.metric
    write_weights(writer.path / WEIGHTS, tensors)
    facts = {"dim": quantizer.dim, "health": None if health is None else dataclasses.asdict(health)}
    return StoredQuantizer(writer.finish(facts=facts).folder, device=str(quantizer.device))


def load_quantizer(folder: Path, *, device: str = "cpu") -> Quantizer:
    """Load a quantizer from its folder; raise :class:`ArtifactMismatch` where its files do not fit."""
    manifest = open_artifact(folder, kind=KIND)
    make = partial(Quantizer, dim_of(manifest), settings_of(QuantizerConfig, manifest))
    return load_weights(folder / WEIGHTS, make, change=_take_optional).to(device).eval()


def _take_optional(quantizer: Quantizer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a quantizer its pool sample and metric, and return the other tensors."""
    quantizer.set_pool_sample(tensors.pop(POOL_SAMPLE, quantizer.pool_sample))
    quantizer.metric = tensors.pop(METRIC, None)
    return tensors


def encode(quantizer: Quantizer, features: Features, rows: np.ndarray | None = None) -> EncodedItems:
    """Encode candidates (all, or the given rows) into embeddings and IDs."""
    rows = np.arange(len(features)) if rows is None else rows
    parts: list[EncodedItems] = []
    for start in range(0, len(rows), FUSE_BATCH):
        chosen = rows[start : start + FUSE_BATCH]
        batch = features.gather(chosen)
        modalities = torch.from_numpy(features.modality[chosen].astype(np.int64))
        parts.append(quantizer.encode_items(batch.image, batch.text, modalities))
    return EncodedItems(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def fuse(quantizer: Quantizer, features: Features) -> Float[Tensor, "rows dim"]:
    """Return the fused embeddings of all rows as 16-bit floats on the CPU."""
    device = quantizer.device
    output = torch.empty(len(features), features.dim, dtype=torch.float16)
    for rows, batch in features.batches(FUSE_BATCH):
        output[rows] = quantizer.fusion(batch.image.to(device), batch.text.to(device)).half().cpu()
    return output
