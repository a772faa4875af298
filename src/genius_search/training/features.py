"""Queries and candidates become features on disk, in chunks; and the training records of a data set.

:func:`embed` is the one way: an interrupted run goes on after its last finished chunk. Above it are the
records of a data set in M-BEIR's layout: pools, queries of an evaluation row, and all that training reads.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Shaped
from PIL import Image

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.data.features import (
    ABSENT,
    KIND,
    FeatureBatch,
    Features,
    LeftOut,
    Shard,
    has_shard,
    num_rows,
    write_shard,
)
from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
from genius_search.data.pairs import look_up
from genius_search.encoders.base import (
    Encoder,
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    is_joint,
)
from genius_search.errors import BadData, BadImage
from genius_search.nn.codebooks import AnyArray, as_array
from genius_search.progress import Progress
from genius_search.records import (
    TASKS,
    Candidate,
    Modality,
    Query,
    candidate_number,
    did_of,
    format_text,
    instructed,
    parse_id,
    qid_of,
    query_number,
)
from genius_search.writing import ArtifactWriter

Item = TypeVar("Item")
AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)
InstructionChoice = Literal["hashed", "first", "none", "all"]

SHARD_ROWS: Final = 8192
ENCODE_BATCH: Final = 256
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass it only takes memory."""
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


_Batch = list[tuple[FeatureRow, Image.Image | None]]


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> EncodedShard:
    """Encode rows into a shard, leaving out those with unreadable images.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    """
    bad: dict[Path | None, BadImage] | None = {} if skip_bad_images else None
    # Encode each distinct input once: keyed by item if features are looked up, by content otherwise.
    looks_up = not encoder.needs_pixels
    if is_joint(encoder):
        image_keys: list[Hashable] = [None] * len(rows)
        text_keys: list[Hashable] = [row.key if looks_up else (row.image, row.text or "") for row in rows]
        image, text = _join([], [], encoder), _encode(rows, text_keys, encoder, _encode_both, bad)
    else:
        image_keys = [None if row.image is None else (row.key if looks_up else row.image) for row in rows]
        text_keys = [None if not row.text else (row.key if looks_up else row.text) for row in rows]
        image = _encode(rows, image_keys, encoder, _encode_images, bad)
        text = _encode(rows, text_keys, encoder, _encode_texts, bad)
    errors = [bad.get(row.image) if bad else None for row in rows]
    kept = [place for place, error in enumerate(errors) if error is None]
    chosen = rows if len(kept) == len(rows) else [rows[place] for place in kept]
    shard = Shard(
        ids=np.array([row.id for row in chosen], dtype=np.int64),
        variant=np.array([row.variant for row in chosen], dtype=np.int16),
        modality=np.array([_CODES[row.modality] for row in chosen], dtype=np.int8),
        wanted=np.array([_CODES[row.wanted] for row in chosen], dtype=np.int8),
        image_index=np.array([image.places.get(image_keys[place], ABSENT) for place in kept], dtype=np.int64),
        text_index=np.array([text.places.get(text_keys[place], ABSENT) for place in kept], dtype=np.int64),
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


def _encode_images(encoder: Encoder, batch: _Batch) -> AnyArray:
    return encoder.image_features([ImageInput(picture, row.key) for row, picture in batch])


def _encode_texts(encoder: Encoder, batch: _Batch) -> AnyArray:
    return encoder.text_features([TextInput(row.text or "", row.key) for row, _ in batch])


def _encode_both(encoder: JointEncoder, batch: _Batch) -> AnyArray:
    return encoder.joint_features(
        [JointInput(picture, row.text or "", row.key, row.image is not None) for row, picture in batch]
    )


def _encode(
    rows: Sequence[FeatureRow],
    keys: Sequence[Hashable],
    encoder: AnyEncoder,
    encode: Callable[[AnyEncoder, _Batch], AnyArray],
    bad: dict[Path | None, BadImage] | None,
) -> _Encoded:
    """Encode a row of each key but None. Two threads decode the images that the encoder needs.

    Unreadable images are collected in ``bad``; without one, the first is an error.
    """
    distinct = {key: row for key, row in zip(keys, rows, strict=True) if key is not None}
    decodes = encoder.needs_pixels and encode is not _encode_texts
    parts: list[np.ndarray] = []
    good: list[Hashable] = []
    with ThreadPoolExecutor(2) as pool:
        for batch in chunks(distinct.items(), ENCODE_BATCH if encoder.needs_pixels else LOOK_UP_BATCH):
            opened = pool.map(_decode, [row.image for _, row in batch]) if decodes else [None] * len(batch)
            readable: _Batch = []
            for (key, row), picture in zip(batch, opened, strict=True):
                if not isinstance(picture, BadImage):
                    readable.append((row, picture))
                    good.append(key)
                elif bad is None:
                    raise BadImage(
                        picture.file,
                        f"{picture.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all "
                        "such images with `genius data check`",
                    )
                else:
                    bad[row.image] = picture
            if readable:
                parts.append(as_array(encode(encoder, readable)))
    return _join(parts, good, encoder)


def _decode(path: Path | None) -> Image.Image | BadImage | None:
    if path is None:
        return None
    try:
        return open_image(path, shortest_side=SHORTEST_SIDE)
    except BadImage as error:
        return error


def _join(parts: list[np.ndarray], keys: Iterable[Hashable], encoder: Encoder) -> _Encoded:
    packed = np.concatenate(parts) if parts else np.zeros((0, encoder.dim), dtype=np.float16)
    return _Encoded(packed, {key: place for place, key in enumerate(keys)})


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
    shard_rows: int | None = None,
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
    shard_rows
        rows that are finished together; an interrupted run loses at most those. Default: :data:`SHARD_ROWS`.

    Raises
    ------
    BadData
        There is nothing to embed, or features are not finite.
    BadImage
        An image cannot be read.
    """
    shard_rows = shard_rows or SHARD_ROWS
    writer = _writer(folder, inputs, encoder, shard_rows)
    if writer.finished() is not None:
        return Features.open(folder)
    progress.begin(f"embed {folder.name}", expected)
    for number, chunk in enumerate(chunks(rows, shard_rows)):
        if not has_shard(writer.path, number):
            encoded = encode_shard(chunk, encoder, skip_bad_images=skip_bad_images)
            write_shard(writer.path, number, encoded.shard, encoded.left_out)
        progress.advance(min(expected - 1, number * shard_rows + len(chunk)), {})
    _finish(writer)
    progress.advance(expected, {})
    return Features.open(folder)


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
    writer = _writer(folder, inputs, encoder, SHARD_ROWS)
    if writer.finished() is not None:
        return Features.open(folder)
    for number, shard in enumerate(source.shards()):
        if not has_shard(writer.path, number):
            write_shard(writer.path, number, change(shard), [])
    _finish(writer)
    return Features.open(folder)


def _writer(folder: Path, inputs: Mapping[str, str], encoder: Encoder, shard_rows: int) -> ArtifactWriter:
    return ArtifactWriter(
        folder,
        kind=KIND,
        config={"shard_rows": shard_rows},
        inputs={**inputs, "encoder": encoder.fingerprint},
    )


def _finish(writer: ArtifactWriter) -> None:
    rows = num_rows(writer.path)
    if rows == 0:
        raise BadData(f"nothing to embed into {writer.folder}: there is no record that can be read")
    # Shards without any image (or text) have width 0 there, so take the maximum.
    widths = {
        f"{name}_dim": max(
            np.load(path, mmap_mode="r").shape[1] for path in writer.path.glob(f"shard-*/{name}.npy")
        )
        for name in ("image", "text")
    }
    writer.finish(facts={"rows": rows, **widths})


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
    data: MBeir, query: Query, wanted: Modality, instruction: str | None, variant: int
) -> FeatureRow:
    """Return a query's row with one instruction."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid),
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
    return fingerprint_of(digests(files))


def digests(files: Sequence[Path]) -> list[list[str]]:
    """Return the name and the SHA-256 of each file."""
    return [[path.name, file_fingerprint(path)] for path in files]


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
    variants: list[Sequence[str | None]]
    if instructions == "all":
        offered = [instructions_for(data.instructions, query, target) for query in queries]
        if len({len(texts) for texts in offered}) > 1:
            raise BadData(
                "the queries of a row have different numbers of instructions; choose hashed or first"
            )
        variants = [*zip(*offered, strict=True)] or [[None] * len(queries)]
    else:
        choose = partial(choose_instruction, data.instructions, choice=instructions, seed=seed)
        variants = [[choose(query, target) for query in queries]]
    features = embed(
        (
            query_row(data, query, target, instruction, variant)
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


class TrainingFeatures(NamedTuple):
    """Features of a data set's training queries and training pool."""

    queries: Features
    candidates: Features


class Embedded(NamedTuple):
    """An encoder and the training records it embedded."""

    encoder: Encoder
    features: TrainingFeatures


class TrainingRecords:
    """Training queries of a data set, kept as columns: M-BEIR's 1.3 million lines take some 250 MB.

    A file may repeat a query, so that it is drawn more often (M-BEIR's upsampled training file does).
    """

    def __init__(self, data: MBeir) -> None:
        self.data = data
        numbers, modalities = array("q"), array("b")
        positives, ends = array("q"), array("q")
        self._texts: list[str | None] = []
        self._images: list[str | None] = []
        digests: list[list[str]] = []
        for path in data.training_queries():
            digest = hashlib.sha256()
            for query in read_queries(path, observe=digest.update):
                numbers.append(query_number(query.qid))
                modalities.append(query.modality.code)
                positives.extend(map(candidate_number, query.positives))
                ends.append(len(positives))
                self._texts.append(query.text)
                self._images.append(query.image)
            digests.append([path.name, digest.hexdigest()])
        self._numbers = np.array(numbers, dtype=np.int64)
        self._modalities = np.array(modalities, dtype=np.int8)
        self._positives = np.array(positives, dtype=np.int64)
        self._starts = np.array([0, *ends], dtype=np.int64)
        self._digests = digests
        self._distinct = np.sort(np.unique(self._numbers, return_index=True)[1])

    @cached_property
    def pool_digests(self) -> list[list[str]]:
        """Names and SHA-256 of the files of the training pool."""
        return digests(self.data.training_pools())

    @property
    def query_fingerprint(self) -> str:
        """Fingerprint of the training queries and the instructions."""
        return fingerprint_of([*self._digests, *digests(instruction_files(self.data))])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all files that training reads."""
        return fingerprint_of([*self.pool_digests, *self._digests, *digests(instruction_files(self.data))])

    def lines(self) -> Iterator[Query]:
        """Yield the query of each line, repeated ones included."""
        return map(self._query, range(len(self._numbers)))

    def texts(self) -> dict[int, str]:
        """Return the texts of queries by their numbers."""
        return {
            int(self._numbers[line]): text
            for line in self._distinct.tolist()
            if (text := self._texts[line]) is not None
        }

    def all_texts(self) -> Iterator[str]:
        """Yield all texts that an encoder reads in training; instructions once, not with every query."""
        for candidate in read_pool(self.data.training_pools()):
            if candidate.text:
                yield format_text(candidate.text)
        for text in self._texts:
            if text:
                yield format_text(text)
        for row in self.data.instructions.rows.values():
            # Twice, since a word seen once is spelled in pieces, and instructions go with every query.
            yield from (format_text(text) for text in (*row, *row))

    def rows(self, candidates: Features) -> Iterator[FeatureRow]:
        """Yield each query once under each instruction that fits a modality of its positives.

        Raises
        ------
        BadData
            a positive is not among the candidates.
        """
        order = np.argsort(candidates.ids, kind="stable")
        modalities = list(Modality)
        for line in self._distinct.tolist():
            query = self._query(line)
            positives = self._positives[self._starts[line] : self._starts[line + 1]]
            rows, exists = look_up(candidates.ids, order, positives)
            if not exists.all():
                absent = query.positives[int(np.flatnonzero(~exists)[0])]
                raise BadData(
                    f"{self.data.root}: query {query.qid} has the positive {absent}, which is not in the "
                    "training pool; run `genius data check` on the data set"
                )
            for code in np.unique(candidates.modality[rows]).tolist():
                wanted = modalities[code]
                offered = instructions_for(self.data.instructions, query, wanted) or (None,)
                for variant, instruction in enumerate(offered):
                    yield query_row(self.data, query, wanted, instruction, variant)

    def num_rows(self) -> int:
        """Return about how many rows :meth:`rows` yields."""
        counts = [len(texts) for texts in self.data.instructions.rows.values()]
        usual = max(1, round(sum(counts) / len(counts))) if counts else 1
        return len(self._distinct) * usual

    def _query(self, line: int) -> Query:
        positives = self._positives[self._starts[line] : self._starts[line + 1]]
        return Query(
            qid=qid_of(int(self._numbers[line])),
            modality=list(Modality)[self._modalities[line]],
            text=self._texts[line],
            image=self._images[line],
            positives=tuple(map(did_of, positives.tolist())),
        )


def embed_training(
    records: TrainingRecords, encoder: Encoder, folder: Path, *, progress: Progress
) -> TrainingFeatures:
    """Embed the training pool, and each training query once under each of its instructions."""
    data = records.data
    candidates = embed_pool(
        data,
        data.training_pools(),
        encoder,
        folder / "candidates",
        fingerprint=fingerprint_of(records.pool_digests),
        progress=progress,
    )
    queries = embed(
        records.rows(candidates),
        encoder,
        folder / "queries",
        inputs={"records": records.query_fingerprint},
        expected=records.num_rows(),
        progress=progress,
    )
    return TrainingFeatures(queries, candidates)
