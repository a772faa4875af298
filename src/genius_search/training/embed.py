"""Training records: the queries read from disk once, and both queries and pool turned into features."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genius_search.artifact import fingerprint_of
from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_pool, read_queries
from genius_search.data.pairs import look_up
from genius_search.embed import FeatureRow, embed
from genius_search.embed_mbeir import digests, embed_pool, instruction_files, instructions_for, query_row
from genius_search.encoders.base import Encoder
from genius_search.errors import BadData
from genius_search.progress import Progress
from genius_search.records import (
    Modality,
    Query,
    candidate_number,
    did_of,
    format_text,
    qid_of,
    query_number,
)


class TrainingFeatures(NamedTuple):
    """Features of a data set's training queries and training pool."""

    queries: Features
    candidates: Features


class Embedded(NamedTuple):
    """An encoder and the training records it embedded."""

    encoder: Encoder
    features: TrainingFeatures


class TrainingRecords:
    """Training queries of a data set, kept as columns: M-BEIR's 1.3 million lines take some 250 MB.

    A file may repeat a query, so that it is drawn more often (M-BEIR's upsampled training file does).
    """

    def __init__(self, data: MBeir) -> None:
        self.data = data
        numbers, modalities = array("q"), array("b")
        positives, ends = array("q"), array("q")
        self._texts: list[str | None] = []
        self._images: list[str | None] = []
        digests: list[list[str]] = []
        for path in data.training_queries():
            digest = hashlib.sha256()
            for query in read_queries(path, observe=digest.update):
                numbers.append(query_number(query.qid))
                modalities.append(query.modality.code)
                positives.extend(map(candidate_number, query.positives))
                ends.append(len(positives))
                self._texts.append(query.text)
                self._images.append(query.image)
            digests.append([path.name, digest.hexdigest()])
        self._numbers = np.array(numbers, dtype=np.int64)
        self._modalities = np.array(modalities, dtype=np.int8)
        self._positives = np.array(positives, dtype=np.int64)
        self._starts = np.array([0, *ends], dtype=np.int64)
        self._digests = digests
        self._distinct = np.sort(np.unique(self._numbers, return_index=True)[1])

    @cached_property
    def pool_digests(self) -> list[list[str]]:
        """Names and SHA-256 of the files of the training pool."""
        return digests(self.data.training_pools())

    @property
    def query_fingerprint(self) -> str:
        """Fingerprint of the training queries and the instructions."""
        return fingerprint_of([*self._digests, *digests(instruction_files(self.data))])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all files that training reads."""
        return fingerprint_of([*self.pool_digests, *self._digests, *digests(instruction_files(self.data))])

    def lines(self) -> Iterator[Query]:
        """Yield the query of each line, repeated ones included."""
        return map(self._query, range(len(self._numbers)))

    def texts(self) -> dict[int, str]:
        """Return the texts of queries by their numbers."""
        return {
            int(self._numbers[line]): text
            for line in self._distinct.tolist()
            if (text := self._texts[line]) is not None
        }

    def all_texts(self) -> Iterator[str]:
        """Yield all texts that an encoder reads in training; instructions once, not with every query."""
        for candidate in read_pool(self.data.training_pools()):
            if candidate.text:
                yield format_text(candidate.text)
        for text in self._texts:
            if text:
                yield format_text(text)
        for row in self.data.instructions.rows.values():
            # Twice, since a word seen once is spelled in pieces, and instructions go with every query.
            yield from (format_text(text) for text in (*row, *row))

    def rows(self, candidates: Features) -> Iterator[FeatureRow]:
        """Yield each query once under each instruction that fits a modality of its positives.

        Raises
        ------
        BadData
            a positive is not among the candidates.
        """
        order = np.argsort(candidates.ids, kind="stable")
        modalities = list(Modality)
        for line in self._distinct.tolist():
            query = self._query(line)
            positives = self._positives[self._starts[line] : self._starts[line + 1]]
            rows, exists = look_up(candidates.ids, order, positives)
            if not exists.all():
                absent = query.positives[int(np.flatnonzero(~exists)[0])]
                raise BadData(
                    f"{self.data.root}: query {query.qid} has the positive {absent}, which is not in the "
                    "training pool; run `genius data check` on the data set"
                )
            for code in np.unique(candidates.modality[rows]).tolist():
                wanted = modalities[code]
                offered = instructions_for(self.data.instructions, query, wanted) or (None,)
                for variant, instruction in enumerate(offered):
                    yield query_row(self.data, query, wanted, instruction, variant, split="train")

    def num_rows(self) -> int:
        """Return about how many rows :meth:`rows` yields."""
        counts = [len(texts) for texts in self.data.instructions.rows.values()]
        usual = max(1, round(sum(counts) / len(counts))) if counts else 1
        return len(self._distinct) * usual

    def _query(self, line: int) -> Query:
        positives = self._positives[self._starts[line] : self._starts[line + 1]]
        return Query(
            qid=qid_of(int(self._numbers[line])),
            modality=list(Modality)[self._modalities[line]],
            text=self._texts[line],
            image=self._images[line],
            positives=tuple(map(did_of, positives.tolist())),
        )


def embed_training(
    records: TrainingRecords, encoder: Encoder, folder: Path, *, progress: Progress
) -> TrainingFeatures:
    """Embed the training pool, and each training query once under each of its instructions."""
    data = records.data
    candidates = embed_pool(
        data,
        data.training_pools(),
        encoder,
        folder / "candidates",
        fingerprint=fingerprint_of(records.pool_digests),
        progress=progress,
    )
    queries = embed(
        records.rows(candidates),
        encoder,
        folder / "queries",
        inputs={"records": records.query_fingerprint},
        expected=records.num_rows(),
        progress=progress,
    )
    return TrainingFeatures(queries, candidates)
