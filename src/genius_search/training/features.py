"""Encoding queries and candidates into features on disk, and the training records of a data set.

:func:`embed` encodes rows in chunks; an interrupted run resumes after its last finished chunk. The
second half of the file holds the records of a data set in M-BEIR's layout: pools, queries of an
evaluation row, and the records that training reads.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from PIL import Image

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.border import as_numbers
from genius_search.data.features import (
    ABSENT,
    FEATURES_KIND,
    ROW,
    FeatureBatch,
    Features,
    LeftOut,
    Shard,
    find_positives,
    read_shards,
    to_float16,
    write_shard,
)
from genius_search.data.images import SHORTEST_SIDE
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
from genius_search.data.video import open_still
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.errors import BadData, BadImage
from genius_search.nn.codebooks import AnyArray
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
from genius_search.writing import ArtifactWriter

Item = TypeVar("Item")
InstructionChoice = Literal["hashed", "first", "none"]

SHARD_ROWS: Final = 8192
"""Number of rows that are finished together; an interrupted run loses at most this many."""
ENCODE_BATCH: Final = 256
"""Batch size of encoders that run a network."""
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass, it only costs memory."""


class FeatureRow(NamedTuple):
    """A query or candidate to embed."""

    id: int
    """Number of the query or candidate."""
    key: ItemKey
    """Role and id, with which some encoders look features up."""
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """Text for the encoder, including the instruction."""
    wanted: Modality | None = None
    """Modality that a query asks for; None for candidates."""


_Encode: TypeAlias = Callable[[list[Any], list[str], list[ItemKey]], AnyArray]
"""Encodes pictures, texts and keys; pictures are None if they are not decoded."""


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> Shard:
    """Encode rows into a shard.

    With ``skip_bad_images``, rows with unreadable images are left out. An encoder of texts then
    reads the texts of images, and images without a text are left out.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    BadData
        Features are not finite.
    """
    return _ShardEncoder(rows, encoder, skip_bad_images=skip_bad_images).encode()


class _ShardEncoder:
    """Encodes rows into a shard, each distinct input once, and records unreadable images.

    A row of the shard refers to the rows of its features, by number:

        input rows              encoded features                rows of the shard (ABSENT is −1)
        a.jpg, "a dog"          image 0: a.jpg                  image 0, text 0
        b.jpg                   image 1: b.jpg                  image 1, text ABSENT
        a.jpg, "a cat"          text 0: "a dog", 1: "a cat"     image 0, text 1
    """

    def __init__(
        self, rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool
    ) -> None:
        self._rows = rows
        self._encoder = encoder
        self._skip_bad_images = skip_bad_images
        self._bad_images: dict[Path | None, BadImage] = {}
        if skip_bad_images and not reads_images(encoder):
            self._replace_images_by_texts()

    def encode(self) -> Shard:
        """Return the shard of all rows except rows with unreadable images."""
        encode_jointly = getattr(self._encoder, "joint_features", None)
        if encode_jointly is not None:
            image, image_rows = self._without_images()
            text, text_rows = self._encode_pairs(encode_jointly)
        else:
            image, image_rows = self._encode_images()
            text, text_rows = self._encode_texts()
        rows: list[tuple[int, int, int, int, int]] = []
        left_out: list[LeftOut] = []
        for row, image_row, text_row in zip(self._rows, image_rows, text_rows, strict=True):
            error = self._bad_images.get(row.image)
            if error is not None:
                left_out.append(LeftOut(row.id, str(error.file), error.reason))
                continue
            target = ABSENT if row.wanted is None else row.wanted.code
            rows.append((row.id, image_row, text_row, row.modality.code, target))
        return Shard(np.array(rows, ROW), image, text, left_out)

    def _replace_images_by_texts(self) -> None:
        """Replace images by their texts alone; images without a text count as unreadable."""
        reason = f"has no words, and {self._encoder.spec} reads texts only"
        for row in self._rows:
            if row.image and not row.text:
                self._bad_images[row.image] = BadImage(row.image, reason)
        self._rows = [
            row._replace(image=None, modality=Modality.TEXT) if row.text else row
            for row in self._rows
        ]

    # The keys of the next methods say which rows have the same input: by the item if features are
    # looked up, by the contents otherwise. A row without this input has the key None.

    def _without_images(self) -> tuple[np.ndarray, list[int]]:
        """Return no image features."""
        return np.zeros((0, self._encoder.dim), np.float16), [ABSENT] * len(self._rows)

    def _encode_pairs(self, encode: _Encode) -> tuple[np.ndarray, list[int]]:
        """Encode image and text of each row together; the vector is stored as a text's feature."""
        keys = [(row.image, row.text or "") for row in self._rows]
        return self._encode_distinct(keys, encode, decode=True)

    def _encode_images(self) -> tuple[np.ndarray, list[int]]:
        """Encode the readable images."""
        keys: list[Hashable] = []
        for row in self._rows:
            is_readable = row.image and row.image not in self._bad_images
            key = row.image if self._encoder.needs_pixels else row.key
            keys.append(key if is_readable else None)
        return self._encode_distinct(
            keys,
            lambda pictures, _, item_keys: self._encoder.image_features(pictures, item_keys),
            decode=self._encoder.needs_pixels,
        )

    def _encode_texts(self) -> tuple[np.ndarray, list[int]]:
        """Encode the texts, those of rows with unreadable images included."""
        keys: list[Hashable] = []
        for row in self._rows:
            key = row.text if self._encoder.needs_pixels else row.key
            keys.append(key if row.text else None)
        return self._encode_distinct(
            keys,
            lambda _, texts, item_keys: self._encoder.text_features(texts, item_keys),
            decode=False,
        )

    def _encode_distinct(
        self, keys: Sequence[Hashable], encode: _Encode, *, decode: bool
    ) -> tuple[np.ndarray, list[int]]:
        """Encode a row of each distinct key; return the features, and the feature row of each key.

        Parameters
        ----------
        keys
            of all rows; rows with the same key have the same input, and None has no input.
        decode
            whether images are decoded. Unreadable ones have no feature.
        """
        rows_by_key = {
            key: row for key, row in zip(keys, self._rows, strict=True) if key is not None
        }
        parts = [np.zeros((0, self._encoder.dim), dtype=np.float16)]
        feature_rows: dict[Hashable, int] = {}
        batch_size = ENCODE_BATCH if self._encoder.needs_pixels else LOOK_UP_BATCH
        for batch in chunks(rows_by_key.items(), batch_size):
            pictures: list[Image.Image | None] = [None] * len(batch)
            if decode:
                pictures = self._open_images([row for _, row in batch])
            inputs: list[tuple[Image.Image | None, str, ItemKey]] = []
            for (key, row), picture in zip(batch, pictures, strict=True):
                if decode and row.image in self._bad_images:
                    continue
                feature_rows[key] = len(feature_rows)
                inputs.append((picture, row.text or "", row.key))
            if inputs:
                features = encode(*map(list, zip(*inputs, strict=True)))
                parts.append(as_numbers(features, f"the features of {self._encoder.spec}"))
        features = to_float16(np.concatenate(parts[1:] or parts))
        return features, [feature_rows.get(key, ABSENT) for key in keys]

    def _open_images(self, rows: Sequence[FeatureRow]) -> list[Image.Image | None]:
        """Decode the images of rows in two threads; record unreadable ones, or raise for them."""

        def decode(row: FeatureRow) -> Image.Image | None:
            try:
                if row.image is None:
                    return None
                return open_still(row.image, shortest_side=SHORTEST_SIDE)
            except BadImage as error:
                if not self._skip_bad_images:
                    raise BadImage(
                        error.file,
                        f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or "
                        "find all such images with `genius data check`",
                    ) from None
                self._bad_images[row.image] = error
                return None

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(decode, rows))


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
    shard_rows: int = SHARD_ROWS,
) -> Features:
    """Embed rows into ``folder``, or open it if it is finished with the same inputs.

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
    shard_rows
        number of rows that are finished together; an interrupted run loses at most this many.

    Raises
    ------
    BadData
        There are no rows, or features are not finite.
    BadImage
        An image cannot be read.
    """

    def read() -> Iterator[list[FeatureRow]]:
        progress.begin(f"embed {folder.name}", expected)
        num_embedded = 0
        for chunk in chunks(rows, shard_rows):
            yield chunk
            num_embedded += len(chunk)
            progress.advance(min(expected - 1, num_embedded), {})
        progress.advance(expected, {})

    encode = partial(encode_shard, encoder=encoder, skip_bad_images=skip_bad_images)
    return write_features(folder, read(), encode, encoder, inputs=inputs, shard_rows=shard_rows)


def write_features(
    folder: Path,
    parts: Iterable[Item],
    make: Callable[[Item], Shard],
    encoder: Encoder,
    *,
    inputs: Mapping[str, str],
    shard_rows: int = SHARD_ROWS,
) -> Features:
    """Write a shard of each part, or open the folder if it is finished.

    An interrupted run keeps its finished shards. Shards with other columns are written again, since
    columns are part of the settings.
    """
    writer = ArtifactWriter(
        folder,
        kind=FEATURES_KIND,
        config={"shard_rows": shard_rows, "columns": ROW.names},
        inputs={**inputs, "encoder": encoder.fingerprint},
    )
    if writer.finished() is None:
        for number, part in enumerate(parts):
            if not (writer.path / f"shard-{number:06d}").is_dir():
                write_shard(writer.path, number, make(part))
        if not any(len(shard.rows) for shard in read_shards(writer.path)):
            raise BadData(f"nothing to embed into {folder}: no record can be read")
        writer.finish()
    return Features.open(folder)


def embed_pool(
    data: MBeir,
    pools: Sequence[Path],
    encoder: Encoder,
    folder: Path,
    *,
    only: Collection[str] | None = None,
    progress: Progress,
) -> Features:
    """Embed the candidates of pool files, each once, or ``only`` the candidates with these ids."""
    choice = {} if only is None else {"only": fingerprint_of(sorted(only))}
    return embed(
        (
            candidate_row(data, candidate)
            for candidate in read_pool(pools)
            if only is None or candidate.did in only
        ),
        encoder,
        folder,
        inputs={"records": fingerprint_of_files(pools), **choice},
        expected=count_lines(pools) if only is None else len(only),
        progress=progress,
    )


def candidate_row(data: MBeir, candidate: Candidate) -> FeatureRow:
    """Return the row of a candidate; it has no instruction."""
    return FeatureRow(
        id=candidate_number(candidate.did),
        key=ItemKey("candidate", candidate.did),
        modality=candidate.modality,
        image=None if candidate.image is None else data.image_path(candidate.image),
        text=format_text(candidate.text),
    )


def query_row(data: MBeir, query: Query, target: Modality, instruction: str | None) -> FeatureRow:
    """Return the row of a query with an instruction for the target modality."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        wanted=target,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    target: Modality,
    choice: InstructionChoice,
    *,
    seed: int,
) -> str | None:
    """Choose an instruction for a query that asks for a modality, reproducibly.

    Deviation 25: the choice is a hash of the seed and the query; UniIR draws it at random.
    """
    suitable = instructions.lookup(parse_id(query.qid)[0], query.modality, target)
    if choice == "none" or not suitable:
        return None
    if choice == "first":
        return suitable[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return suitable[int.from_bytes(digest[:8], "big") % len(suitable)]


def count_lines(files: Sequence[Path]) -> int:
    """Count the records in files: the lines that are not blank."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            total += sum(not line.isspace() for line in file)
    return total


def fingerprint_of_files(files: Iterable[Path]) -> str:
    """Return a fingerprint of files' names and contents, independent of their folder."""
    return fingerprint_of([[path.name, file_fingerprint(path)] for path in files])


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
) -> tuple[list[str], FeatureBatch]:
    """Embed the queries of an evaluation row, each with an instruction; return ids and features.

    Features are cached in ``folder``. With ``max_queries``, at most this many queries are used,
    evenly spaced.

    Raises
    ------
    BadData
        A query occurs twice.
    """
    target = TASKS[row.task_id][1]
    queries = list(read_queries(row.queries))
    if max_queries and max_queries < len(queries):
        positions = np.linspace(0, len(queries) - 1, max_queries)
        queries = [queries[int(position)] for position in positions]
    counts = Counter(query.qid for query in queries)
    repeated = [qid for qid, count in counts.items() if count > 1]
    if repeated:
        raise BadData(
            f"{row.queries}: query {repeated[0]} occurs twice, like {len(repeated) - 1} more; each "
            "query may occur once"
        )
    features = embed(
        (
            query_row(
                data,
                query,
                target,
                choose_instruction(data.instructions, query, target, instructions, seed=seed),
            )
            for query in queries
        ),
        encoder,
        folder / f"queries-{fingerprint_of([instructions, seed, max_queries])[:8]}" / row.name,
        inputs={
            "records": fingerprint_of_files(filter(None, [row.queries, data.instructions.file]))
        },
        expected=len(queries),
        progress=progress,
    )
    return [query.qid for query in queries], features.gather(np.arange(len(features)))


class Embedded(NamedTuple):
    """Features of the training queries and the training pool of a data set, and their encoder."""

    encoder: Encoder
    queries: Features
    candidates: Features


class TrainingRecords:
    """Training queries of a data set, in memory; M-BEIR's 1.3 million lines take some 600 MB.

    Parameters
    ----------
    validation
        if not 0, read the split ``val`` instead: at most this many queries with answers, evenly
        spaced, and their answers as candidates.
    """

    def __init__(self, data: MBeir, *, validation: int = 0) -> None:
        self.data = data
        files = list(data.query_files("val").values()) if validation else data.training_queries()
        self.lines: list[Query] = []
        """The query of each line. Repeated lines, as in M-BEIR, are drawn more often."""
        for path in files:
            for query in read_queries(path):
                self.lines.append(
                    Query(query.qid, query.modality, query.text, query.image, query.positives)
                )
        self.pools = data.training_pools()
        self.only: frozenset[str] | None = None
        """Ids of the candidates to embed; None for all candidates of the pools."""
        if validation:
            answered = [query for query in self.lines if query.positives]
            self.lines = answered[:: max(1, -(-len(answered) // validation))]
            self.pools = data.global_pool("val") if files else []
            self.only = frozenset(did for query in self.lines for did in query.positives)
        self.queries: dict[str, Query] = {}
        """The first line of each query, by its id."""
        for query in self.lines:
            self.queries.setdefault(query.qid, query)
        self.fingerprint = fingerprint_of_files(filter(None, [*files, data.instructions.file]))
        """Fingerprint of the files of queries and instructions."""

    def all_texts(self) -> Iterator[str]:
        """Yield all texts that an encoder reads in training, instructions apart."""
        for candidate in read_pool(self.data.training_pools()):
            if candidate.text:
                yield format_text(candidate.text)
        for query in self.lines:
            if query.text:
                yield format_text(query.text)
        for row in self.data.instructions.rows.values():
            # Twice, since the tokenizer splits a word that occurs once into pieces, and the words
            # of instructions occur in every query.
            yield from (format_text(text) for text in (*row, *row))

    def rows(self, candidates: Features) -> Iterator[FeatureRow]:
        """Yield each query once under each instruction that fits a modality of its positives.

        Raises
        ------
        BadData
            A query has no positive, or a positive that is not among the candidates.
        """
        queries = list(self.queries.values())
        positives, counts = find_positives(queries, candidates)
        modalities = list(Modality)
        # The positives of all queries follow one another; those of a query end at the cumulated
        # count.
        for query, end, count in zip(queries, np.cumsum(counts), counts, strict=True):
            rows = positives[end - count : end]
            for code in np.unique(candidates.modality[rows]).tolist():
                target = modalities[code]
                suitable = self.data.instructions.lookup(
                    parse_id(query.qid)[0], query.modality, target
                )
                for instruction in suitable or (None,):
                    yield query_row(self.data, query, target, instruction)

    def num_rows(self) -> int:
        """Return the approximate number of rows that :meth:`rows` yields."""
        counts = [len(texts) for texts in self.data.instructions.rows.values()]
        return len(self.queries) * max(1, round(sum(counts) / max(1, len(counts))))


def embed_training(
    records: TrainingRecords, encoder: Encoder, folder: Path, *, progress: Progress
) -> Embedded:
    """Embed the training pool, and each training query once under each of its instructions."""
    candidates = embed_pool(
        records.data,
        records.pools,
        encoder,
        folder / "candidates",
        only=records.only,
        progress=progress,
    )
    queries = embed(
        records.rows(candidates),
        encoder,
        folder / "queries",
        inputs={"records": records.fingerprint},
        expected=records.num_rows(),
        progress=progress,
    )
    return Embedded(encoder, queries, candidates)
