"""One row of M-BEIR's JSON lines becomes a query or a candidate.

Absent and null fields are alike, key order is free, and unknown keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from genius.data.records import Candidate, Modality, Query, candidate_number, query_number
from genius.errors import BadData


def parse_query(row: Mapping[str, Any]) -> Query:
    """The query that a row is."""
    qid = _text(row, "qid")
    if qid is None:
        raise BadData("has no qid")
    query_number(qid)
    modality, text, image = _content(row, "query_modality", "query_txt", "query_img_path")
    task_id = row.get("task_id")
    if task_id is not None and (not isinstance(task_id, int) or isinstance(task_id, bool)):
        raise BadData(f"task_id is {task_id!r}, expected a number")
    return Query(
        qid=qid,
        modality=modality,
        text=text,
        image=image,
        positives=_ids(row, "pos_cand_list"),
        negatives=_ids(row, "neg_cand_list"),
        task_id=task_id,
        source=_source(row.get("query_src_content")),
    )


def parse_candidate(row: Mapping[str, Any]) -> Candidate:
    """The candidate that a row is."""
    did = _text(row, "did")
    if did is None:
        raise BadData("has no did")
    candidate_number(did)
    modality, text, image = _content(row, "modality", "txt", "img_path")
    return Candidate(did, modality, text, image, _source(row.get("src_content")))


def _content(
    row: Mapping[str, Any], modality_key: str, text_key: str, image_key: str
) -> tuple[Modality, str | None, str | None]:
    """What a row is made of, when it is made of what it says."""
    declared = _text(row, modality_key)
    if declared is None:
        raise BadData(f"has no {modality_key}")
    modality = Modality.parse(declared)
    text, image = _text(row, text_key), _text(row, image_key)
    for key, value, wanted in (
        (text_key, text, modality is not Modality.IMAGE),
        (image_key, image, modality is not Modality.TEXT),
    ):
        if wanted and value is None:
            raise BadData(f"{modality_key} is {declared!r} but there is no {key}")
        if not wanted and value is not None:
            raise BadData(f"{modality_key} is {declared!r} but {key} is {value[:80]!r}")
    return modality, text, image


def _text(row: Mapping[str, Any], key: str) -> str | None:
    """A string field; absent, null and blank are alike."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadData(f"{key} is {str(value)[:80]}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadData(f"{key} holds half a character (a lone surrogate)") from None
    return value if value.strip() else None


def _ids(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(did, str) for did in value):
        raise BadData(f"{key} is {str(value)[:80]}, expected a list of candidate ids")
    for did in value:
        candidate_number(did)
    return tuple(value)


def _source(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
