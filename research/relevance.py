"""``python -m research.relevance``: what tells that an index has no answer, without known answers.

Queries whose answers were taken out of the index are compared with those whose answers are there: how well
numbers of their hits tell the two apart (area under the curve), and how many of each have no good match in an
index that was given other queries, of both kinds. Or, with texts, how many lines of files have none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from jaxtyping import Bool, Float, Int64

from genius_search import Index
from genius_search.cli.options import DataArgument, JsonOption, OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table
from genius_search.errors import BadData
from genius_search.index.hits import SearchHit
from genius_search.index.request import SearchRequest
from genius_search.model import Genius
from genius_search.records import Modality
from research.bench.given import Given, read_given
from research.command import run

FEWEST_HITS = 10


def take_out(right: Sequence[set[int]], seed: int) -> tuple[set[int], Bool[np.ndarray, " queries"]]:
    """Take answers of queries out until half have none; return these items, and which queries have some."""
    gone: set[int] = set()
    for number in np.random.default_rng(seed).permutation(len(right)).tolist():
        gone |= right[number]
        has_answer = np.array([not own <= gone for own in right])
        if has_answer.mean() <= 0.5:
            break
    return gone, has_answer


def area(
    numbers: Float[np.ndarray, "queries measures"], is_right: Bool[np.ndarray, " queries"]
) -> Float[np.ndarray, " measures"]:
    """Return the probability that a query with an answer has the larger number; ties count half."""
    above = numbers[is_right][:, None] - numbers[~is_right]
    return np.asarray(((above > 0) + (above == 0) / 2).mean(axis=(0, 1)))


def measure(
    given: Given, queries: Int64[np.ndarray, " queries"], seed: int, folder: Path
) -> dict[str, float]:
    """Measure with half of the answers taken out; hits are of the modality of the answers."""
    right = [(given.right or [])[number] for number in queries]
    gone, has_answer = take_out(right, seed)
    kept = np.array([row not in gone for row in range(len(given.items))])
    order = np.random.default_rng([seed, 1]).permutation(len(queries))
    known, asked = order[: len(order) // 2], order[len(order) // 2 :]
    kinds = given.modality[kept]
    index, _ = Index.create(
        folder / str(seed),
        vectors=given.items[kept],
        modalities=[[*Modality][code] for code in kinds.tolist()],
        query_vectors=given.queries[queries[known]],
    )
    rows, is_refused = [], []
    for number in asked.tolist():
        vector, code = given.queries[queries[number]], given.modality[min(right[number])]
        hits = index.search(vector=vector, modality=[*Modality][code], k=FEWEST_HITS)
        products = given.items[kept][kinds == code] @ vector
        first, second, last = (hits[place].score for place in (0, 1, -1))
        mean, spread = products.mean(), products.std()
        rows.append(
            {
                "score": first,
                "lead over second": first - second,
                "score + lead": 2 * first - second,
                "lead over tenth": first - last,
                "spreads above mean": (products.max() - mean) / spread,
                "spreads + lead": (products.max() - mean + first - second) / spread,
            }
        )
        is_refused.append(index.good_match(hits) is False)
    numbers = np.array([[*row.values()] for row in rows], dtype=float)
    is_right, refused = has_answer[asked], np.array(is_refused)
    return {
        **dict(zip(rows[0], area(numbers, is_right).tolist(), strict=True)),
        "refused with answer": float(refused[is_right].mean()),
        "refused without": float(refused[~is_right].mean()),
    }


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file that are not empty."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@command
class Relevance(JsonOption):
    """Measure how well numbers of hits tell that an index has no answer."""

    data: DataArgument
    """A data set in M-BEIR's layout with features, one .npy file with a vector for each item, or a .txt file
    with a text in each line."""

    model: OptionalFolder = None
    """With a data set: the model that embeds it, instead of its features."""

    query_vectors: OptionalFile = None
    """With a .npy file: another one, of queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item."""

    asked: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[FILE ...]")] = ()
    """With a .txt file: files of queries, one a line. The share without a good match is told of each."""

    encoder: str = "text:wordllama"
    """Encoder of texts."""

    seeds: tuple[int, ...] = (0, 1, 2)

    def run(self) -> None:
        """Measure and print."""
        with tempfile.TemporaryDirectory() as folder:
            found = self._ask(Path(folder)) if self.data.suffix == ".txt" else self._measure(Path(folder))
        if self.json:
            print_json(found)
        else:
            print_table(["", "value"], [(name, f"{value:.3f}") for name, value in found.items()])

    def _measure(self, folder: Path) -> dict[str, float]:
        with TerminalProgress() as progress:
            given = read_given(
                self.data,
                None if self.model is None else Genius.open(self.model),
                folder,
                most_queries=4000,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
        if given.right is None:
            raise BadData("the right answers are not known; give --query-vectors and --answers")
        queries = np.flatnonzero([bool(own) for own in given.right])
        measured = [measure(given, queries, seed, folder) for seed in self.seeds]
        return {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}

    def _ask(self, folder: Path) -> dict[str, float]:
        index, _ = Index.create(folder / "index", pool=read_lines(self.data), encoder=self.encoder)

        def is_refused(hits: Sequence[SearchHit]) -> bool:
            return index.good_match(hits) is False

        return {
            file.name: float(np.mean([*map(is_refused, index.search_many([*map(ask, read_lines(file))]))]))
            for file in self.asked
        }


def ask(text: str) -> SearchRequest:
    """Return a request for a text."""
    return SearchRequest(text=text)


main = partial(run, Relevance, "relevance")


if __name__ == "__main__":
    sys.exit(main())
