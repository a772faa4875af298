"""Embedding of queries and candidates: choice of instructions, encoding, and folders of features."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeGuard, TypeVar

import numpy as np
from jaxtyping import Int64, Shaped
from PIL import Image
from torch import Tensor

from genius_search.artifact import ArtifactWriter, file_fingerprint, fingerprint_of
from genius_search.data.features import (
    ABSENT,
    KIND,
    FeatureBatch,
    Features,
    LeftOut,
    Shard,
    has_shard,
    num_records,
    num_rows,
    write_shard,
)
from genius_search.data.images import open_image
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
from genius_search.encoders.base import Encoder, ImageInput, ItemKey, JointEncoder, JointInput, TextInput
from genius_search.errors import ArtifactMismatch, BadData, BadImage
from genius_search.progress import Progress
from genius_search.records import (
    TASKS,
    Candidate,
    Modality,
    Query,
    candidate_number,
    format_text,
    instructed,
    parse_id,
    query_number,
)

Item = TypeVar("Item")

ENCODE_BATCH: Final = 256
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass it only takes memory."""
SHORTEST_SIDE: Final = 256
"""Images are decoded at no less than this size in pixels, at which M-BEIR stores them (deviation 22)."""
_CODES: Final = {modality: modality.code for modality in Modality} | {None: ABSENT}


class FeatureRow(NamedTuple):
    """A query or candidate to embed."""

    id: int
    key: ItemKey
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """Text for the encoder, including the instruction."""
    variant: int = ABSENT
    wanted: Modality | None = None


class EncodedShard(NamedTuple):
    """A shard, and the rows that were left out of it."""

    shard: Shard
    left_out: list[LeftOut]


class _Encoded(NamedTuple):
    """Features of one modality (or both jointly), and the row of each key."""

    packed: Shaped[np.ndarray, "items dim"]
    places: Mapping[Hashable, int]


def is_joint(encoder: Encoder) -> TypeGuard[JointEncoder]:
    """Return whether an encoder gives one joint vector for image and text.

    Unlike ``isinstance``, this does not access the encoder's fingerprint, which is slow to compute.
    """
    return hasattr(encoder, "joint_features")


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> EncodedShard:
    """Encode rows into a shard, leaving out those with unreadable images.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    """
    # Encode each distinct input once: keyed by item if features are looked up, by content otherwise.
    looks_up = not encoder.needs_pixels
    bad = _Bad(skip=skip_bad_images)
    image_keys: list[Hashable]
    if is_joint(encoder):
        image_keys = [None] * len(rows)
        text_keys: list[Hashable] = [row.key if looks_up else (row.image, row.text or "") for row in rows]
        image, text = _nothing(encoder), _encode_together(rows, text_keys, encoder, bad)
    else:
        image_keys = [None if row.image is None else (row.key if looks_up else row.image) for row in rows]
        text_keys = [None if not row.text else (row.key if looks_up else row.text) for row in rows]
        image, text = (
            _encode_images(rows, image_keys, encoder, bad),
            _encode_texts(rows, text_keys, encoder),
        )
    errors = [bad.found.get(row.image) if bad.found else None for row in rows]
    kept = [place for place, error in enumerate(errors) if error is None]
    chosen = rows if len(kept) == len(rows) else [rows[place] for place in kept]
    shard = Shard(
        ids=np.array([row.id for row in chosen], dtype=np.int64),
        variant=np.array([row.variant for row in chosen], dtype=np.int16),
        modality=np.array([_CODES[row.modality] for row in chosen], dtype=np.int8),
        wanted=np.array([_CODES[row.wanted] for row in chosen], dtype=np.int8),
        image_index=_places(image_keys, image.places, kept),
        text_index=_places(text_keys, text.places, kept),
        image=image.packed,
        text=text.packed,
    )
    left_out = [
        LeftOut(row.id, str(error.file), error.reason)
        for row, error in zip(rows, errors, strict=True)
        if error is not None
    ]
    return EncodedShard(shard, left_out)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


class _Bad:
    """Collector of unreadable images, or with ``skip`` false, raiser of the first."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self.found: dict[Path | None, BadImage] = {}

    def add(self, row: FeatureRow, error: BadImage) -> None:
        if not self._skip:
            raise BadImage(
                error.file,
                f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all such images "
                "with `genius data check`",
            )
        self.found[row.image] = error


def _encode_images(
    rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: Encoder, bad: _Bad
) -> _Encoded:
    def encode(batch: list[tuple[FeatureRow, Image.Image | None]]) -> Tensor:
        return encoder.image_features([ImageInput(picture, row.key) for row, picture in batch])

    return _encode(_distinct(rows, keys), encoder, encode, bad)


def _encode_texts(rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: Encoder) -> _Encoded:
    distinct = _distinct(rows, keys)
    parts = [
        encoder.text_features([TextInput(row.text or "", row.key) for row in batch]).cpu().numpy()
        for batch in chunks(distinct.values(), _batch_size(encoder))
    ]
    return _join(parts, distinct, encoder)


def _encode_together(
    rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: JointEncoder, bad: _Bad
) -> _Encoded:
    def encode(batch: list[tuple[FeatureRow, Image.Image | None]]) -> Tensor:
        return encoder.joint_features(
            [JointInput(picture, row.text or "", row.key, row.image is not None) for row, picture in batch]
        )

    return _encode(_distinct(rows, keys), encoder, encode, bad)


def _encode(
    distinct: dict[Hashable, FeatureRow],
    encoder: Encoder,
    encode: Callable[[list[tuple[FeatureRow, Image.Image | None]]], Tensor],
    bad: _Bad,
) -> _Encoded:
    """Encode rows with images, which two threads decode if the encoder needs pixels."""
    parts: list[np.ndarray] = []
    good: list[Hashable] = []
    with ThreadPoolExecutor(2) as pool:
        for batch in chunks(distinct.items(), _batch_size(encoder)):
            opened = pool.map(_decode, [row.image for _, row in batch]) if encoder.needs_pixels else None
            readable: list[tuple[FeatureRow, Image.Image | None]] = []
            for key, row in batch:
                picture = None if opened is None else next(opened)
                if isinstance(picture, BadImage):
                    bad.add(row, picture)
                else:
                    readable.append((row, picture))
                    good.append(key)
            if readable:
                parts.append(encode(readable).cpu().numpy())
    return _join(parts, good, encoder)


def _decode(path: Path | None) -> Image.Image | BadImage | None:
    if path is None:
        return None
    try:
        return open_image(path, shortest_side=SHORTEST_SIDE)
    except BadImage as error:
        return error


def _distinct(rows: Sequence[FeatureRow], keys: Sequence[Hashable]) -> dict[Hashable, FeatureRow]:
    return {key: row for key, row in zip(keys, rows, strict=True) if key is not None}


def _batch_size(encoder: Encoder) -> int:
    return ENCODE_BATCH if encoder.needs_pixels else LOOK_UP_BATCH


def _join(parts: list[np.ndarray], keys: Iterable[Hashable], encoder: Encoder) -> _Encoded:
    if not parts:
        return _nothing(encoder)
    packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return _Encoded(packed, {key: place for place, key in enumerate(keys)})


def _nothing(encoder: Encoder) -> _Encoded:
    return _Encoded(np.zeros((0, encoder.dim), dtype=np.float16), {})


def _places(keys: Sequence[Hashable], places: Mapping[Hashable, int], kept: Sequence[int]) -> np.ndarray:
    return np.array([places.get(keys[index], ABSENT) for index in kept], dtype=np.int64)


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
    """Embed rows into ``folder``, or open it if it is already finished with the same inputs.

    Parameters
    ----------
    rows
        read as a stream. The same ``inputs`` must always give the same rows in the same order.
    expected
        approximate number of rows, for the progress display.
    skip_bad_images
        leave out rows with unreadable images, and list them in :attr:`Features.left_out`; otherwise such an
        image is an error.

    Raises
    ------
    BadData
        There is nothing to embed, or features are not finite.
    BadImage
        An image cannot be read.
    ArtifactMismatch
        The records changed since an interrupted run, or another process removed shards.
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
    """Image, text or both of one query or candidate, for the encoder."""

    image: Image.Image | None
    text: str
    """Text for the encoder; empty if there is none."""
    key: ItemKey


def features_of(encoder: Encoder, contents: Sequence[Content]) -> FeatureBatch:
    """Compute features of queries or candidates in memory, all images and all texts in one batch each.

    Raises
    ------
    BadData
        One of them has neither an image nor a text.
    """
    for image, text, key in contents:
        if image is None and not text:
            raise BadData(f"{key.role} {key.id!r} has neither an image nor a text; it needs one of them")
    if is_joint(encoder):
        both = encoder.joint_features(
            [JointInput(image, text, key, image is not None) for image, text, key in contents]
        )
        absent = np.full(len(contents), ABSENT)
        return FeatureBatch.of(both[:0], both, absent, np.arange(len(contents)))
    pictures = [ImageInput(image, key) for image, _, key in contents if image is not None]
    words = [TextInput(text, key) for _, text, key in contents if text]
    image_features = encoder.image_features(pictures) if pictures else None
    text_features = encoder.text_features(words) if words else None
    nothing = (text_features if image_features is None else image_features)[:0]  # type: ignore[index]  # one is there
    return FeatureBatch.of(
        nothing if image_features is None else image_features,
        nothing if text_features is None else text_features,
        _rows_of([image is not None for image, _, _ in contents]),
        _rows_of([bool(text) for _, text, _ in contents]),
    )


def _rows_of(present: Sequence[bool]) -> Int64[np.ndarray, " items"]:
    """Number the present items from 0; absent ones get ``ABSENT``."""
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
    """Write the features that :func:`embed` would for ``encoder``, by changing every shard of ``source``.

    ``source`` holds features of the same records by the encoder's first half.
    """
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
    """Check that all shards are present with these numbers of records, then finish the folder."""
    written = num_records(writer.path)
    if written != dict(enumerate(sizes)):
        raise ArtifactMismatch(
            f"{writer.path} holds {sum(written.values()):,} of {sum(sizes):,} records, in {len(written)} of "
            f"{len(sizes)} shards: the records changed, or another process removed shards; remove the folder "
            "and run the command again"
        )
    rows = num_rows(writer.path)
    if rows == 0:
        raise BadData(f"nothing to embed into {writer.folder}: there is no record that can be read")
    # Shards without any image (or text) have width 0 there, so take the maximum.
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


InstructionChoice = Literal["hashed", "first", "none", "all"]


def embed_pool(
    data: MBeir,
    pools: Sequence[Path],
    encoder: Encoder,
    folder: Path,
    *,
    fingerprint: str | None = None,
    progress: Progress,
) -> Features:
    """Embed the candidates of pool files, each once. ``fingerprint`` is that of the files, if known."""
    rows = (candidate_row(data, candidate) for candidate in read_pool(pools))
    return embed(
        rows,
        encoder,
        folder,
        inputs={"records": fingerprint or fingerprint_of_files(pools)},
        expected=count_lines(pools),
        progress=progress,
    )


def candidate_row(data: MBeir, candidate: Candidate) -> FeatureRow:
    """Return a candidate's row, without an instruction."""
    return FeatureRow(
        id=candidate_number(candidate.did),
        key=ItemKey("candidate", candidate.did),
        modality=candidate.modality,
        image=None if candidate.image is None else data.image_path(candidate.image),
        text=format_text(candidate.text),
    )


def query_row(
    data: MBeir, query: Query, wanted: Modality, instruction: str | None, variant: int, *, split: str
) -> FeatureRow:
    """Return a query's row with one instruction."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid, split),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        variant=variant,
        wanted=wanted,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    wanted: Modality,
    choice: Literal["hashed", "first", "none"],
    *,
    seed: int,
) -> str | None:
    """Choose an instruction for a query, reproducibly.

    Deviation 25: UniIR draws it at random.
    """
    if choice == "none":
        return None
    offered = instructions_for(instructions, query, wanted)
    if not offered:
        return None
    if choice == "first":
        return offered[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return offered[int.from_bytes(digest[:8], "big") % len(offered)]


def instructions_for(instructions: Instructions, query: Query, wanted: Modality) -> tuple[str, ...]:
    """Return all instructions for a query and its target modality."""
    return instructions.lookup(parse_id(query.qid)[0], query.modality, wanted)


def instruction_files(data: MBeir) -> list[Path]:
    """Return the path of the data set's instructions as a list, empty if there are none."""
    return [data.instructions_file] if data.instructions_file.exists() else []


def count_lines(files: Sequence[Path]) -> int:
    """Count the records in files: their lines without blank ones."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            total += sum(not line.isspace() for line in file)
    return total


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Return a fingerprint of files' names and contents, independent of their folder."""
    return fingerprint_of([[path.name, file_fingerprint(path)] for path in files])


class EmbeddedQueries(NamedTuple):
    """Features of the queries of one evaluation row."""

    qids: list[str]
    features: FeatureBatch


def embed_queries(
    data: MBeir,
    encoder: Encoder,
    row: EvaluationRow,
    folder: Path,
    *,
    instructions: InstructionChoice = "hashed",
    max_queries: int = 0,
    seed: int = 0,
    progress: Progress,
) -> list[EmbeddedQueries]:
    """Embed the queries of an evaluation row; with ``instructions="all"`` once per instruction.

    Features are cached in ``folder``. ``max_queries`` limits the number of queries, which are evenly spaced.

    Raises
    ------
    BadData
        A query occurs twice, or with ``all``, queries have different numbers of instructions.
    """
    target = TASKS[row.task_id][1]
    queries = list(read_queries(row.queries))
    if max_queries and max_queries < len(queries):
        queries = [queries[int(place)] for place in np.linspace(0, len(queries) - 1, max_queries)]
    repeated = [qid for qid, count in Counter(query.qid for query in queries).items() if count > 1]
    if repeated:
        raise BadData(
            f"{row.queries}: query {repeated[0]} occurs twice ({len(repeated)} such); each may occur once"
        )
    variants: list[list[str | None]]
    if instructions == "all":
        offered = [instructions_for(data.instructions, query, target) for query in queries]
        if len({len(texts) for texts in offered}) > 1:
            raise BadData(
                "the queries of a row have different numbers of instructions; choose hashed or first"
            )
        variants = [list(texts) for texts in zip(*offered, strict=True)] or [[None] * len(queries)]
    else:
        variants = [
            [
                choose_instruction(data.instructions, query, target, instructions, seed=seed)
                for query in queries
            ]
        ]
    features = embed(
        (
            query_row(data, query, target, instruction, variant, split=row.split)
            for variant, texts in enumerate(variants)
            for query, instruction in zip(queries, texts, strict=True)
        ),
        encoder,
        folder / f"queries-{fingerprint_of([instructions, seed, max_queries])[:8]}" / row.name,
        inputs={"records": fingerprint_of_files([row.queries, *instruction_files(data)])},
        expected=len(queries) * len(variants),
        progress=progress,
    )
    return [
        EmbeddedQueries(
            [query.qid for query in queries], features.gather(np.flatnonzero(features.variant == variant))
        )
        for variant in range(len(variants))
    ]
