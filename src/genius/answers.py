"""Answer requests: from a text and a picture to found items, many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from genius.asking import Asked, SearchPart, SearchRequest, embed_requests
from genius.config import SearchConfig
from genius.data.records import Modality
from genius.model import Genius
from genius.search.beam import Beams, search
from genius.search.calibration import DEPTH
from genius.search.items import fields_of
from genius.search.opened import OpenedIndex
from genius.search.searcher import Answer, Evidence, rank_items

__all__ = ["Found", "SearchHit", "SearchPart", "SearchRequest", "answer", "embed_requests", "find"]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One found item."""

    rank: int
    """From 1."""
    item_id: str
    score: float
    """Of the evidence that ordered the hits: log-probability, or how near the item is to the query. By codes
    that is the inner product with its ID's vector less half the square of this, by embeddings the cosine;
    either less its share of hubness, and with a mix plus the weighted log-probability."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of its picture."""
    codes: tuple[int, ...]
    """Its ID."""
    log_probabilities: tuple[float, ...]
    """What the generator gave each code that it decoded; fewer than codes where a re-ranking decided."""
    source: str | None = None
    """Whatever came with it."""
    probability: float | None = None
    """That it answers the query, where `genius calibrate` measured what the scores of this index are worth.
    None too where hits are ordered otherwise than they were then, and for requests of several parts."""

    @property
    def fields(self) -> dict[str, Any]:
        """What came with it, by name, if that is a JSON object."""
        return fields_of(self.source)


class Found(NamedTuple):
    """What a request found."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Items that were looked at, under all beams."""


def answer(
    model: Genius, opened: OpenedIndex, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[list[SearchHit]]:
    """Hits of each request, best first: :func:`embed_requests`, then :func:`find`.

    A beam is never narrower than the number of hits asked for.

    Raises
    ------
    UsageError
        a request has nothing to look for, asks for fewer than one hit or for more than a billion, is no
        text, or names an item that is not there.
    """
    return [
        found.hits for found in find(model, opened, embed_requests(model, opened, requests, config), config)
    ]


def find(model: Genius, opened: OpenedIndex, asked: Sequence[Asked], config: SearchConfig) -> list[Found]:
    """Search for what was understood, all of it together."""
    if not asked or not opened.segments:
        return [Found([], 0) for _ in asked]
    requests = [one.request for one in asked]
    beams = search(
        model.decoder,
        opened.parts,
        torch.cat([one.embedding for one in asked]),
        config,
        level0=[one.level0 for one in asked],
        restrictions=[one.restriction for one in asked],
        widths=[max(request.beam or config.beam, request.k) for request in requests],
    )
    is_raw = opened.state.facts.embeddings == "raw"
    evidence = Evidence(model.ranker, opened.vectors, is_raw, opened.densities)
    calibration = opened.state.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    answers = [
        rank_items(
            opened.parts,
            beams,
            query,
            one.evidence,
            config=config,
            evidence=evidence,
            k=one.request.k if calibration is None else max(one.request.k, DEPTH),
            restriction=one.restriction,
            for_codes=one.embedding[0],
        )
        for query, one in enumerate(asked)
    ]
    return [
        Found(
            _hits(
                model,
                opened,
                beams,
                query,
                found.first(request.k),
                None
                if calibration is None or request.parts
                else calibration.probabilities(found.scores).tolist(),
            ),
            found.touched,
        )
        for query, (request, found) in enumerate(zip(requests, answers, strict=True))
    ]


def _hits(
    model: Genius,
    opened: OpenedIndex,
    beams: Beams,
    query: int,
    found: Answer,
    probabilities: Sequence[float] | None,
) -> list[SearchHit]:
    items = opened.items(found.parts, found.items)
    num_levels = model.quantizer.num_levels  # an ID's marks stand behind its codes
    hits = []
    for place, item in enumerate(items):
        table = opened.parts[found.parts[place]].table
        decoded = beams.log_probabilities[query, found.beams[place]]
        hits.append(
            SearchHit(
                rank=place + 1,
                item_id=item.item_id,
                score=float(found.scores[place]),
                modality=item.modality,
                text=item.text,
                image=item.image,
                codes=tuple(table.ids[found.rows[place], :num_levels].tolist()),
                log_probabilities=tuple(decoded[~np.isnan(decoded)].tolist()),
                source=item.source,
                probability=None if probabilities is None else probabilities[place],
            )
        )
    return hits
