"""Settings of evaluations and rivals, which are flags too; light enough to be imported for ``--help``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from pydantic import ConfigDict

from genius_search.config import Count, Natural, NonNegative, Positive, SearchConfig
from genius_search.errors import UsageError

Name = TypeVar("Name", bound=str)
Pool = Literal["local", "global"]
POOLS: Final[tuple[Pool, Pool]] = ("local", "global")
METHODS: Final = (
    "exact-raw",
    "exact-fused",
    "exact-fused+hubness",
    "exact-codes",
    "routing+codes",
    "routing+embeddings",
    "generative",
    "generative+codes",
    "generative+embeddings",
    "generative+raw",
)
"""The methods of an evaluation in the order of the tables."""
IdKind = Literal[
    "grace-numeric", "grace-string", "grace-semantic", "grace-structured", "dsi", "nci", "irgen", "genius"
]
DenseKind = Literal["exact", "hnsw", "ivf-pq", "ivf-rq"]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation, without what it evaluates."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    split: str = "test"
    """Split of the data set."""

    beam: Count = 50
    """IDs kept at each level."""

    scores: Literal["level", "vocabulary", "children"] = "level"
    """Normalise the generator's scores over a level's codes, over its whole vocabulary, or over the codes
    that exist at that point."""

    candidates: Natural = 0
    """Re-ranking: stop decoding once the beams cover at most this many IDs, and rank them all;
    0 decodes all levels."""

    shortlist: Natural = 0
    """Re-ranking by embeddings: compare only this many hits, the best by codes; 0 compares all."""

    generator_weight: NonNegative = 0.0
    """Ranking by codes: weight of the log-probability of the beam, added to the score."""

    density_weight: NonNegative = SearchConfig.density_weight
    """Ranking by codes or fused embeddings: weight of the density around an item, subtracted from its score.
    exact-fused is never corrected; exact-fused+hubness is exact search with the correction."""

    instructions: Literal["hashed", "first", "none", "all"] = "hashed"
    """Instruction of each query: one of the data set's, chosen by a hash; the first; none; or each in turn,
    with the mean of the measures."""

    max_queries: Natural = 0
    """Queries of each row at most, spread evenly; 0 means all."""

    seed: Natural = 0
    """Seed for the choice of instructions."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(EvaluationSettings):
    """Everything that decides the results of an evaluation."""

    pools: tuple[Pool, ...] = ("local", "global")
    """Each query against its own task's pool, against the union of all pools, or both."""

    methods: tuple[str, ...] = METHODS
    """Methods to measure."""

    rows: tuple[str, ...] = ()
    """Rows to evaluate, named as in file names (``mscoco_task0``); none means all."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Settings of a rival that writes IDs; all others are the model's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: IdKind
    """Kind of the IDs."""

    indexing: Literal["yes", "no"] = "yes"
    """Learn the IDs of the pool that will be searched, too, as many items a step as pairs; without it they
    are computed from the items afterwards, as for items that are added later."""

    split: str = "test"
    """Split whose pools will be searched."""

    epochs: Positive = 20.0
    """Passes over the training queries."""

    batch_size: Count = 256
    """Pairs in a batch, and with indexing as many items."""

    seed: Natural = 0
    """Seed of IDs, initial weights, batches and augmentation."""

    @property
    def is_numbered(self) -> bool:
        """Whether the IDs are random numbers, so that new items can have none."""
        return self.kind in ("grace-numeric", "grace-string")


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Settings of faiss's indexes."""

    kinds: str = "exact"
    """Kinds of index: exact (compare with every item), hnsw (a graph of neighbours), ivf-pq (product codes in
    lists), ivf-rq (residual codes in lists); separated by commas, or all."""

    code_bytes: Count = 14
    """Bytes of an item, where codes are kept: by default as many as an ID of the preset small with norm and
    density; ivf-pq takes the next number that divides a vector."""

    effort: Count = 16
    """Nodes that hnsw keeps in view, lists that the other two look through."""

    seed: Natural = 0
    """Seed for the choice of instructions, and for the sample that codes are learned from."""


def choose(flag: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """Return the names in a list with commas, or every name for ``all``.

    Raises UsageError: a name is not known, or is repeated.

    >>> choose("--kinds", "hnsw, exact", ("exact", "hnsw"))
    ('hnsw', 'exact')
    """
    if text == "all":
        return tuple(known)
    names = [name.strip() for name in text.split(",")]
    found = tuple(one for name in names for one in known if one == name)
    if len(found) < len(names) or len(set(found)) < len(found):
        raise UsageError(
            f"{flag} {text!r}: expected some of {', '.join(known)}, each once with commas between, or all"
        )
    return found
