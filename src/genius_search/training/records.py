"""The records of a data set in M-BEIR's layout, and their features.

Pools, the queries of a row of an evaluation, and the records that training reads.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.data.features import FeatureBatch, Features, Pairs, find_positives
from genius_search.data.mbeir import EvaluationRow, Instructions, MBeir, read_pool, read_queries
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.rows import FeatureRow
from genius_search.encoders.store import ALONE, Share, embed, embed_unfinished
from genius_search.errors import BadData
from genius_search.progress import Progress
from genius_search.records import (
    TASKS,
    Candidate,
    Modality,
    Query,
    format_text,
    instructed,
)

InstructionChoice = Literal["hashed", "first", "none"]


def embed_pool(
    data: MBeir,
    pools: Sequence[Path],
    encoder: Encoder,
    folder: Path,
    *,
    only: Collection[str] | None = None,
    progress: Progress,
    share: Share = ALONE,
) -> Features:
    """Embed the candidates of pool files, each once, or ``only`` the candidates with these ids."""
    choice = {} if only is None else {"only": fingerprint_of(sorted(only))}
    return embed(
        (
            candidate_row(data, candidate)
            for candidate in read_pool(pools)
            if only is None or candidate.did in only
        ),
        encoder,
        folder,
        inputs={"records": fingerprint_of_files(pools), **choice},
        expected=count_lines(pools) if only is None else len(only),
        progress=progress,
        share=share,
    )


def candidate_row(data: MBeir, candidate: Candidate) -> FeatureRow:
    """Return the row of a candidate; it has no instruction."""
    return FeatureRow(
        id=candidate.number,
        key=ItemKey("candidate", candidate.did),
        modality=candidate.modality,
        image=None if candidate.image is None else data.image_path(candidate.image),
        text=format_text(candidate.text),
    )


def query_row(data: MBeir, query: Query, target: Modality, instruction: str | None) -> FeatureRow:
    """Return the row of a query with an instruction for the target modality."""
    return FeatureRow(
        id=query.number,
        key=ItemKey("query", query.qid),
        modality=query.modality,
        image=None if query.image is None else data.image_path(query.image),
        text=instructed(instruction, query.text),
        wanted=target,
    )


def choose_instruction(
    instructions: Instructions,
    query: Query,
    target: Modality,
    choice: InstructionChoice,
    *,
    seed: int,
) -> str | None:
    """Choose an instruction for a query that asks for a modality, reproducibly.

    Deviation 25: the choice is a hash of the seed and the query; UniIR draws it at random.
    """
    suitable = instructions.lookup(query.dataset, query.modality, target)
    if choice == "none" or not suitable:
        return None
    if choice == "first":
        return suitable[0]
    digest = hashlib.sha256(f"{seed} {query.qid}".encode()).digest()
    return suitable[int.from_bytes(digest[:8], "big") % len(suitable)]


def count_lines(files: Sequence[Path]) -> int:
    """Count the records in files: the lines that are not blank."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            total += sum(not line.isspace() for line in file)
    return total


def fingerprint_of_files(files: Iterable[Path]) -> str:
    """Return a fingerprint of files' names and contents, independent of their folder."""
    return fingerprint_of([[path.name, file_fingerprint(path)] for path in files])


def choose_queries(row: EvaluationRow, max_queries: int) -> list[Query]:
    """Return the queries of an evaluation row, at most ``max_queries`` unless it is 0.

    They are evenly spaced in their file.

    Raises
    ------
    BadData
        A query occurs twice.
    """
    queries = list(read_queries(row.queries))
    if max_queries and max_queries < len(queries):
        positions = np.linspace(0, len(queries) - 1, max_queries)
        queries = [queries[int(position)] for position in positions]
    counts = Counter(query.qid for query in queries)
    repeated = [qid for qid, count in counts.items() if count > 1]
    if repeated:
        raise BadData(
            f"{row.queries}: query {repeated[0]} occurs twice, like {len(repeated) - 1} more; each "
            "query may occur once"
        )
    return queries


def embed_queries(
    data: MBeir,
    encoder: Encoder,
    row: EvaluationRow,
    folder: Path | None,
    *,
    instructions: InstructionChoice = "hashed",
    max_queries: int = 0,
    seed: int = 0,
    progress: Progress,
) -> tuple[list[str], FeatureBatch]:
    """Embed the queries of an evaluation row, each with an instruction; return ids and features.

    Features are saved in ``folder``, or only in memory without one. No other query is encoded than
    those of :func:`choose_queries`.
    """
    target = TASKS[row.task_id][1]
    queries = choose_queries(row, max_queries)
    rows = (
        query_row(
            data,
            query,
            target,
            choose_instruction(data.instructions, query, target, instructions, seed=seed),
        )
        for query in queries
    )
    features = embed_unfinished(
        rows, encoder, folder, name=row.name, expected=len(queries), progress=progress
    )
    return [query.qid for query in queries], features.gather(np.arange(len(features)))


class TrainingRecords:
    """Training queries of a data set, in memory; M-BEIR's 1.3 million lines take some 600 MB.

    Parameters
    ----------
    validation
        if not 0, read the split ``val`` instead: at most this many queries with answers, evenly
        spaced, and their answers as candidates.
    """

    def __init__(self, data: MBeir, *, validation: int = 0) -> None:
        self.data = data
        files = list(data.query_files("val").values()) if validation else data.training_queries()
        self.lines: list[Query] = []
        """The query of each line. Repeated lines, as in M-BEIR, are drawn more often."""
        for path in files:
            for query in read_queries(path):
                self.lines.append(replace(query, task_id=None, source=None))
        self.pools = data.training_pools()
        self.only: frozenset[str] | None = None
        """Ids of the candidates to embed; None for all candidates of the pools."""
        if validation:
            answered = [query for query in self.lines if query.positives]
            self.lines = answered[:: max(1, -(-len(answered) // validation))]
            self.pools = data.global_pool("val") if files else []
            self.only = frozenset(did for query in self.lines for did in query.positives)
        self.queries: dict[str, Query] = {}
        """The first line of each query, by its id."""
        for query in self.lines:
            self.queries.setdefault(query.qid, query)
        self.fingerprint = fingerprint_of_files(filter(None, [*files, data.instructions.file]))
        """Fingerprint of the files of queries and instructions."""

    def all_texts(self) -> Iterator[str]:
        """Yield all texts that an encoder reads in training, instructions apart."""
        for candidate in read_pool(self.data.training_pools()):
            if candidate.text:
                yield format_text(candidate.text)
        for query in self.lines:
            if query.text:
                yield format_text(query.text)
        for row in self.data.instructions.rows.values():
            # Twice, since the tokenizer splits a word that occurs once into pieces, and the words
            # of instructions occur in every query.
            yield from (format_text(text) for text in (*row, *row))

    def rows(self, candidates: Features) -> Iterator[FeatureRow]:
        """Yield each query once under each instruction that fits a modality of its positives.

        Raises
        ------
        BadData
            A query has no positive, or a positive that is not among the candidates.
        """
        queries = list(self.queries.values())
        positives, counts = find_positives(queries, candidates)
        modalities = list(Modality)
        # The positives of all queries follow one another; those of a query end at the cumulated
        # count.
        for query, end, count in zip(queries, np.cumsum(counts), counts, strict=True):
            rows = positives[end - count : end]
            for code in np.unique(candidates.modality[rows]).tolist():
                target = modalities[code]
                suitable = self.data.instructions.lookup(query.dataset, query.modality, target)
                for instruction in suitable or (None,):
                    yield query_row(self.data, query, target, instruction)

    def num_rows(self) -> int:
        """Return the approximate number of rows that :meth:`rows` yields."""
        counts = [len(texts) for texts in self.data.instructions.rows.values()]
        return len(self.queries) * max(1, round(sum(counts) / max(1, len(counts))))


def embed_training(
    records: TrainingRecords,
    encoder: Encoder,
    folder: Path,
    *,
    progress: Progress,
    share: Share = ALONE,
) -> Pairs:
    """Embed the training pool, and each training query once under each of its instructions.

    Parameters
    ----------
    share
        The share of this process, if several embed together.
    """
    candidates = embed_pool(
        records.data,
        records.pools,
        encoder,
        folder / "candidates",
        only=records.only,
        progress=progress,
        share=share,
    )
    queries = embed(
        records.rows(candidates),
        encoder,
        folder / "queries",
        inputs={"records": records.fingerprint},
        expected=records.num_rows(),
        progress=progress,
        share=share,
    )
    return Pairs(records.lines, queries, candidates)
