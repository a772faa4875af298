"""A file of M-BEIR's, line by line: what is wrong is named by data set, split, file and line, or counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from genius.errors import BadData, BadRecord, UsageError

Record = TypeVar("Record")

_FILE_NAME: Final = re.compile(
    r"^mbeir_(?P<name>.+?)(?:_(?P<split>up_train|train|val|test))?(?:_cand_pool|_qrels)?\.(?:jsonl|txt)$"
)


@dataclass(slots=True)
class BadLines:
    """Counts lines that could not be used and remembers the first few."""

    remember: int = 20
    """How many to keep; all are counted."""
    count: int = 0
    problems: list[BadRecord] = field(default_factory=list)

    def add(self, problem: BadRecord) -> None:
        """Count one more."""
        self.count += 1
        if len(self.problems) < self.remember:
            self.problems.append(problem)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; a byte order mark is dropped."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def numbered_records(
    path: Path, parse: Callable[[dict[str, Any]], Record], skip_bad: BadLines | None
) -> Iterator[tuple[int, Record]]:
    """What ``parse`` makes of each line's JSON object, with the line's number."""
    for line, raw in numbered_lines(path):
        try:
            record = parse(_object(raw))
        except UnicodeDecodeError as error:
            refuse(path, line, f"is not UTF-8 (byte {error.start + 1} of the line)", skip_bad)
        except json.JSONDecodeError as error:
            refuse(path, line, f"is not valid JSON: {error.msg} at column {error.colno}", skip_bad)
        except RecursionError:
            refuse(path, line, "is not usable JSON: nested too deeply", skip_bad)
        except (BadData, UsageError, ValueError) as error:
            refuse(path, line, str(error), skip_bad)
        else:
            yield line, record


def refuse(path: Path, line: int, problem: str, skip_bad: BadLines | None) -> None:
    """Raise that a line cannot be used, or give it to ``skip_bad``."""
    error = bad_record(path, line, problem)
    if skip_bad is None:
        raise error from None
    skip_bad.add(error)


def bad_record(path: Path, line: int, problem: str) -> BadRecord:
    """The error that names a line with its data set and split."""
    return BadRecord(path, line, f"{_origin(path)}{problem}")


def _origin(path: Path) -> str:
    """``flickr8k_task1, test: `` from a file's name and folder, as far as they tell."""
    match = _FILE_NAME.match(path.name)
    if match is None:
        return ""
    split = match["split"] or path.parent.name
    return f"{match['name']}, {split}: "


def _object(raw: bytes) -> dict[str, Any]:
    row = json.loads(raw.decode())
    if not isinstance(row, dict):
        raise BadData(f"is a JSON {type(row).__name__}, expected an object {{...}}")
    return row
