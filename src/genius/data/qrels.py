"""Read which candidates answer which query (qrels), in TREC's four columns or M-BEIR's five."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from genius.data.lines import bad_record, numbered_lines
from genius.data.records import candidate_number, query_number
from genius.errors import BadData

_WHOLE: Final = {"mbeir": re.compile(r"[0-9]{1,9}"), "trec": re.compile(r"-?[0-9]{1,9}")}
"""What a relevance looks like: M-BEIR's count from 0 up, TREC has collections with some below 0."""


def read_qrels(path: Path, *, layout: Literal["mbeir", "trec"] = "mbeir") -> dict[str, dict[str, int]]:
    """Relevance by query and candidate; a pair may be judged twice if it is judged alike.

    M-BEIR, section 1.5: ``qid 0 did relevance [task]``; blank lines are passed over.

    Parameters
    ----------
    layout
        ``mbeir``: ids are M-BEIR's (``9:12``), and a relevance counts from 0 up. ``trec``: ids are any
        words, and a relevance is any whole number; above 0 is a right answer.

    Raises
    ------
    BadRecord
        a line with other columns, an id that is none, a relevance that is none, or another relevance than
        an earlier line gave the same pair.
    """
    qrels: dict[str, dict[str, int]] = {}
    for line, raw in numbered_lines(path):
        columns = raw.split()
        if len(columns) not in {4, 5}:
            raise bad_record(
                path,
                line,
                f"has {len(columns)} columns, expected 4 (TREC) or 5 (M-BEIR): qid 0 did relevance [task]",
            )
        try:
            qid, _, did, relevance = (column.decode() for column in columns[:4])
            if layout == "mbeir":
                query_number(qid)
                candidate_number(did)
            judged = _relevance(relevance, layout)
        except (BadData, ValueError) as error:
            raise bad_record(path, line, str(error)) from None
        if qrels.setdefault(qid, {}).setdefault(did, judged) != judged:
            raise bad_record(path, line, f"{qid} {did} has another relevance in an earlier line")
    return qrels


def _relevance(text: str, layout: Literal["mbeir", "trec"]) -> int:
    if not _WHOLE[layout].fullmatch(text):
        expected = "a whole number from 0 up" if layout == "mbeir" else "a whole number"
        raise BadData(f"relevance {text[:20]!r} is not {expected}, of at most nine digits")
    return int(text)
