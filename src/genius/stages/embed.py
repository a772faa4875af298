"""``genius embed``: run the encoder over records and keep the features.

Shards are finished one by one, so a killed run goes on where it stopped. Within a shard each picture and each
text is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64
from PIL import Image

from genius.artifact import ArtifactWriter
from genius.data.features import (
    ABSENT,
    KIND,
    FeatureBatch,
    Features,
    Shard,
    has_shard,
    num_records,
    num_rows,
    write_shard,
)
from genius.encoders.protocol import Encoder, ImageInput, ItemKey, JointInput, TextInput
from genius.errors import ArtifactMismatch, BadData
from genius.stages.embed_shard import SHORTEST_SIDE, FeatureRow, chunks, encode_shard, is_joint
from genius.stages.progress import Progress

__all__ = ["SHARD_ROWS", "SHORTEST_SIDE", "Content", "FeatureRow", "embed", "features_of", "transform"]

SHARD_ROWS: Final = 8192


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
) -> Features:
    """Embed rows into ``folder``; a finished folder of the same inputs is opened as it is.

    Parameters
    ----------
    rows
        streamed; the same rows in the same order for the same ``inputs``.
    expected
        about how many rows there will be, for the progress display.
    skip_bad_images
        leave out rows whose picture cannot be read and list them in :attr:`Features.left_out`; otherwise
        the first such picture is an error.

    Raises
    ------
    BadData
        there is nothing to embed, or features are not finite.
    BadImage
        a picture cannot be read.
    ArtifactMismatch
        the records changed since a killed run, or somebody else took away what was written.
    """
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    progress.begin(f"embed {folder.name}", expected)
    sizes: list[int] = []
    for number, chunk in enumerate(chunks(rows, SHARD_ROWS)):
        if not has_shard(writer.path, number):
            encoded = encode_shard(chunk, encoder, skip_bad_images=skip_bad_images)
            write_shard(writer.path, number, encoded.shard, encoded.left_out)
        sizes.append(len(chunk))
        progress.advance(min(expected - 1, number * SHARD_ROWS + len(chunk)), {})
    _finish(writer, encoder.spec, sizes)
    progress.advance(expected, {})
    return Features.open(folder)


class Content(NamedTuple):
    """What an encoder reads of one query or candidate; at least one of image and text."""

    image: Image.Image | None
    text: str
    """As the encoder shall read it; empty where there is none."""
    key: ItemKey


def features_of(encoder: Encoder, contents: Sequence[Content]) -> FeatureBatch:
    """Features of queries or candidates in memory: all their images at once, and all their texts.

    Raises
    ------
    BadData
        one has neither an image nor a text.
    """
    for image, text, key in contents:
        if image is None and not text:
            raise BadData(f"{key.role} {key.id!r} has neither an image nor a text; it needs one of them")
    if is_joint(encoder):
        both = encoder.joint_features(
            [JointInput(image, text, key, image is not None) for image, text, key in contents]
        )
        nowhere = np.full(len(contents), ABSENT)
        return FeatureBatch.of(both[:0], both, nowhere, np.arange(len(contents)))
    pictures = [ImageInput(image, key) for image, _, key in contents if image is not None]
    words = [TextInput(text, key) for _, text, key in contents if text]
    image_features = encoder.image_features(pictures) if pictures else None
    text_features = encoder.text_features(words) if words else None
    nothing = (text_features if image_features is None else image_features)[:0]  # type: ignore[index]  # one is there
    return FeatureBatch.of(
        nothing if image_features is None else image_features,
        nothing if text_features is None else text_features,
        _counted([image is not None for image, _, _ in contents]),
        _counted([bool(text) for _, text, _ in contents]),
    )


def _counted(present: Sequence[bool]) -> Int64[np.ndarray, " items"]:
    """Places of what is present among all that is, in order."""
    mask = np.array(present)
    return np.where(mask, np.cumsum(mask) - 1, ABSENT).astype(np.int64)


def transform(
    source: Features,
    folder: Path,
    *,
    change: Callable[[Shard], Shard],
    inputs: Mapping[str, str],
    encoder: Encoder,
) -> Features:
    """What :func:`embed` would write for ``encoder``, from what its first half gave for the same records."""
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    sizes: list[int] = []
    for number, shard in enumerate(source.shards()):
        sizes.append(len(shard.ids))
        if not has_shard(writer.path, number):
            write_shard(writer.path, number, change(shard), [])
    _finish(writer, encoder.spec, sizes)
    return Features.open(folder)


def _writer(folder: Path, inputs: Mapping[str, str], encoder: Encoder) -> ArtifactWriter:
    return ArtifactWriter(
        folder,
        kind=KIND,
        config={"shard_rows": SHARD_ROWS},
        inputs={**inputs, "encoder": encoder.fingerprint},
    )


def _finish(writer: ArtifactWriter, spec: str, sizes: Sequence[int]) -> None:
    """Finish a folder whose shards are all there and stand for so many records each."""
    found = num_records(writer.path)
    if found != dict(enumerate(sizes)):
        raise ArtifactMismatch(
            f"{writer.path} holds {sum(found.values()):,} of {sum(sizes):,} records, in {len(found)} of "
            f"{len(sizes)} shards: the records changed, or another writer took some away; remove it and run "
            "the same again"
        )
    rows = num_rows(writer.path)
    if rows == 0:
        raise BadData(f"nothing to embed into {writer.folder}: there is no record that can be read")
    # A shard without pictures (or texts) cannot know how wide they are; the widest one does.
    widths = {
        name: max(np.load(path, mmap_mode="r").shape[1] for path in writer.path.glob(f"shard-*/{name}.npy"))
        for name in ("image", "text")
    }
    writer.finish(
        facts={
            "rows": rows,
            "image_dim": widths["image"],
            "text_dim": widths["text"],
        },
        notes={"encoder": spec},
    )
