"""Queries with right answers among the items of an index, by which it is trained, calibrated and measured.

They are what the index has learned of its use, a file with a query a line, or a data set in M-BEIR's layout.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius_search.data.mbeir import MBeir, read_json_lines, read_queries
from genius_search.errors import BadData
from genius_search.index.items import Item
from genius_search.index.learned import FIELD, read_choices
from genius_search.records import Modality

WHAT_PAIRS_ARE: Final = (
    "pairs are a .jsonl file of queries with lines such as "
    '{"text": "a red kite", "id": "kites/7.jpg"}, or a data set in M-BEIR\'s layout whose candidates have '
    "the items' ids"
)
TRAINING: Final = "train"


class Pair(NamedTuple):
    """A query, and the ids of the items that answer it."""

    query: Item
    items: tuple[str, ...]
    vector: Float32[np.ndarray, " dim"] | None = None
    """The query's feature, if no more is known of it."""


def read_pairs(index: Path, source: Path | None, *, split: str = TRAINING) -> list[Pair]:
    """Read queries and answers: what the index has learned, those of a file, or a split of a data set.

    Raises
    ------
    BadData
        A line of the file is no pair, or the data set has no such split.
    """
    if source is None:
        return [_from_choice(choice) for choice in read_choices(index)]
    if source.is_file():
        return [pair for _, pair in read_json_lines(source, lambda row: _parse_pair(row, source))]
    data = MBeir(source)
    files = data.training_queries() if split == TRAINING else [row.queries for row in data.rows(split)]
    pairs = []
    for query in chain.from_iterable(map(read_queries, files)):
        image = None if query.image is None else str(data.image_path(query.image))
        pairs.append(Pair(Item(query.qid, query.modality, query.text, image), query.positives))
    return pairs


def _from_choice(choice: dict[str, Any]) -> Pair:
    query = Item("", Modality.TEXT, choice.get("text"))
    vector = None if "text" in choice else np.array(choice["vector"], dtype=np.float32)
    return Pair(query, (choice[FIELD],), vector)


def _parse_pair(row: dict[str, Any], source: Path) -> Pair:
    """Read a line: ``text``, ``image`` or both, and ``id``, one or a list; or ``chosen``."""
    text, image, answers = row.get("text"), row.get("image"), row.get("id", row.get("chosen"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
        raise BadData("needs an id, the right item's, or a list of several")
    if not all(part is None or (isinstance(part, str) and part.strip()) for part in (text, image)) or (
        text is None and image is None
    ):
        raise BadData("needs a text, an image (a file's name), or both")
    modality = Modality.of(has_image=image is not None, has_text=text is not None)
    place = None if image is None else str(source.parent / image)
    return Pair(Item("", modality, text, place), tuple(answers))
