"""Short queries for the drawn catalogue's pictures: a word, a few words, a picture and a wish."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from genius_search.config import SearchConfig
from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.data.mbeir import EvaluationRow, MBeir, read_candidates, read_queries
from genius_search.encoders.base import ItemKey
from genius_search.encoders.content import Content, features_of
from genius_search.lab.evaluate import EvaluationPools
from genius_search.lab.methods import RowQueries, find
from genius_search.lab.runs import Run, evaluate
from genius_search.lab.settings import EvaluationConfig
from genius_search.lab.synth.world import ATTRIBUTES, VALUES
from genius_search.lab.table import Table
from genius_search.model import Genius
from genius_search.nn.arrays import normalize
from genius_search.progress import Progress
from genius_search.records import Candidate, Modality, Query, instructed

METHODS: Final = ("exact-fused", "routing+codes", "generative+codes")
"""Exact search over the embeddings, and search by codes led by geometry and by the generator."""
DEPTHS: Final = (1, 5)
TEXT_QUERIES: Final = 300
EDIT_QUERIES: Final = 100


@dataclass(frozen=True, slots=True)
class QuerySetResult:
    """What each method finds for one kind of query."""

    name: str
    queries: int
    measures: dict[str, dict[str, float]]
    """Method -> ``R@1`` and ``R@5``."""


def make_query_sets(data: MBeir, *, seed: int = 0) -> dict[str, list[Query]]:
    """Make short queries for the pictures of a drawn catalogue's test pool, each with all right answers.

    Words are the first of their synonyms. "the same in COLOUR" shows a picture of the pool, so that ignoring
    the words finds that very picture.

    Returns
    -------
    dict
        every shape's name; COLOUR SHAPE and FILL COLOUR SHAPE of pictures drawn at random; captions as in
        task 0; "the same in COLOUR" where a picture that differs in nothing else is the answer; and where
        any picture of the shape in that colour is.
    """
    row = _caption_row(data)
    shown = {
        candidate: _product(candidate) for candidate in read_candidates(row.local_pool) if candidate.image
    }
    rng = random.Random(f"{seed} short queries")

    sets: dict[str, list[Query]] = {}
    for name, attributes, count in (
        ("one word", ("shape",), len(VALUES["shape"])),
        ("two words", ("colour", "shape"), TEXT_QUERIES),
        ("three words", ("fill", "colour", "shape"), TEXT_QUERIES),
    ):
        places = [ATTRIBUTES.index(attribute) for attribute in attributes]
        found: dict[str, list[str]] = defaultdict(list)
        for candidate, product in shown.items():
            words = " ".join(product[place] for place in places)
            found[words if len(places) == 1 else f"{_article(words)} {words}"].append(candidate.did)
        texts = rng.sample(sorted(found), min(count, len(found)))
        sets[name] = [_query(number, text, found[text]) for number, text in enumerate(texts)]
    sets["full caption"] = list(read_queries(row.queries))
    for which in ("one", "any"):
        sets[f"the same in COLOUR, {which}"] = _edits(shown, rng, exact=which == "one")
    return sets


def _caption_row(data: MBeir) -> EvaluationRow:
    """Return the row whose queries are captions of pictures."""
    return next(row for row in data.rows("test") if row.task_id == 0)


def _edits(shown: Mapping[Candidate, tuple[str, ...]], rng: random.Random, *, exact: bool) -> list[Query]:
    """Return requests for the thing in a picture in another colour."""
    place = ATTRIBUTES.index("colour")

    def rest(product: tuple[str, ...]) -> tuple[str, ...]:
        return product[:place] + product[place + 1 :] if exact else product[:place]

    by_rest: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for candidate, product in shown.items():
        by_rest[rest(product)][product[place]].append(candidate.did)
    offered = [
        (candidate, colour, dids)
        for candidate, product in shown.items()
        for colour, dids in by_rest[rest(product)].items()
        if colour != product[place]
    ]
    chosen = rng.sample(offered, min(EDIT_QUERIES, len(offered)))
    return [
        _query(number, f"the same in {colour}", dids, image=candidate.image)
        for number, (candidate, colour, dids) in enumerate(chosen)
    ]


def _query(number: int, text: str, dids: Sequence[str], *, image: str | None = None) -> Query:
    modality = Modality.of(has_image=image is not None, has_text=True)
    return Query(f"0:{number}", modality, text, image, tuple(dids))


def _product(candidate: Candidate) -> tuple[str, ...]:
    words = json.loads(candidate.source or "{}")["product"]
    return tuple(words[name] for name in ATTRIBUTES)


def _article(text: str) -> str:
    return "an" if text[0] in "aeiou" else "a"


def measure(
    data: MBeir,
    model: Genius,
    evaluation: Path,
    settings: SearchConfig,
    *,
    seed: int = 0,
    progress: Progress,
) -> list[QuerySetResult]:
    """Measure short queries among the pictures, with the instruction that a search uses if none is given.

    Parameters
    ----------
    evaluation
        folder of an evaluation of the model, whose features and codes of the pool are used.
    """
    row = _caption_row(data)
    config = EvaluationConfig(pools=("global",), methods=METHODS)
    pool = EvaluationPools(data, model, [row], evaluation, config, progress=progress).of(row, "local")
    results = []
    for name, asked in make_query_sets(data, seed=seed).items():
        contents = [_content(data, model, query) for query in asked]
        features = features_of(model.encoder, contents)
        raw, fused = normalize(features.total()), model.fuse(features.image, features.text)
        qids = [query.qid for query in asked]
        queries = RowQueries(qids, torch.from_numpy(raw), torch.from_numpy(fused))
        qrels = {query.qid: dict.fromkeys(query.positives, 1) for query in asked}
        (found,) = find(model, [queries], pool, METHODS, settings)
        measures = {
            one.method: dict(
                evaluate(qrels, Run(one.method, dict(zip(qids, one.hits, strict=True))), ks=DEPTHS).means
            )
            for one in found
        }
        results.append(QuerySetResult(name, len(qids), measures))
    return results


def _content(data: MBeir, model: Genius, query: Query) -> Content:
    image = None
    if query.image is not None:
        image = open_image(data.image_path(query.image), shortest_side=SHORTEST_SIDE)
    instruction = model.instruction_for(query.modality, Modality.IMAGE)
    return Content(image, instructed(instruction, query.text), ItemKey("query", query.qid))


def as_table(results: Sequence[QuerySetResult]) -> Table:
    """Return a line for each kind of query."""
    columns = [(method, f"R@{depth}") for method in METHODS for depth in DEPTHS]
    return Table(
        name="short-queries",
        title="Short queries for pictures",
        headings=("queries", "number", *map(" ".join, columns)),
        lines=[
            (one.name, one.queries, *(one.measures[method][measure] for method, measure in columns))
            for one in results
        ],
        decimals=3,
    )
