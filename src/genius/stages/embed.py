"""``genius embed``: run the encoder over records and keep the features.

Shards are finished one by one, so a killed run goes on where it stopped. Within a shard each picture and each
text is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
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

__all__ = ["SHARD_ROWS", "SHORTEST_SIDE", "FeatureRow", "embed", "features_of", "transform"]

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


def features_of(encoder: Encoder, *, image: Image.Image | None, text: str, key: ItemKey) -> FeatureBatch:
    """Features of one query or candidate in memory; ``text`` as the encoder shall read it, or empty.

    Raises
    ------
    BadData
        there is neither an image nor a text.
    """
    if image is None and not text:
        raise BadData(f"{key.role} {key.id!r} has neither an image nor a text; it needs one of them")
    present, absent = np.array([0]), np.array([ABSENT])
    if is_joint(encoder):
        both = encoder.joint_features([JointInput(image, text, key, image is not None)])
        return FeatureBatch.of(both[:0], both, absent, present)
    pictures = None if image is None else encoder.image_features([ImageInput(image, key)])
    words = encoder.text_features([TextInput(text, key)]) if text else None
    nothing = (words if pictures is None else pictures)[:0]  # type: ignore[index]  # one of them is there
    return FeatureBatch.of(
        nothing if pictures is None else pictures,
        nothing if words is None else words,
        absent if pictures is None else present,
        absent if words is None else present,
    )


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
