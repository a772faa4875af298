"""Write M-BEIR's files: queries, candidates, qrels. Each appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from genius.data.records import Candidate, Query
from genius.errors import BadData


def write_queries(path: Path, queries: Iterable[Query]) -> int:
    """Write queries with M-BEIR's fields; how many there were. The file appears when it is complete."""
    return _write_json_lines(
        path,
        (
            {
                "qid": query.qid,
                "query_txt": query.text,
                "query_img_path": query.image,
                "query_modality": query.modality.value,
                "query_src_content": query.source,
                "pos_cand_list": list(query.positives),
                "neg_cand_list": list(query.negatives),
                "task_id": query.task_id,
            }
            for query in queries
        ),
    )


def write_candidates(path: Path, candidates: Iterable[Candidate]) -> int:
    """Write candidates with M-BEIR's fields; how many there were. The file appears when it is complete."""
    return _write_json_lines(
        path,
        (
            {
                "did": candidate.did,
                "txt": candidate.text,
                "img_path": candidate.image,
                "modality": candidate.modality.value,
                "src_content": candidate.source,
            }
            for candidate in candidates
        ),
    )


def write_qrels(path: Path, queries: Iterable[Query]) -> int:
    """Write the queries' positives in five columns, as UniIR needs them; how many lines there were."""
    num_lines = 0
    with appearing_whole(path) as file:
        for query in queries:
            if query.task_id is None:
                raise BadData(f"query {query.qid} has no task number, and M-BEIR's qrels need one")
            for did in query.positives:
                file.write(f"{query.qid} 0 {did} 1 {query.task_id}\n")
                num_lines += 1
    return num_lines


@contextmanager
def appearing_whole(path: Path) -> Iterator[TextIO]:
    """A file to write that takes its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    num_rows = 0
    with appearing_whole(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_rows += 1
    return num_rows
