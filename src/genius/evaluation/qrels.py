"""Which candidates answer which query (qrels): cut to a pool, and written for TREC's tools."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from genius.artifact import write_file
from genius.errors import BadData

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Query id -> candidate id -> relevance; above 0 is a right answer."""

NUM_NAMED = 5
"""How many offending ids an error names."""


def filter_to_pool(
    qrels: Qrels, pool_ids: Container[str], *, unanswerable: Literal["refuse", "drop"] = "refuse"
) -> dict[str, dict[str, int]]:
    """Keep the answers that are in the pool, so that recall and nDCG are over what can be found.

    OVEN's queries name InfoSeek's candidates too, which its own pool lacks (M-BEIR, section 1.7).
    A query left without any right answer is refused, or dropped when asked for.

    Raises
    ------
    BadData
        queries have no right answer in the pool and ``unanswerable`` is ``refuse``.
    """
    kept: dict[str, dict[str, int]] = {}
    lost: list[str] = []
    for qid, judged in qrels.items():
        inside = {did: relevance for did, relevance in judged.items() if did in pool_ids}
        if any(relevance > 0 for relevance in inside.values()):
            kept[qid] = inside
        else:
            lost.append(f"{qid} (answered by {some(list(judged))})")
    if lost and unanswerable == "refuse":
        raise BadData(
            f"{len(lost)} of {len(qrels)} queries have no right answer in the pool: {some(lost)}. "
            "Take the pool that these qrels were made for, restore the candidates, or drop such queries"
        )
    return kept


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write TREC's four columns ``qid 0 did relevance``, in one step.

    trec_eval, pytrec_eval and pyserini read these; M-BEIR's own files have a fifth column, the task, that
    they stumble over, and :func:`genius.data.writing.write_qrels` writes it.
    """
    lines = [
        f"{trec_word(qid)} 0 {trec_word(did)} {relevance}\n"
        for qid, judged in qrels.items()
        for did, relevance in judged.items()
    ]
    write_file(path, "".join(lines).encode())


def some(ids: list[str]) -> str:
    """The first few ids, for an error message."""
    return ", ".join(ids[:NUM_NAMED]) + (", …" if len(ids) > NUM_NAMED else "")


def trec_word(text: str) -> str:
    """The text itself when it can be a column of a TREC file, whose columns are parted by blanks."""
    if len(text.split()) != 1 or text.strip() != text:
        raise BadData(f"{text!r} cannot stand in a TREC file: ids and names must be one word without blanks")
    return text
