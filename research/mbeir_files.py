"""Write queries, candidates, judgements and instructions in M-BEIR's format."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from genius_search.errors import BadData
from genius_search.records import Candidate, Modality, Query
from genius_search.writing import write_atomically


class InstructionRow(NamedTuple):
    """A row of the instruction file."""

    query: Modality
    candidate: Modality
    dataset: str
    dataset_id: int
    instructions: tuple[str, ...]


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line atomically."""
    with replacing(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing; it replaces ``path`` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        write_atomically(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        yield file


def query_file(root: Path, split: str, name: str) -> Path:
    """Return the path of a query file; ``name`` ends with the split."""
    return root / "query" / split / f"mbeir_{name}.jsonl"


def write_queries(path: Path, queries: Iterable[Query]) -> None:
    """Write queries in M-BEIR's format atomically."""
    write_json_lines(
        path,
        (
            {
                "qid": query.qid,
                "query_txt": query.text,
                "query_img_path": query.image,
                "query_modality": query.modality.mbeir,
                "query_src_content": query.source,
                "pos_cand_list": list(query.positives),
                "neg_cand_list": [],
                "task_id": query.task_id,
            }
            for query in queries
        ),
    )


def write_candidates(path: Path, candidates: Iterable[Candidate]) -> None:
    """Write candidates in M-BEIR's format atomically."""
    write_json_lines(
        path,
        (
            {
                "did": candidate.did,
                "txt": candidate.text,
                "img_path": candidate.image,
                "modality": candidate.modality.mbeir,
                "src_content": candidate.source,
            }
            for candidate in candidates
        ),
    )


def write_qrels(path: Path, queries: Iterable[Query]) -> None:
    """Write the queries' positives in UniIR's five columns."""
    with replacing(path) as file:
        for query in queries:
            if query.task_id is None:
                raise BadData(f"query {query.qid} has no task number, and M-BEIR's qrels need one")
            file.writelines(f"{query.qid} 0 {did} 1 {query.task_id}\n" for did in query.positives)


def write_instructions(path: Path, rows: Iterable[InstructionRow]) -> None:
    """Write ``query_instructions.tsv``, padding shorter rows with empty cells."""
    rows = list(rows)
    for row in rows:
        if any(set(text) & set("\t\r\n") for text in row.instructions):
            raise BadData(
                f"instructions of {row.dataset} have a tab or a line break, which separate cells "
                "and rows of the file"
            )
    width = max((len(row.instructions) for row in rows), default=0)
    with replacing(path) as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        names = (f"prompt_{number}" for number in range(1, width + 1))
        writer.writerow(["query_modality", "cand_modality", "dataset_name", "dataset_id", *names])
        for row in rows:
            empty = [""] * (width - len(row.instructions))
            key = (row.query.mbeir, row.candidate.mbeir, row.dataset, row.dataset_id)
            writer.writerow([*key, *row.instructions, *empty])
