"""Search requests, the vectors they become, and the hits they find."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig
from genius_search.encoders.base import ItemKey
from genius_search.encoders.content import Content, features_of
from genius_search.errors import UsageError, need_packages
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.settings import DEPTH
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.model import Genius
from genius_search.nn.arrays import as_floats, normalize
from genius_search.records import Modality, instructed
from genius_search.search.fast import Wanted
from genius_search.search.find import find
from genius_search.search.rank import Evidence, Ranking
from genius_search.search.table import Restriction

if TYPE_CHECKING:
    from pandas import DataFrame
    from PIL import Image

    Picture: TypeAlias = str | Path | bytes | Image.Image | np.ndarray
    """A picture: a file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""

MAX_HITS: Final = 10**9
"""Hits or beams that a request may ask for."""
MIN_LENGTH: Final = 1e-4
"""A weighted sum of unit vectors shorter than this, times the largest weight, has no direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPart:
    """One weighted part of a query: a text, an image, both, or an item of the index."""

    text: str | None = None
    image: Picture | None = None
    id: str | None = None
    """An item of the index, instead of a text and an image."""
    weight: float = 1.0
    """Negative weights search away from this part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A query and the conditions its results must meet.

    >>> SearchRequest(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP

    Raises
    ------
    UsageError
        The modality is unknown, or a condition cannot be parsed.
    """

    text: str | None = None
    image: Picture | None = None
    parts: tuple[SearchPart, ...] = ()
    """Weighted parts ("this picture, in red, less of that"). The query is the weighted sum of their
    embeddings, scaled to unit length. ``text`` and ``image`` form one more part of weight 1."""
    instruction: str | None = None
    """A description of the wanted results; by default the model's own for this kind of query and result."""
    modality: Modality | str | None = None
    """Return only items of this modality. Strings are converted to :class:`Modality`. Without a modality and
    an instruction, each modality is searched and the hits are merged (:func:`merge`)."""
    where: Filter | Sequence[str] | Mapping[str, object] = ()
    """Conditions on the items' fields, as :meth:`Filter.parse` takes them."""
    match: str | None = None
    """Words that the items' texts must contain."""
    k: int = 10
    """Number of hits."""
    beam: int | None = None
    """Beam width for this request instead of the configured one."""
    deadline: float = math.inf
    """Time at which looking for items that meet the conditions ends with an error, on the clock of
    :func:`time.monotonic`."""
    filter: Filter = field(init=False, repr=False, compare=False)
    """``where`` and ``match``, parsed."""

    def __post_init__(self) -> None:
        if isinstance(self.modality, str):
            object.__setattr__(self, "modality", Modality.parse(self.modality))
        object.__setattr__(self, "parts", tuple(self.parts))
        if isinstance(self.where, Filter):
            parsed = self.where if self.match is None else dataclasses.replace(self.where, match=self.match)
        else:
            parsed = Filter.parse(self.where, self.match)
        object.__setattr__(self, "filter", parsed)

    def all_parts(self) -> tuple[SearchPart, ...]:
        """Return every part of the query; the request's own text and image come first."""
        own = SearchPart(text=self.text, image=self.image)
        return (own, *self.parts) if _has_content(own) else self.parts

    def check(self) -> None:
        """Check everything that can be checked without the index.

        Raises
        ------
        UsageError
            The request is empty, ``k`` or ``beam`` is below 1 or above a billion, a weight is not finite, or
            a text contains invalid Unicode.
        """
        for name, number in (("k", self.k), ("beam", self.beam)):
            if number is not None and not 1 <= number <= MAX_HITS:
                raise UsageError(f"{name} is {number}, it must be at least 1 and at most {MAX_HITS}")
        parts = self.all_parts()
        texts = [*(("text", part.text) for part in parts), ("instruction", self.instruction)]
        for name, words in texts:
            try:
                (words or "").encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"the {name} {words!r} contains a lone surrogate (half a character)"
                ) from None
        if not parts:
            raise UsageError("a query needs a text, an image, or both")
        for part in parts:
            if (part.id is None) is not _has_content(part):
                raise UsageError("a part of a query needs a text, an image, or both; or else an item")
            if not math.isfinite(part.weight):
                raise UsageError(f"the weight of a part is {part.weight}, it must be a finite number")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One item in the result of a search."""

    rank: int
    """From 1."""
    id: str
    score: float
    """Score that the hits are ranked by. Without re-ranking it is a log-probability. By codes it is the inner
    product with the ID's vector minus half that vector's squared norm; by embeddings it is the cosine. The
    weighted density is subtracted from both, and the weighted log-probability is added to scores by codes."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of the picture."""
    fields: dict[str, Any]
    """The item's fields by name."""
    codes: tuple[int, ...]
    """The item's ID."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each decoded code; shorter than ``codes`` if decoding stopped early."""
    probability: float | None = None
    """Probability that the hit is relevant, if `genius calibrate` calibrated the index for these settings.
    None for queries with ``parts``."""
    relevance: float | None = None
    """How well the item matches, from 0 to 1; from 0.5 on it is a match. The probability if there is one;
    otherwise, for a text found by a text, how its cosine compares with those of related texts
    (:class:`~genius_search.index.settings.Relevance`). None where neither is known."""

    def _repr_html_(self) -> str:
        """Show the hit with its picture in a notebook."""
        from genius_search.index.html import draw_hits  # noqa: PLC0415  for notebooks only

        return draw_hits([self])


class Hits(list[SearchHit]):
    """Hits of a search, best first. A notebook shows their pictures."""

    def _repr_html_(self) -> str:
        from genius_search.index.html import draw_hits  # noqa: PLC0415  for notebooks only

        return draw_hits(self)

    def to_pandas(self) -> DataFrame:
        """Return a data frame with a row for each hit; an item's fields are columns ``fields.NAME``.

        Raises
        ------
        MissingExtra
            pandas is not installed.
        """
        need_packages("to_pandas needs", "pandas")
        import pandas as pd  # noqa: PLC0415  an extra

        names = [field.name for field in dataclasses.fields(SearchHit) if field.name != "fields"]
        rows = [
            {
                **{name: getattr(hit, name) for name in names},
                **{f"fields.{name}": value for name, value in hit.fields.items()},
            }
            for hit in self
        ]
        return pd.DataFrame(rows, columns=None if rows else names)


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


class EncodedQuery(NamedTuple):
    """A request, or its part for one modality, ready for beam search."""

    request: SearchRequest
    number: int
    """Position of the request; the queries of one request follow one another."""
    level0: frozenset[int]
    """Allowed codes at level 0; empty means any."""
    restriction: Restriction | None
    """Allowed items; None means all."""
    embedding: Float32[np.ndarray, " dim"]
    """The generator's input."""
    evidence: Float32[np.ndarray, " dim"]
    """The query in the space of the vectors that hits are re-ranked by."""


Constraint: TypeAlias = tuple[frozenset[int], Restriction | None]
"""Allowed codes at level 0, of which none means any, and allowed items, of which None means all."""


def has_conditions(model: Genius, request: SearchRequest) -> bool:
    """Return whether the items that a request allows have to be looked up, which may take long."""
    return request.filter != Filter() or (request.modality is not None and not model.level0_is_exact)


def find_constraints(model: Genius, snapshot: Snapshot, request: SearchRequest) -> list[Constraint]:
    """Return the constraint of each query that a request becomes."""
    if not snapshot.segments:
        return []
    with diagnose_corruption(snapshot):
        return [_constraint(model, snapshot, one) for one in split_by_modality(model, snapshot, request)]


def encode_queries(
    model: Genius,
    snapshot: Snapshot,
    requests: Sequence[SearchRequest],
    config: SearchConfig,
    constraints: Sequence[list[Constraint]] | None = None,
) -> list[EncodedQuery]:
    """Encode requests, with all images in one batch and all texts in another.

    A request with neither modality nor instruction becomes a query for each modality of the index.

    Parameters
    ----------
    constraints
        of each request, if they are known (:func:`find_constraints`).

    Raises
    ------
    UsageError
        A request is invalid (:meth:`SearchRequest.check`), refers to an item that is not in the index, or its
        parts cancel out. All but the last are checked before anything is encoded.
    """
    for request in requests:
        request.check()
    if not snapshot.segments:
        nothing = np.zeros(model.dim, dtype=np.float32)
        return [
            EncodedQuery(request, number, frozenset(), None, nothing, nothing)
            for number, request in enumerate(requests)
        ]
    constraints = constraints or [find_constraints(model, snapshot, request) for request in requests]
    single = [
        (number, one)
        for number, request in enumerate(requests)
        for one in split_by_modality(model, snapshot, request)
    ]
    requests = [request for _, request in single]
    is_raw = snapshot.manifest.embeddings == "raw" and config.rerank == "embeddings"
    parts = [(request, part) for request in requests for part in request.all_parts()]
    with diagnose_corruption(snapshot):
        from_items = iter(
            [
                _item_vectors(model, snapshot, part.id, is_raw=is_raw)
                for _, part in parts
                if part.id is not None
            ]
        )
    images = _open_images([part for _, part in parts])
    contents = [
        Content(images.get(id(part.image)), _text(model, snapshot, request, part), ItemKey("query", ""))
        for request, part in parts
        if part.id is None
    ]
    encoded = iter(_encode(model, contents, is_raw=is_raw))
    queries = []
    for (number, request), (level0, restriction) in zip(
        single, chain.from_iterable(constraints), strict=True
    ):
        vectors = [next(encoded if part.id is None else from_items) for part in request.all_parts()]
        fused, evidence = _weighted_sum([part.weight for part in request.all_parts()], np.stack(vectors))
        queries.append(EncodedQuery(request, number, level0, restriction, fused, evidence))
    return queries


def split_by_modality(model: Genius, snapshot: Snapshot, request: SearchRequest) -> list[SearchRequest]:
    """Return the request for each modality of the index, if it names neither modality nor instruction.

    Scores of items of different modalities are hard to compare, because encoders place images and texts in
    different regions; so each modality is searched by itself.
    """
    if request.modality is not None or request.instruction or not model.level0_is_exact:
        return [request]
    return [dataclasses.replace(request, modality=modality) for modality in snapshot.modalities]


def search_encoded(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    """Search for encoded queries in one batch, and return the result of each request.

    A query's beam is at least as wide as its ``k``. The hits of a request that became several queries are
    merged (:func:`merge`).
    """
    if not queries or not snapshot.segments:
        return [SearchResult([], 0) for _ in queries]
    with diagnose_corruption(snapshot):
        found = zip(queries, _search(model, snapshot, queries, config), strict=True)
        return [
            merge([result for _, result in group], k)
            for (_, k), group in groupby(found, key=lambda pair: (pair[0].number, pair[0].request.k))
        ]


def merge(results: Sequence[SearchResult], k: int) -> SearchResult:
    """Merge the hits of several modalities into one list of ``k``.

    They are ordered by probability if the index is calibrated, otherwise by reciprocal rank: the first hit of
    each modality, the second of each, and so on, in the order of their scores.
    """
    if len(results) == 1:
        return results[0]
    hits = [hit for result in results for hit in result.hits]
    if all(hit.probability is not None for hit in hits):
        hits.sort(key=lambda hit: (-(hit.probability or 0), hit.rank, -hit.score))
    else:
        hits.sort(key=lambda hit: (hit.rank, -hit.score))
    ranked = [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits[:k], start=1)]
    return SearchResult(ranked, sum(result.touched for result in results))


def _search(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    calibration = snapshot.manifest.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    wanted = [
        Wanted(
            width=max(query.request.beam or config.beam, query.request.k),
            k=query.request.k if calibration is None else max(query.request.k, DEPTH),
            level0=query.level0,
            restriction=query.restriction,
        )
        for query in queries
    ]
    embeddings = np.stack([query.embedding for query in queries])
    evidence = [query.evidence for query in queries]
    if snapshot.search is not None:
        answers = snapshot.search(embeddings, evidence, wanted, config)
    else:
        answers = find(
            lambda: model.decoder,
            model.fast,
            snapshot.parts,
            embeddings,
            wanted,
            config,
            evidence=evidence_of(model, snapshot),
            embeddings=evidence,
        )
    results = []
    num_levels = model.num_levels  # hits show the codes without the columns stored after them
    for query, (found, log_probabilities) in zip(queries, answers, strict=True):
        probabilities = None
        if calibration is not None and not query.request.parts:
            probabilities = calibration.probabilities(found.scores).tolist()
        ranking = found.take(slice(query.request.k))
        found_at = zip(ranking.parts.tolist(), ranking.rows.tolist(), strict=True)
        codes = [snapshot.parts[part].table.ids[row, :num_levels].tolist() for part, row in found_at]
        scores = ranking.scores.tolist()
        decoded = log_probabilities.tolist()
        items = snapshot.items(ranking.parts, ranking.items)
        relevance = probabilities or _rate_texts(model, snapshot, query, ranking, items)
        hits = [
            SearchHit(
                rank=place + 1,
                id=item.id,
                score=scores[place],
                modality=item.modality,
                text=item.text,
                image=item.image,
                fields=item.fields,
                codes=tuple(codes[place]),
                log_probabilities=tuple(one for one in decoded[place] if not math.isnan(one)),
                probability=None if probabilities is None else probabilities[place],
                relevance=relevance[place],
            )
            for place, item in enumerate(items)
        ]
        results.append(SearchResult(hits, ranking.touched))
    return results


def _rate_texts(
    model: Genius, snapshot: Snapshot, query: EncodedQuery, ranking: Ranking, items: Sequence[Item]
) -> Sequence[float | None]:
    """Return the relevance of texts found by a text, if the index has a scale, otherwise None."""
    request, scale = query.request, snapshot.manifest.relevance
    if scale is None or request.parts or request.image is not None:
        return [None] * len(items)
    cosines = np.zeros(len(ranking.items), dtype=np.float32)
    for part in set(ranking.parts.tolist()):
        own = ranking.parts == part
        if snapshot.vectors is None:
            vectors = model.ranker.vectors(snapshot.parts[part].table.ids[ranking.rows[own]])
        else:
            vectors = as_floats(snapshot.vectors[part](ranking.items[own]))
        cosines[own] = normalize(vectors) @ query.embedding
    rated = scale.rate(cosines, snapshot.num_alive).tolist()
    return [rate if item.modality is Modality.TEXT else None for rate, item in zip(rated, items, strict=True)]


def evidence_of(model: Genius, snapshot: Snapshot) -> Evidence:
    """Return the data that the hits of this index can be re-ranked by."""
    return Evidence(model.ranker, snapshot.vectors, snapshot.manifest.embeddings == "raw", snapshot.densities)


def _has_content(part: SearchPart) -> bool:
    return part.image is not None or bool(part.text and part.text.strip())


def _constraint(model: Genius, snapshot: Snapshot, request: SearchRequest) -> Constraint:
    """Return the allowed level-0 codes and items.

    If the level-0 code determines the modality, it restricts decoding; otherwise it is one more filter.
    """
    conditions = request.filter
    level0: frozenset[int] = frozenset()
    if request.modality is not None:
        modality = Modality(request.modality)
        if model.level0_is_exact:
            level0 = model.level0_codes(modality)
        else:
            conditions = dataclasses.replace(conditions, modality=modality)
    return level0, None if conditions == Filter() else snapshot.restriction(
        conditions, deadline=request.deadline
    )


def _open_images(parts: Sequence[SearchPart]) -> dict[int, Image.Image]:
    """Open the image of each part, by the identity of what was given; the same is opened once."""
    given = {id(part.image): part.image for part in parts if part.image is not None}
    if not given:
        return {}
    from genius_search.data.images import SHORTEST_SIDE, as_image  # noqa: PLC0415  for images only

    return {key: as_image(image, shortest_side=SHORTEST_SIDE) for key, image in given.items()}


def _text(model: Genius, snapshot: Snapshot, request: SearchRequest, part: SearchPart) -> str:
    """Return the instruction and text of one part, as the encoder reads them."""
    instruction = request.instruction
    if not instruction:
        has_text = bool(part.text and part.text.strip())
        query = Modality.of(has_image=part.image is not None, has_text=has_text)
        wanted = snapshot.modalities[0] if request.modality is None else Modality(request.modality)
        instruction = model.instruction_for(query, wanted)
    return instructed(instruction, part.text)


def _encode(
    model: Genius, contents: Sequence[Content], *, is_raw: bool
) -> Float32[np.ndarray, "contents 2 dim"]:
    """Return two vectors of each content: the generator's input, and the one that hits are re-ranked by."""
    if not contents:
        return np.zeros((0, 2, model.dim), dtype=np.float32)
    features = features_of(model.encoder, contents)
    fused = model.fuse(features.image, features.text)
    return np.stack([fused, normalize(features.total()) if is_raw else fused], axis=1)


def _item_vectors(
    model: Genius, snapshot: Snapshot, item_id: str, *, is_raw: bool
) -> Float32[np.ndarray, "2 dim"]:
    """Return the two vectors of an item: its stored embedding, or the vector of its ID."""
    place = snapshot.place_of(item_id)
    of_codes = normalize(model.ranker.vectors(snapshot.id_at(place)[None]))[0]
    if snapshot.vectors is None:
        return np.stack([of_codes, of_codes])
    stored = as_floats(snapshot.vectors[place.part](np.array([place.row])))[0]
    if snapshot.manifest.embeddings == "fused":
        return np.stack([stored, stored])
    return np.stack([of_codes, stored if is_raw else of_codes])


def _weighted_sum(
    weights: Sequence[float], vectors: Float32[np.ndarray, "parts 2 dim"]
) -> Float32[np.ndarray, "2 dim"]:
    """Return the weighted sum of the parts, scaled to unit length. A single part is returned unchanged."""
    if len(weights) == 1 and weights[0] > 0:
        return np.asarray(vectors[0])
    factors = np.array(weights, dtype=np.float32)
    totals: np.ndarray = np.tensordot(factors, vectors, axes=1)
    if not (np.linalg.norm(totals, axis=-1) > MIN_LENGTH * np.abs(factors).max()).all():
        raise UsageError("the parts of the query cancel each other out; change their weights")
    return normalize(totals)
