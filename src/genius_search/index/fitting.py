"""Creating an index with an encoder alone: codebooks are fitted to the pool, and nothing is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from genius_search.artifact import fingerprint_of
from genius_search.data.features import Features
from genius_search.embed import embed
from genius_search.encoders.base import Encoder, reads_images
from genius_search.errors import BadData, UsageError
from genius_search.index.adding import (
    CHUNK,
    Added,
    Batch,
    Pool,
    encode_batch,
    feature_rows,
    open_pool,
    stamp_of,
)
from genius_search.index.items import Item
from genius_search.index.store import OWN_MODEL, EmbeddingType, IndexManifest, StoredEmbeddings
from genius_search.index.writer import WORK, Writer, remove_work
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import Modality
from genius_search.training.codebooks import fit_codebooks

MANY_ITEMS: Final = 1_000_000
"""Number of items from which embeddings are not stored by default."""


def create_with_encoder(
    writer: Writer,
    encoder: Encoder,
    pool: Path,
    *,
    captions: bool,
    embeddings: StoredEmbeddings | None,
    embedding_type: EmbeddingType,
    progress: Progress,
) -> tuple[Genius, Added]:
    """Create an index whose model is an encoder and codebooks fitted to the pool.

    The model is stored in the index. An interrupted run resumes when repeated: features that are already
    computed are not computed again.

    Parameters
    ----------
    embeddings
        by default fused ones for fewer than a million items, otherwise none.

    Raises
    ------
    BadData
        nothing in the pool can be used.
    UsageError
        the encoder reads texts only, and the pool has images.
    """
    stamps = [_stamp(item, encoder) for item in open_pool(pool, captions=captions).items]
    features = embed(
        feature_rows(open_pool(pool, captions=captions).items, writer.folder),
        encoder,
        writer.folder / WORK / "features",
        inputs={"items": fingerprint_of(stamps)},
        expected=len(stamps),
        progress=progress,
        skip_bad_images=True,
    )
    folder = writer.folder / OWN_MODEL
    quantizer = fit_codebooks(features, folder / "quantizer", progress=progress)
    model = Genius.finish(folder, encoder, quantizer, None, ())
    if embeddings is None:
        embeddings = "fused" if len(features) < MANY_ITEMS else "none"
    manifest = IndexManifest(
        model=OWN_MODEL,
        model_fingerprint=model.fingerprint,
        embeddings=embeddings,
        embedding_type=embedding_type,
    )
    again = open_pool(pool, captions=captions)
    batches = _batches(model, features, again, stamps, embeddings, progress)
    added, replaced = writer.create_batches(manifest, batches)
    remove_work(writer.folder)
    return model, Added(added, replaced, left_out=[*again.left_out, *features.left_out])


def _stamp(item: Item, encoder: Encoder) -> str:
    """Return an item's stamp; refuse an image that the encoder cannot read before anything is encoded."""
    if item.modality is not Modality.TEXT and not reads_images(encoder):
        raise UsageError(
            f"{encoder.spec} reads texts only, and {item.id!r} has an image; choose an encoder of images, "
            "for example clip:NAME or siglip:NAME"
        )
    return stamp_of(item)


def _batches(
    model: Genius,
    features: Features,
    pool: Pool,
    stamps: list[str],
    embeddings: StoredEmbeddings,
    progress: Progress,
) -> Iterator[Batch]:
    """Yield the items with features and their IDs."""
    progress.begin("index", len(features))
    numbers = features.ids.tolist()
    stamped = (item._replace(stamp=stamp) for item, stamp in zip(pool.items, stamps, strict=True))
    readable = _at(stamped, numbers)
    for start in range(0, len(features), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(features)))
        items = list(itertools.islice(readable, len(rows)))
        if len(items) < len(rows):
            raise BadData("the pool changed while it was indexed; run the command again")
        arrays = encode_batch(
            model,
            features.gather(rows),
            features.modality[rows],
            embeddings=embeddings,
            numbers=np.full(len(rows), -1),
        )
        yield items, arrays
        progress.advance(start + len(rows), {})


def _at(items: Iterator[Item], positions: list[int]) -> Iterator[Item]:
    """Yield the items at ascending positions."""
    wanted = iter(positions)
    position = next(wanted, None)
    for number, item in enumerate(items):
        if number == position:
            yield item
            position = next(wanted, None)
