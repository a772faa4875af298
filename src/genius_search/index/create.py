"""Creating an index, with a trained model, or with an encoder and codebooks fitted to the pool."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from genius_search.artifact import fingerprint_of
from genius_search.data.features import Features
from genius_search.encoders.base import Encoder, load_encoder, reads_images
from genius_search.errors import UsageError
from genius_search.index.adding import (
    Added,
    GivenPool,
    Pool,
    add_pool,
    chunk_size,
    encode_features,
    feature_rows,
    open_memory,
    open_pool,
    stamp_of,
)
from genius_search.index.items import Item
from genius_search.index.store import (
    CURRENT,
    DELETED,
    LOCK,
    OWN_MODEL,
    SEGMENTS,
    TEMPORARY,
    WORK,
    IndexManifest,
    StoredEmbeddings,
    check_bits,
)
from genius_search.index.vectors import VectorItems, add_vectors, fit_to_vectors
from genius_search.index.writer import PICTURES, Writer, one_writer, remove_unused_pictures, remove_work
from genius_search.model import Genius
from genius_search.nn.fusion import SumFusion
from genius_search.progress import Progress
from genius_search.records import Modality
from genius_search.search.vectors import EmbeddingBits
from genius_search.training.codebooks import LEVELS, check_levels, draw_sample, fit_codebooks
from genius_search.training.features import SHARD_ROWS, embed
from genius_search.training.fit import absolute_spec

MANY_ITEMS: Final = 1_000_000
"""Number of items from which embeddings have one bit a number by default."""


LEFTOVERS: Final = frozenset(
    {LOCK, WORK, TEMPORARY, PICTURES, SEGMENTS, DELETED, f"{CURRENT}.tmp", Path(OWN_MODEL).name}
)
"""Names that an interrupted writer may leave in the folder of an index."""


def usual_bits(items: int) -> EmbeddingBits:
    """Return the bits of a number of an embedding, for an index of so many items without a trained model."""
    return 4 if items < MANY_ITEMS else 1


def create_index(
    folder: Path,
    *,
    pool: GivenPool | VectorItems,
    model: str | Path | Genius | None,
    encoder: str | None,
    embeddings: StoredEmbeddings | None,
    embedding_bits: EmbeddingBits | None,
    levels: int | None,
    captions: bool,
    device: str,
    download: bool,
    progress: Progress,
) -> tuple[Genius, Added]:
    """Create an index, and return its model; see :meth:`genius_search.index.index.Index.create`."""
    check_bits(embedding_bits, embeddings)
    if (model is None) is (encoder is None) and not (model is None and isinstance(pool, VectorItems)):
        raise UsageError("give either a model, or the encoder of an index that needs no training")
    if model is not None and levels is not None:
        raise UsageError("a trained model has its levels; give levels with an encoder only")
    levels = LEVELS if levels is None else check_levels(levels)
    if isinstance(model, str | Path):
        model = Genius.open(model, device=device, download=download)
    opened = (
        None if encoder is None else load_encoder(absolute_spec(encoder), download=download, device=device)
    )
    check_place(folder)
    with one_writer(folder) as writer:
        try:
            given = pool if isinstance(pool, VectorItems) else _open(pool, folder, captions=captions)
            if model is not None:
                manifest = IndexManifest(
                    model=str(model.folder.resolve()),
                    model_fingerprint=model.fingerprint,
                    embeddings=embeddings or "none",
                    embedding_bits=embedding_bits or 16,
                )
                created = model, _add(writer, model, given, manifest, progress)
            else:
                created = _create_with_encoder(
                    writer, opened, given, embeddings, embedding_bits, levels, progress
                )
        except BaseException:
            with contextlib.suppress(OSError):  # what an interrupted run may continue with stays
                shutil.rmtree(folder / PICTURES, ignore_errors=True)
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    shutil.rmtree(folder)
            raise
        if created[1].left_out:
            remove_unused_pictures(folder, writer.snapshot.segments)
        return created


def _add(
    writer: Writer, model: Genius, pool: Pool | VectorItems, manifest: IndexManifest, progress: Progress
) -> Added:
    """Create an index of a pool with a model."""
    if isinstance(pool, VectorItems):
        return add_vectors(writer, model, pool, create=manifest, progress=progress)
    return add_pool(writer, model, pool, create=manifest, progress=progress)


def _open(pool: GivenPool, folder: Path, *, captions: bool) -> Pool:
    """Open a pool on disk, or one in memory, whose pictures are stored in the folder of the index."""
    if isinstance(pool, str | Path):
        return open_pool(Path(pool), captions=captions)
    return open_memory(pool, folder, captions=captions)


def check_place(folder: Path) -> None:
    """Raise :class:`UsageError` unless an index can be created in this folder."""
    if (folder / CURRENT).exists():
        raise UsageError(f"{folder} holds an index already; `genius index add` adds to it")
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not place.is_dir():
        raise UsageError(f"{place} is a file, or a link to nothing; an index needs a folder")
    if folder.exists() and not all(entry.name in LEFTOVERS for entry in folder.iterdir()):
        raise UsageError(f"{folder} holds other things; an index needs a folder of its own")


def _create_with_encoder(
    writer: Writer,
    encoder: Encoder | None,
    pool: Pool | VectorItems,
    embeddings: StoredEmbeddings | None,
    embedding_bits: EmbeddingBits | None,
    levels: int,
    progress: Progress,
) -> tuple[Genius, Added]:
    """Create an index with a model of its own: an encoder, and codebooks fitted to the pool.

    Features that an interrupted run computed are not computed again. Vectors need no encoder.
    """

    def describe(model: Genius, items: int) -> IndexManifest:
        return IndexManifest(
            model=OWN_MODEL,
            model_fingerprint=model.fingerprint,
            embeddings=embeddings or "fused",
            embedding_bits=embedding_bits or (16 if embeddings == "raw" else usual_bits(items)),
        )

    if isinstance(pool, VectorItems):
        model = fit_to_vectors(writer, pool, encoder, levels, progress)
        return model, _add(writer, model, pool, describe(model, len(pool.ids)), progress)
    if encoder is None:
        raise UsageError("a pool of pictures and texts needs an encoder")
    stamps = [_stamp(item, encoder) for item in pool.items()]
    features = embed(
        feature_rows(pool.items(), writer.folder),
        encoder,
        writer.folder / WORK / "features",
        inputs={"items": fingerprint_of(stamps)},
        expected=len(stamps),
        progress=progress,
        skip_bad_images=True,
        shard_rows=chunk_size(len(stamps), SHARD_ROWS),
    )
    model = fit_model(
        writer.folder / OWN_MODEL, encoder, features, items=len(features), levels=levels, progress=progress
    )
    manifest = describe(model, len(features))
    readable = _readable(pool, stamps, features)
    added, replaced = writer.create_batches(
        manifest, encode_features(model, readable, features, manifest, progress)
    )
    remove_work(writer.folder)
    return model, Added(added, replaced, left_out=[*pool.left_out, *features.left_out])


def fit_model(
    folder: Path,
    encoder: Encoder,
    features: Features,
    *,
    items: int,
    levels: int = LEVELS,
    progress: Progress,
) -> Genius:
    """Fit codebooks to features of a pool of so many ``items``, or of a sample; return a model with them."""
    rows = draw_sample(features)
    sampled = features.gather(rows)
    quantizer = fit_codebooks(
        SumFusion()(sampled.image, sampled.text),
        features.modality[rows],
        folder / "quantizer",
        items=items,
        inputs={"items": features.manifest.fingerprint},
        levels=levels,
        progress=progress,
    )
    return Genius.finish(folder, encoder, quantizer, None, ())


def _stamp(item: Item, encoder: Encoder) -> str:
    """Return an item's stamp; refuse an image that the encoder cannot read before anything is encoded."""
    if item.modality is not Modality.TEXT and not reads_images(encoder):
        raise UsageError(
            f"{encoder.spec} reads texts only, and {item.id!r} has an image; choose an encoder of images, "
            "for example clip:NAME or siglip:NAME"
        )
    return stamp_of(item)


def _readable(pool: Pool, stamps: Sequence[str], features: Features) -> Iterator[Item]:
    """Yield the items with features, in the order of these."""
    positions = iter(features.ids.tolist())
    position = next(positions, None)
    for number, (item, stamp) in enumerate(zip(pool.items(), stamps, strict=True)):
        if number == position:
            yield pool.with_fields(item._replace(stamp=stamp))
            position = next(positions, None)
