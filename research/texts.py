"""``python -m research.texts``: vectors of real texts and of queries, for the benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import tyro
from jaxtyping import Float16

from genius_search.cli.options import command
from genius_search.cli.terminal import print_text
from genius_search.encoders.open import load_encoder
from genius_search.errors import BadData
from research.command import run

FEWEST_WORDS: Final = 3
"""Shorter texts are left out."""
BATCH: Final = 16_384


@command
class Texts:
    """Encode distinct texts, and queries with answers, as arrays for `python -m research.bench`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Text files with a text in each line."""

    queries: tuple[Path, ...] = ()
    """Files with a query, a tab, and its right texts with tabs between them in each line. Queries leave the
    pool, right texts join it."""

    encoder: str = "text:wordllama"
    """The encoder of all texts."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of items.npy and queries.npy; of answers.npy, rows of right items; and of sources.npy and
    kinds.npy, the name of the file that each item and each query is from."""

    def run(self) -> None:
        """Encode and save."""
        asked = [(file.stem, *line.split("\t")) for file in self.queries for line in _lines(file)]
        named = [(text, file.stem) for file in self.files for text in _lines(file)]
        named = [(text, name) for text, name in named if len(text.split()) >= FEWEST_WORDS]
        source: dict[str, str] = {}
        for text, name in [*named, *((text, kind) for kind, _, *right in asked for text in right)]:
            source.setdefault(text, name)
        for _, query, *_ in asked:
            source.pop(query, None)
        place = {text: row for row, text in enumerate(source)}
        if not place:
            raise BadData(
                f"no file has a text of {FEWEST_WORDS} words; give files with a text in each line"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        items = self._encode(list(place))
        arrays = {"items": items, "sources": np.array([*source.values()])}
        if asked:
            answers = np.full((len(asked), max(map(len, asked)) - 2), -1)
            for row, (_, _, *right) in zip(answers, asked, strict=True):
                rows = [place[text] for text in right if text in place]
                row[: len(rows)] = rows
            kinds, queries = (
                [kind for kind, *_ in asked],
                self._encode([query for _, query, *_ in asked]),
            )
            arrays |= {"answers": answers, "queries": queries, "kinds": np.array(kinds)}
        for name, array in arrays.items():
            np.save(self.out / f"{name}.npy", array)
        print_text(f"{len(items):,} texts, {len(asked):,} queries")

    def _encode(self, texts: Sequence[str]) -> Float16[np.ndarray, "texts dim"]:
        encoder = load_encoder(self.encoder)
        batches = []
        for start in range(0, len(texts), BATCH):
            own = encoder.text_features(texts[start : start + BATCH])
            batches.append(np.asarray(own, dtype=np.float16))
        return np.concatenate(batches)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


main = partial(run, Texts, "texts")


if __name__ == "__main__":
    sys.exit(main())
