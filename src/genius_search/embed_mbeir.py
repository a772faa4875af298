"""Embedding of queries and candidates of a data set in M-BEIR's layout, with a choice of instructions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.data.features import FeatureBatch, Features
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
from genius_search.embed import FeatureRow, embed
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.errors import BadData
from genius_search.progress import Progress
from genius_search.records import (
    TASKS,
    Candidate,
    Modality,
    Query,
    candidate_number,
    format_text,
    instructed,
    parse_id,
    query_number,
)

InstructionChoice = Literal["hashed", "first", "none", "all"]


def embed_pool(
    data: MBeir,
    pools: Sequence[Path],
    encoder: Encoder,
    folder: Path,
    *,
    fingerprint: str | None = None,
    progress: Progress,
) -> Features:
    """Embed the candidates of pool files, each once. ``fingerprint`` is that of the files, if known."""
    rows = (candidate_row(data, candidate) for candidate in read_pool(pools))
    return embed(
        rows,
        encoder,
        folder,
        inputs={"records": fingerprint or fingerprint_of_files(pools)},
        expected=count_lines(pools),
        progress=progress,
    )


def candidate_row(data: MBeir, candidate: Candidate) -> FeatureRow:
    """Return a candidate's row, without an instruction."""
    return FeatureRow(
        id=candidate_number(candidate.did),
        key=ItemKey("candidate", candidate.did),
        modality=candidate.modality,
        image=None if candidate.image is None else data.image_path(candidate.image),
        text=format_text(candidate.text),
    )


def query_row(
    data: MBeir, query: Query, wanted: Modality, instruction: str | None, variant: int, *, split: str
) -> FeatureRow:
    """Return a query's row with one instruction."""
    return FeatureRow(
        id=query_number(query.qid),
        key=ItemKey("query", query.qid, split),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        variant=variant,
        wanted=wanted,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    wanted: Modality,
    choice: Literal["hashed", "first", "none"],
    *,
    seed: int,
) -> str | None:
    """Choose an instruction for a query, reproducibly.

    Deviation 25: UniIR draws it at random.
    """
    if choice == "none":
        return None
    offered = instructions_for(instructions, query, wanted)
    if not offered:
        return None
    if choice == "first":
        return offered[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return offered[int.from_bytes(digest[:8], "big") % len(offered)]


def instructions_for(instructions: Instructions, query: Query, wanted: Modality) -> tuple[str, ...]:
    """Return all instructions for a query and its target modality."""
    return instructions.lookup(parse_id(query.qid)[0], query.modality, wanted)


def instruction_files(data: MBeir) -> list[Path]:
    """Return the path of the data set's instructions as a list, empty if there are none."""
    return [data.instructions_file] if data.instructions_file.exists() else []


def count_lines(files: Sequence[Path]) -> int:
    """Count the records in files: their lines without blank ones."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            total += sum(not line.isspace() for line in file)
    return total


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Return a fingerprint of files' names and contents, independent of their folder."""
    return fingerprint_of(digests(files))


def digests(files: Sequence[Path]) -> list[list[str]]:
    """Return the name and the SHA-256 of each file."""
    return [[path.name, file_fingerprint(path)] for path in files]


class EmbeddedQueries(NamedTuple):
    """Features of the queries of one evaluation row."""

    qids: list[str]
    features: FeatureBatch


def embed_queries(
    data: MBeir,
    encoder: Encoder,
    row: EvaluationRow,
    folder: Path,
    *,
    instructions: InstructionChoice = "hashed",
    max_queries: int = 0,
    seed: int = 0,
    progress: Progress,
) -> list[EmbeddedQueries]:
    """Embed the queries of an evaluation row; with ``instructions="all"`` once per instruction.

    Features are cached in ``folder``. ``max_queries`` limits the number of queries, which are evenly spaced.

    Raises
    ------
    BadData
        A query occurs twice, or with ``all``, queries have different numbers of instructions.
    """
    target = TASKS[row.task_id][1]
    queries = list(read_queries(row.queries))
    if max_queries and max_queries < len(queries):
        queries = [queries[int(place)] for place in np.linspace(0, len(queries) - 1, max_queries)]
    repeated = [qid for qid, count in Counter(query.qid for query in queries).items() if count > 1]
    if repeated:
        raise BadData(
            f"{row.queries}: query {repeated[0]} occurs twice ({len(repeated)} such); each may occur once"
        )
    variants: list[Sequence[str | None]]
    if instructions == "all":
        offered = [instructions_for(data.instructions, query, target) for query in queries]
        if len({len(texts) for texts in offered}) > 1:
            raise BadData(
                "the queries of a row have different numbers of instructions; choose hashed or first"
            )
        variants = [*zip(*offered, strict=True)] or [[None] * len(queries)]
    else:
        choose = partial(choose_instruction, data.instructions, choice=instructions, seed=seed)
        variants = [[choose(query, target) for query in queries]]
    features = embed(
        (
            query_row(data, query, target, instruction, variant, split=row.split)
            for variant, texts in enumerate(variants)
            for query, instruction in zip(queries, texts, strict=True)
        ),
        encoder,
        folder / f"queries-{fingerprint_of([instructions, seed, max_queries])[:8]}" / row.name,
        inputs={"records": fingerprint_of_files([row.queries, *instruction_files(data)])},
        expected=len(queries) * len(variants),
        progress=progress,
    )
    return [
        EmbeddedQueries(
            [query.qid for query in queries], features.gather(np.flatnonzero(features.variant == variant))
        )
        for variant in range(len(variants))
    ]
