"""The store of features: what an encoder has encoded is found again by a key of its contents.

One store serves data sets and indexes: creating, adding, training and evaluating. An interrupted
run loses at most its last part::

    FOLDER/
      features-3f9a0c61b7e2/        of the encoder with this fingerprint
        shard-000000-5d1c02aa/      a part: rows with their keys, and their features
        shard-000001-90be77f3/

The features of a data set, which training reads at random, are joined into few large shards at the
end (:func:`embed`); those of an index become its embeddings.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int64

from genius_search.artifact import file_fingerprint, fingerprint_of, open_artifact
from genius_search.data.features import (
    FEATURES_KIND,
    ROW,
    Features,
    LeftOut,
    Shard,
    StoredArray,
    join_shards,
    read_shards,
    rows_of_ids,
    write_shard,
)
from genius_search.encoders.base import Encoder
from genius_search.encoders.rows import FeatureRow, KeyedRow, encode_rows
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter, make_folder

Input = TypeVar("Input")

KEY_BYTES: Final = 8
"""Length of the keys of features."""
PART_ROWS: Final = 1024
"""Number of rows of a data set that are saved together, if the encoder runs a network."""
LOOK_UP_PART_ROWS: Final = 8192
"""Number of rows of a data set that are saved together by an encoder that reads no pictures."""
SHARD_ROWS: Final = 32_768
"""Number of rows in a shard of finished features."""
FIRST_BLOCK_ROWS: Final = 8
"""Number of rows that are encoded together at first, if blocks grow."""
MAX_BLOCK_SECONDS: Final = 1.0
"""Blocks double in size while they take less than half of this time."""
SAVE_INTERVAL_SECONDS: Final = 10.0
"""Time after which encoded features are saved, if blocks grow."""
MAX_UNSAVED_ROWS: Final = 8192


def key_of(*parts: object) -> int:
    """Return the key of contents: a hash of parts that identify them, as a signed number."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()
    return int.from_bytes(digest, "big", signed=True)


class Share(NamedTuple):
    """The share of one of several processes that encode together: every ``total``-th block."""

    number: int = 0
    """Number of the process, from 0; the first one also joins the parts of all."""
    total: int = 1
    agree: Callable[[bool], bool] = bool
    """Returns the first process's value in every process."""
    wait: Callable[[], None] = lambda: None
    """Waits until every process has called this function."""


ALONE: Final = Share()


class GrowingBlocks(Generic[Input]):
    """Blocks that double in size while they are fast, saved every ten seconds.

    Parameters
    ----------
    max_rows
        Maximum size of a block.
    shows_speed
        Returns whether the time of an encoded block predicts that of the next one.
    """

    def __init__(
        self, max_rows: int, shows_speed: Callable[[Sequence[tuple[int, Input]]], bool]
    ) -> None:
        self.size = min(FIRST_BLOCK_ROWS, max_rows)
        self._max_rows = max_rows
        self._shows_speed = shows_speed
        self._last_save = time.monotonic()

    def note_time(self, encoded: Sequence[tuple[int, Input]], seconds: float) -> None:
        """Double the size if the next block would still be fast."""
        # The next block takes twice as long if it has twice the rows; saved ones take no time.
        if encoded and 2 * seconds < MAX_BLOCK_SECONDS and self._shows_speed(encoded):
            self.size = min(2 * self.size, self._max_rows)

    def is_save_due(self, unsaved_rows: int) -> bool:
        """Return whether the last save was long ago, or many features are not saved."""
        is_long_ago = time.monotonic() - self._last_save > SAVE_INTERVAL_SECONDS
        if is_long_ago:
            self._last_save = time.monotonic()
        return is_long_ago or unsaved_rows >= MAX_UNSAVED_ROWS


class FeatureStore(Generic[Input]):
    """Encodes inputs, and saves their features in parts, where a later run finds them.

    Parameters
    ----------
    folder
        Receives the parts, below a folder of the encoder; None keeps the features in memory.
    encode
        Encodes a block of inputs, each with its key, into a shard, whose rows have the keys.
    earlier
        A folder of shards by the same encoder, whose features are used, too.
    """

    def __init__(
        self,
        folder: Path | None,
        encoder: Encoder,
        encode: Callable[[Sequence[tuple[int, Input]]], Shard],
        *,
        earlier: Path | None = None,
    ) -> None:
        self._encoder = encoder
        self._encode = encode
        self._earlier = earlier
        # Parts with other columns are not read.
        name = f"features-{fingerprint_of([encoder.fingerprint, ROW.names])[:12]}"
        self.folder = None if folder is None else folder / name
        self._unsaved: list[Shard] = []

    def features_of(
        self,
        inputs: Iterable[tuple[int, Input]],
        blocks: GrowingBlocks[Input] | int,
        report: Callable[[int], None],
    ) -> tuple[Features, Int64[np.ndarray, " rows"]]:
        """Return the features of inputs in their order, and the position of each row's input.

        Inputs that the encoder cannot read have no row; the features list them in ``left_out``.
        Parameters and errors are those of :meth:`fill`.
        """
        keys, left_out = self.fill(inputs, blocks, report)
        features, positions = self.find(keys)
        features.left_out = left_out
        return features, positions

    def fill(
        self,
        inputs: Iterable[tuple[int, Input]],
        blocks: GrowingBlocks[Input] | int,
        report: Callable[[int], None],
        *,
        share: Share = ALONE,
    ) -> tuple[Int64[np.ndarray, " inputs"], list[LeftOut]]:
        """Encode the inputs that are not saved; return the keys of all, and what was left out.

        Parameters
        ----------
        inputs
            Keys and inputs, read as a stream.
        blocks
            Number of inputs that are encoded together and saved as a part; or blocks that grow
            while they are fast, several of which become a part.
        report
            Called with the number of inputs that are done.
        share
            The blocks that this process encodes.

        Raises
        ------
        BadData
            Features are not finite.
        """
        saved_keys = np.sort(np.concatenate([shard.rows["key"] for shard in self._saved()]))
        growing = None if isinstance(blocks, int) else blocks
        keys = array("q")
        left_out: list[LeftOut] = []
        num_unsaved = 0
        iterator = iter(inputs)
        for number in itertools.count():
            block = list(islice(iterator, blocks if isinstance(blocks, int) else blocks.size))
            if not block:
                break
            start = time.monotonic()
            first = len(keys)
            keys.extend(key for key, _ in block)
            new: list[tuple[int, Input]] = []
            if number % share.total == share.number:
                block_keys = np.array(keys[first:], dtype=np.int64)
                new = [*compress(block, ~_contains(saved_keys, block_keys))]
            if new:
                shard = self._encode(new)
                left_out += shard.left_out
                if len(shard.rows):
                    self._unsaved.append(shard)
                    num_unsaved += len(shard.rows)
            report(len(keys))
            if growing is not None:
                growing.note_time(new, time.monotonic() - start)
            if growing is None or growing.is_save_due(num_unsaved):
                self.save(number)
                num_unsaved = 0
        return np.array(keys, dtype=np.int64), left_out

    def save(self, number: int | None = None) -> None:
        """Save the features that are not saved yet, as a part with a number."""
        if self.folder is None or not self._unsaved:
            return
        make_folder(self.folder)
        part = join_shards(self._unsaved)
        if number is None:
            number = sum(1 for _ in self.folder.glob("shard-*"))
        name = f"shard-{number:06d}-{hashlib.sha256(part.rows['key'].tobytes()).hexdigest()[:8]}"
        if not (self.folder / name).exists():
            write_shard(self.folder, name, part)
        self._unsaved = []

    def _saved(self) -> Iterator[Shard]:
        """Yield the parts; the empty one makes a type of no parts."""
        empty = np.zeros((0, 0), dtype=np.float16)
        yield Shard(np.zeros(0, ROW), empty, empty)
        for folder in (self.folder, self._earlier):
            if folder is not None:
                yield from read_shards(folder, StoredArray)

    def find(
        self, keys: Int64[np.ndarray, " inputs"]
    ) -> tuple[Features, Int64[np.ndarray, " rows"]]:
        """Return the features with the given keys, in their order, and their positions."""
        features = Features([*self._saved(), *self._unsaved])
        positions = np.zeros(0, dtype=np.int64)
        if len(features):
            rows, exists = rows_of_ids(features.keys, keys)
            positions = np.flatnonzero(exists)
            features.select(rows[positions])
        contents = hashlib.sha256(features.keys.tobytes()).hexdigest()
        features.fingerprint = fingerprint_of([self._encoder.fingerprint, contents])
        return features, positions


def _contains(
    sorted_keys: Int64[np.ndarray, " saved"], keys: Int64[np.ndarray, " keys"]
) -> Bool[np.ndarray, " keys"]:
    """Return which keys are among sorted ones."""
    if not len(sorted_keys):
        return np.zeros(len(keys), dtype=bool)
    positions = np.searchsorted(sorted_keys, keys).clip(max=len(sorted_keys) - 1)
    return np.asarray(sorted_keys[positions] == keys)


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
    part_rows: int | None = None,
    share: Share = ALONE,
) -> Features:
    """Embed rows into ``folder``, or open it if it is finished with the same inputs.

    Rows that the folder already has, with other inputs, are not encoded again.

    Parameters
    ----------
    rows
        read as a stream. The same ``inputs`` must always give the same rows in the same order.
    inputs
        fingerprints of the inputs of the rows.
    expected
        approximate number of rows, for the progress display.
    skip_bad_images
        leave out rows with unreadable images; otherwise such an image is an error.
    part_rows
        number of rows that are saved together; an interrupted run loses at most this many.
    share
        the share of this process, if several embed together.

    Raises
    ------
    BadData
        There are no rows, or features are not finite.
    BadImage
        An image cannot be read.
    """

    def read() -> Iterator[tuple[int, FeatureRow]]:
        progress.begin(f"embed {folder.name}", expected)
        yield from keyed_rows(rows, encoder)
        progress.advance(expected, {})

    return write_features(
        folder,
        read(),
        partial(encode_rows, encoder=encoder, skip_bad_images=skip_bad_images),
        encoder,
        inputs=inputs,
        part_rows=part_rows,
        report=lambda count: progress.advance(min(expected - 1, count), {}),
        share=share,
    )


def embed_unfinished(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path | None,
    *,
    name: str,
    expected: int,
    progress: Progress,
) -> Features:
    """Embed rows into the store in ``folder``, or in memory, for as long as the caller needs them.

    Raises
    ------
    BadImage
        An image cannot be read.
    """
    progress.begin(f"embed {name}", expected)
    store = FeatureStore(
        folder, encoder, partial(encode_rows, encoder=encoder, skip_bad_images=False)
    )
    features, _ = store.features_of(
        keyed_rows(rows, encoder),
        _part_rows(encoder),
        lambda count: progress.advance(min(expected, count), {}),
    )
    return features


def keyed_rows(rows: Iterable[FeatureRow], encoder: Encoder) -> Iterator[KeyedRow]:
    """Yield each row with the key of its contents, for which its picture is read."""
    last_image, picture = None, ""
    for row in rows:
        if row.image != last_image:  # the rows of a query, one for each instruction, are adjacent
            last_image, picture = row.image, ""
            if row.image is not None and encoder.needs_pixels and row.image.is_file():
                with contextlib.suppress(OSError):  # the encoder reports that it cannot be read
                    picture = file_fingerprint(row.image)
        target = None if row.wanted is None else row.wanted.value
        yield key_of(row.id, *row.key, row.modality.value, target, row.text, picture), row


def write_features(
    folder: Path,
    inputs_with_keys: Iterable[tuple[int, Input]],
    encode: Callable[[Sequence[tuple[int, Input]]], Shard],
    encoder: Encoder,
    *,
    inputs: Mapping[str, str],
    part_rows: int | None = None,
    report: Callable[[int], None] = lambda _: None,
    share: Share = ALONE,
) -> Features:
    """Encode inputs in parts, and join them in ``folder``; or open it if it is finished.

    The joined shards depend on the order of the inputs only, and not on interruptions.
    """
    parts = folder.with_name(f".{folder.name}.parts")
    writer = None
    if share.number == 0:
        writer = ArtifactWriter(
            folder,
            kind=FEATURES_KIND,
            config={"columns": ROW.names},
            inputs={**inputs, "encoder": encoder.fingerprint},
        )
    if not share.agree(writer is not None and writer.finished() is not None):
        store = FeatureStore(parts, encoder, encode, earlier=_finished_shards(folder, encoder))
        keys, _ = store.fill(
            inputs_with_keys, part_rows or _part_rows(encoder), report, share=share
        )
        share.wait()  # until the parts of all processes are saved
        if writer is not None:
            _join_parts(store.find(keys)[0], writer)
    if writer is not None:
        shutil.rmtree(parts, ignore_errors=True)
    share.wait()
    return Features.open(folder)


def _join_parts(features: Features, writer: ArtifactWriter) -> None:
    """Write features as the shards of a finished folder."""
    if not len(features):
        raise BadData(f"nothing to embed into {writer.folder}: no record can be read")
    for joined in writer.path.glob("shard-*"):  # of a run that was interrupted while it joined
        shutil.rmtree(joined)
    for number, start in enumerate(range(0, len(features), SHARD_ROWS)):
        shard = features.shard(np.arange(start, min(start + SHARD_ROWS, len(features))))
        write_shard(writer.path, f"shard-{number:06d}", shard)
    writer.finish()


def _finished_shards(folder: Path, encoder: Encoder) -> Path | None:
    """Return a finished folder whose features the same encoder has computed."""
    try:
        manifest = open_artifact(folder, kind=FEATURES_KIND)
    except (ArtifactMissing, ArtifactMismatch):
        return None
    is_same = manifest.inputs.get("encoder") == encoder.fingerprint
    has_same_columns = manifest.config.get("columns") == [*(ROW.names or ())]
    return folder if is_same and has_same_columns else None


def _part_rows(encoder: Encoder) -> int:
    """Return the number of rows of a data set that are saved together."""
    return PART_ROWS if encoder.needs_pixels else LOOK_UP_PART_ROWS
