"""Turn requests into encoded queries: vectors, matching words, and the items they may find."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.border import SHORTEST_VECTOR, as_numbers, check_range
from genius_search.config import SearchSettings
from genius_search.encoders.base import ItemKey
from genius_search.encoders.contents import encode_contents
from genius_search.encoders.passages import query_passages
from genius_search.errors import UsageError
from genius_search.index.request import SearchPart, SearchRequest, Vector
from genius_search.index.score import RANGE_DEPTH, covers_request
from genius_search.index.snapshot import Location, Snapshot, check_files_on_error
from genius_search.index.store import Calibration
from genius_search.index.words import (
    MAX_NAME_WORDS,
    MAX_RAISED_ITEMS,
    NO_WORD_MATCHES,
    WordMatches,
    find_word_matches,
    pack_location,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.records import Modality, instructed
from genius_search.search.rank import SearchQuery
from genius_search.search.table import Restriction

if TYPE_CHECKING:
    from PIL import Image

    from genius_search.encoders.contents import Content

MIN_SUM_LENGTH: Final = 1e-4
"""A weighted sum of unit vectors has no direction if it is shorter than this times the largest
weight."""
QUERY_KEY: Final = ItemKey("query", "")
"""Key that encoders get for every query; only precomputed features need keys of items."""
NO_VECTOR: Final = np.zeros(0, dtype=np.float32)
"""Vector of a query that is not encoded yet."""

ContentKey: TypeAlias = tuple[int, str]
"""Identity of an image (of None without one), and a text. Equal keys are encoded once."""

PartVectors: TypeAlias = tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, " dim"]]
"""The fused embedding and the feature of a part of a query."""
PartSource: TypeAlias = list[ContentKey] | PartVectors
"""The contents of a part of a query, one for each passage; or vectors that need no encoding."""


@dataclass(slots=True, eq=False, kw_only=True)
class EncodedQuery(SearchQuery):
    """A request, or its part for one modality, ready for a search.

    A search of segments reads the fields of :class:`SearchQuery`. Those added here change the
    scores of its candidates, and say what hits show.
    """

    feature: Float32[np.ndarray, " dim"]
    """The encoder's feature, with which the queries of choices are compared. Training a fusion
    does not change it."""
    words: WordMatches | None = None
    """Items that contain words of the query; None if words do not count."""
    choice_shares: Mapping[Location, float] = field(default_factory=dict)
    """Shares of items that were chosen for similar queries (:mod:`genius_search.index.learned`)."""
    has_parts: bool = False
    """Whether it is a sum of weighted parts, whose scores have no probabilities."""
    is_measured: bool = False
    """Whether the calibration, or without one the least scores, were measured with queries like
    this one, so that hits show them."""

    @staticmethod
    def of_vector(vector: Float32[np.ndarray, " dim"], k: int) -> EncodedQuery:
        """Return a query for ``k`` hits with one vector as embedding and feature."""
        return EncodedQuery(vector, vector, k, feature=vector)

    @property
    def raised_locations(self) -> Int64[np.ndarray, " items"]:
        """Packed locations of items that words or choices raise, ascending."""
        words = NO_WORD_MATCHES if self.words is None else self.words
        if not self.choice_shares:
            return words.locations
        chosen = [pack_location(*location) for location in self.choice_shares]
        return np.union1d(words.locations, np.array(chosen, dtype=np.int64))


class QueryEncoder:
    """Encodes requests for the search of a snapshot.

    Parameters
    ----------
    calibration
        the calibration that applies to the settings, if there is one.
    """

    def __init__(
        self,
        model: Genius,
        snapshot: Snapshot,
        settings: SearchSettings,
        calibration: Calibration | None,
    ) -> None:
        self._model = model
        self._snapshot = snapshot
        self._calibration = calibration
        reads_images = snapshot.manifest.reads_images
        self._splits_modalities = model.level0_is_exact and reads_images
        # Without an encoder of pictures, all items are texts to the search.
        has_one_code = model.level0_is_exact and not reads_images
        self._common_level0 = model.level0_codes(Modality.TEXT) if has_one_code else frozenset()
        has_raw = snapshot.manifest.embeddings == "raw"
        self._compares_features = has_raw and settings.rerank == "embeddings"
        self._dim = model.dim
        # The generator decodes every raised item, so it gets fewer.
        decodes = model.uses_generator(settings)
        self._max_raised = RANGE_DEPTH if decodes else MAX_RAISED_ITEMS
        self._level0: dict[Modality, frozenset[int]] = {}

    @cached_property
    def _instructions(self) -> dict[tuple[Modality, Modality], str | None]:
        """The model's instruction for each modality of a query and of a result."""
        pairs = [(query, item) for query in Modality for item in Modality]
        return {pair: self._model.instruction_for(*pair) for pair in pairs}

    def encode(self, requests: Sequence[SearchRequest]) -> list[list[EncodedQuery]]:
        """Return the queries of each request, which has no alternatives.

        All images are encoded in one batch, all texts in another. Without modality and instruction,
        a request becomes a query for each modality of the index: scores of items of different
        modalities are hard to compare, because encoders place images and texts in different
        regions. Otherwise it becomes one query.

        Raises
        ------
        UsageError
            A request has no query, refers to an item or a field that is not in the index, or its
            parts cancel out. All but the last are checked before anything is encoded.
        """
        if not self._snapshot.segments:
            return [[EncodedQuery.of_vector(NO_VECTOR, request.k)] for request in requests]
        divided: list[list[EncodedQuery]] = []
        targets: list[tuple[SearchRequest, Modality]] = []
        with check_files_on_error(self._snapshot):
            for request in requests:
                modalities = self._modalities_of(request)
                divided.append(self._divide_request(request, modalities))
                targets += [
                    (request, modality or self._snapshot.modalities[0]) for modality in modalities
                ]
        all_vectors = iter(self._embed(targets))
        return [
            [self._with_vectors(query, *next(all_vectors)) for query in queries]
            for queries in divided
        ]

    def encode_vectors(self, vectors: Iterable[Vector], k: int) -> list[list[EncodedQuery]]:
        """Return the queries of requests for ``k`` hits of a vector, as :meth:`encode` does."""
        check_range("k", k, 1)
        arrays = [as_numbers(vector, "the query's vector") for vector in vectors]
        if not self._snapshot.segments:
            return [[EncodedQuery.of_vector(NO_VECTOR, k)] for _ in arrays]
        all_queries = []
        for array in arrays:
            fused, feature = self._vectors_of_feature(array)
            compared = feature if self._compares_features else fused
            all_queries.append(
                [
                    EncodedQuery(
                        fused,
                        compared,
                        k,
                        level0=limits.level0,
                        restriction=limits.restriction,
                        feature=feature,
                        is_measured=limits.is_measured,
                    )
                    for limits in self.limits_of_vectors
                ]
            )
        return all_queries

    def encode_vector(self, vector: Vector) -> PartVectors:
        """Return the fused embedding of a vector, and the vector that a search compares."""
        fused, feature = self._vectors_of_feature(as_numbers(vector, "the query's vector"))
        return fused, feature if self._compares_features else fused

    @cached_property
    def limits_of_vectors(self) -> list[EncodedQuery]:
        """The queries of a request for a vector alone, without their vectors."""
        with check_files_on_error(self._snapshot):
            request = SearchRequest(vector=(0.0,))
            return self._divide_request(request, self._modalities_of(request))

    def _with_vectors(
        self,
        query: EncodedQuery,
        fused: Float32[np.ndarray, " dim"],
        feature: Float32[np.ndarray, " dim"],
    ) -> EncodedQuery:
        """Return a query with its vectors."""
        compared = feature if self._compares_features else fused
        return dataclasses.replace(query, fused=fused, compared=compared, feature=feature)

    def _modalities_of(self, request: SearchRequest) -> list[Modality | None]:
        """Return the modalities that a request is divided into; None stands for all of them."""
        if request.modality is not None:
            return [Modality(request.modality)]
        if self._splits_modalities and not request.instruction:
            return [*self._snapshot.modalities]
        return [None]

    def _divide_request(
        self, request: SearchRequest, modalities: Sequence[Modality | None]
    ) -> list[EncodedQuery]:
        """Return a query for each modality, without vectors."""
        words = self._find_words(request)
        if self._calibration is None:
            is_measured = has_least_scores(request, words)
        else:
            is_measured = covers_request(self._calibration, request)
        undivided = EncodedQuery(
            NO_VECTOR,
            NO_VECTOR,
            request.k + request.offset,
            level0=self._common_level0,
            feature=NO_VECTOR,
            words=words,
            has_parts=bool(request.parts),
            is_measured=is_measured,
        )
        if modalities == [None] and request.filter is None:
            return [undivided]
        queries = []
        for modality in modalities:
            level0, restriction = self._limit_items(request, modality)
            queries.append(dataclasses.replace(undivided, level0=level0, restriction=restriction))
        return queries

    def _limit_items(
        self, request: SearchRequest, modality: Modality | None
    ) -> tuple[frozenset[int], Restriction | None]:
        """Return the first codes and the items that a request may find in a modality.

        If first codes do not stand for modalities, the modality becomes one more condition.
        """
        conditions, level0 = request.filter, self._common_level0
        if modality is not None and self._splits_modalities:
            if modality not in self._level0:
                self._level0[modality] = self._model.level0_codes(modality)
            level0 = self._level0[modality]
        elif modality is not None and self._snapshot.modalities != [modality]:
            from genius_search.index.filters import Filter  # noqa: PLC0415  only here

            conditions = dataclasses.replace(conditions or Filter(), modality=modality)
        if conditions is None:
            return level0, None
        return level0, self._snapshot.restriction(conditions, deadline=request.deadline)

    def _find_words(self, request: SearchRequest) -> WordMatches | None:
        """Return the items that contain words of a text query; None if words do not count."""
        text = request.text
        is_text = bool(text) and request.image is None and len(request.query) == 1
        if not (request.hybrid and text and is_text):
            return None
        return find_word_matches(self._snapshot, text, max_raised=self._max_raised)

    def _embed(self, targets: Sequence[tuple[SearchRequest, Modality]]) -> list[PartVectors]:
        """Return the vectors of requests, the sums of those of their parts.

        Parameters
        ----------
        targets
            requests, and the modality that each looks for, which selects the model's instruction.
        """
        encoder = self._model.encoder
        divide = cache(
            lambda instruction, text: query_passages(
                encoder, text, partial(instructed, instruction)
            )
        )
        images: dict[int, Image.Image] = {}  # opened images, by the identity of the given pictures
        all_sources: list[list[PartSource]] = []
        for request, modality in targets:
            if not request.query:
                raise UsageError("this needs a query: a text, an image, or both; or a vector")
            sources: list[PartSource] = []
            for part in request.query:
                if part.vector is not None:
                    sources.append(self._vectors_of_feature(np.asarray(part.vector)))
                elif part.id is not None:
                    sources.append(self._vectors_of_item(part.id))
                else:
                    _open_image(part, images)
                    sources.append(self._content_keys(request, part, modality, divide))
            all_sources.append(sources)
        encoded = self._encode_sources(all_sources, images)
        embedded = []
        for (request, _), sources in zip(targets, all_sources, strict=True):
            vectors = [
                _mean([encoded[key] for key in source]) if isinstance(source, list) else source
                for source in sources
            ]
            is_sum = len(vectors) > 1 or request.query[0].weight <= 0
            embedded.append(_weighted_sum(request.query, vectors) if is_sum else vectors[0])
        return embedded

    def _content_keys(
        self,
        request: SearchRequest,
        part: SearchPart,
        modality: Modality,
        divide: Callable[[str | None, str], list[str]],
    ) -> list[ContentKey]:
        """Return the contents of a part: its image with each passage of its text."""
        instruction = request.instruction
        if not instruction:
            has_text = bool(part.text and not part.text.isspace())
            query_modality = Modality.of(has_image=part.image is not None, has_text=has_text)
            instruction = self._instructions[query_modality, modality]
        return [(id(part.image), passage) for passage in divide(instruction, part.text or "")]

    def _encode_sources(
        self, all_sources: Sequence[Sequence[PartSource]], images: Mapping[int, Image.Image]
    ) -> dict[ContentKey, PartVectors]:
        """Encode the contents of all sources in one batch; equal contents are encoded once."""
        keys: dict[ContentKey, None] = {}
        for sources in all_sources:
            for source in sources:
                if isinstance(source, list):
                    keys |= dict.fromkeys(source)
        contents = [(images.get(image), text) for image, text in keys]
        vectors = self._encode_contents(contents) if contents else []
        return dict(zip(keys, vectors, strict=True))

    def _encode_contents(self, contents: Sequence[Content]) -> list[PartVectors]:
        """Encode images, texts, or both."""
        image, text = encode_contents(self._model.encoder, contents, QUERY_KEY)
        return [*zip(self._model.fuse(image, text), normalize(image + text), strict=True)]

    def _vectors_of_feature(self, vector: np.ndarray) -> PartVectors:
        """Return the vectors of a query by vector, which is read as the feature of a text."""
        if vector.shape != (self._dim,):
            raise UsageError(
                f"the query's vector is {vector.dtype} of shape {vector.shape}; "
                f"expected {self._dim} numbers"
            )
        wide = vector.astype(np.float64)  # in which large squares are finite
        length = math.sqrt(np.vdot(wide, wide))  # vdot does not warn of an infinite length
        if not SHORTEST_VECTOR < length < math.inf:  # False for NaN, too
            raise UsageError("the query's vector has only zeros, or a number that is not finite")
        feature = (wide / length).astype(np.float32)
        return self._model.codebooks.fuse_text(feature), feature

    def _vectors_of_item(self, item_id: str | int) -> PartVectors:
        """Return the vectors of an item as a query: its embedding, or the vector of its ID."""
        ranker = self._model.ranker
        with check_files_on_error(self._snapshot):
            location = self._snapshot.locate(item_id)
            evidence = self._snapshot.evidence(ranker)
            [of_codes] = normalize(ranker.vectors(self._snapshot.id_at(location)[None]))
            if evidence.embeddings is None:
                return of_codes, of_codes
            read_rows = evidence.embeddings[location.segment]
            [stored] = normalize(as_floats(read_rows(np.array([location.row]))))
        return of_codes if evidence.is_raw else stored, stored


def has_least_scores(request: SearchRequest, words: WordMatches | None) -> bool:
    """Return whether the index's least scores apply to the hits of a request.

    Least scores were measured with texts or vectors as queries, and without conditions.
    """
    is_name = words is not None and words.has_rare and request.num_words <= MAX_NAME_WORDS
    is_unlike = request.parts or request.image is not None or request.filter is not None
    return not (is_name or is_unlike)


def _open_image(part: SearchPart, images: dict[int, Image.Image]) -> None:
    """Add the image of a part, if it has one that is not open yet."""
    if part.image is not None and id(part.image) not in images:
        from genius_search.data.images import SHORTEST_SIDE, as_image  # noqa: PLC0415  only here

        images[id(part.image)] = as_image(part.image, shortest_side=SHORTEST_SIDE)


def _mean(passages: Sequence[PartVectors]) -> PartVectors:
    """Return the normalised mean of the passages' vectors; a single passage stays as it is."""
    if len(passages) == 1:
        return passages[0]
    stacked = np.stack([np.stack(vectors) for vectors in passages])
    fused, feature = normalize(stacked.mean(axis=0))
    return fused, feature


def _weighted_sum(parts: Sequence[SearchPart], vectors: Sequence[PartVectors]) -> PartVectors:
    """Return the sum of the parts' vectors by their weights, scaled to unit length."""
    weights = np.array([part.weight for part in parts], dtype=np.float32)
    stacked = np.stack([np.stack(part_vectors) for part_vectors in vectors])
    totals: np.ndarray = np.tensordot(weights, stacked, axes=1)
    is_long = np.linalg.norm(totals, axis=-1) > MIN_SUM_LENGTH * np.abs(weights).max()
    if not is_long.all():
        raise UsageError("the parts of the query cancel each other out; change their weights")
    fused, feature = normalize(totals)
    return fused, feature
