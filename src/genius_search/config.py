"""Settings of a search and of the models it reads, and their conversion from and to JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius_search.artifact import Manifest
from genius_search.errors import ArtifactMismatch, UsageError

Level0 = Literal["learned", "assigned", "classifier", "none"]
Rerank = Literal["none", "codes", "embeddings"]
Router = Literal["generator", "geometry"]
Scores = Literal["level", "vocabulary"]
Settings = TypeVar("Settings")
_validator = lru_cache(TypeAdapter)  # constructing a validator takes a third as long as a search

Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(1), Le(1 << 20)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative = Annotated[float, Ge(0), Lt(float("inf"))]
Share = Annotated[float, Ge(0), Le(1)]
Width = Annotated[Count, Le(10**9)]
Limit = Annotated[Natural, Le(10**9)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(cls: type[Settings]) -> type[Settings]:
    """Turn a class into a frozen dataclass, for which :func:`from_json` rejects unknown fields."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


@settings
class SmallEncoderConfig:
    """Sizes of the encoder trained from scratch (paper, equation 2, with a light network)."""

    dim: Size = 128
    """Width of the features."""

    vocabulary: Annotated[int, Ge(257), Le(1 << 20)] = 8192
    """Maximum number of words and word pieces learned from the training texts; at least 257."""

    max_tokens: Annotated[int, Ge(1), Le(8192)] = 64
    """Longer texts are truncated."""

    pair_buckets: Size = 8192
    """Rows of the hashed embedding table for pairs of adjacent words, which encode word order."""

    text_width: Size = 256
    """Width of a word's vector and of the layers that read texts."""

    image_width: Size = 512
    """Width of the layers that read pictures."""


@settings
class FusionConfig:
    """Fusion of image and text features into one embedding (paper, section 4.2.1)."""

    kind: Literal["network", "sum"] = "network"
    """A trained network, or the sum of the normalised features, which needs no training."""

    hidden: Count = 2560
    """Width of the layer on each modality; the joint layers are twice as wide."""

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.0
    """Dropout before each layer of the MLP, but not of the features added to its output."""

    # Deviation 28: the paper's network starts at random, so embeddings start far from the features'
    # sum.
    start: Literal["random", "sum"] = "random"
    """Initialise the MLP at random, or with an output of zero. In the latter case embeddings start
    as λ·text + (1−λ)·image, which already works well in exact search."""


@dataclass(frozen=True, kw_only=True)
class CodebookConfig:
    """The settings of a quantizer that a search reads; other settings are ignored."""

    levels: Annotated[int, Ge(1), Le(32)] = 8
    """Number of semantic levels, coarse to fine; the modality level is extra. Choosing codes needs
    the products of code vectors between all pairs of levels: 130 MB for 32 levels of 256 codes."""

    codebook_size: Annotated[int, Ge(2), Le(32767)] = 4096
    """Number of codes at each semantic level."""

    level0: Level0 = "learned"
    """Modality code: learned by k-means (the paper), assigned from the candidate's known modality,
    predicted by a classifier (supplement, table 3), or none."""

    fusion: FusionConfig = FusionConfig()
    """The fusion network."""

    # Deviation 30: the paper greedily takes the nearest code vector at each level.
    encoding_beam: Annotated[int, Ge(1), Le(1024)] = 1
    """Beam width when the codes of an item are chosen; 1 is the paper's greedy choice. A
    second-best code at a level can leave a smaller residual for the next. Training is always
    greedy."""

    norm_weight: Share = 1.0
    """Weight of half the squared norm of an ID's vector, which is subtracted from scores by codes:
    1 ranks by distance, 0 by inner product. IDs are stored with weighted half norms."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The settings of a generator that a search reads; other settings are ignored.

    The default sizes are those of T5-small.
    """

    layers: Annotated[int, Ge(1), Le(256)] = 6
    """Number of decoder blocks."""

    width: Count = 512
    """Width of the residual stream (d_model)."""

    feedforward: Count = 2048
    """Width inside the feed-forward layers (d_ff)."""

    heads: Count = 8
    """Number of attention heads."""

    head_width: Count = 64
    """Width of one head (d_kv)."""

    prefixes: Count = 30
    """Number of prefix vectors computed from the query."""

    head: Literal["tied", "per-level"] = "tied"
    """Output weights: tied to the code embeddings, or a separate matrix for each level."""

    # Deviation 29: the paper's decoder has no access to distances and must learn them from pairs.
    guide: Literal["none", "geometry"] = "none"
    """With geometry, each level's logits start from the distances between the residual of the
    query's embedding and the code vectors, and the decoder learns a correction. Implies normalising
    per level."""


@settings
class SearchConfig:
    """Options of a search. An option that is None keeps the index's setting (``Index.settings``).

    >>> index.search("a red bag", config=SearchConfig(beam=20))  # doctest: +SKIP
    """

    beam: Width | None = None
    """Beam width: number of partial IDs extended at each level (the paper's B)."""

    # Deviation 19: the stored embeddings may be the fused ones; the paper's are raw sums.
    rerank: Rerank | None = None
    """Rank items by the generator's probability (none), by the vectors of their codes, or by stored
    embeddings (the paper's GENIUS^R)."""

    # Deviation 17: the released code normalises over the whole vocabulary.
    scores: Scores | None = None
    """Normalise each decoding step over the level's codes, or over the whole vocabulary (released
    code)."""

    # Deviation 23: the paper decodes every level.
    candidates: Limit | None = None
    """With re-ranking: stop decoding once the beams contain at most this many IDs (or the beam
    width, if larger), and rank them all. If conditions allow few items, at most the square root of
    this number times the number of all IDs, all of them are ranked without decoding. In an index
    with fine codes: scan the best cells until about this many items are scanned."""

    router: Router | None = None
    """With re-ranking: find candidates with the generator, or by the distances between the query
    and the code vectors. IDs without code vectors, and ranking by probability, need the generator.
    """

    shortlist: Limit | None = None
    """With stored embeddings: compare only this many items, the best by codes; 0 means all."""

    # Deviation 27: the paper has no such correction.
    density_weight: NonNegative | None = None
    """Weight of the density around an item, which is subtracted from scores by codes and by fused
    embeddings, because items in dense regions are near every query
    (:mod:`genius_search.nn.density`). With a weight of 0.2, a density of 0.1 costs a cosine of
    0.02. Has no effect on raw embeddings."""


@settings
class SearchSettings(SearchConfig):
    """All settings of a search, as ``Index.settings`` returns them."""

    # Without field(), each setting would inherit None as its default.
    beam: Width = field()
    rerank: Rerank = field()
    scores: Scores = field()
    candidates: Limit = field()
    router: Router = field()
    shortlist: Limit = field()
    density_weight: NonNegative = field()

    margin: NonNegative = field()
    """In an index with fine codes: leave out the cells from which an item reaches the shortlist
    only if its fine codes add more than this many standard deviations above their mean."""

    def with_options(self, config: SearchConfig) -> SearchSettings:
        """Return these settings with the options of ``config`` that are not None.

        Raises
        ------
        UsageError
            An option is out of range.
        """
        values = to_json(validate_settings(config))
        options = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **options)


DENSITY_WEIGHT: Final = 0.25
"""Density weight of pools up to :data:`MAX_EXHAUSTIVE_POOL`, until calibration chooses another."""
DENSITY_WEIGHT_PER_DECADE: Final = 0.11
"""Increase of the density weight when a pool is ten times as large, since larger pools have more
hubs: .36 for a million texts."""
MAX_COMPARED_POOL: Final = 8192
"""In pools up to this size every item is compared by its embedding, since codes may explain it
poorly."""
PAPER_SEARCH: Final = SearchSettings(
    beam=50,
    rerank="none",
    scores="level",
    candidates=0,
    router="generator",
    shortlist=0,
    density_weight=0.0,
    margin=0.0,
)
"""The search of the paper: the generator decodes every level, and its probabilities order the
hits."""
DEFAULT_SEARCH: Final = SearchSettings(
    beam=10,
    rerank="codes",
    scores="level",
    candidates=1000,
    router="geometry",
    shortlist=100,
    density_weight=DENSITY_WEIGHT,
    margin=0.0,
)
"""Base of the default settings: follow the nearest codes until at most 1000 candidates remain, rank
them by codes, and compare the best 100 by stored embeddings, if there are any."""
MAX_EXHAUSTIVE_POOL: Final = 100_000
"""In pools up to this size every item is a candidate. If any are left out, queries that are unlike
the items, such as words that look for pictures, lose five to thirteen points of R@5 and save a
third to a half of the time."""
ITEMS_PER_CANDIDATE: Final = 4
"""In pools up to :data:`LARGE_POOL`, at least one item in four is a candidate."""
LARGE_POOL: Final = 500_000
"""In pools above this size, the items under each of 256 first codes are so many that decoding the
second codes saves time."""
WIDE_BEAM: Final = 128
"""Beam width in pools above :data:`LARGE_POOL`."""
CANDIDATES_PER_ROOT_ITEM: Final = 96
"""Number of candidates in pools above :data:`LARGE_POOL`, per square root of the number of
items."""
CANDIDATES_PER_SHORTLISTED: Final = 100
"""One candidate in this many is compared by its embedding in pools above :data:`LARGE_POOL`: about
1,000 of a million items. Codes distinguish more items less well, and items that densities raise are
further down."""


def decades_above_small(items: int) -> float:
    """Return the decimal logarithm of a pool's size relative to :data:`MAX_EXHAUSTIVE_POOL`, or 0.

    Above that size the correction for hubs gets stronger (:mod:`genius_search.nn.spread`).
    """
    return max(0.0, math.log10(max(items, 1) / MAX_EXHAUSTIVE_POOL))


@lru_cache
def default_search(items: int) -> SearchSettings:
    """Return the default settings of an index of ``items`` items.

    ==================  ==========================  =========================
    items n             candidates                  compared by embeddings
    ==================  ==========================  =========================
    up to 8,192         1,000 or all                all candidates
    up to 100,000       all                         100
    up to 500,000       100,000 or n / 4            100
    more                96 √n, with a beam of 128   a hundredth of candidates
    ==================  ==========================  =========================

    A quarter of the items are those under the best 64 of 256 first semantic codes. Their rows are
    adjacent, so ranking them takes little longer than decoding another code to leave most of them
    out. Above 500,000 items, the first two codes are decoded with a wide beam, since the answers of
    a query unlike the items are spread over many first codes. ``docs/lab/log.md`` has the measured
    recall and time for a million texts.
    """
    weight = round(DENSITY_WEIGHT + DENSITY_WEIGHT_PER_DECADE * decades_above_small(items), 2)
    weighted = dataclasses.replace(DEFAULT_SEARCH, density_weight=weight)
    if items > LARGE_POOL:
        candidates = round(CANDIDATES_PER_ROOT_ITEM * math.sqrt(items))
        shortlist = round(candidates / CANDIDATES_PER_SHORTLISTED)
        return dataclasses.replace(
            weighted, beam=WIDE_BEAM, candidates=candidates, shortlist=shortlist
        )
    candidates = max(
        min(items, MAX_EXHAUSTIVE_POOL), items // ITEMS_PER_CANDIDATE, DEFAULT_SEARCH.candidates
    )
    shortlist = 0 if items <= MAX_COMPARED_POOL else DEFAULT_SEARCH.shortlist
    return dataclasses.replace(weighted, candidates=candidates, shortlist=shortlist)


CELL_SHORTLIST: Final = 200
"""Number of items that are compared by embeddings in pools with fine codes up to
:data:`MAX_EXHAUSTIVE_POOL`."""
MAX_COMPARED_CELL_POOL: Final = 1024
"""In pools with fine codes up to this size every item is compared by its embedding, which takes
about 10 of 200 microseconds. Where items are close together, such as the rows of a table, the
vector of an item may have more than 200 others nearer by codes."""
LARGE_SHORTLIST_GROWTH: Final = 4
"""In larger pools, this many times as many are compared."""
CELL_MARGIN: Final = 3.0
"""Default margin of pools with fine codes (:attr:`SearchSettings.margin`) up to
:data:`MAX_EXHAUSTIVE_POOL`."""
LARGE_MARGIN_GROWTH: Final = 1.0
"""Increase of the margin up to a pool of a million items, since the correction for hubs, which
grows, too, raises items of worse cells (docs/lab/log.md). In ten million items, another 1 took 2.5
times as long and found no more right answers."""
WIDEST_MARGIN_POOL: Final = 1_000_000
"""Number of items from which on the margin no longer grows."""
MAX_SCANNED_SHARE: Final = 4
"""In pools above :data:`MAX_EXHAUSTIVE_POOL`, at most one item in this many is scanned."""


def _largeness(items: int) -> float:
    """Return 0 for pools up to 100,000 items, 1 from a million on, and the logarithm between."""
    return min(1.0, decades_above_small(items))


def narrow_search(settings: SearchSettings, items: int, allowed: int) -> SearchSettings:
    """Return the settings of a search whose conditions allow ``allowed`` items of a large pool.

    The allowed items are like a smaller pool, whose searches need a smaller margin and a shorter
    shortlist (:func:`default_cell_search`). Since they may also be unlike the query, both shrink by
    half as much: where a tenth of a million items is allowed, the margin by
    :data:`LARGE_MARGIN_GROWTH` / 2 and the shortlist by half. Where a hundredth is allowed, both
    are those of small pools.
    """
    if items <= MAX_EXHAUSTIVE_POOL or settings.shortlist >= allowed:
        return settings
    decades = max(0.0, math.log10(min(items, WIDEST_MARGIN_POOL) / allowed))
    margin = settings.margin - LARGE_MARGIN_GROWTH * decades / 2
    shortlist = math.ceil(settings.shortlist / math.sqrt(LARGE_SHORTLIST_GROWTH) ** decades)
    return dataclasses.replace(
        settings,
        margin=max(margin, min(settings.margin, CELL_MARGIN)),
        shortlist=max(shortlist, min(settings.shortlist, CELL_SHORTLIST)),
    )


@lru_cache
def default_cell_search(items: int) -> SearchSettings:
    """Return the default settings of an index of ``items`` items with fine codes.

    Items are scanned by their fine codes cell by cell, until no other cell may have an item for the
    shortlist. When the index is created, the shortlist and the margin grow until the search agrees
    with exact search (:mod:`genius_search.index.measure`).
    """
    is_small = items <= MAX_EXHAUSTIVE_POOL
    shortlist = CELL_SHORTLIST if is_small else LARGE_SHORTLIST_GROWTH * CELL_SHORTLIST
    return dataclasses.replace(
        default_search(items),
        candidates=items if is_small else max(MAX_EXHAUSTIVE_POOL, items // MAX_SCANNED_SHARE),
        shortlist=0 if items <= MAX_COMPARED_CELL_POOL else shortlist,
        margin=CELL_MARGIN + LARGE_MARGIN_GROWTH * _largeness(items),
    )


def routed_by_generator(default_settings: SearchSettings) -> SearchSettings:
    """Return an index's default settings with the generator as the router.

    Since decoding with the generator is slower, it finds a tenth of the candidates.
    """
    candidates = max(default_settings.candidates // 10, DEFAULT_SEARCH.candidates)
    return dataclasses.replace(default_settings, router="generator", candidates=candidates)


def validate_settings(config: Settings) -> Settings:
    """Return the settings if every field is within its limits.

    Raises
    ------
    UsageError
        A setting is out of range.
    """
    return from_json(type(config), to_json(config))


def from_json(cls: type[Settings], value: Mapping[str, Any]) -> Settings:
    """Read settings that :func:`to_json` wrote.

    Raises
    ------
    UsageError
        A field is unknown or invalid.
    """
    # Classes can be hashed, which mypy does not know.
    validator: TypeAdapter[Settings] = _validator(cls)  # type: ignore[arg-type]
    try:
        return validator.validate_python(dict(value))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"{cls.__name__}: setting {where} = {problem.get('input')!r}: {problem['msg'].lower()}"
        ) from None


def settings_of(cls: type[Settings], manifest: Manifest) -> Settings:
    """Return the settings in a manifest.

    Raises
    ------
    ArtifactMismatch
        A setting is unknown or out of range.
    """
    try:
        return from_json(cls, manifest.config)
    except UsageError as error:
        raise ArtifactMismatch(f"{manifest.folder} cannot be used: {error}") from None


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as a dictionary that can be written as JSON."""
    return dataclasses.asdict(config)
