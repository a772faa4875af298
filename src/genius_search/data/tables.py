"""Tables of captions: files named ``metadata`` or ``captions`` with one row for each picture.

They are JSON lines, CSV with any of four delimiters, or Parquet, in a picture's folder or one above
it. The columns are ``file_name`` or ``image``, ``text`` or ``caption``, and others::

    file_name,text,price
    toys/kite.jpg,a red kite,12
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from genius_search.data.captions import (
    FILE_COLUMNS,
    TEXT_COLUMNS,
    Caption,
    Problem,
    caption_from_record,
    find_columns,
    normalize_path,
)
from genius_search.data.images import is_image_file, require_file
from genius_search.data.mbeir import read_json_lines
from genius_search.data.text_files import MAX_TEXT_BYTES, decode_text
from genius_search.errors import BadImage, BadRecord

_TABLE_NAME: Final = re.compile(r"(metadata|captions)\.(jsonl|csv|tsv|txt|parquet)", re.IGNORECASE)
_DELIMITERS: Final = ",;\t|"
_CAPTION_NUMBER: Final = re.compile(r"#\d+$")
"""Flickr30k numbers a picture's captions after the file name: ``1000092795.jpg#2``."""
_EMPTY_CELLS: Final = ("", "nan", "NaN", "NaT", "<NA>", "NULL", "null")
"""Cells without a value, as programs write them."""
_PARQUET_ROWS: Final = 1024
"""Rows of a Parquet file that are read together."""
Rows: TypeAlias = Iterator[tuple[int, dict[str, Any]]]
"""Line numbers, and the values of each line by column."""


def is_caption_table(path: Path) -> bool:
    """Return whether a file has the name of a table of captions."""
    return _TABLE_NAME.fullmatch(path.name) is not None


def read_caption_tables(
    files: Iterable[Path], pictures: Iterable[Path], problems: list[Problem]
) -> tuple[dict[Path, Caption], set[Path]]:
    """Return the captions of pictures in the tables among files, and the paths of the tables."""
    pictures = list(pictures)
    # An exact path wins over one that differs in case.
    pictures_by_path = {normalize_path(picture).lower(): picture for picture in pictures}
    pictures_by_path |= {normalize_path(picture): picture for picture in pictures}
    captions: dict[Path, Caption] = {}
    tables = {path for path in files if is_caption_table(path)}
    for path in sorted(tables):
        try:
            rows = _read_rows(path, problems)
            if rows is None:
                tables.remove(path)
            else:
                _read_captions(path, rows, pictures_by_path, captions, problems)
        except BadImage as error:
            problems.append(error)
        except Exception as error:  # noqa: BLE001  pyarrow's errors have no common class
            problems.append(BadImage(path, f"cannot be read: {error}"))
    return captions, tables


def _read_captions(
    path: Path,
    rows: Rows,
    pictures_by_path: Mapping[str, Path],
    captions: dict[Path, Caption],
    problems: list[Problem],
) -> None:
    """Add the captions in a table to ``captions``; a picture may have several rows."""
    row_without_text: dict[str, Any] = {}
    columns_without_file: set[Sequence[str]] = set()
    has_texts = False
    rows, rows_ahead = itertools.tee(rows)
    names = filter(None, (_file_name(row) for _, row in rows_ahead))
    finder = _PictureFinder(path.parent, names, pictures_by_path)
    for line, row in rows:
        name = _file_name(row)
        if name is None:
            columns = tuple(row)
            if columns not in columns_without_file:  # one message for all rows like this
                problems.append(BadRecord(path, line, _wrong_columns(columns)))
            columns_without_file.add(columns)
            continue
        picture = finder.find(name)
        if picture is None:
            problems.append(BadRecord(path, line, f"there is no picture {name!r} in this folder"))
            continue
        caption = caption_from_record(row)
        earlier = captions.get(picture, Caption())
        captions[picture] = Caption(
            texts=(*earlier.texts, *caption.texts), fields={**caption.fields, **earlier.fields}
        )
        has_texts = has_texts or bool(caption.texts)
        row_without_text = row
    if row_without_text and not has_texts:
        message = f"gives no picture a text: it {_wrong_columns(row_without_text)}"
        problems.append(BadImage(path, message))


def _wrong_columns(columns: Collection[str]) -> str:
    file_columns, text_columns = " or ".join(FILE_COLUMNS[:2]), " or ".join(TEXT_COLUMNS[:2])
    expected = f"{file_columns} with the name of a file, and {text_columns}"
    return f"has the columns {', '.join(columns)}; expected {expected}"


def _file_name(row: Mapping[str, Any]) -> str | None:
    """Return the file name in a row; None if no column has one."""
    for column in find_columns(row, FILE_COLUMNS):
        if isinstance(row[column], str):
            return _CAPTION_NUMBER.sub("", row[column])
    return None


class _PictureFinder:
    r"""Finds the picture that a table means by a file name.

    Names are paths relative to the table's folder. If no name in the table is such a path, the
    table comes from another machine. Then the ends of paths are compared, and a name means the only
    picture with this end::

        name in the table      pictures                result
        C:\data\toys\kite.jpg  toys/kite.jpg           toys/kite.jpg
        kite.jpg               toys/kite.jpg           toys/kite.jpg
        kite.jpg               a/kite.jpg, b/kite.jpg  None
    """

    def __init__(
        self, folder: Path, names: Iterable[str], pictures_by_path: Mapping[str, Path]
    ) -> None:
        self._folder = folder
        self._pictures_by_path = pictures_by_path
        self._has_paths = any(
            self._find_by_path(name) or os.path.isfile(folder / name)  # noqa: PTH113  never raises
            for name in names
        )
        self._ends_by_file_name: defaultdict[str, list[tuple[str, Path]]] = defaultdict(list)
        if not self._has_paths:
            for picture in set(pictures_by_path.values()):
                if picture.is_relative_to(folder):
                    end = "/" + normalize_path(picture.relative_to(folder)).lower()
                    self._ends_by_file_name[end.rpartition("/")[2]].append((end, picture))

    def find(self, name: str) -> Path | None:
        return self._find_by_path(name) if self._has_paths else self._find_by_end(name)

    def _find_by_path(self, name: str) -> Path | None:
        path = self._folder / name
        posix_path = Path(str(path).replace("\\", "/"))
        return self._pictures_by_path.get(normalize_path(path)) or self._pictures_by_path.get(
            normalize_path(posix_path).lower()
        )

    def _find_by_end(self, name: str) -> Path | None:
        path = "/" + normalize_path(Path(name.replace("\\", "/"))).lower()
        if "/../" in path:
            return None
        matches = []
        for end, picture in self._ends_by_file_name.get(path.rpartition("/")[2], ()):
            if end.endswith(path) or path.endswith(end):
                matches.append(picture)
        return matches[0] if len(matches) == 1 else None


def _read_rows(path: Path, problems: list[Problem]) -> Rows | None:
    """Return the rows of a table; None if a ``.txt`` file is a text and no table."""
    require_file(path)
    match path.suffix.lower():
        case ".jsonl":
            return read_json_lines(path, dict, problems.append)
        case ".parquet":
            return _parquet_rows(path)
    return _csv_rows(path)


def _csv_rows(path: Path) -> Rows | None:
    """Return the rows of a table in text form; None if a ``.txt`` file is not a table.

    The delimiter is the one that splits the first line into known columns. A table without a header
    has file names in its first column and texts in the second one.
    """
    file = io.StringIO(decode_text(path), newline="")
    csv.field_size_limit(MAX_TEXT_BYTES)
    first_line = file.readline()
    longest_header: list[str] = []
    for delimiter in _DELIMITERS:
        reader = csv.reader([first_line], delimiter=delimiter)
        cells = [cell.strip() for cell in next(reader, [])]
        if find_columns(cells, FILE_COLUMNS):
            columns = _unique_columns(cells)
            return _clean_rows(csv.DictReader(file, columns, delimiter=delimiter), delimiter, 1)
        if len(cells) > 1 and is_image_file(Path(_CAPTION_NUMBER.sub("", cells[0]))):
            lines = itertools.chain([first_line], file)
            columns = [FILE_COLUMNS[0], TEXT_COLUMNS[0]]
            return _clean_rows(csv.DictReader(lines, columns, delimiter=delimiter), delimiter, 0)
        if len(cells) > len(longest_header):
            longest_header = cells
    if path.suffix.lower() == ".txt":
        return None
    raise BadImage(path, _wrong_columns(longest_header))


def _unique_columns(cells: Sequence[str]) -> list[str]:
    """Number repeated columns: ``caption, caption`` become ``caption, caption 1``."""
    columns: list[str] = []
    for index, cell in enumerate(cells):
        columns.append(f"{cell} {index}" if cell and cell in cells[:index] else cell)
    return columns


def _clean_rows(reader: csv.DictReader[str], delimiter: str, header_lines: int) -> Rows:
    """Yield the rows of a table without empty cells.

    Raises
    ------
    ValueError
        A quote is never closed, so that a cell contains the rows after it.
    """
    for row in reader:
        line = reader.line_num + header_lines
        # DictReader puts surplus cells under the key None: kite.jpg,a kite, red -> ["red"].
        # They belong to the last column, a text with commas and without quotes.
        surplus_cells = row.pop(None, None)
        if surplus_cells:
            last_column = [*row][-1]
            row[last_column] += delimiter + delimiter.join(surplus_cells)
        cells: dict[str, str] = {}
        for column, cell in row.items():
            if column:  # pandas writes row numbers into a column without a name
                cells[column] = (cell or "").strip()
        for cell in cells.values():
            for inner_line in cell.split("\n")[1:]:
                if is_image_file(Path(inner_line.partition(delimiter)[0])):
                    raise ValueError(f"the row that ends in line {line} has an unclosed quote")
        yield line, {column: cell for column, cell in cells.items() if cell not in _EMPTY_CELLS}


def _parquet_rows(path: Path) -> Rows:
    try:
        from pyarrow import parquet  # noqa: PLC0415  optional
    except ImportError:
        needs = "needs the extra parquet: pip install 'genius-search[parquet]'"
        raise BadImage(path, f"is Parquet, which {needs}") from None
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(_PARQUET_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield number, {column: value for column, value in row.items() if value is not None}
