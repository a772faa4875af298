"""Fitting the codebooks of an index anew after it has grown, from its stored embeddings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch

from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import UsageError
from genius_search.index.adding import CHUNK, Batch, encode_batch
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import OWN_MODEL, Segment
from genius_search.index.writer import Writer, alive_items
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.training.codebooks import FITTED, MAX_SAMPLE, check_levels, fit_codebooks
from genius_search.writing import new_folder

GROWTH: Final = 1.5
"""A refit is suggested when an index has this many times the items that its codebooks were fitted to."""


def has_outgrown(model: Genius, snapshot: Snapshot) -> bool:
    """Return whether an index has grown by more than a half since its codebooks were fitted to it."""
    fitted = model.quantizer_manifest.inputs.get(FITTED)
    return fitted is not None and snapshot.num_alive > GROWTH * int(fitted)


def refit_index(
    writer: Writer, model: Genius, *, levels: int | None = None, seed: int = 0, progress: Progress
) -> None:
    """Fit the codebooks to the items of an index, and give all items new IDs in one step.

    Nothing is encoded. Generator and calibration, which belong to the old IDs, are removed.

    Raises
    ------
    UsageError
        the index was not created with an encoder alone, stores no fused embeddings, or has no items.
    """
    levels = model.quantizer.config.levels if levels is None else check_levels(levels)
    snapshot = writer.snapshot
    manifest = snapshot.manifest
    if not manifest.has_own_model or manifest.embeddings != "fused":
        raise UsageError(
            f"{writer.folder} was created with a trained model, or stores no fused embeddings; only an index "
            "that was created with an encoder, and stores them, can be refitted"
        )
    if not snapshot.num_alive:
        raise UsageError(f"{writer.folder} has no items to fit codebooks to")
    rows = [segment.alive_rows() for segment in snapshot.segments]
    total = sum(map(len, rows))
    chosen = np.random.default_rng(seed).permutation(total)[:MAX_SAMPLE]
    starts = np.cumsum([0, *map(len, rows)])
    vectors, modalities = [], []
    for number, segment in enumerate(snapshot.segments):
        inside = np.sort(chosen[(chosen >= starts[number]) & (chosen < starts[number + 1])]) - starts[number]
        vectors.append(normalize(segment.vectors(model.ranker)(rows[number][inside])))
        modalities.append(_modalities(segment, rows[number][inside]))
    name = f"{OWN_MODEL}-{manifest.generation + 1}"
    folder = writer.folder / name
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted refit
    quantizer = fit_codebooks(
        torch.from_numpy(np.concatenate(vectors)),
        np.concatenate(modalities),
        folder / "quantizer",
        items=total,
        inputs={"quantizer": model.quantizer_manifest.fingerprint},
        fused_by=model.quantizer,
        levels=levels,
        seed=seed,
        progress=progress,
    )
    fitted = Genius.finish(folder, carry_encoder(model, folder), quantizer, None, model.instructions)
    before = writer.folder / manifest.model
    changed = manifest.replace(
        model=name, model_fingerprint=fitted.fingerprint, calibration=None, hubness=None
    )
    writer.replace(writer.write_replacement(changed, _batches(fitted, model, snapshot, rows, progress)))
    shutil.rmtree(before, ignore_errors=True)


def _batches(
    model: Genius, before: Genius, snapshot: Snapshot, rows: list[np.ndarray], progress: Progress
) -> Iterator[Batch]:
    """Yield the items with new IDs and their old embeddings, which the model before may be needed to read."""
    progress.begin("index", snapshot.num_alive)
    done = 0
    for segment, kept in zip(snapshot.segments, rows, strict=True):
        items = alive_items(segment)
        for start in range(0, len(kept), CHUNK):
            some = kept[start : start + CHUNK]
            vectors = torch.from_numpy(segment.vectors(before.ranker)(some))
            present = torch.ones(len(some), dtype=torch.bool)
            arrays = encode_batch(
                model,
                FeatureBatch(torch.zeros_like(vectors), vectors, ~present, present),
                _modalities(segment, some),
                embeddings="fused",
                bits=snapshot.manifest.embedding_bits,
            )
            yield list(islice(items, len(some))), arrays
            done += len(some)
            progress.advance(done, {})


def _modalities(segment: Segment, rows: np.ndarray) -> np.ndarray:
    """Return the modality code of items, which is the first code of their IDs."""
    return np.asarray(segment.table.ids[segment.table.rows()[rows], 0], dtype=np.int8)


def carry_encoder(model: Genius, folder: Path) -> Encoder:
    """Return the encoder for a new model in a folder; one inside the old model's folder is copied to it."""
    kind, _, place = model.encoder.spec.partition(":")
    inside = Path(place)
    if not inside.exists() or not inside.resolve().is_relative_to(model.folder.resolve()):
        return model.encoder
    target = folder / inside.resolve().relative_to(model.folder.resolve())
    shutil.rmtree(target, ignore_errors=True)  # of an interrupted run
    with new_folder(target) as partial:
        shutil.copytree(inside, partial, dirs_exist_ok=True)
    return load_encoder(f"{kind}:{target}", device=model.device)
