"""Requests as vectors: what is looked for in texts, pictures and items, and what may answer it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchConfig
from genius_search.data.images import open_image
from genius_search.embed import SHORTEST_SIDE, Content, features_of
from genius_search.encoders.base import ItemKey
from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.snapshot import OpenedIndex, Place
from genius_search.model import Genius
from genius_search.records import Modality, instructed
from genius_search.search.table import Restriction

EVERYTHING = Filter()
"""No condition at all."""
MOST: Final = 10**9
"""Hits or beams that can be asked for."""
NOTHING_LEFT: Final = 1e-4
"""A sum of unit vectors that is shorter than this, times the largest weight, says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPart:
    """A text, a picture, both, or an item of the index, that counts so much towards what is looked for."""

    text: str | None = None
    image: str | Path | Image.Image | None = None
    item_id: str | None = None
    """Instead of text and picture: an item that is there."""
    weight: float = 1.0
    """Negative: away from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What one asks for: a text, a picture or both, and what may answer it."""

    text: str | None = None
    image: str | Path | Image.Image | None = None
    parts: tuple[SearchPart, ...] = ()
    """What is looked for in several parts ("this picture, in red, less of that"): the weighted sum of their
    embeddings, made a unit vector. ``text`` and ``image``, if given, are one more part of weight 1."""
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


class Asked(NamedTuple):
    """A request, understood: what may answer it, and what it asks for as vectors."""

    request: SearchRequest
    level0: frozenset[int]
    """The codes to begin with; empty, which means any, where they do not settle the modality."""
    restriction: Restriction | None
    """Which items may be found; None: all."""
    embedding: Float[Tensor, "1 dim"]
    """For the generator."""
    evidence: Float[Tensor, " dim"]
    """In the space of what hits are re-ranked by."""


def embed_requests(
    model: Genius, opened: OpenedIndex, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[Asked]:
    """Requests as vectors: all their pictures are encoded at once, and all their texts.

    What is wrong with a request is said before anything is encoded; raises as :func:`answer`.
    """
    for request in requests:
        _check(request)
    if not opened.segments:
        nothing = torch.zeros(1, model.dim)
        return [Asked(request, frozenset(), None, nothing, nothing[0]) for request in requests]
    level0 = [_level0(model, request.modality) for request in requests]
    restrictions = [_restriction(model, opened, request) for request in requests]
    is_raw = opened.state.facts.embeddings == "raw" and config.rerank == "embeddings"
    places = {
        part.item_id: opened.place_of(part.item_id)
        for request in requests
        for part in request.parts
        if part.item_id is not None
    }
    contents = [
        _content(model, opened, request, part)
        for request in requests
        for part in _parts(request)
        if part.item_id is None
    ]
    encoded = iter(_encode(model, contents, is_raw=is_raw))

    def vectors(part: SearchPart) -> _Vectors:
        if part.item_id is None:
            return next(encoded)
        return _of_item(model, opened, places[part.item_id], is_raw=is_raw)

    together = [_together([(part.weight, vectors(part)) for part in _parts(request)]) for request in requests]
    return [
        Asked(request, codes, restriction, sums.fused[None], sums.evidence)
        for request, codes, restriction, sums in zip(requests, level0, restrictions, together, strict=True)
    ]


class _Vectors(NamedTuple):
    """What something is, in the two spaces that matter; one if they are the same."""

    fused: Float[Tensor, " dim"]
    evidence: Float[Tensor, " dim"]


def _check(request: SearchRequest) -> None:
    for name, number in (("k", request.k), ("beam", request.beam)):
        if number is not None and not 1 <= number <= MOST:
            raise UsageError(f"{name} is {number}, it must be at least 1 and at most {MOST}")
    parts = _parts(request)
    texts = [*(("text", part.text) for part in parts), ("instruction", request.instruction)]
    for name, words in texts:
        try:
            (words or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"the {name} {words!r} holds half a character; give it as UTF-8") from None
    if not parts:
        raise UsageError("a query needs a text, an image, or both")
    for part in parts:
        if (part.item_id is None) is not _has_content(part):
            raise UsageError("a part of a query needs a text, an image, or both; or else an item")
        if not math.isfinite(part.weight):
            raise UsageError(f"the weight of a part is {part.weight}, it must be a finite number")


def _parts(request: SearchRequest) -> tuple[SearchPart, ...]:
    """Everything that is looked for; the request's own text and picture come first."""
    own = SearchPart(text=request.text, image=request.image)
    return (own, *request.parts) if _has_content(own) else request.parts


def _has_content(part: SearchPart) -> bool:
    return part.image is not None or _has_words(part)


def _has_words(part: SearchPart) -> bool:
    return bool(part.text and part.text.strip())


def _content(model: Genius, opened: OpenedIndex, request: SearchRequest, part: SearchPart) -> Content:
    """What the encoder reads."""
    image = part.image
    if isinstance(image, str | Path):
        image = open_image(Path(image), shortest_side=SHORTEST_SIDE)
    words = request.instruction or _usual_instruction(model, opened, request, part)
    return Content(image, instructed(words, part.text), ItemKey("query", ""))


def _encode(model: Genius, contents: Sequence[Content], *, is_raw: bool) -> list[_Vectors]:
    if not contents:
        return []
    features = features_of(model.encoder, contents)
    fused = model.embed(features)
    evidence = F.normalize(features.total(), dim=-1) if is_raw else fused
    return [_Vectors(*pair) for pair in zip(fused, evidence, strict=True)]


def _of_item(model: Genius, opened: OpenedIndex, place: Place, *, is_raw: bool) -> _Vectors:
    """An item as it is known here: its stored embedding, else the vector that its ID stands for."""
    of_codes = F.normalize(model.ranker.vectors(opened.id_at(place)[None]), dim=-1)[0]
    if opened.vectors is None:
        return _Vectors(of_codes, of_codes)
    kept = opened.vectors[place.part](np.array([place.row]))[0]
    if opened.state.facts.embeddings == "fused":
        return _Vectors(kept, kept)
    return _Vectors(of_codes, kept if is_raw else of_codes)


def _together(parts: Sequence[tuple[float, _Vectors]]) -> _Vectors:
    """The weighted sum, as unit vectors; what is one part alone, however much it weighs, stays as it is."""
    if len(parts) == 1 and parts[0][0] > 0:
        return parts[0][1]
    weights = torch.tensor([weight for weight, _ in parts])
    sums = [weights @ torch.stack(space) for space in zip(*(one for _, one in parts), strict=True)]
    if any(not total.norm() > NOTHING_LEFT * weights.abs().max() for total in sums):
        raise UsageError("the parts of the query cancel each other out; change their weights")
    return _Vectors(*(F.normalize(total, dim=-1) for total in sums))


def _usual_instruction(
    model: Genius, opened: OpenedIndex, request: SearchRequest, part: SearchPart
) -> str | None:
    query = Modality.of(has_image=part.image is not None, has_text=_has_words(part))
    return model.instruction_for(query, request.modality or opened.usual_modality)


def _level0(model: Genius, wanted: Modality | None) -> frozenset[int]:
    return model.level0_codes(wanted) if wanted is not None and model.level0_is_exact else frozenset()


def _restriction(model: Genius, opened: OpenedIndex, request: SearchRequest) -> Restriction | None:
    """What may be found; the modality is a condition like any other unless its level-0 code settles it."""
    only = request.only
    if request.modality is not None and not model.level0_is_exact:
        only = dataclasses.replace(only, modality=request.modality)
    return None if only == EVERYTHING else opened.restriction(only)
