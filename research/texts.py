"""``python -m research.texts``: vectors of texts and of queries, for the benchmark of search."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float16, Int64

from genius_search.cli.options import command
from genius_search.cli.terminal import print_text
from genius_search.encoders.open import load_encoder
from genius_search.errors import BadData
from research.command import run

MIN_WORDS: Final = 3
"""Minimum number of words in a text of the pool."""
BATCH: Final = 16_384


class TextQuery(NamedTuple):
    """A line of a file of queries."""

    file_name: str
    """Name of the file."""
    text: str
    answers: list[str]
    """Right texts."""


@command
class Texts:
    """Encode distinct texts, and queries with answers, as arrays for `python -m research.bench`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Text files with a text in each line."""

    queries: tuple[Path, ...] = ()
    """Files with a query and its right texts, separated by tabs, in each line. Right texts join the
    pool, and queries are removed from it."""

    encoder: str = "text:wordllama"
    """The encoder of all texts."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of items.npy, queries.npy, answers.npy (rows of right items), sources.npy and
    kinds.npy (the name of each item's and each query's file)."""

    def run(self) -> None:
        """Encode and save."""
        queries = self._read_queries()
        sources = self._choose_texts(queries)
        if not sources:
            raise BadData(
                f"no file has a text of {MIN_WORDS} words; give files with a text in each line"
            )
        arrays = {"items": self._encode(list(sources)), "sources": np.array([*sources.values()])}
        if queries:
            arrays |= {
                "answers": find_answer_rows(queries, list(sources)),
                "queries": self._encode([query.text for query in queries]),
                "kinds": np.array([query.file_name for query in queries]),
            }
        self.out.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(self.out / f"{name}.npy", array)
        print_text(f"{len(sources):,} texts, {len(queries):,} queries")

    def _read_queries(self) -> list[TextQuery]:
        queries = []
        for file in self.queries:
            for line in _read_lines(file):
                text, *answers = line.split("\t")
                queries.append(TextQuery(file.stem, text, answers))
        return queries

    def _choose_texts(self, queries: Sequence[TextQuery]) -> dict[str, str]:
        """Return the texts of the pool and the name of the first file of each."""
        sources: dict[str, str] = {}
        for file in self.files:
            for text in _read_lines(file):
                if len(text.split()) >= MIN_WORDS:
                    sources.setdefault(text, file.stem)
        for query in queries:
            for text in query.answers:
                sources.setdefault(text, query.file_name)
        for query in queries:
            sources.pop(query.text, None)
        return sources

    def _encode(self, texts: Sequence[str]) -> Float16[np.ndarray, "texts dim"]:
        encoder = load_encoder(self.encoder)
        batches = []
        for start in range(0, len(texts), BATCH):
            features = encoder.text_features(texts[start : start + BATCH])
            batches.append(np.asarray(features, dtype=np.float16))
        return np.concatenate(batches)


def find_answer_rows(
    queries: Sequence[TextQuery], texts: Sequence[str]
) -> Int64[np.ndarray, "queries answers"]:
    """Return the rows of each query's right texts, padded with −1."""
    rows_of_texts = {text: row for row, text in enumerate(texts)}
    rows = np.full((len(queries), max(len(query.answers) for query in queries)), -1)
    for query_rows, query in zip(rows, queries, strict=True):
        present = [rows_of_texts[text] for text in query.answers if text in rows_of_texts]
        query_rows[: len(present)] = present
    return rows


def _read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


main = partial(run, Texts, "texts")


if __name__ == "__main__":
    sys.exit(main())
