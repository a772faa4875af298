"""``genius embed``: run the encoder over records and keep the features.

Shards are finished one by one, so a killed run goes on where it stopped. Within a shard each picture and each
text is encoded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from PIL import Image

from genius.artifact import ArtifactWriter
from genius.data.features import ABSENT, KIND, Features, LeftOut, Shard, has_shard, num_rows, write_shard
from genius.data.images import open_image
from genius.data.records import Modality
from genius.encoders.protocol import Encoder, ImageInput, ItemKey, TextInput
from genius.errors import BadData, BadImage
from genius.stages.progress import Progress

Item = TypeVar("Item")

SHARD_ROWS: Final = 8192
ENCODE_BATCH: Final = 256
SHORTEST_SIDE: Final = 256
"""Pictures are decoded no smaller than this; M-BEIR's are stored at it (deviation 22)."""


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One row to be embedded."""

    id: int
    key: ItemKey
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """As the encoder shall read it, instruction included."""
    variant: int = ABSENT
    wanted: Modality | None = None


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
    """
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    progress.begin(f"embed {folder.name}", expected)
    for number, chunk in enumerate(_chunks(rows, SHARD_ROWS)):
        if not has_shard(writer.path, number):
            shard, left_out = _embed_shard(chunk, encoder, skip_bad_images=skip_bad_images)
            write_shard(writer.path, number, shard, left_out)
        progress.advance(min(expected - 1, number * SHARD_ROWS + len(chunk)), {})
    if num_rows(writer.path) == 0:
        raise BadData(f"nothing to embed into {folder}: there is no record that can be read")
    _finish(writer, encoder.spec)
    progress.advance(expected, {})
    return Features.open(folder)


def transform(
    source: Features,
    folder: Path,
    *,
    image: Callable[[np.ndarray], np.ndarray],
    text: Callable[[np.ndarray], np.ndarray],
    inputs: Mapping[str, str],
    encoder: Encoder,
) -> Features:
    """What :func:`embed` would write for ``encoder``, from what its first half gave for the same records."""
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    for number, shard in enumerate(source.shards()):
        if not has_shard(writer.path, number):
            changed = shard._replace(image=image(shard.image), text=text(shard.text))
            write_shard(writer.path, number, changed, [])
    _finish(writer, encoder.spec)
    return Features.open(folder)


def _writer(folder: Path, inputs: Mapping[str, str], encoder: Encoder) -> ArtifactWriter:
    return ArtifactWriter(
        folder,
        kind=KIND,
        config={"shard_rows": SHARD_ROWS},
        inputs={**inputs, "encoder": encoder.fingerprint},
    )


def _finish(writer: ArtifactWriter, spec: str) -> None:
    """A shard without pictures (or texts) cannot know how wide they are; the widest one does."""
    widths = {
        name: max(np.load(path, mmap_mode="r").shape[1] for path in writer.path.glob(f"shard-*/{name}.npy"))
        for name in ("image", "text")
    }
    writer.finish(
        facts={
            "rows": num_rows(writer.path),
            "image_dim": widths["image"],
            "text_dim": widths["text"],
        },
        notes={"encoder": spec},
    )


def _embed_shard(
    rows: list[FeatureRow], encoder: Encoder, *, skip_bad_images: bool
) -> tuple[Shard, list[LeftOut]]:
    # Where the encoder looks features up, the item decides; where it computes them, the content does.
    image_keys: list[Hashable] = [
        None if row.image is None else (row.image if encoder.needs_pixels else row.key) for row in rows
    ]
    text_keys: list[Hashable] = [
        None if not row.text else (row.text if encoder.needs_pixels else row.key) for row in rows
    ]
    images = {key: row for key, row in zip(image_keys, rows, strict=True) if key is not None}
    texts = {key: row for key, row in zip(text_keys, rows, strict=True) if key is not None}
    image_parts: list[np.ndarray] = []
    bad: dict[Hashable, BadImage] = {}
    with ThreadPoolExecutor(2) as pool:
        for batch in _chunks(images.items(), ENCODE_BATCH):
            good: list[ImageInput] = []
            opened = pool.map(_decoder(encoder), [row for _, row in batch])
            for (key, row), result in zip(batch, opened, strict=True):
                if isinstance(result, BadImage):
                    if not skip_bad_images:
                        raise result
                    bad[key] = result
                else:
                    good.append(ImageInput(result, row.key))
            if good:
                image_parts.append(encoder.image_features(good).cpu().numpy())
    text_parts = [
        encoder.text_features([TextInput(row.text or "", row.key) for row in batch]).cpu().numpy()
        for batch in _chunks(texts.values(), ENCODE_BATCH)
    ]
    image_place = {key: place for place, key in enumerate(key for key in images if key not in bad)}
    text_place = {key: place for place, key in enumerate(texts)}
    kept = [index for index, key in enumerate(image_keys) if key is None or key not in bad]
    image = np.concatenate(image_parts) if image_parts else _nothing(encoder)
    text = np.concatenate(text_parts) if text_parts else _nothing(encoder)
    chosen = [rows[index] for index in kept]
    shard = Shard(
        ids=np.array([row.id for row in chosen], dtype=np.int64),
        variant=np.array([row.variant for row in chosen], dtype=np.int16),
        modality=np.array([row.modality.code for row in chosen], dtype=np.int8),
        wanted=np.array([ABSENT if row.wanted is None else row.wanted.code for row in chosen], dtype=np.int8),
        image_index=_places(image_keys, image_place, kept),
        text_index=_places(text_keys, text_place, kept),
        image=image,
        text=text,
    )
    left_out = [
        LeftOut(row.id, str(bad[key].file), bad[key].reason)
        for key, row in zip(image_keys, rows, strict=True)
        if key in bad
    ]
    return shard, left_out


def _nothing(encoder: Encoder) -> np.ndarray:
    return np.zeros((0, encoder.dim), dtype=np.float16)


def _decoder(encoder: Encoder) -> Callable[[FeatureRow], Image.Image | BadImage | None]:
    def decode(row: FeatureRow) -> Image.Image | BadImage | None:
        if not encoder.needs_pixels or row.image is None:
            return None
        try:
            return open_image(row.image, shortest_side=SHORTEST_SIDE)
        except BadImage as error:
            return error

    return decode


def _places(keys: list[Hashable], place: Mapping[Hashable, int], kept: list[int]) -> np.ndarray:
    return np.array([ABSENT if keys[index] is None else place[keys[index]] for index in kept], dtype=np.int64)


def _chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
