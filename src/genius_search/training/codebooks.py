"""Codebooks fitted to a pool without training, for models that need neither pairs nor a generator.

Below are what every finished quantizer needs: measures of items, and its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float, Float16, Float32, Int8, Int64, Integer
from safetensors.numpy import save

from genius_search.border import as_matrix, as_numbers
from genius_search.config import FusionConfig, to_json
from genius_search.data.features import Features
from genius_search.errors import UsageError
from genius_search.nn.codebooks import (
    FUSION,
    METRIC,
    POOL_SAMPLE,
    QUANTIZER_FILE,
    QUANTIZER_KIND,
    Codebooks,
    StoredQuantizer,
    normalize,
    sum_codes,
    weight_shapes,
)
from genius_search.nn.kmeans import (
    Coder,
    EncodedItems,
    NearestSums,
    residual_kmeans,
    subtract_vectors,
    sum_by_code,
)
from genius_search.nn.spread import MAX_CONSTANT_DIRECTIONS, NUM_MODALITY_STATISTICS, Residuals
from genius_search.progress import Progress
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES
from genius_search.search.vectors import RESIDUAL_BITS, dequantize, quantize
from genius_search.writing import ArtifactWriter

LEVELS: Final = 12
MAX_CODES: Final = 256
"""Largest codebook: a code fits into one byte."""
MIN_CODES: Final = 4
ITEMS_PER_CODE: Final = 8
"""Codebooks shrink with the pool so that a code of the first level has at least about this many items.
With 30, codes alone find much less of a small pool; with 2, less of items that are added later."""
MAX_FIT_ITEMS: Final = 49_152
"""Most items that the codebooks are fitted to."""
COARSE_LEVELS: Final = 3
"""The first semantic levels, whose k-means takes more iterations."""
COARSE_ITERATIONS: Final = 8
DEEP_ITERATIONS: Final = 3
"""Iterations of k-means at the deeper levels. More, and more than eight at the first, take long and find no
more; fewer find one to two points less of exact search's first ten."""
ENCODING_BEAM: Final = 4
"""Width of the beam search by which codes are chosen. With 8 it takes twice as long and finds no more."""
SWEEPS: Final = 2
"""How often the code vectors of every level are moved to fit the items' codes."""
NORM_WEIGHT: Final = 0.5
"""Weight of half norms for embeddings that were not trained, chosen on Flickr8k's validation queries."""
SAMPLED_IDS: Final = 2048
"""Items of a modality whose IDs are sampled for densities. More find no more in pools of 100,000 items, and
take longer with every item."""
ITEMS_PER_SAMPLED: Final = 128
"""In larger pools one in so many is sampled. Of a million texts, right answers are among the first five for
.539 of the captions with 8,192, and for .528 with 2,048 (exact search: .523)."""
MAX_SAMPLED_IDS: Final = 8192
MAX_MEASURED_ITEMS: Final = 8192
"""Most items that spreads are measured of."""
MAX_SPREAD_IDS: Final = 1024
"""Most IDs of a modality whose products are measured."""
NEGLIGIBLE: Final = 1e-4
"""Smaller spreads, of densities or relative to the products themselves, are no differences between items."""
MIN_ITEMS_PER_DIMENSION: Final = 2
"""Fewer items for each dimension say too little of how much the dimensions differ."""
CONSTANT: Final = 1e-6
"""Share of the mean variance below which a direction does not differ between items."""
TINY: Final = 1e-30
METRIC_POWER: Final = 0.5
METRIC_FLOOR: Final = 0.3
"""Of :func:`query_metric`. Codes alone then find .79 to .82 of exact search's first ten with CLIP, .86 to .88
with trained adapters; 1 and more powers of the covariance find no more."""
MIN_METRIC_QUERIES: Final = 100
FUSE_BATCH: Final = 4096
FITTED_ITEMS: Final = "fitted_items"
"""Input of the quantizer's manifest: the number of items that its codebooks were fitted to."""


def codebook_size(items: int) -> int:
    """Return the number of codes at each level for a pool: a power of two from 4 to 256."""
    wanted = max(1, items // ITEMS_PER_CODE)
    return int(min(MAX_CODES, max(MIN_CODES, 1 << (wanted - 1).bit_length())))


def fit_codebooks(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    folder: Path,
    *,
    items: int,
    inputs: Mapping[str, str],
    fused_by: Codebooks | None = None,
    metric: Float32[np.ndarray, "dim dim"] | None = None,
    levels: int = LEVELS,
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
        unit vectors of the pool's items, or of a sample of at most :data:`MAX_FIT_ITEMS`.
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
    fusion = FusionConfig(kind="sum") if fused_by is None else fused_by.config.fusion
    config = QuantizerConfig(
        levels=levels,
        codebook_size=codebook_size(items),
        level0="assigned",
        encoding_beam=ENCODING_BEAM,
        norm_weight=NORM_WEIGHT if fusion.kind == "sum" else 1.0,
        kmeans_iterations=COARSE_ITERATIONS,
        fusion=fusion,
    )
    inputs = {**inputs, FITTED_ITEMS: str(items)}
    if metric is not None:
        inputs[METRIC] = hashlib.sha256(metric.tobytes()).hexdigest()
    writer = ArtifactWriter(
        folder,
        kind=QUANTIZER_KIND,
        config=to_json(config),
        inputs=inputs,
    )
    if writer.finished() is not None:
        return StoredQuantizer(folder)
    given = embeddings if metric is None else embeddings @ metric
    tables = _fit(given, modalities, config, np.random.default_rng(0), progress)
    dim = embeddings.shape[1]
    weights: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.float32) for name, shape in weight_shapes(dim, config).items()
    }
    if metric is not None:  # back to where products with queries are what they were
        tables = [np.linalg.solve(metric, table.T).T for table in tables]
        weights[METRIC] = metric
    weights |= {
        f"codebooks.{level}.embed": np.ascontiguousarray(one) for level, one in enumerate(tables)
    }
    weights["level0_modality"] = np.arange(NUM_MODALITIES)
    if fused_by is not None:
        weights |= {
            name: array for name, array in fused_by.weights.items() if name.startswith(FUSION)
        }
    drawn = np.random.default_rng(0).permutation(len(embeddings))
    sample_size = min(max(SAMPLED_IDS, items // ITEMS_PER_SAMPLED), MAX_SAMPLED_IDS)
    per_modality = [
        drawn[modalities[drawn] == modality][:sample_size] for modality in range(NUM_MODALITIES)
    ]
    sampled = np.concatenate(per_modality)
    ids = Coder(Codebooks(dim, config, weights)).assign_ids(
        embeddings[sampled], modalities[sampled]
    )
    weights[POOL_SAMPLE] = np.unique(ids, axis=0).astype(np.int16)
    codebooks = Codebooks(dim, config, weights)
    measured = drawn[:MAX_MEASURED_ITEMS]
    encoded = Coder(codebooks).encode_items(embeddings[measured], modalities[measured])
    weights |= measure_items(codebooks, encoded)
    return write_quantizer(writer, Codebooks(dim, config, weights))


def query_metric(queries: object, dim: int) -> Float32[np.ndarray, "dim dim"]:
    """Return a matrix that makes errors of codes count by how much queries notice them.

    The error of a query's product with an item is q·e, and E[(q·e)²] = eᵀΣe with Σ the covariance of queries.
    The matrix is (Σ / s + λ)^(a/2) with s the mean variance, λ = :data:`METRIC_FLOOR` and a = :data:`METRIC_POWER`, so
    that directions that these queries do not know still count. What is the same for all queries, such as the
    cone that a CLIP model's texts lie in, does not.

    Deviation 33: the paper's codes know nothing of queries (compare LeanVec-OOD, arXiv:2312.16335).

    Raises
    ------
    UsageError
        There are fewer than :data:`MIN_METRIC_QUERIES` queries, or not ``dim`` numbers in each.
    BadData
        A query has no direction, or a number that is not finite.
    """
    given = as_numbers(queries, "the query vectors")
    if given.ndim != 2 or given.shape[1] != dim or len(given) < MIN_METRIC_QUERIES:
        raise UsageError(
            f"the query vectors are of shape {given.shape}; expected {dim} numbers in each row, and at "
            f"least {MIN_METRIC_QUERIES} rows, for fewer say too little of what is asked"
        )
    units = normalize(as_matrix(given, "the query vectors").astype(np.float64))
    variances, directions = np.linalg.eigh(np.cov(units.T, bias=True))
    factors = (variances.clip(min=0) / max(variances.mean(), TINY) + METRIC_FLOOR) ** (
        METRIC_POWER / 2
    )
    return np.asarray((directions * factors) @ directions.T, dtype=np.float32)


def _fit(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    config: QuantizerConfig,
    random: np.random.Generator,
    progress: Progress,
) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the code vectors of each level."""
    progress.begin("fit codebooks", 2)
    iterations = [COARSE_ITERATIONS] * (1 + COARSE_LEVELS) + [DEEP_ITERATIONS] * config.levels
    started = residual_kmeans(
        embeddings,
        modalities,
        [NUM_MODALITIES, *[config.codebook_size] * config.levels],
        iterations=iterations[: 1 + config.levels],
        random=random,
    )
    progress.advance(1, {})
    of_modalities, *tables = [level.centroids for level in started]
    residuals = embeddings - of_modalities[modalities]
    _move_vectors(tables, residuals, NearestSums(tables, beam=ENCODING_BEAM)(residuals))
    progress.advance(2, {})
    return [of_modalities, *tables]


def _move_vectors(
    tables: Sequence[Float32[np.ndarray, "_ dim"]],
    targets: Float32[np.ndarray, "items dim"],
    codes: Int64[np.ndarray, "items levels"],
) -> None:
    """Reduce the squared error of the sums of code vectors, one level at a time; codes stay as they are."""
    missing = targets - sum_codes(tables, codes)
    for _ in range(SWEEPS):
        for level, table in enumerate(tables):
            chosen = codes[:, level]
            counts = np.bincount(chosen, minlength=len(table)).clip(min=1).astype(np.float32)
            change = sum_by_code(missing, chosen, len(table)) / counts[:, None]
            subtract_vectors(missing, change, chosen)
            table += change  # noqa: PLW2901  in place


def measure_items(codebooks: Codebooks, encoded: EncodedItems) -> dict[str, np.ndarray]:
    """Measure by how much a pool's items differ (:mod:`genius_search.nn.spread`), as weights."""
    drawn = np.random.default_rng(0).permutation(len(encoded.codes))[:MAX_MEASURED_ITEMS]
    vectors, ids = encoded.embeddings[drawn], encoded.codes[drawn]
    tables = codebooks.tables()
    embeddings = np.asarray(vectors, np.float32)
    densities = Coder(codebooks).norm_and_density.densities(embeddings, ids)
    has_modality_level = codebooks.has_modality_level
    usage, spreads = measure_spread(
        tables, ids, embeddings, densities, has_modality_level=has_modality_level
    )
    residuals = _measure_residuals(vectors - sum_codes(tables, ids))
    constant = np.zeros((MAX_CONSTANT_DIRECTIONS, codebooks.dim), np.float32)
    constant[: len(residuals.constant)] = residuals.constant
    return {
        "usage": usage,
        "spreads": spreads,
        "residual_weights": residuals.weights,
        "constant": constant,
    }


def measure_spread(
    tables: Sequence[Float32[np.ndarray, "_ dim"]],
    ids: Integer[np.ndarray, "items levels"],
    embeddings: Float32[np.ndarray, "items dim"],
    densities: Float[np.ndarray, " items"],
    *,
    has_modality_level: bool,
) -> tuple[Float32[np.ndarray, "modalities codes"], Float32[np.ndarray, "modalities 3"]]:
    """Measure what a :class:`Spread` of IDs is made of: usage; spread, mean density and its reliability.

    ``tables`` are the code vectors, ``densities`` the mean cosines of embeddings to their neighbours.
    """
    level = int(has_modality_level and len(tables) > 1)
    first = np.asarray(tables[level])
    usage = np.zeros((len(tables[0]) if level else 1, len(first)))
    spreads = np.zeros((len(usage), NUM_MODALITY_STATISTICS))
    groups = ids[:, 0] if level else np.zeros(len(ids), dtype=np.int64)
    np.add.at(usage, (groups, ids[:, level]), 1)
    random = np.random.default_rng(0)
    for group in np.flatnonzero(usage.sum(axis=1)).tolist():
        rows = np.flatnonzero(groups == group)
        spreads[group, 1] = densities[rows].mean()
        spreads[group, 2] = measure_reliability(embeddings[rows])
        vectors = sum_codes(tables, ids[random.permutation(rows)[:MAX_SPREAD_IDS]])
        weights = usage[group] / usage[group].sum()
        products = vectors @ first.T
        centred = products - (products @ weights)[:, None]
        first_spread = np.sqrt(np.square(centred) @ weights).mean()
        if first_spread > NEGLIGIBLE * np.abs(products).mean():  # otherwise it is rounding
            spreads[group, 0] = first_spread
    return usage.astype(np.float32), spreads.astype(np.float32)


def measure_reliability(embeddings: Float32[np.ndarray, "items dim"]) -> float:
    """Return the reliability of densities, 0 to 1: 2c / (1 + c) with c the correlation of two estimates.

    Each is the cosine of items to the nearest of other items (Spearman, 1910; Brown, 1910). It is 0 if the
    estimates do not differ between items. The vectors of IDs are not used: they are means of few items, and
    nearer to these than to others.
    """
    items = embeddings[:MAX_SPREAD_IDS]
    nearest = []
    for others in (embeddings[::2][:MAX_SPREAD_IDS], embeddings[1::2][:MAX_SPREAD_IDS]):
        cosines = items @ others.T
        cosines[cosines > 1 - NEGLIGIBLE] = -1  # the item itself, and copies of it
        nearest.append(cosines.max(axis=1, initial=-1))
    first, second = nearest
    deviations = first.std(), second.std()
    if min(deviations) <= NEGLIGIBLE:
        return 0.0
    covariance = float(np.mean((first - first.mean()) * (second - second.mean())))
    correlation = max(0.0, covariance / float(deviations[0] * deviations[1]))
    return 2 * correlation / (1 + correlation)


def _measure_residuals(residuals: Float32[np.ndarray, "items dim"]) -> Residuals:
    """Find the best weights of rounded residuals, and the directions in which items do not differ."""
    count, dim = residuals.shape
    found = Residuals.unweighted(dim)
    energy = np.square(residuals, dtype=np.float64).mean(axis=0)
    if count < MIN_ITEMS_PER_DIMENSION * dim or not energy.any():
        return found
    for weights, bits in zip(found.weights, RESIDUAL_BITS, strict=True):
        rounded = dequantize(quantize(residuals, bits), bits, dim)
        shares = (residuals * rounded).mean(axis=0) / np.maximum(
            np.square(rounded).mean(axis=0), TINY
        )
        shares = np.where(energy > CONSTANT * energy.mean(), shares, 0).clip(min=0)
        weights[:] = shares * energy.sum() / max(float(shares @ energy), TINY)  # 1 in the mean
    differing = energy > CONSTANT * energy.mean()
    inside = residuals[:, differing].astype(np.float64)
    sizes, directions = np.linalg.eigh(inside.T @ inside / count)
    constant = directions[:, sizes < CONSTANT * energy.mean()].T[:MAX_CONSTANT_DIRECTIONS]
    spread_out = np.zeros((len(constant), dim), np.float32)
    spread_out[:, differing] = constant
    return found._replace(constant=spread_out)


def write_quantizer(writer: ArtifactWriter, codebooks: Codebooks) -> StoredQuantizer:
    """Write the folder of a quantizer."""
    arrays = {name: np.ascontiguousarray(weight) for name, weight in codebooks.weights.items()}
    (writer.path / QUANTIZER_FILE).write_bytes(save(arrays))
    return StoredQuantizer(writer.finish(facts={"dim": codebooks.dim}).folder)


def fuse_features(codebooks: Codebooks, features: Features) -> Float16[np.ndarray, "rows dim"]:
    """Return the fused embeddings of all rows."""
    fused = np.empty((len(features), features.dim), dtype=np.float16)
    for rows, batch in features.batches(FUSE_BATCH):
        fused[rows] = codebooks.fuse(batch.image, batch.text)
    return fused


def encode_features(
    codebooks: Codebooks, features: Features, rows: Int64[np.ndarray, " rows"] | None = None
) -> EncodedItems:
    """Return embeddings and IDs of candidates, all or some."""
    coder = Coder(codebooks)
    parts = [
        coder.encode_items(codebooks.fuse(batch.image, batch.text), features.modality[own])
        for own, batch in features.batches(FUSE_BATCH, rows)
    ]
    return EncodedItems(*(np.concatenate(column) for column in zip(*parts, strict=True)))
