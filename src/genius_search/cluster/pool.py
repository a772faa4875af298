"""Pools of any size, in partitions: JSON lines, Parquet, WebDataset, or a folder of pictures and texts.

Files may be local or anywhere that fsspec reads (``s3://``, ``gs://``, ``hf://``). A row is an item in
M-BEIR's fields (``did``, ``modality``, ``txt``, ``img_path``, ``src_content``), or has an ``id``, a ``text``
(or ``caption``), an ``image`` (a path beside the file, or the picture's bytes) and any fields to filter by.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NamedTuple, cast

import fsspec

from genius_search.artifact import read_json
from genius_search.data.features import LeftOut
from genius_search.data.folder import CAPTION_LISTS, read_folder
from genius_search.data.images import IMAGE_SUFFIXES
from genius_search.data.mbeir import parse_candidate, write_json_lines
from genius_search.errors import BadData, need_packages
from genius_search.index.adding import Pool, check_item, pictures_root, to_item
from genius_search.index.items import Item
from genius_search.index.writer import picture_name
from genius_search.records import Candidate, Modality
from genius_search.writing import make_folder, write_json

SUFFIXES: Final = (".jsonl", ".parquet", ".tar")
TEXTS: Final = ("text", "caption", "txt")
"""Names of the text, in a row or as an ending in a tar file."""
BATCH: Final = 1024
"""Rows of a Parquet file that are read together."""


class Partition(NamedTuple):
    """Rows of a file that are encoded together."""

    file: str
    """Path or address."""
    start: int = 0
    """First byte of JSON lines, or first row of Parquet."""
    stop: int | None = None
    """One past the last; None means the end of the file."""
    rows: int | None = None
    """Number of rows; None if counting would mean reading the file."""
    root: str | None = None
    """Folder that the paths of pictures start at; None for a file elsewhere, which has none beside it."""
    has_files: bool = False
    """Whether it lists files of a folder, whose names, places and dates become fields."""


def split_pool(pool: str, rows: int, scratch: Path, *, captions: bool = True) -> list[Partition]:
    """Split a pool into partitions of ``rows`` rows; each tar file is one partition.

    Parameters
    ----------
    pool
        a file, a folder of files, a folder of pictures and texts, or a pattern such as ``s3://bucket/*.tar``.
    scratch
        folder for the list of a folder of pictures and texts, and of its files that cannot be used.

    Raises
    ------
    BadData
        There is no such pool, or nothing in it.
    """
    partitions: list[Partition] = []
    split = {".jsonl": _split_lines, ".parquet": _split_parquet, ".tar": _whole}
    for whole in _files(pool, scratch, captions=captions):
        partitions += split[PurePosixPath(whole.file).suffix](whole, rows)
    if not partitions:
        raise BadData(f"there is nothing to index in {pool}")
    return partitions


def _files(pool: str, scratch: Path, *, captions: bool) -> list[Partition]:
    """Return the files of a pool."""
    local = "://" not in pool
    if local and Path(pool).is_dir() and not _holds_data(Path(pool)):
        listed = _list_folder(Path(pool), scratch, captions=captions)
        return [Partition(str(listed), root=str(Path(pool).resolve()), has_files=True)]
    files, path = fsspec.core.url_to_fs(pool)
    if any(sign in pool for sign in "*?["):
        found = sorted(files.glob(path))
    elif files.isdir(path):
        found = sorted(name for name in files.ls(path, detail=False) if name.endswith(SUFFIXES))
    else:
        found = [path] if files.exists(path) else []
    found = [name for name in found if files.isfile(name)]
    if not found or not all(name.endswith(SUFFIXES) for name in found):
        raise BadData(
            f"{pool} is not a pool: give a folder of pictures and texts, or files that end in "
            f"{', '.join(SUFFIXES)}"
        )
    if local:
        return [Partition(str(Path(name)), root=str(pictures_root(Path(name)))) for name in found]
    return [Partition(files.unstrip_protocol(name)) for name in found]


def _holds_data(folder: Path) -> bool:
    names = [one.name for one in folder.iterdir() if one.is_file() and not one.name.startswith(".")]
    return bool(names) and all(name.endswith(SUFFIXES) and name not in CAPTION_LISTS for name in names)


def _list_folder(folder: Path, scratch: Path, *, captions: bool) -> Path:
    """Write the candidates of a folder of pictures and texts as JSON lines."""
    scan = read_folder(folder, captions=captions)
    make_folder(scratch)
    left_out = [[str(one.file), getattr(one, "reason", str(one))] for one in scan.problems]
    write_json(scratch / LEFT_OUT_OF_FOLDER, left_out)
    rows = (
        {"id": one.did, "text": one.text, "image": one.image, "src_content": one.source}
        for one in scan.candidates
    )
    write_json_lines(scratch / "pool.jsonl", rows)
    return scratch / "pool.jsonl"


LEFT_OUT_OF_FOLDER: Final = "left-out-of-folder.json"
"""List of files and reasons that :func:`split_pool` writes."""


def _split_lines(whole: Partition, rows: int) -> Iterator[Partition]:
    start = stop = count = 0
    with open_file(whole.file) as lines:
        for line in lines:
            stop += len(line)
            count += 1
            if count == rows:
                yield whole._replace(start=start, stop=stop, rows=count)
                start, count = stop, 0
    if count:
        yield whole._replace(start=start, stop=stop, rows=count)


def _split_parquet(whole: Partition, rows: int) -> Iterator[Partition]:
    with open_file(whole.file) as opened:
        total = _parquet(opened).metadata.num_rows
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        yield whole._replace(start=start, stop=stop, rows=stop - start)


def _whole(whole: Partition, rows: int) -> Iterator[Partition]:  # noqa: ARG001  a tar file is read as a whole
    yield whole


def open_file(file: str) -> Any:
    """Open a file for reading bytes, wherever it is."""
    return fsspec.open(file, "rb").open()


def _parquet(file: Any) -> Any:
    need_packages("Parquet files need", "pyarrow")
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415  an optional dependency

    return ParquetFile(file)


def open_partition(partition: Partition, folder: Path) -> Pool:
    """Open the items of a partition; unusable rows are listed in ``left_out`` as they are met.

    Pictures that come as bytes are stored in ``folder``, and their paths start two folders below it: at a
    part or a shard.
    """
    left_out: list[LeftOut] = []
    return Pool(
        lambda: _items(partition, folder, left_out),
        partition.rows or 0,
        left_out,
        has_files=partition.has_files,
    )


def open_partitions(pool: str, folder: Path, scratch: Path, *, captions: bool = True) -> Pool:
    """Open all items of a pool; see :func:`split_pool` and :func:`open_partition`."""
    opened = [
        open_partition(one, folder) for one in split_pool(pool, sys.maxsize, scratch, captions=captions)
    ]
    of_folder = scratch / LEFT_OUT_OF_FOLDER
    left_out = [LeftOut(-1, *one) for one in read_json(of_folder)] if of_folder.exists() else []

    def items() -> Iterator[Item]:
        for one in opened:
            yield from one.items()
            left_out.extend(one.left_out)

    return Pool(
        items, sum(one.expected for one in opened), left_out, has_files=any(one.has_files for one in opened)
    )


def _items(partition: Partition, folder: Path, left_out: list[LeftOut]) -> Iterator[Item]:
    read = {".jsonl": _read_lines, ".parquet": _read_parquet, ".tar": _read_tar}
    for place, row in read[PurePosixPath(partition.file).suffix](partition):
        try:
            yield _item(json.loads(row) if isinstance(row, bytes) else row, partition.root, folder)
        except (ValueError, RecursionError) as error:
            left_out.append(LeftOut(-1, f"{partition.file}: {place}", str(error)))


def _read_lines(partition: Partition) -> Iterator[tuple[str, bytes]]:
    with open_file(partition.file) as file:
        place = file.seek(partition.start)
        for line in file:
            if partition.stop is not None and place >= partition.stop:
                return
            if line.strip():
                yield f"byte {place}", line.removeprefix(b"\xef\xbb\xbf")
            place += len(line)


def _read_parquet(partition: Partition) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open_file(partition.file) as opened:
        file = _parquet(opened)
        ends = list(
            itertools.accumulate(file.metadata.row_group(n).num_rows for n in range(file.num_row_groups))
        )
        starts = [0, *ends][: len(ends)]
        stop = ends[-1] if partition.stop is None else partition.stop
        groups = [n for n, end in enumerate(ends) if end > partition.start and starts[n] < stop]
        row = starts[groups[0]] if groups else 0
        for batch in file.iter_batches(batch_size=BATCH, row_groups=groups):
            for values in batch.to_pylist():
                if partition.start <= row < stop:
                    yield f"row {row}", values
                row += 1


def _read_tar(partition: Partition) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the samples of a WebDataset file: adjacent members whose paths agree up to the first dot."""
    with open_file(partition.file) as opened, closing(tarfile.open(fileobj=opened, mode="r|*")) as file:
        files = (member for member in file if member.isfile())
        for key, members in itertools.groupby(files, lambda member: _key_and_ending(member.name)[0]):
            sample: dict[str, Any] = {"id": key}
            for member in members:
                ending = _key_and_ending(member.name)[1]
                content = cast("IO[bytes]", file.extractfile(member)).read()
                if f".{ending.rpartition('.')[2]}" in IMAGE_SUFFIXES:
                    sample["image"] = content
                elif ending in TEXTS:
                    sample["text"] = content.decode(errors="replace")
                elif ending == "json":
                    sample = {**_object(content), **sample}
            yield key, sample


def _key_and_ending(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return f"{folder}/{key}" if folder else key, ending.lower()


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _item(row: Any, root: str | None, folder: Path) -> Item:
    """Return a row as an item.

    Raises
    ------
    BadData
        It cannot be used; the message says why.
    """
    if not isinstance(row, Mapping):
        raise BadData(f"is a JSON {type(row).__name__}, expected an object {{...}}")
    picture = _picture(row.get("image"))
    candidate = parse_candidate(row) if "did" in row else _candidate(row, has_picture=picture is not None)
    if picture is not None:
        image = _store(picture, folder)
        item = Item(candidate.did, candidate.modality, candidate.text, image, candidate.source)
        check_item(item)
        return item
    if candidate.image is not None and root is None:
        raise BadData(
            f"its picture is the path {candidate.image!r}, but the pool is not on this machine; give bytes"
        )
    return to_item(candidate, Path(root or os.curdir))


def _picture(value: Any) -> bytes | None:
    """Return a picture's bytes, if a row holds them: alone, or as Hugging Face's data sets hold them."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return value if isinstance(value, bytes) else None


def _candidate(row: Mapping[str, Any], *, has_picture: bool) -> Candidate:
    item_id = row.get("id")
    if not isinstance(item_id, str | int) or item_id == "":
        raise BadData(f"its id is {item_id!r}, expected a text or a number")
    text = next((row[name] for name in TEXTS if isinstance(row.get(name), str) and row[name].strip()), None)
    image = row.get("image")
    path = image if isinstance(image, str) and image.strip() else None
    if path is not None and "\0" in path:
        raise BadData(f"its image is {path!r}, and no file's name contains a NUL character")
    if text is None and path is None and not has_picture:
        raise BadData("it has neither a text nor an image")
    modality = Modality.of(has_image=has_picture or path is not None, has_text=text is not None)
    source = row.get("src_content")
    if not isinstance(source, str):
        fields = {name: value for name, value in row.items() if name not in ("id", "image", *TEXTS)}
        kept = {name: value for name, value in fields.items() if value is not None}
        source = json.dumps(kept, ensure_ascii=False, default=str) if kept else None
    return Candidate(str(item_id), modality, text, path, source)


def _store(picture: bytes, folder: Path) -> str:
    """Store a picture once; return its path from a part or a shard."""
    name = picture_name(picture)
    place = folder / name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        temporary.write_bytes(picture)
        temporary.replace(place)
    return f"../../{name}"
