"""Codebooks fitted to a pool without training, for models that need neither pairs nor a generator."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from genius_search.artifact import ArtifactWriter
from genius_search.config import FusionConfig, QuantizerConfig, to_json
from genius_search.data.features import NUM_MODALITIES, Features
from genius_search.nn.health import measure_health
from genius_search.nn.quantizer import (
    KIND,
    Codebook,
    Quantizer,
    TrainedQuantizer,
    encode,
    fuse,
    load_quantizer,
    make_quantizer,
    nearest_sums,
    write_quantizer,
)
from genius_search.progress import Progress

LEVELS: Final = 12
MAX_CODES: Final = 256
"""Largest codebook: a code fits into one byte."""
MIN_CODES: Final = 4
ITEMS_PER_CODE: Final = 30
"""Codebooks shrink with the pool so that a code of the first level has at least about this many items."""
MAX_SAMPLE: Final = 65_536
"""Most items that the codebooks are fitted to."""
ROUNDS: Final = 3
"""How often all items get new codes, and all code vectors are moved to fit them."""
SWEEPS: Final = 3
"""How often each round moves the code vectors of every level."""
SAMPLED_IDS: Final = 8192
"""Most items of a modality whose IDs are sampled."""


def codebook_size(items: int) -> int:
    """Return the number of codes at each level for a pool: a power of two from 4 to 256."""
    wanted = max(1, items // ITEMS_PER_CODE)
    return int(min(MAX_CODES, max(MIN_CODES, 1 << (wanted - 1).bit_length())))


def fit_codebooks(features: Features, folder: Path, *, seed: int = 0, progress: Progress) -> TrainedQuantizer:
    """Fit codebooks to the features of a pool, or open the folder if this was done already.

    Embeddings are the normalised sums of image and text features. Level 0 is the item's modality, with the
    modality's mean as its vector. The vectors of the other levels start from k-means on the residuals, level
    by level; then items get the codes that a beam search over all levels finds, and each code's vector moves
    to the mean of what the other levels leave of its items, several times in turn.

    Parameters
    ----------
    folder
        receives the quantizer.
    """
    config = QuantizerConfig(
        levels=LEVELS,
        codebook_size=codebook_size(len(features)),
        level0="assigned",
        encoding_beam=8,
        kmeans_iterations=15,
        fusion=FusionConfig(kind="sum"),
    )
    inputs = {"items": features.manifest.fingerprint, "seed": str(seed)}
    writer = ArtifactWriter(folder, kind=KIND, config=to_json(config), inputs=inputs)
    if writer.finished() is not None:
        return load_quantizer(folder)
    generator = torch.Generator().manual_seed(seed)
    rows = np.sort(torch.randperm(len(features), generator=generator)[:MAX_SAMPLE].numpy())
    quantizer = make_quantizer(features.dim, config)
    modalities = torch.from_numpy(features.modality[rows].astype(np.int64))
    _fit(quantizer, fuse(quantizer, features, rows).float(), modalities, generator, progress)
    quantizer.set_pool_sample(sample_ids(quantizer, features, seed=seed))
    return write_quantizer(writer, quantizer, measure_health(quantizer, features, rows))


@torch.no_grad()
def _fit(
    quantizer: Quantizer,
    embeddings: Float[Tensor, "items dim"],
    modalities: Int[Tensor, " items"],
    generator: torch.Generator,
    progress: Progress,
) -> None:
    progress.begin("fit codebooks", 1 + ROUNDS)
    quantizer.start_codebooks(embeddings, modalities, batch_size=len(embeddings), generator=generator)
    progress.advance(1, {})
    modality_level, *books = quantizer.books
    residuals = embeddings - modality_level.embed[modalities]
    for done in range(ROUNDS):
        codes = nearest_sums(residuals, [book.embed for book in books], beam=quantizer.config.encoding_beam)
        _move_vectors(books, residuals, codes)
        progress.advance(2 + done, {})


def _move_vectors(
    books: list[Codebook], targets: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
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


def sample_ids(quantizer: Quantizer, features: Features, *, seed: int) -> Int[Tensor, "sampled levels"]:
    """Return distinct IDs of items drawn from each modality, to measure densities against."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = []
    for modality in range(NUM_MODALITIES):
        rows = np.flatnonzero(features.modality == modality)
        chosen = torch.randperm(len(rows), generator=generator)[:SAMPLED_IDS].numpy()
        if len(chosen):
            drawn.append(encode(quantizer, features, np.sort(rows[chosen])).codes)
    ids: Tensor = torch.cat(drawn).unique(dim=0)
    return ids
