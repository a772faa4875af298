"""Replacing the encoder of an index: items and choices get vectors of another one.

Ids, fields, texts and stamps stay. The items come first, in one commit, and then the choices, in
another; :meth:`genius_search.Index.refit` continues a run that was killed between the two.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from genius_search.encoders.base import Encoder, VectorEncoder
from genius_search.index.build import (
    PoolChanges,
    all_changes,
    check_recall,
    fit_pool_model,
    with_recall,
)
from genius_search.index.fit import check_refit, commit_replacement, replaced_manifest
from genius_search.index.learned import NewChoice, encode_queries, has_log, reading_log
from genius_search.index.measure import measure_least_scores
from genius_search.index.pool import Pool
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import item_encoder, refuse_left_out
from genius_search.index.store import LEARNED, WORK
from genius_search.index.writer import Writer, open_writer, remove_work
from genius_search.model import Genius
from genius_search.progress import Progress, Silent


def reencode_index(
    writer: Writer,
    encoder: Encoder,
    *,
    levels: int | None = None,
    recall: float | None = None,
    query_vectors: Shaped[np.ndarray, ...] | None = None,
    progress: Progress,
) -> None:
    """Encode all items of an index with another encoder.

    An interrupted run continues with the features that it has saved.

    Raises
    ------
    UsageError
        The index was created with a trained model, stores no fused embeddings, or has no items.
    BadData
        An item cannot be encoded; nothing is changed.
    """
    check_recall(recall)
    snapshot = writer.snapshot
    check_refit(writer)
    items = [item for item, _ in snapshot.alive()]
    with item_encoder(writer.folder, encoder) as work:
        pool_changes = all_changes(Pool(lambda: iter(items)), encoder)
        pool_changes.compute_features(work, progress)
    refuse_left_out(pool_changes.left_out, encoder)
    pool_changes.keep_contents()
    _replace_model(
        writer,
        pool_changes,
        levels=levels,
        recall=recall,
        query_vectors=query_vectors,
        progress=progress,
    )


def _replace_model(
    writer: Writer,
    pool_changes: PoolChanges,
    *,
    levels: int | None = None,
    recall: float | None = None,
    query_vectors: Shaped[np.ndarray, ...] | None = None,
    progress: Progress,
) -> None:
    """Fit codebooks to encoded items, which become the items of an index in one step."""
    before = writer.snapshot.manifest
    folder = writer.folder / WORK / "refit"
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted refit
    model = fit_pool_model(folder, pool_changes, levels, query_vectors, progress)
    manifest = replaced_manifest(before, model, recall)
    batches = pool_changes.batches(model, Snapshot(manifest, ()), progress)
    written = with_recall(model, writer.rewrite(manifest, batches))
    least = {}
    if before.least:
        least = measure_least_scores(model, written, query_vectors)
    commit_replacement(writer, model, written.manifest.replace(least=least))
    remove_work(writer.folder)


def reencode_choices(folder: Path, model: Genius, snapshot: Snapshot, wait_seconds: float) -> int:
    """Encode the choices of an index again, after its encoder has changed.

    A choice for a picture or a vector cannot be encoded from the log and is forgotten; return the
    number of such choices.
    """
    if not has_log(folder):
        return 0
    with reading_log(folder), open_writer(folder / LEARNED, wait_seconds=wait_seconds) as writer:
        logged = [item for item, _ in writer.snapshot.alive()]
        texts = [item for item in logged if item.text]
        if not texts:
            writer.delete([item.id for item in logged])
            return len(logged)
        requests = [SearchRequest(text=item.text, modality=item.modality) for item in texts]
        choices = [
            NewChoice(request, item.id, item.modality)
            for request, item in zip(requests, texts, strict=True)
        ]
        vectors = encode_queries(SnapshotSearcher(model, snapshot), choices)
        encoder = VectorEncoder(str(model.dim))
        pool_changes = all_changes(Pool(lambda: iter(texts), vectors=vectors), encoder)
        with item_encoder(writer.folder, encoder) as work:
            pool_changes.compute_features(work, Silent())
        _replace_model(writer, pool_changes, progress=Silent())
    return len(logged) - len(texts)
