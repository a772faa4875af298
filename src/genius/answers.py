"""Answer requests: from a text and a picture to found items, many requests at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from genius.config import SearchConfig
from genius.data.images import open_image
from genius.data.records import Modality, instructed
from genius.encoders.protocol import ItemKey
from genius.errors import UsageError
from genius.model import Genius
from genius.search.beam import Beams, search
from genius.search.filters import Filter
from genius.search.opened import OpenedIndex
from genius.search.prefixes import Restriction
from genius.search.searcher import Answer, Evidence, rank_items
from genius.stages.embed import SHORTEST_SIDE, Content, features_of

EVERYTHING = Filter()
"""No condition at all."""
MOST: Final = 10**9
"""Hits or beams that can be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What one asks for: a text, a picture or both, and what may answer it."""

    text: str | None = None
    image: str | Path | Image.Image | None = None
    instruction: str | None = None
    """What is wanted, in words; without it the model's own for this kind of query and result."""
    modality: Modality | None = None
    """Find only such items."""
    only: Filter = EVERYTHING
    """Find only items that it matches."""
    k: int = 10
    """How many."""
    beam: int | None = None
    """Width of the beam for this request, instead of the common one."""


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


def answer(
    model: Genius, opened: OpenedIndex, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[list[SearchHit]]:
    """Hits of each request, best first.

    A beam is never narrower than the number of hits asked for.

    Raises
    ------
    UsageError
        a request has neither text nor image, asks for fewer than one hit or for more than a billion, or is
        no text.
    """
    for request in requests:
        _check(request)
    if not requests or not opened.segments:
        return [[] for _ in requests]
    asked = [_ask(model, opened, request, config) for request in requests]
    restrictions = [_restriction(model, opened, request) for request in requests]
    beams = search(
        model.decoder,
        opened.parts,
        torch.cat([one.embedding for one in asked]),
        config,
        level0=[_level0(model, request.modality) for request in requests],
        restrictions=restrictions,
        widths=[max(request.beam or config.beam, request.k) for request in requests],
    )
    evidence = Evidence(model.ranker, opened.vectors, is_raw=opened.state.facts.embeddings == "raw")
    return [
        _hits(
            model,
            opened,
            beams,
            query,
            rank_items(
                opened.parts,
                beams,
                query,
                asked[query].evidence,
                config=config,
                evidence=evidence,
                k=request.k,
                restriction=restrictions[query],
                for_codes=asked[query].embedding[0],
            ),
        )
        for query, request in enumerate(requests)
    ]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as vectors."""

    embedding: Tensor
    """For the generator; one row."""
    evidence: Tensor
    """In the space of what hits are re-ranked by."""


def _check(request: SearchRequest) -> None:
    for name, number in (("k", request.k), ("beam", request.beam)):
        if number is not None and not 1 <= number <= MOST:
            raise UsageError(f"{name} is {number}, it must be at least 1 and at most {MOST}")
    for name, words in (("text", request.text), ("instruction", request.instruction)):
        try:
            (words or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"the {name} {words!r} holds half a character; give it as UTF-8") from None
    if not _has_words(request) and request.image is None:
        raise UsageError("a query needs a text, an image, or both")


def _has_words(request: SearchRequest) -> bool:
    return bool(request.text and request.text.strip())


def _ask(model: Genius, opened: OpenedIndex, request: SearchRequest, config: SearchConfig) -> _Asked:
    image = request.image
    if isinstance(image, str | Path):
        image = open_image(Path(image), shortest_side=SHORTEST_SIDE)
    words = request.instruction or _usual_instruction(model, opened, request)
    content = Content(image, instructed(words, request.text), ItemKey("query", ""))
    features = features_of(model.encoder, [content])
    embedding = model.embed(features)
    is_raw = opened.state.facts.embeddings == "raw" and config.rerank == "embeddings"
    return _Asked(embedding, F.normalize(features.total(), dim=-1)[0] if is_raw else embedding[0])


def _usual_instruction(model: Genius, opened: OpenedIndex, request: SearchRequest) -> str | None:
    query = Modality.of(has_image=request.image is not None, has_text=_has_words(request))
    return model.instruction_for(query, request.modality or opened.usual_modality)


def _level0(model: Genius, wanted: Modality | None) -> frozenset[int]:
    """The codes to begin with; empty, which means any, where they do not settle the modality."""
    return model.level0_codes(wanted) if wanted is not None and model.level0_is_exact else frozenset()


def _restriction(model: Genius, opened: OpenedIndex, request: SearchRequest) -> Restriction | None:
    """What may be found; the modality is a condition like any other unless its level-0 code settles it."""
    only = request.only
    if request.modality is not None and not model.level0_is_exact:
        only = dataclasses.replace(only, modality=request.modality)
    return None if only == EVERYTHING else opened.restriction(only)


def _hits(model: Genius, opened: OpenedIndex, beams: Beams, query: int, found: Answer) -> list[SearchHit]:
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
            )
        )
    return hits
