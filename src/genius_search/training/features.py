"""Queries and candidates become features on disk, in chunks; and the training records of a data set.

:func:`embed` is the one way: an interrupted run goes on after its last finished chunk. Below it are the
records of a data set in M-BEIR's layout: pools, queries of an evaluation row, and all that training reads.
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
    KIND,
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
from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
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
ENCODE_BATCH: Final = 256
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass it only takes memory."""


class FeatureRow(NamedTuple):
    """A query or candidate to embed."""

    id: int
    key: ItemKey
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """Text for the encoder, including the instruction."""
    wanted: Modality | None = None


_Encode: TypeAlias = Callable[[list[Any], list[str], list[ItemKey]], AnyArray]
"""Makes features of pictures, texts and keys; pictures are None if they are not decoded."""


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> Shard:
    """Encode rows into a shard, leaving out those with unreadable images.

    With ``skip_bad_images``, an encoder of texts reads the texts of images, and those without are left out.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    BadData
        Features are not finite.
    """
    has_pixels = encoder.needs_pixels
    bad: dict[Path | None, BadImage] = {}
    if skip_bad_images and not reads_images(encoder):
        reason = f"has no caption, and {encoder.spec} reads texts only; clip:NAME or onnx:NAME read pictures"
        bad = {row.image: BadImage(row.image, reason) for row in rows if row.image and not row.text}
        rows = [
            row._replace(image=None, modality=Modality.TEXT) if row.text else row for row in rows
        ]

    def encode(
        keys: Sequence[Hashable], run: _Encode, *, decode: bool
    ) -> tuple[np.ndarray, list[int]]:
        """Encode a row of each key but None; return the features and the place of each row's."""
        distinct = {key: row for key, row in zip(keys, rows, strict=True) if key is not None}
        parts = [np.zeros((0, encoder.dim), dtype=np.float16)]
        places: dict[Hashable, int] = {}
        for batch in chunks(distinct.items(), ENCODE_BATCH if has_pixels else LOOK_UP_BATCH):
            own = [row for _, row in batch]
            pictures = (
                _open_images(own, bad if skip_bad_images else None) if decode else [None] * len(own)
            )
            good = [place for place, row in enumerate(own) if not (decode and row.image in bad)]
            places.update(
                (batch[place][0], number) for number, place in enumerate(good, len(places))
            )
            if good:
                inputs = [
                    (pictures[place], own[place].text or "", own[place].key) for place in good
                ]
                features = run(*map(list, zip(*inputs, strict=True)))
                parts.append(as_numbers(features, f"the features of {encoder.spec}"))
        return to_float16(np.concatenate(parts[1:] or parts)), [
            places.get(key, ABSENT) for key in keys
        ]

    # Encode each distinct input once: keyed by item if features are looked up, by content otherwise.
    if hasattr(encoder, "joint_features"):
        image, image_places = np.zeros((0, encoder.dim), np.float16), [ABSENT] * len(rows)
        text, text_places = encode(
            [(row.image, row.text or "") for row in rows], encoder.joint_features, decode=True
        )
    else:
        image, image_places = encode(
            [
                (row.image if has_pixels else row.key)
                if row.image and row.image not in bad
                else None
                for row in rows
            ],
            lambda pictures, _, keys: encoder.image_features(pictures, keys),
            decode=has_pixels,
        )
        text, text_places = encode(
            [(row.text if has_pixels else row.key) if row.text else None for row in rows],
            lambda _, texts, keys: encoder.text_features(texts, keys),
            decode=False,
        )
    kept = [
        (row.id, *places, row.modality.code, ABSENT if row.wanted is None else row.wanted.code)
        for row, *places in zip(rows, image_places, text_places, strict=True)
        if row.image not in bad
    ]
    left_out = [
        LeftOut(row.id, str(error.file), error.reason)
        for row in rows
        if (error := bad.get(row.image))
    ]
    return Shard(np.array(kept, ROW), image, text, left_out)


def _open_images(
    rows: Sequence[FeatureRow], bad: dict[Path | None, BadImage] | None
) -> list[Image.Image | None]:
    """Decode the images of rows in two threads; unreadable ones go into ``bad``, without it they raise."""

    def decode(row: FeatureRow) -> Image.Image | None:
        try:
            return None if row.image is None else open_image(row.image, shortest_side=SHORTEST_SIDE)
        except BadImage as error:
            if bad is None:
                raise BadImage(
                    error.file,
                    f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all "
                    "such images with `genius data check`",
                ) from None
            bad[row.image] = error
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
    """Embed rows into ``folder``, or open it if it is already finished with the same inputs.

    Parameters
    ----------
    rows
        read as a stream. The same ``inputs`` must always give the same rows in the same order.
    expected
        approximate number of rows, for the progress display.
    skip_bad_images
        leave out rows with unreadable images; otherwise such an image is an error.
    shard_rows
        rows that are finished together; an interrupted run loses at most those.

    Raises
    ------
    BadData
        There is nothing to embed, or features are not finite.
    BadImage
        An image cannot be read.
    """

    def read() -> Iterator[list[FeatureRow]]:
        progress.begin(f"embed {folder.name}", expected)
        done = 0
        for chunk in chunks(rows, shard_rows):
            yield chunk
            done += len(chunk)
            progress.advance(min(expected - 1, done), {})
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
    """Make a shard of each part, or open the folder if it is finished; shards that are there stay."""
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={
            "shard_rows": shard_rows,
            "columns": ROW.names,
        },  # those of other columns are made again
        inputs={**inputs, "encoder": encoder.fingerprint},
    )
    if writer.finished() is None:
        for number, part in enumerate(parts):
            if not (writer.path / f"shard-{number:06d}").is_dir():
                write_shard(writer.path, number, make(part))
        if not any(len(shard.rows) for shard in read_shards(writer.path)):
            raise BadData(f"nothing to embed into {folder}: there is no record that can be read")
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
    """Embed the candidates of pool files, each once; or ``only`` those with these ids."""
    choice = {} if only is None else {"only": fingerprint_of(sorted(only))}
    return embed(
        (
            candidate_row(data, some)
            for some in read_pool(pools)
            if only is None or some.did in only
        ),
        encoder,
        folder,
        inputs={"records": fingerprint_of_files(pools), **choice},
        expected=count_lines(pools) if only is None else len(only),
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


def query_row(data: MBeir, query: Query, wanted: Modality, instruction: str | None) -> FeatureRow:
    """Return a query's row with one instruction."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        wanted=wanted,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    wanted: Modality,
    choice: InstructionChoice,
    *,
    seed: int,
) -> str | None:
    """Choose an instruction for a query, reproducibly.

    Deviation 25: UniIR draws it at random.
    """
    offered = instructions.lookup(parse_id(query.qid)[0], query.modality, wanted)
    if choice == "none" or not offered:
        return None
    if choice == "first":
        return offered[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return offered[int.from_bytes(digest[:8], "big") % len(offered)]


def count_lines(files: Sequence[Path]) -> int:
    """Count the records in files: their lines without blank ones."""
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
    """Embed the queries of an evaluation row, each with one instruction; return their ids and features.

    Features are cached in ``folder``. ``max_queries`` limits the number of queries, which are evenly spaced.

    Raises
    ------
    BadData
        A query occurs twice.
    """
    wanted = TASKS[row.task_id][1]
    queries = list(read_queries(row.queries))
    if max_queries and max_queries < len(queries):
        queries = [queries[int(place)] for place in np.linspace(0, len(queries) - 1, max_queries)]
    repeated = [qid for qid, count in Counter(query.qid for query in queries).items() if count > 1]
    if repeated:
        raise BadData(
            f"{row.queries}: query {repeated[0]} occurs twice ({len(repeated)} such); each may occur once"
        )
    features = embed(
        (
            query_row(
                data,
                query,
                wanted,
                choose_instruction(data.instructions, query, wanted, instructions, seed=seed),
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
    """The training queries and the training pool of a data set, and the encoder that embedded them."""

    encoder: Encoder
    queries: Features
    candidates: Features


class TrainingRecords:
    """Training queries of a data set; M-BEIR's 1.3 million lines take some 600 MB.

    Parameters
    ----------
    validation
        instead, up to so many queries of the split ``val`` that have answers, evenly spaced, and those.
    """

    def __init__(self, data: MBeir, *, validation: int = 0) -> None:
        self.data = data
        files = list(data.query_files("val").values()) if validation else data.training_queries()
        self.lines: list[Query] = []
        """The query of each line: a file may repeat one, so that it is drawn more often (M-BEIR's does)."""
        for path in files:
            for query in read_queries(path):
                self.lines.append(
                    Query(query.qid, query.modality, query.text, query.image, query.positives)
                )
        self.pools = data.training_pools()
        self.only: frozenset[str] | None = None
        """Ids of the candidates that count; None for all of the pools."""
        if validation:
            answered = [query for query in self.lines if query.positives]
            self.lines = answered[:: max(1, -(-len(answered) // validation))]
            self.pools = data.global_pool("val") if files else []
            self.only = frozenset(did for query in self.lines for did in query.positives)
        self.queries: dict[str, Query] = {}
        """Each query once, by its id."""
        for query in self.lines:
            self.queries.setdefault(query.qid, query)
        self.fingerprint = fingerprint_of_files(filter(None, [*files, data.instructions.file]))
        """Of the queries and the instructions."""

    def all_texts(self) -> Iterator[str]:
        """Yield all texts that an encoder reads in training; instructions once, not with every query."""
        for candidate in read_pool(self.data.training_pools()):
            if candidate.text:
                yield format_text(candidate.text)
        for query in self.lines:
            if query.text:
                yield format_text(query.text)
        for row in self.data.instructions.rows.values():
            # Twice, since a word seen once is spelled in pieces, and instructions go with every query.
            yield from (format_text(text) for text in (*row, *row))

    def rows(self, candidates: Features) -> Iterator[FeatureRow]:
        """Yield each query once under each instruction that fits a modality of its positives.

        Raises
        ------
        BadData
            a query has no positive, or one that is not among the candidates.
        """
        queries = list(self.queries.values())
        positives, counts = find_positives(queries, candidates)
        modalities = list(Modality)
        for query, end, count in zip(queries, np.cumsum(counts), counts, strict=True):
            rows = positives[end - count : end]
            for code in np.unique(candidates.modality[rows]).tolist():
                wanted = modalities[code]
                offered = self.data.instructions.lookup(
                    parse_id(query.qid)[0], query.modality, wanted
                )
                for instruction in offered or (None,):
                    yield query_row(self.data, query, wanted, instruction)

    def num_rows(self) -> int:
        """Return about how many rows :meth:`rows` yields."""
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
