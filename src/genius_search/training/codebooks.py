"""Codebooks fitted to a pool without training, for models that need neither pairs nor a generator."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int8, Shaped
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import FusionConfig, to_json
from genius_search.errors import UsageError
from genius_search.nn.codebooks import KIND, METRIC, StoredQuantizer, as_floats, normalize
from genius_search.nn.health import examine
from genius_search.nn.quantizer import (
    Codebook,
    Quantizer,
    nearest_sums,
    write_quantizer,
)
from genius_search.nn.spread import MOST_CONSTANT, Residuals, Spread, sum_codes
from genius_search.progress import Progress
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES
from genius_search.search.vectors import RESIDUAL_BITS, dequantize, quantize
from genius_search.writing import ArtifactWriter

LEVELS: Final = 12
MAX_LEVELS: Final = 128
MAX_CODES: Final = 256
"""Largest codebook: a code fits into one byte."""
MIN_CODES: Final = 4
ITEMS_PER_CODE: Final = 30
"""Codebooks shrink with the pool so that a code of the first level has at least about this many items."""
MAX_SAMPLE: Final = 49_152
"""Most items that the codebooks are fitted to."""
DEEP_ITERATIONS: Final = 3
"""Iterations of k-means at the deeper levels. With 15, codes alone find .003 more of exact search's first ten
(Flickr8k, CLIP), and k-means takes more than twice as long."""
FITTING_BEAM: Final = 4
"""Width of the beam search by which codes are chosen before code vectors are moved."""
SWEEPS: Final = 2
"""How often the code vectors of every level are moved to fit the items' codes."""
NORM_WEIGHT: Final = 0.5
"""Weight of half norms for embeddings that were not trained, chosen on Flickr8k's validation queries.
Distance (1) finds fewer of exact search's first five, above all if items are unlike the codebooks'."""
SAMPLED_IDS: Final = 2048
"""Most items of a modality whose IDs are sampled. More find no more, and take longer with every item."""
MEASURED: Final = 8192
"""Most items that spreads are measured of."""
ENOUGH: Final = 2
"""Fewer items for each dimension say too little of how much the dimensions differ."""
CONSTANT: Final = 1e-6
"""Share of the mean variance below which a direction does not differ between items."""
TINY: Final = 1e-30
POWER: Final = 0.5
EVENLY: Final = 0.3
"""Of :func:`query_metric`. Codes alone then find .79 to .82 of exact search's first ten with CLIP, .86 to .88
with trained adapters; 1 and more powers of the covariance find no more."""
FEWEST_QUERIES: Final = 100
FITTED: Final = "fitted_items"
"""Input of the quantizer's manifest: the number of items that its codebooks were fitted to."""


def codebook_size(items: int) -> int:
    """Return the number of codes at each level for a pool: a power of two from 4 to 256."""
    wanted = max(1, items // ITEMS_PER_CODE)
    return int(min(MAX_CODES, max(MIN_CODES, 1 << (wanted - 1).bit_length())))


def check_levels(levels: int) -> int:
    """Return a number of levels; raise :class:`UsageError` unless it is from 1 to :data:`MAX_LEVELS`."""
    if not 1 <= levels <= MAX_LEVELS:
        raise UsageError(f"levels is {levels}, it must be from 1 to {MAX_LEVELS}; each is a byte of an ID")
    return levels


def fit_codebooks(
    embeddings: Float[Tensor, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    folder: Path,
    *,
    items: int,
    inputs: Mapping[str, str],
    fused_by: Quantizer | None = None,
    metric: Float[Tensor, "dim dim"] | None = None,
    levels: int = LEVELS,
    seed: int = 0,
    progress: Progress,
) -> StoredQuantizer:
    """Fit codebooks to the embeddings of a pool, or open the folder if this was done already.

    Level 0 is the item's modality, with the modality's mean as its vector. The vectors of the other levels
    start from k-means on the residuals, level by level; then items get the codes that a beam search over all
    levels finds, and each code's vector moves to the mean of what the other levels leave of its items,
    several times in turn.

    Parameters
    ----------
    embeddings, modalities
        unit vectors of the pool's items, or of a sample of at most :data:`MAX_SAMPLE`.
    folder
        receives the quantizer.
    items
        number of items in the pool.
    inputs
        fingerprints of what the embeddings depend on.
    fused_by
        the quantizer whose fusion gave the embeddings, and which the new one gets; by default a sum.
    metric
        by which errors of codes are measured (:func:`query_metric`); by default all directions count alike.
    levels
        number of codes beside the modality's, each a byte of an ID.
    """
    is_trained = fused_by is not None and fused_by.config.fusion.kind != "sum"
    config = QuantizerConfig(
        levels=levels,
        codebook_size=codebook_size(items),
        level0="assigned",
        encoding_beam=8,
        norm_weight=1.0 if is_trained else NORM_WEIGHT,
        kmeans_iterations=15,
        fusion=FusionConfig(kind="sum"),
    )
    final = config if fused_by is None else replace(config, fusion=fused_by.config.fusion)
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config=to_json(final),
        inputs={**inputs, FITTED: str(items), "seed": str(seed), **_metric_input(metric)},
    )
    if writer.finished() is not None:
        return StoredQuantizer(folder)
    quantizer = Quantizer(embeddings.shape[1], config)  # its sum leaves unit vectors as they are
    codes = torch.from_numpy(modalities.astype(np.int64))
    if metric is None:
        _fit(quantizer, embeddings, codes, seed, progress)
    else:
        _fit(quantizer, embeddings @ metric, codes, seed, progress)
        for book in quantizer.books:  # back to where products with queries are what they were
            book.start(torch.linalg.solve(metric, book.embed.T).T, book.cluster_size)
        quantizer.metric = metric
    drawn = np.random.default_rng(seed).permutation(len(embeddings))
    per_modality = [drawn[modalities[drawn] == modality][:SAMPLED_IDS] for modality in range(NUM_MODALITIES)]
    sampled = torch.from_numpy(np.concatenate(per_modality))
    quantizer.set_pool_sample(quantizer.assign_ids(embeddings[sampled], codes[sampled]).unique(dim=0))
    measured = torch.from_numpy(drawn[:MEASURED])
    ids = quantizer.assign_ids(embeddings[measured], codes[measured])
    measure_items(quantizer, embeddings[measured], ids)
    health = examine(
        ids.numpy(),
        codes[measured].numpy(),
        F.cosine_similarity(embeddings[measured], quantizer.decode(ids)).numpy(),
        sizes=quantizer.sizes,
        has_modality_level=True,
    )
    if fused_by is not None:
        quantizer.config, quantizer.fusion = final, fused_by.fusion
    return write_quantizer(writer, quantizer, health)


def query_metric(queries: Shaped[np.ndarray, ...], dim: int) -> Float[Tensor, "dim dim"]:
    """Return a matrix that makes errors of codes count by how much queries notice them.

    The error of a query's product with an item is q·e, and E[(q·e)²] = eᵀΣe with Σ the covariance of queries.
    The matrix is (Σ / s + λ)^(a/2) with s the mean variance, λ = :data:`EVENLY` and a = :data:`POWER`, so
    that directions that these queries do not know still count. What is the same for all queries, such as the
    cone that a CLIP model's texts lie in, does not.

    Deviation 33: the paper's codes know nothing of queries (compare LeanVec-OOD, arXiv:2312.16335).

    Raises
    ------
    UsageError
        There are fewer than :data:`FEWEST_QUERIES` queries, or not ``dim`` finite numbers in each.
    """
    if queries.ndim != 2 or queries.shape[1] != dim or len(queries) < FEWEST_QUERIES:
        raise UsageError(
            f"the query vectors are of shape {queries.shape}; expected {dim} numbers in each row, and at "
            f"least {FEWEST_QUERIES} rows, for fewer say too little of what is asked"
        )
    if not np.isfinite(queries).all():
        raise UsageError("the query vectors have a number that is not finite")
    units = normalize(queries.astype(np.float64))
    variances, directions = np.linalg.eigh(np.cov(units.T, bias=True))
    factors = (variances.clip(min=0) / max(variances.mean(), TINY) + EVENLY) ** (POWER / 2)
    return torch.from_numpy(((directions * factors) @ directions.T).astype(np.float32))


def _metric_input(metric: Float[Tensor, "dim dim"] | None) -> dict[str, str]:
    return {} if metric is None else {METRIC: hashlib.sha256(metric.numpy().tobytes()).hexdigest()}


@torch.no_grad()
def _fit(
    quantizer: Quantizer,
    embeddings: Float[Tensor, "items dim"],
    modalities: Int[Tensor, " items"],
    seed: int,
    progress: Progress,
) -> None:
    progress.begin("fit codebooks", 2)
    generator = torch.Generator().manual_seed(seed)
    quantizer.start_codebooks(
        embeddings,
        modalities,
        batch_size=len(embeddings),
        generator=generator,
        deep_iterations=DEEP_ITERATIONS,
    )
    progress.advance(1, {})
    modality_level, *books = quantizer.books
    residuals = embeddings - modality_level.embed[modalities]
    codes = nearest_sums(residuals, [book.embed for book in books], beam=FITTING_BEAM)
    _move_vectors(books, residuals, codes)
    progress.advance(2, {})


def _move_vectors(
    books: Sequence[Codebook], targets: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
) -> None:
    """Reduce the squared error of the sums of code vectors, one level at a time; codes stay as they are."""
    missing = targets.clone()
    for level, book in enumerate(books):
        missing -= book.embed[codes[:, level]]
    for _ in range(SWEEPS):
        for level, book in enumerate(books):
            chosen = codes[:, level]
            counts = torch.bincount(chosen, minlength=len(book.embed))[:, None]
            change = torch.zeros_like(book.embed).index_add_(0, chosen, missing) / counts.clamp(min=1)
            missing -= change[chosen]
            book.start(book.embed + change, counts[:, 0].float())


@torch.no_grad()
def measure_items(
    quantizer: Quantizer, embeddings: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
) -> None:
    """Measure by how much a pool's items differ, and keep it (:mod:`genius_search.nn.spread`)."""
    drawn = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))[:MEASURED]
    vectors, ids = embeddings[drawn].cpu().float(), codes[drawn].cpu()
    densities = quantizer.norm_and_density.measure(ids).densities.cpu().numpy()
    tables = [as_floats(table) for table in quantizer.tables()]
    measured = Spread.measure(tables, ids.numpy(), densities, has_modality_level=quantizer.has_modality_level)
    residuals = vectors.numpy() - sum_codes(tables, ids.numpy())
    found = _measure_residuals(residuals)
    for buffer, array in zip(
        (quantizer.usage, quantizer.spreads, quantizer.residual_weights),
        (*measured.arrays(), found.weights),
        strict=True,
    ):
        buffer.copy_(torch.from_numpy(array))
    quantizer.constant.zero_()[: len(found.constant)] = torch.from_numpy(found.constant)


def _measure_residuals(residuals: Float32[np.ndarray, "items dim"]) -> Residuals:
    """Find the best weights of rounded residuals, and the directions in which items do not differ."""
    count, dim = residuals.shape
    found = Residuals.plain(dim)
    energy = np.square(residuals, dtype=np.float64).mean(axis=0)
    if count < ENOUGH * dim or not energy.any():
        return found
    for weights, bits in zip(found.weights, RESIDUAL_BITS, strict=True):
        rounded = dequantize(quantize(residuals, bits), bits, dim)
        shares = (residuals * rounded).mean(axis=0) / np.maximum(np.square(rounded).mean(axis=0), TINY)
        shares = np.where(energy > CONSTANT * energy.mean(), shares, 0).clip(min=0)
        weights[:] = shares * energy.sum() / max(float(shares @ energy), TINY)  # 1 in the mean
    differing = energy > CONSTANT * energy.mean()
    inside = residuals[:, differing].astype(np.float64)
    sizes, directions = np.linalg.eigh(inside.T @ inside / count)
    constant = directions[:, sizes < CONSTANT * energy.mean()].T[:MOST_CONSTANT]
    spread_out = np.zeros((len(constant), dim), np.float32)
    spread_out[:, differing] = constant
    return found._replace(constant=spread_out)
