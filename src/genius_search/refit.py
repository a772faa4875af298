"""``genius refit``: adapt codebooks to a pool unlike the training data, without training.

Items unlike the training data share few codes, which describe them badly; fusion suffers less. So the code
vectors resume their moving average, over the items that will be searched; at the end each moves to the mean
of what the other levels leave of its items. They move little at a time and each keeps its meaning, so the
generator can stay: only its guide gets the new vectors. A sample of the pool's IDs is stored with them, by
which the density around items is measured.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from genius_search.artifact import fingerprint_of
from genius_search.errors import UsageError
from genius_search.index.adding import feature_rows, open_pool, stamp_of
from genius_search.index.refit import carry_encoder
from genius_search.model import MODEL_FILE, Genius
from genius_search.nn.codebooks import KIND as QUANTIZER
from genius_search.nn.folded import KIND as GENERATOR
from genius_search.nn.generator import write_generator
from genius_search.nn.health import Health, measure_health
from genius_search.nn.quantizer import Quantizer, encode, fuse, write_quantizer
from genius_search.progress import Progress
from genius_search.training.codebooks import draw_ids, measure_items, move_vectors
from genius_search.training.features import embed
from genius_search.training.fit import check_folder
from genius_search.writing import ArtifactWriter

BATCH: Final = 2048
"""Items in a step of the moving average."""
FEATURES: Final = "features"
"""Folder of the pool's features until the model is finished."""


class Refitted(NamedTuple):
    """The new model, and the health of the pool's IDs."""

    model: Genius
    before: Health
    """By the old codebooks."""
    after: Health


def refit(
    model: Genius, pool: Path, folder: Path, *, passes: int = 20, seed: int = 0, progress: Progress
) -> Refitted:
    """Make a copy of a model whose codebooks fit a pool; its IDs differ, so indexes must be made again.

    The pool should be what will be searched, old items and new: codes that nothing in it has are moved to
    where they are needed.

    Parameters
    ----------
    pool
        a folder of pictures and texts, or a ``.jsonl`` file of M-BEIR candidates.
    passes
        how often the codebooks follow all items.

    Raises
    ------
    UsageError
        the folder holds a model or something else already, or fewer than one pass is asked for.
    BadData
        nothing in the pool can be used.
    """
    if passes < 1:
        raise UsageError(f"passes is {passes}, it must be at least 1")
    if (folder / MODEL_FILE).exists():
        raise UsageError(f"{folder} holds a model already; choose another folder for the new one")
    check_folder(folder)
    items = open_pool(pool, captions=True).items
    stamps = [stamp_of(item) for item in items()]
    features = embed(
        feature_rows(items(), folder),
        model.encoder,
        folder / FEATURES,
        inputs={"items": fingerprint_of(stamps)},
        expected=len(stamps),
        progress=progress,
        skip_bad_images=True,
    )
    before = measure_health(model.quantizer, features)
    quantizer = copy.deepcopy(model.quantizer)
    embeddings = fuse(quantizer, features)
    _follow(quantizer, embeddings, features.modality, passes=passes, seed=seed, progress=progress)
    if not quantizer.config.shared_codebook:
        move_vectors(list(quantizer.books), embeddings.float(), encode(quantizer, features).codes.long())
    after = measure_health(quantizer, features)
    encoded = encode(quantizer, features)
    quantizer.set_pool_sample(draw_ids(encoded.codes, features.modality, seed=seed))
    measure_items(quantizer, encoded.embeddings, encoded.codes)
    source = {"pool": features.manifest.fingerprint, "passes": str(passes), "seed": str(seed)}
    old = model.quantizer_manifest
    inputs = {**source, "quantizer": old.fingerprint}
    writer = ArtifactWriter(folder / "quantizer", kind=QUANTIZER, config=old.config, inputs=inputs)
    ours = write_quantizer(writer, quantizer, after)
    decoder = None
    if model.generator is not None and model.generator_manifest is not None:
        generator = copy.deepcopy(model.generator)
        if generator.guide is not None:
            generator.guide.vectors.copy_(torch.cat(quantizer.tables()))
        old = model.generator_manifest
        inputs = {"generator": old.fingerprint, "quantizer": ours.manifest.fingerprint}
        writer = ArtifactWriter(folder / "generator", kind=GENERATOR, config=old.config, inputs=inputs)
        decoder = write_generator(writer, generator, dim=model.dim)
    made = Genius.finish(folder, carry_encoder(model, folder), ours, decoder, model.instructions)
    shutil.rmtree(folder / FEATURES)
    return Refitted(made, before, after)


@torch.no_grad()
def _follow(
    quantizer: Quantizer,
    embeddings: Tensor,
    modality: np.ndarray,
    *,
    passes: int,
    seed: int,
    progress: Progress,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    modalities = torch.from_numpy(modality.astype(np.int64))
    progress.begin("refit codebooks", passes)
    for done in range(1, passes + 1):
        for rows in torch.randperm(len(embeddings), generator=generator).split(BATCH):
            found = quantizer.quantize(
                embeddings[rows].float().to(quantizer.device), modalities[rows].to(quantizer.device)
            )
            quantizer.follow(found, generator=generator)
        progress.advance(done, {})
