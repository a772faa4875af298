"""From the body of a search to requests of the Python API, and from their hits to JSON."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Shaped
from pydantic_core import to_json

from genius_search.border import SHORTEST_VECTOR
from genius_search.config import SearchConfig, SearchSettings
from genius_search.data.images import SAFE_FORMATS, SHORTEST_SIDE, open_image
from genius_search.encoders.base import VectorEncoder
from genius_search.errors import GeniusError
from genius_search.index.filters import Filter
from genius_search.index.hits import Hits, SearchHit, read_hits, values_of
from genius_search.index.index import Index, current_searcher
from genius_search.index.request import SearchPart, SearchRequest
from genius_search.serve import schemas
from genius_search.serve.describe import describe_settings, picture_path, written
from genius_search.serve.schemas import Problem, status_of

if TYPE_CHECKING:
    from PIL import Image

MAX_HITS_BYTES: Final = 8 << 20
"""Maximum total size of the hits of one response."""


class Query(NamedTuple):
    """A search of a body, as a request and the settings that it changes."""

    request: SearchRequest
    config: SearchConfig | None
    """None for the settings of the index."""
    fields: list[str] | None
    """Names of the fields to return with each hit; None for all."""


def read_queries(
    body: schemas.SearchBody, pictures: Mapping[str, memoryview], deadline: float, index: Index
) -> list[Query]:
    """Return the search of a body, or its searches.

    Raises
    ------
    Problem, GeniusError
        A search is invalid. The message names the field.
    """
    if body.searches is None:
        return [read_query(body, pictures, deadline, index)]
    queries = []
    for number, search in enumerate(body.searches):
        with in_field(f"searches[{number}]"):
            queries.append(read_query(search, pictures, deadline, index))
    num_hits = sum(query.request.k + query.request.offset for query in queries)
    num_beams = sum(
        _num_beams(query.request, search)
        for query, search in zip(queries, body.searches, strict=True)
        if search.rerank == "none"
    )
    if num_hits > schemas.MAX_HTTP_HITS:
        raise Problem(
            422,
            f"searches: k and offset of all searches together are {num_hits:,}, at most "
            f"{schemas.MAX_HTTP_HITS:,} are allowed; send several requests",
        )
    if num_beams > schemas.QUICK_HITS:
        raise Problem(
            422,
            f"searches: rerank none allows at most {schemas.QUICK_HITS} hits or beams in all "
            "searches together; send several requests, or leave out rerank",
        )
    return queries


def read_query(
    search: schemas.Search, pictures: Mapping[str, memoryview], deadline: float, index: Index
) -> Query:
    """Convert a search to a request, and decode its pictures."""
    decode_part = functools.cache(lambda name: decode(picture_part(pictures, name)))
    check_contents(index, search)
    parts = []
    for number, part in enumerate(search.parts):
        with in_field(f"parts[{number}]"):
            check_contents(index, part)
            if part.weight != 1 and search.combine == "any":
                raise Problem(422, "weight: has no effect with combine any; leave it out")
            parts.append(
                SearchPart(
                    text=part.text,
                    image=part.image and decode_part(part.image),
                    id=part.id,
                    vector=part.vector,
                    weight=part.weight,
                )
            )
    request = SearchRequest(
        text=search.text,
        image=search.image and decode_part(search.image),
        vector=search.vector,
        parts=tuple(parts),
        combine=search.combine,
        instruction=search.instruction,
        modality=search.modality,
        where=search.where,
        match=search.match,
        hybrid=search.hybrid,
        k=search.k,
        offset=search.offset,
        order_by=search.order_by,
        facets=search.facets,
        group_by=search.group_by,
        deadline=deadline,
    )
    _check_limits(request, search)
    config = None
    if (search.beam, search.rerank, search.router) != (None, None, None):
        config = SearchConfig(beam=search.beam, rerank=search.rerank, router=search.router)
    return Query(request, config, search.fields)


def check_contents(index: Index, part: schemas.Search | schemas.SearchPart) -> None:
    """Raise :class:`Problem` if the encoder of an index does not read a query or a part of it."""
    encoder = index.model.encoder
    if part.vector is not None:
        check_vector(part.vector, encoder.dim)
    if isinstance(encoder, VectorEncoder) and (part.text or part.image):
        raise Problem(
            422,
            f"{'text' if part.text else 'image'}: this index was created from vectors and has no "
            f"encoder; send vector, with {encoder.dim} numbers",
        )


def check_vector(vector: Shaped[np.ndarray, " numbers"], dim: int) -> None:
    """Raise :class:`Problem` for a vector of another dimension, or without a direction."""
    if len(vector) != dim:
        raise Problem(422, f"vector: expected {dim} numbers, got {len(vector)}")
    length = np.linalg.norm(vector.astype(np.float64))  # in which large squares are finite
    if not SHORTEST_VECTOR < length < np.inf:
        raise Problem(422, "vector: has no direction; its numbers are zeros, or too large")


@contextlib.contextmanager
def in_field(path: str) -> Iterator[None]:
    """Put the path of a field before the message of an error that a client can correct."""
    try:
        yield
    except Problem as error:  # begins with the name of a field
        raise Problem(error.status_code, f"{path}.{error.detail}", None, **error.more) from None
    except GeniusError as error:
        status = status_of(error)
        if status is None:
            raise
        raise Problem(status, f"{path}: {error}") from None


def _check_limits(request: SearchRequest, search: schemas.Search) -> None:
    """Raise :class:`Problem` for a request that would reveal paths or take too long."""
    if request.filter is not None:
        refuse_paths(request.filter)
    if not request.query:
        return
    if request.k + request.offset > schemas.MAX_HTTP_HITS:
        raise Problem(
            422,
            f"offset: k and offset together are at most {schemas.MAX_HTTP_HITS:,}; use where to "
            "find other items",
        )
    if search.rerank == "none" and _num_beams(request, search) > schemas.QUICK_HITS:
        raise Problem(
            422,
            f"rerank: none allows at most {schemas.QUICK_HITS} hits or beams, counted for each "
            "alternative; request fewer, or leave out rerank",
        )


def refuse_paths(conditions: Filter) -> None:
    """Raise :class:`Problem` for conditions that would reveal paths."""
    if any(condition.column == "image" for condition in conditions.conditions):
        raise Problem(
            422, "where: the image of an item is a path on the server, and cannot be compared"
        )


def _num_beams(request: SearchRequest, search: schemas.Search) -> int:
    """Return the number of partial IDs that a request follows at a level."""
    width = max(request.k + request.offset, search.beam or 1)
    return width * len(request.alternatives())


class Result(NamedTuple):
    """The hits of a query, and the settings that they were found with."""

    settings: SearchSettings
    hits: Hits


def search_all(index: Index, queries: Sequence[Query]) -> list[Result]:
    """Search for all queries, in one batch for each combination of settings, and read the hits."""
    groups: dict[SearchConfig | None, list[int]] = {}
    for number, query in enumerate(queries):
        groups.setdefault(query.config, []).append(number)
    results: dict[int, Result] = {}
    for config, numbers in groups.items():
        searcher = current_searcher(index, config)
        requests = [queries[number].request for number in numbers]
        try:
            all_hits = searcher.search(requests)
        except GeniusError:
            if len(queries) == 1:
                raise
            for number, request in zip(numbers, requests, strict=True):  # find the one to blame
                with in_field(f"searches[{number}]"):
                    searcher.search([request])
            raise
        for number, hits in zip(numbers, all_hits, strict=True):
            results[number] = Result(searcher.config, hits)
    read_hits([result.hits for result in results.values()])
    return [results[number] for number in range(len(queries))]


def encode_results(
    index: Index, name: str, queries: Sequence[Query], results: Sequence[Result]
) -> list[bytes]:
    """Return the settings and hits of each query as the members of a JSON object.

    Raises
    ------
    Problem
        The hits have more than :data:`MAX_HITS_BYTES` together.
    """
    encoded_results = []
    size = 0
    for query, (settings, hits) in zip(queries, results, strict=True):
        request = query.request
        width = request.k + request.offset
        head = {
            "settings": describe_settings(index, settings, width),
            "good_match": hits.good_match,
            **describe_arrangement(request, hits),
        }
        encoded = encode_hits(hits, name, query.fields)
        size += len(encoded)
        if size > MAX_HITS_BYTES:
            raise Problem(
                413,
                f"the hits have more than {MAX_HITS_BYTES:,} bytes; request a smaller k, or only "
                "the fields that you need",
            )
        encoded_results.append(to_json(head)[1:-1] + b',"hits":' + encoded)
    return encoded_results


def describe_arrangement(request: SearchRequest, hits: Hits) -> dict[str, Any]:
    """Return the counts of values and groups, and which hits were sorted, as far as asked for."""
    described: dict[str, Any] = {}
    if request.facets:
        described["facets"] = {
            name: [value._asdict() for value in values] for name, values in hits.facets.items()
        }
    if request.group_by is not None:
        described["more_in_group"] = hits.more_in_group
    if hits.cut_off is not None:
        described["cut_off"] = hits.cut_off
    return described


def encode_hits(hits: Sequence[SearchHit], index: str, names: list[str] | None) -> bytes:
    """Return hits as JSON, with the named fields, or all fields for None."""
    encoded_hits = []
    for hit in hits:
        encoded = dict(zip(SearchHit.__match_args__, values_of(hit), strict=True))
        if names is not None:
            fields = encoded["fields"]
            encoded["fields"] = {name: fields[name] for name in names if name in fields}
        if encoded["image"] is not None:
            encoded["image"] = picture_path(hit, index)
        encoded_hits.append(encoded)
    return written(encoded_hits)


def decode(data: bytes) -> Image.Image:
    """Decode a picture of a request, at about the size that the encoder needs.

    Raises
    ------
    BadImage
        The picture is damaged, has too many pixels, or has a format that is not accepted from
        clients.
    """
    return open_image(
        data,
        name="image",
        formats=SAFE_FORMATS,
        max_pixels=schemas.PICTURE_PIXELS,
        shortest_side=SHORTEST_SIDE,
    )


def picture_part(pictures: Mapping[str, memoryview], name: str) -> bytes:
    """Return the part of multipart/form-data with a picture."""
    if name not in pictures:
        raise Problem(
            422,
            f"image: there is no part {name[:80]!r}; send multipart/form-data with a part json and "
            "a part for each picture, and name that part here. URLs are not fetched",
        )
    return bytes(pictures[name])
