"""What a catalogue holds and what is asked of it: candidates, queries, modalities, tasks, ids.

Names and numbers follow M-BEIR, so that its files are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from genius_search.errors import BadData, UsageError


class Modality(StrEnum):
    """The parts that a query or a candidate has. Members are strings: ``Modality.TEXT == "text"``."""

    IMAGE = "image"
    TEXT = "text"
    IMAGE_TEXT = "image-text"

    @property
    def code(self) -> int:
        """Its number as an assigned level-0 code: image 0, text 1, image-text 2."""
        return list(Modality).index(self)

    @property
    def mbeir(self) -> str:
        """M-BEIR's spelling, which its files and our older formats hold: ``image,text``."""
        return self.value.replace("-", ",")

    @staticmethod
    def parse(value: str) -> Modality:
        """Read our spelling or M-BEIR's, ``image,text`` or ``text,image``."""
        match value.replace(" ", ""):
            case "image":
                return Modality.IMAGE
            case "text":
                return Modality.TEXT
            case "image,text" | "text,image" | "image-text":
                return Modality.IMAGE_TEXT
            case _:
                raise UsageError(f"modality {value!r} is not one of image, text, image-text")

    @staticmethod
    def of(*, has_image: bool, has_text: bool) -> Modality:
        """The modality of something that has these parts."""
        match has_image, has_text:
            case True, True:
                return Modality.IMAGE_TEXT
            case True, False:
                return Modality.IMAGE
            case False, True:
                return Modality.TEXT
            case _:
                raise UsageError("a record needs an image or a text, and this one has neither")


TASKS: Final[dict[int, tuple[Modality, Modality]]] = {
    0: (Modality.TEXT, Modality.IMAGE),
    1: (Modality.TEXT, Modality.TEXT),
    2: (Modality.TEXT, Modality.IMAGE_TEXT),
    3: (Modality.IMAGE, Modality.TEXT),
    4: (Modality.IMAGE, Modality.IMAGE),
    6: (Modality.IMAGE_TEXT, Modality.TEXT),
    7: (Modality.IMAGE_TEXT, Modality.IMAGE),
    8: (Modality.IMAGE_TEXT, Modality.IMAGE_TEXT),
}
"""M-BEIR's tasks: number -> (query modality, candidate modality). 5 is unused."""


def task_name(task_id: int) -> str:
    """``0`` -> ``text -> image``."""
    query, candidate = TASKS[task_id]
    return f"{query.value} -> {candidate.value}"


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked: content and, for evaluation and training, what answers it."""

    qid: str
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path relative to the data set's root."""
    positives: tuple[str, ...] = ()
    """Candidate ids that answer it, the query's own data set first."""
    negatives: tuple[str, ...] = ()
    """Candidate ids known not to answer it."""
    task_id: int | None = None
    source: str | None = None
    """M-BEIR's ``query_src_content``, kept as it came."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What can be found."""

    did: str
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path relative to the data set's root."""
    source: str | None = None
    """M-BEIR's ``src_content``, kept as it came."""


QUERY_CAP: Final = 500_000
"""Queries of one data set have numbers below this (UniIR's hash)."""
CANDIDATE_CAP: Final = 10_000_000
"""Candidates of one data set have numbers below this (UniIR's hash)."""

_LONGEST_ID: Final = 32


def parse_id(text: str) -> tuple[int, int]:
    """``"9:12"`` -> (data set 9, number 12). Both may be 0-based or 1-based; negative is refused.

    One item has one id: ``9:012`` would be another text and the same number.
    """
    dataset, _, number = text.partition(":")
    if not (
        dataset.isdecimal()
        and number.isdecimal()
        and text.isascii()
        and (dataset[0] != "0" or dataset == "0")
        and (number[0] != "0" or number == "0")
        and len(text) <= _LONGEST_ID
    ):
        raise BadData(
            f"id {text[:80]!r} is not of the form <data set number>:<number> in plain digits without leading "
            "zeros, for example 9:12"
        )
    return int(dataset), int(number)


def query_number(qid: str) -> int:
    """UniIR's integer for a query id: ``data set * 500,000 + number``."""
    dataset, number = parse_id(qid)
    if number >= QUERY_CAP:
        raise BadData(f"query id {qid!r}: the number must be below {QUERY_CAP:,}")
    return dataset * QUERY_CAP + number


def candidate_number(did: str) -> int:
    """UniIR's integer for a candidate id: ``data set * 10,000,000 + number``."""
    dataset, number = parse_id(did)
    if number >= CANDIDATE_CAP:
        raise BadData(f"candidate id {did!r}: the number must be below {CANDIDATE_CAP:,}")
    return dataset * CANDIDATE_CAP + number


def qid_of(number: int) -> str:
    """Inverse of :func:`query_number`."""
    return f"{number // QUERY_CAP}:{number % QUERY_CAP}"


def did_of(number: int) -> str:
    """Inverse of :func:`candidate_number`."""
    return f"{number // CANDIDATE_CAP}:{number % CANDIDATE_CAP}"


def format_text(text: str | None) -> str:
    """UniIR's ``format_string``: trimmed, unquoted, capitalised, closed with a full stop.

    Not idempotent; apply exactly as often as UniIR does (twice to an instruction, once to the whole).
    """
    if text is None:
        return ""
    text = text.replace("\r", "").strip().strip('"')
    if not text:
        return ""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."


def instructed(instruction: str | None, text: str | None) -> str:
    """What the encoder reads for a query: instruction, blank, text (UniIR); without one, the text."""
    if not instruction:
        return format_text(text)
    return format_text(f"{format_text(instruction)} {text or ''}")
