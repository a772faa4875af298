"""Candidates, queries, modalities, tasks and ids, with the names and numbers of M-BEIR."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from genius_search.errors import BadData, UsageError


class Modality(StrEnum):
    """The modality of a query or candidate. Members are strings: ``Modality.TEXT == "text"``."""

    IMAGE = "image"
    TEXT = "text"
    IMAGE_TEXT = "image-text"

    @property
    def code(self) -> int:
        """The code at level 0: image 0, text 1, image-text 2."""
        return MODALITY_CODES[self]

    @property
    def mbeir(self) -> str:
        """M-BEIR's spelling: ``image,text`` instead of ``image-text``."""
        return self.value.replace("-", ",")

    @staticmethod
    def parse(value: str) -> Modality:
        """Parse our spelling or M-BEIR's (``image,text`` or ``text,image``)."""
        modality = SPELLINGS.get(value.replace(" ", "")) if isinstance(value, str) else None
        if modality is None:
            raise UsageError(f"modality {value!r} is not one of image, text, image-text")
        return modality

    @staticmethod
    def of(*, has_image: bool, has_text: bool) -> Modality:
        """Return the modality of a record with an image, a text, or both."""
        if has_image and has_text:
            return Modality.IMAGE_TEXT
        if not has_image and not has_text:
            raise UsageError("a record needs an image or a text, and this one has neither")
        return Modality.IMAGE if has_image else Modality.TEXT


NUM_MODALITIES: Final = len(Modality)
MODALITY_CODES: Final = {modality: code for code, modality in enumerate(Modality)}
SPELLINGS: Final[dict[str, Modality]] = {
    **{modality.value: modality for modality in Modality},
    "image,text": Modality.IMAGE_TEXT,
    "text,image": Modality.IMAGE_TEXT,
}

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
"""M-BEIR's tasks: number -> (modality of queries, modality of candidates). Number 5 is unused."""


def task_name(task_id: int) -> str:
    """Return the name of a task, for example ``text -> image`` for task 0."""
    query, candidate = TASKS[task_id]
    return f"{query} -> {candidate}"


@dataclass(frozen=True, slots=True)
class Query:
    """A query and, for training and evaluation, the ids of its relevant candidates."""

    qid: str
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path relative to the root of the data set."""
    positives: tuple[str, ...] = ()
    """Ids of relevant candidates. Candidates of the query's data set come first."""
    task_id: int | None = None
    source: str | None = None
    """M-BEIR's ``query_src_content``, verbatim."""
    number: int = field(default=-1, compare=False)
    """UniIR's integer for the id, of which it follows unless the reader of a file has parsed it."""

    def __post_init__(self) -> None:
        """Parse the id, if the reader has not."""
        if self.number < 0:
            object.__setattr__(self, "number", query_number(self.qid))

    @property
    def dataset(self) -> int:
        """The number of the data set."""
        return self.number // QUERY_CAP


@dataclass(frozen=True, slots=True)
class Candidate:
    """An item of a pool."""

    did: str
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path relative to the root of the data set."""
    source: str | None = None
    """M-BEIR's ``src_content``, verbatim."""
    number: int = field(default=-1, compare=False)
    """UniIR's integer for the id; -1 for a file of a folder, whose id is its path."""


QUERY_CAP: Final = 500_000
"""Query numbers within a data set are below this limit (UniIR's hash)."""
CANDIDATE_CAP: Final = 10_000_000
"""Candidate numbers within a data set are below this limit (UniIR's hash)."""
_ID: Final = re.compile(r"(0|[1-9][0-9]{0,15}):(0|[1-9][0-9]{0,15})")


def parse_id(text: str) -> tuple[int, int]:
    """Split ``"9:12"`` into the number of the data set, 9, and the number within it, 12.

    Leading zeros are refused, since ``9:012`` would be a second spelling of the same id.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise BadData(
            f"id {text[:80]!r} is not of the form <data set number>:<number> in plain digits "
            "without leading zeros, for example 9:12"
        )
    return int(match[1]), int(match[2])


def query_number(qid: str) -> int:
    """Return UniIR's integer for a query id: ``data set * 500,000 + number``."""
    return _uniir_number(qid, "query", QUERY_CAP)


def candidate_number(did: str) -> int:
    """Return UniIR's integer for a candidate id: ``data set * 10,000,000 + number``."""
    return _uniir_number(did, "candidate", CANDIDATE_CAP)


def _uniir_number(text: str, role: str, cap: int) -> int:
    # For queries, "9:12" becomes 9 * 500,000 + 12 = 4,500,012.
    dataset, number = parse_id(text)
    if number >= cap:
        raise BadData(f"{role} id {text!r}: the number must be below {cap:,}")
    return dataset * cap + number


def qid_of(number: int) -> str:
    """Return the id of a query number, the inverse of :func:`query_number`."""
    return f"{number // QUERY_CAP}:{number % QUERY_CAP}"


def did_of(number: int) -> str:
    """Return the id of a candidate number, the inverse of :func:`candidate_number`."""
    return f"{number // CANDIDATE_CAP}:{number % CANDIDATE_CAP}"


def format_text(text: str | None) -> str:
    """Trim, unquote and capitalise a text and end it with a full stop (UniIR's ``format_string``).

    The function is not idempotent. Apply it exactly as UniIR does: once to the instruction, and
    then once to the instruction and text together (:func:`instructed`).
    """
    text = (text or "").replace("\r", "").strip().strip('"')
    if not text:
        return ""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."


def instructed(instruction: str | None, text: str | None) -> str:
    """Join an instruction and a query's text with a space, as UniIR does, for the encoder."""
    if not instruction:
        return format_text(text)
    return format_text(f"{format_text(instruction)} {text or ''}")


def composed(text: str) -> str:
    """Return a text in Unicode's composed form (NFC).

    Systems spell accented letters differently: macOS decomposes them in names of files. In the
    composed form, equal words are equal strings.
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def check_unicode(text: str) -> str:
    """Return a text in composed form; raise :class:`UsageError` if UTF-8 cannot encode it."""
    try:
        text.encode()
        return composed(text)
    except UnicodeEncodeError:
        raise UsageError(
            f"{text!r} is not valid Unicode (it contains half a character, a lone surrogate); "
            "encode it as UTF-8"
        ) from None
