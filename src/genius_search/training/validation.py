"""Queries of the split val that watch the training of an encoder, by exact search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from genius_search.data.features import FeatureBatch, Features
from genius_search.data.mbeir import MBeir, read_judgements, read_pool, read_queries
from genius_search.embed import FeatureRow, embed
from genius_search.embed_mbeir import (
    candidate_row,
    choose_instruction,
    count_lines,
    fingerprint_of_files,
    instruction_files,
    query_row,
)
from genius_search.encoders.base import Encoder
from genius_search.errors import BadData
from genius_search.progress import Progress
from genius_search.records import TASKS, candidate_number
from genius_search.search.exact import exact_search

SPLIT: Final = "val"
MOST_QUERIES: Final = 1000
"""Queries that are used, at most; rows have equal shares."""
MOST_OTHERS: Final = 8192
"""Candidates beside the right answers, at most."""
DEPTH: Final = 10
"""Hits per query; a right answer that comes later counts as not found."""


def validation_files(data: MBeir) -> list[Path]:
    """Return the files that a validation reads; none if there are no queries of the split."""
    if not data.query_files(SPLIT):
        return []
    rows = data.rows(SPLIT)
    judged = [row.qrels for row in rows if row.qrels is not None]
    return [*(row.queries for row in rows), *judged, *data.global_pool(SPLIT), *instruction_files(data)]


class Validation(NamedTuple):
    """Prepared queries and candidates, and which belong together."""

    queries: Features
    candidates: Features
    answers: list[set[int]]
    """Rows of the right candidates of each query."""

    @staticmethod
    def prepare(data: MBeir, encoder: Encoder, folder: Path, *, progress: Progress) -> Validation:
        """Describe queries of the split val and its candidates, or open them.

        Raises
        ------
        BadData
            the right answer of a query is not in the pool.
        """
        inputs = {"records": fingerprint_of_files(validation_files(data))}
        queries, answers = _read_queries(data)
        wanted = set().union(*answers)
        candidates = embed(
            _some_candidates(data, wanted),
            encoder,
            folder / "candidates",
            inputs=inputs,
            expected=min(count_lines(data.global_pool(SPLIT)), MOST_OTHERS + len(wanted)),
            progress=progress,
        )
        places = {number: place for place, number in enumerate(candidates.ids.tolist())}
        absent = wanted - set(places)
        if absent:
            raise BadData(
                f"{data.root}: {len(absent)} right answers of the split {SPLIT} are not in its pool, the "
                f"first has number {min(absent)}; run `genius data check` on the data set"
            )
        return Validation(
            embed(
                queries, encoder, folder / "queries", inputs=inputs, expected=len(queries), progress=progress
            ),
            candidates,
            [{places[number] for number in numbers} for numbers in answers],
        )

    def measure(self, vectors_of: Callable[[FeatureBatch], Float[Tensor, "items dim"]]) -> float:
        """Return the mean reciprocal rank of the first right answer by exact search."""

        def embed_rows(features: Features, rows: np.ndarray) -> Float[Tensor, "items dim"]:
            return F.normalize(vectors_of(features.gather(rows)), dim=-1)

        queries = embed_rows(self.queries, np.arange(len(self.queries)))
        nearest = exact_search(
            queries,
            lambda rows: embed_rows(self.candidates, np.arange(rows.start, rows.stop)),
            len(self.candidates),
            k=DEPTH,
        )
        found = zip(nearest.items.tolist(), self.answers, strict=True)
        ranks = [next((n for n, item in enumerate(hits, 1) if item in own), np.inf) for hits, own in found]
        return float(np.mean(1 / np.array(ranks)))


def _read_queries(data: MBeir) -> tuple[list[FeatureRow], list[set[int]]]:
    """Return evenly spaced queries of every row, and the numbers of their right answers."""
    rows = data.rows(SPLIT)
    queries, answers = [], []
    for row in rows:
        wanted = TASKS[row.task_id][1]
        every = list(read_queries(row.queries))
        places = np.linspace(0, len(every) - 1, min(len(every), max(1, MOST_QUERIES // len(rows))))
        chosen = [every[int(place)] for place in places]
        judged = read_judgements(row, [query.qid for query in chosen])
        for query in chosen:
            instruction = choose_instruction(data.instructions, query, wanted, "hashed", seed=0)
            queries.append(query_row(data, query, wanted, instruction, 0, split=SPLIT))
            answers.append({candidate_number(did) for did, grade in judged[query.qid].items() if grade > 0})
    return queries, answers


def _some_candidates(data: MBeir, wanted: set[int]) -> Iterator[FeatureRow]:
    """Yield the right answers and evenly spaced others, in the order of the pool."""
    files = data.global_pool(SPLIT)
    step = -(-count_lines(files) // MOST_OTHERS)
    for place, candidate in enumerate(read_pool(files)):
        if place % step == 0 or candidate_number(candidate.did) in wanted:
            yield candidate_row(data, candidate)
