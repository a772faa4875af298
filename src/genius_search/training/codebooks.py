"""Codebooks fitted to a pool without training, for models that need neither pairs nor a generator.

The second half serves every finished quantizer: statistics of items, and the folder.
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
from genius_search.nn.coder import Coder, EncodedItems, NearestSums
from genius_search.nn.fine import (
    FINE_ENDS,
    FINE_NORMS,
    FINE_VECTORS,
    fit_fine_codes,
    round_to_bytes,
)
from genius_search.nn.kmeans import residual_kmeans, subtract_vectors, sum_by_code
from genius_search.nn.spread import MAX_CONSTANT_DIRECTIONS, NUM_MODALITY_STATISTICS, Residuals
from genius_search.progress import Progress
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES
from genius_search.search.vectors import RESIDUAL_BITS, dequantize, quantize
from genius_search.writing import ArtifactWriter

LEVELS: Final = 12
"""Default number of semantic levels."""
MAX_CODES: Final = 256
"""Size of the largest codebook: a code fits into a byte."""
MIN_CODES: Final = 4
"""Size of the smallest codebook."""
ITEMS_PER_CODE: Final = 8
"""Codebooks shrink with the pool, so that a first semantic code has at least about this many items.
With 30, codes alone find much less in a small pool; with 2, less among items that are added
later."""
MAX_FIT_ITEMS: Final = 49_152
"""Maximum number of items that codebooks are fitted to."""
COARSE_LEVELS: Final = 3
"""Number of first semantic levels whose k-means takes :data:`COARSE_ITERATIONS`."""
COARSE_ITERATIONS: Final = 8
"""Maximum number of k-means iterations at the first levels."""
DEEP_ITERATIONS: Final = 3
"""Maximum number of k-means iterations at the deeper levels. More iterations, here or at the first
levels, take long and find no more; fewer find one to two points less of exact search's first
ten."""
ENCODING_BEAM: Final = 4
"""Width of the beam search that chooses codes. With 8 it takes twice as long and finds no more."""
NUM_SWEEPS: Final = 2
"""How often the code vectors of every level are moved to fit the items' codes."""
NORM_WEIGHT: Final = 0.5
"""Weight of half norms for embeddings without training, chosen on Flickr8k's validation queries."""
MIN_DENSITY_SAMPLE: Final = 2048
"""Items of a modality whose IDs are sampled for densities, if there are enough items. A larger
sample finds no more in pools of 100,000 items, and costs time with every added item."""
ITEMS_PER_SAMPLED_ID: Final = 128
"""In large pools, one item in this many is sampled. In a million texts, the right answer is among
the first five for .539 of the captions with a sample of 8,192, and for .528 with 2,048 (exact
search: .523)."""
MAX_DENSITY_SAMPLE: Final = 8192
"""Maximum size of a modality's sample."""
MAX_MEASURED_ITEMS: Final = 8192
"""Maximum number of items whose spread is measured."""
MAX_SPREAD_IDS: Final = 1024
"""Maximum number of IDs of a modality whose products are measured."""
NEGLIGIBLE: Final = 1e-4
"""Smaller spreads, of densities or relative to the mean product, count as rounding, not as
differences."""
MIN_ITEMS_PER_DIMENSION: Final = 2
"""Minimum number of items per dimension for weights of residuals."""
CONSTANT_SHARE: Final = 1e-6
"""Share of the mean variance below which a direction counts as constant."""
TINY: Final = 1e-30
"""Smallest divisor, in place of 0."""
METRIC_POWER: Final = 0.5
"""The exponent a of :func:`query_metric`. Codes alone then find .79 to .82 of exact search's first
ten with CLIP, and .86 to .88 with trained adapters; exponents of 1 and more find no more."""
METRIC_FLOOR: Final = 0.3
"""The weight λ of :func:`query_metric` for directions in which the sample of queries does not
differ."""
MIN_METRIC_QUERIES: Final = 100
"""Minimum number of queries for :func:`query_metric`."""
FUSE_BATCH: Final = 4096
"""Number of items that are fused in a batch."""
MIN_FINE_DIM: Final = 16
"""Vectors of fewer dimensions get whole IDs. Each fine code needs a dimension, so there would be
few codes, and in few dimensions neighbours differ by less than the rounding of residuals."""
MAX_ONE_LEVEL_POOL: Final = 65_536
"""Pools up to this size have one semantic level before fine codes, of at most 256 cells."""
MAX_PRECISE_POOL: Final = 262_144
"""Pools up to this size have :data:`PRECISE_FINE_CODES`: their items take little memory."""
PRECISE_FINE_CODES: Final = 64
"""Number of fine codes in small pools: 32 bytes an item."""
NUM_FINE_CODES: Final = 40
"""Number of fine codes in large pools: 20 bytes an item."""
FINE_CODES: Final = "fine_codes"
"""Input of the quantizer's manifest: the number of fine codes."""
FITTED_ITEMS: Final = "fitted_items"
"""Input of the quantizer's manifest: the number of items in the pool that its codebooks were fitted
to."""


def codebook_size(items: int) -> int:
    """Return the number of codes at each level for a pool: a power of two from 4 to 256."""
    codes = max(1, items // ITEMS_PER_CODE)
    power_of_two = 1 << (codes - 1).bit_length()  # rounded up: 100 codes become 128
    return int(min(MAX_CODES, max(MIN_CODES, power_of_two)))


def cell_levels(items: int) -> int:
    """Return the number of semantic levels before fine codes: one, or in large pools two."""
    return 1 if items <= MAX_ONE_LEVEL_POOL else 2


def num_fine_codes(items: int) -> int:
    """Return the number of fine codes for a pool, including that of half norms."""
    return PRECISE_FINE_CODES if items <= MAX_PRECISE_POOL else NUM_FINE_CODES


def fit_codebooks(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    folder: Path,
    *,
    items: int,
    inputs: Mapping[str, str],
    fused_by: Codebooks | None = None,
    metric: Float32[np.ndarray, "dim dim"] | None = None,
    levels: int | None = LEVELS,
    progress: Progress,
) -> StoredQuantizer:
    """Fit codebooks to the embeddings of a pool, or open the folder if it is finished.

    Level 0 is the item's modality, with the mean of the modality's items as its vector. The other
    levels start from k-means on the residuals, level by level. Then a beam search over all levels
    chooses the items' codes, and level by level, each code vector moves to the mean of its items'
    residuals, computed with the code vectors of all other levels.

    Parameters
    ----------
    embeddings, modalities
        unit vectors of the pool's items, or of a sample of at most :data:`MAX_FIT_ITEMS`.
    folder
        receives the quantizer.
    items
        number of items in the pool.
    inputs
        fingerprints of the inputs of the embeddings.
    fused_by
        the quantizer whose fusion computed the embeddings, which the new quantizer copies; by
        default, embeddings are sums.
    metric
        the matrix of :func:`query_metric`, which weights errors of codes; by default all directions
        have the same weight.
    levels
        number of semantic levels, each a byte of an ID. With None, IDs have one or two and are
        followed by fine codes, which searches without a generator scan sooner; vectors of fewer
        than :data:`MIN_FINE_DIM` dimensions have :data:`LEVELS`.
    """
    num_fine = 0
    if levels is None and embeddings.shape[1] < MIN_FINE_DIM:
        levels = LEVELS
    elif levels is None:
        levels, num_fine = cell_levels(items), num_fine_codes(items)
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
    inputs = {**inputs, FITTED_ITEMS: str(items), FINE_CODES: str(num_fine)}
    if metric is not None:
        inputs[METRIC] = hashlib.sha256(metric.tobytes()).hexdigest()
    writer = ArtifactWriter(folder, kind=QUANTIZER_KIND, config=to_json(config), inputs=inputs)
    if writer.finished() is not None:
        return StoredQuantizer(folder)
    weights = _fit_weights(embeddings, modalities, config, fused_by, metric, progress)
    if num_fine:
        _add_fine_codes(weights, config, embeddings, modalities, num_fine)
    _add_statistics(weights, config, embeddings, modalities, items)
    return write_quantizer(writer, Codebooks(embeddings.shape[1], config, weights))


def _fit_weights(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    config: QuantizerConfig,
    fused_by: Codebooks | None,
    metric: Float32[np.ndarray, "dim dim"] | None,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Return the weights of a quantizer with fitted code vectors and without statistics."""
    # With a metric A, code vectors are fitted to A x and are A e there. A⁻¹ takes them back to the
    # space of the embeddings, in which queries are compared with them.
    targets = embeddings if metric is None else embeddings @ metric
    tables = _fit_tables(targets, modalities, config, np.random.default_rng(0), progress)
    weights: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.float32)
        for name, shape in weight_shapes(embeddings.shape[1], config).items()
    }
    if metric is not None:
        tables = [np.linalg.solve(metric, table.T).T for table in tables]
        weights[METRIC] = metric
    for level, table in enumerate(tables):
        weights[f"codebooks.{level}.embed"] = np.ascontiguousarray(table)
    weights["level0_modality"] = np.arange(NUM_MODALITIES)
    if fused_by is not None:
        weights |= {
            name: weight for name, weight in fused_by.weights.items() if name.startswith(FUSION)
        }
    return weights


def _add_fine_codes(
    weights: dict[str, np.ndarray],
    config: QuantizerConfig,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    num_codes: int,
) -> None:
    """Round the code vectors of a quantizer to bytes, and add vectors of fine codes to it."""
    for level in range(1 + config.levels):
        name = f"codebooks.{level}.embed"
        weights[name] = round_to_bytes(weights[name])
    codebooks = Codebooks(embeddings.shape[1], config, weights)
    cells = codebooks.vectors(Coder(codebooks).assign_ids(embeddings, modalities))
    fine = fit_fine_codes(embeddings, cells, num_codes, config.norm_weight)
    weights |= dict(zip((FINE_VECTORS, FINE_ENDS, FINE_NORMS), fine, strict=True))


def _add_statistics(
    weights: dict[str, np.ndarray],
    config: QuantizerConfig,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    items: int,
) -> None:
    """Add to a quantizer's weights a sample of the pool's IDs and the statistics of its items."""
    dim = embeddings.shape[1]
    permuted = np.random.default_rng(0).permutation(len(embeddings))
    sample_size = min(max(MIN_DENSITY_SAMPLE, items // ITEMS_PER_SAMPLED_ID), MAX_DENSITY_SAMPLE)
    sampled = np.concatenate(
        [
            permuted[modalities[permuted] == modality][:sample_size]
            for modality in range(NUM_MODALITIES)
        ]
    )
    coder = Coder(Codebooks(dim, config, weights))
    ids = coder.encode_items(embeddings[sampled], modalities[sampled]).all_codes
    weights[POOL_SAMPLE] = np.unique(ids, axis=0).astype(np.int16)
    # Densities are measured with the sample, so the statistics come after it.
    codebooks = Codebooks(dim, config, weights)
    measured = permuted[:MAX_MEASURED_ITEMS]
    encoded = Coder(codebooks).encode_items(embeddings[measured], modalities[measured])
    weights |= measure_items(codebooks, encoded)


def query_metric(queries: object, dim: int) -> Float32[np.ndarray, "dim dim"]:
    """Return a matrix that weights errors of codes by their effect on the products with queries.

    If codes leave the residual e of an item, the error of its product with a query q is q·e, and
    E[(q·e)²] = eᵀΣe with Σ the covariance of the queries. The matrix A is

        A = (Σ / s + λ)^(a/2)

    with s the mean variance, λ = :data:`METRIC_FLOOR` and a = :data:`METRIC_POWER`; codes minimise
    |A e|². λ gives directions in which the sample of queries does not differ some weight. A vector
    that all queries share, such as the axis of the cone of a CLIP model's texts, has none, since Σ
    is centred.

    Deviation 33: the paper's codes do not depend on queries (compare LeanVec-OOD,
    arXiv:2312.16335).

    Raises
    ------
    UsageError
        There are fewer than :data:`MIN_METRIC_QUERIES` queries, or a query does not have ``dim``
        numbers.
    BadData
        A query is zero, or contains a number that is not finite.
    """
    vectors = as_numbers(queries, "the query vectors")
    if vectors.ndim != 2 or vectors.shape[1] != dim or len(vectors) < MIN_METRIC_QUERIES:
        raise UsageError(
            f"the query vectors are of shape {vectors.shape}; expected {dim} numbers in each row, "
            f"and at least {MIN_METRIC_QUERIES} rows, since a smaller sample does not represent "
            "the queries"
        )
    units = normalize(as_matrix(vectors, "the query vectors").astype(np.float64))
    variances, directions = np.linalg.eigh(np.cov(units.T, bias=True))
    factors = (variances.clip(min=0) / max(variances.mean(), TINY) + METRIC_FLOOR) ** (
        METRIC_POWER / 2
    )
    return np.asarray((directions * factors) @ directions.T, dtype=np.float32)


def _fit_tables(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    config: QuantizerConfig,
    random: np.random.Generator,
    progress: Progress,
) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the code vectors of each level."""
    progress.begin("fit codebooks", 2)
    iterations = [COARSE_ITERATIONS] * (1 + COARSE_LEVELS) + [DEEP_ITERATIONS] * config.levels
    clusters = residual_kmeans(
        embeddings,
        modalities,
        [NUM_MODALITIES, *[config.codebook_size] * config.levels],
        iterations=iterations[: 1 + config.levels],
        random=random,
    )
    progress.advance(1, {})
    modality_vectors, *tables = [level.centroids for level in clusters]
    residuals = embeddings - modality_vectors[modalities]
    _move_vectors(tables, residuals, NearestSums(tables, beam=ENCODING_BEAM)(residuals))
    progress.advance(2, {})
    return [modality_vectors, *tables]


def _move_vectors(
    tables: Sequence[Float32[np.ndarray, "_ dim"]],
    targets: Float32[np.ndarray, "items dim"],
    codes: Int64[np.ndarray, "items levels"],
) -> None:
    """Reduce the squared error of the sums of code vectors, in place, without changing codes."""
    # With r the error x − Σ e of an item, the best new vector of a code is e + mean of r over its
    # items. Moving a level changes the errors for the next level.
    errors = targets - sum_codes(tables, codes)
    for _ in range(NUM_SWEEPS):
        for level, table in enumerate(tables):
            chosen = codes[:, level]
            counts = np.bincount(chosen, minlength=len(table)).clip(min=1).astype(np.float32)
            change = sum_by_code(errors, chosen, len(table)) / counts[:, None]
            subtract_vectors(errors, change, chosen)
            table += change  # noqa: PLW2901  in place


def measure_items(codebooks: Codebooks, encoded: EncodedItems) -> dict[str, np.ndarray]:
    """Measure a sample of items; return their statistics as weights of a quantizer.

    See :func:`genius_search.nn.codebooks.statistic_shapes`.
    """
    sampled = np.random.default_rng(0).permutation(len(encoded.codes))[:MAX_MEASURED_ITEMS]
    vectors = encoded.embeddings[sampled]
    ids = encoded.codes[sampled]
    tables = codebooks.tables()
    embeddings = np.asarray(vectors, np.float32)
    all_codes = encoded.all_codes[sampled]
    densities = Coder(codebooks).norm_and_density.densities(embeddings, all_codes)
    usage, spreads = measure_spread(
        tables, ids, embeddings, densities, has_modality_level=codebooks.has_modality_level
    )
    residuals = _measure_residuals(vectors - codebooks.vectors(all_codes))
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
    """Measure the arguments of a :class:`~genius_search.nn.spread.Spread`: usage and spreads.

    Parameters
    ----------
    tables
        the code vectors of each level.
    densities
        mean cosines of the embeddings to their nearest neighbours.

    Returns
    -------
    tuple
        the number of items by first code and first semantic code; and for each first code the
        deviation σ of products, the mean density, and its reliability.
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
        # A smaller spread is rounding; 0 means that queries are not scaled.
        if first_spread > NEGLIGIBLE * np.abs(products).mean():
            spreads[group, 0] = first_spread
    return usage.astype(np.float32), spreads.astype(np.float32)


def measure_reliability(embeddings: Float32[np.ndarray, "items dim"]) -> float:
    """Return the reliability ρ of densities, 0 to 1 (Spearman, 1910; Brown, 1910).

    ρ = 2c / (1 + c), with c the correlation of two estimates of the items' densities: the cosines
    to the nearest item of even number and to the nearest of odd number. It is 0 if the estimates do
    not differ between items. The vectors of IDs are unsuitable as neighbours: each is a mean of few
    items, and nearer to those than to any other item.
    """
    items = embeddings[:MAX_SPREAD_IDS]
    estimates = []
    for neighbours in (embeddings[::2][:MAX_SPREAD_IDS], embeddings[1::2][:MAX_SPREAD_IDS]):
        cosines = items @ neighbours.T
        cosines[cosines > 1 - NEGLIGIBLE] = -1  # the item itself, and copies of it
        estimates.append(cosines.max(axis=1, initial=-1))
    first, second = estimates
    deviations = first.std(), second.std()
    if min(deviations) <= NEGLIGIBLE:
        return 0.0
    covariance = float(np.mean((first - first.mean()) * (second - second.mean())))
    correlation = max(0.0, covariance / float(deviations[0] * deviations[1]))
    return 2 * correlation / (1 + correlation)


def _measure_residuals(residuals: Float32[np.ndarray, "items dim"]) -> Residuals:
    """Measure the best weights of rounded residuals, and the directions that are constant."""
    count, dim = residuals.shape
    measured = Residuals.unweighted(dim)
    energy = np.square(residuals, dtype=np.float64).mean(axis=0)
    if count < MIN_ITEMS_PER_DIMENSION * dim or not energy.any():
        return measured
    for weights, bits in zip(measured.weights, RESIDUAL_BITS, strict=True):
        # Linear regression in each dimension, from rounded numbers r' to true ones r: E[r r'] /
        # E[r'²].
        rounded = dequantize(quantize(residuals, bits), bits, dim)
        shares = (residuals * rounded).mean(axis=0) / np.maximum(
            np.square(rounded).mean(axis=0), TINY
        )
        shares = np.where(energy > CONSTANT_SHARE * energy.mean(), shares, 0).clip(min=0)
        # Scaled so that their mean, weighted by energy, is 1.
        weights[:] = shares * energy.sum() / max(float(shares @ energy), TINY)
    differing = energy > CONSTANT_SHARE * energy.mean()
    # Dimensions that do not differ have a weight of 0. Among the others, constant directions are
    # the eigenvectors of the smallest eigenvalues.
    varying = residuals[:, differing].astype(np.float64)
    variances, directions = np.linalg.eigh(varying.T @ varying / count)
    constant = directions[:, variances < CONSTANT_SHARE * energy.mean()].T[:MAX_CONSTANT_DIRECTIONS]
    padded = np.zeros((len(constant), dim), np.float32)
    padded[:, differing] = constant
    return measured._replace(constant=padded)


def write_quantizer(writer: ArtifactWriter, codebooks: Codebooks) -> StoredQuantizer:
    """Write the folder of a quantizer, and open it."""
    arrays = {name: np.ascontiguousarray(weight) for name, weight in codebooks.weights.items()}
    (writer.path / QUANTIZER_FILE).write_bytes(save(arrays))
    return StoredQuantizer(writer.finish(facts={"dim": codebooks.dim}).folder)


def fuse_features(codebooks: Codebooks, features: Features) -> Float16[np.ndarray, "rows dim"]:
    """Return the fused embeddings of all rows of features."""
    fused = np.empty((len(features), features.dim), dtype=np.float16)
    for rows, batch in features.batches(FUSE_BATCH):
        fused[rows] = codebooks.fuse(batch.image, batch.text)
    return fused


def encode_features(
    codebooks: Codebooks, features: Features, rows: Int64[np.ndarray, " rows"] | None = None
) -> EncodedItems:
    """Return the embeddings and IDs of candidates: of the given rows, or of all."""
    coder = Coder(codebooks)
    parts = [
        coder.encode_items(codebooks.fuse(batch.image, batch.text), features.modality[batch_rows])
        for batch_rows, batch in features.batches(FUSE_BATCH, rows)
    ]
    return EncodedItems(*(np.concatenate(column) for column in zip(*parts, strict=True)))
