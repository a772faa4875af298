"""Read which candidates answer which query (qrels), in TREC's four columns or M-BEIR's five."""

from __future__ import annotations

from pathlib import Path

from genius.data.lines import bad_record, numbered_lines
from genius.data.records import candidate_number, query_number
from genius.errors import BadData


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Relevance by query and candidate; a pair may be judged twice if it is judged alike.

    M-BEIR, section 1.5: ``qid 0 did relevance [task]``; blank lines are passed over.

    Raises
    ------
    BadRecord
        a line with other columns, an id that is none, a relevance that is not a whole number from 0 up, or
        another relevance than an earlier line gave the same pair.
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
            query_number(qid)
            candidate_number(did)
            judged = _relevance(relevance)
        except (BadData, ValueError) as error:
            raise bad_record(path, line, str(error)) from None
        if qrels.setdefault(qid, {}).setdefault(did, judged) != judged:
            raise bad_record(path, line, f"{qid} {did} has another relevance in an earlier line")
    return qrels


def _relevance(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise BadData(f"relevance {text!r} is not a whole number from 0 up")
    return int(text)
