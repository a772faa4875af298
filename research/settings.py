"""Settings of an evaluation, and its methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import ConfigDict

from genius_search.config import DENSITY_WEIGHT, Count, Natural, NonNegative

Pool = Literal["local", "global"]
POOLS: Final[tuple[Pool, Pool]] = ("local", "global")
Method = Literal[
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
]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
"""The methods of an evaluation in the order of the tables."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings that affect the results of an evaluation."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    split: str = "test"
    """Split of the data set."""

    beam: Count = 50
    """Number of prefixes kept at each level."""

    scores: Literal["level", "vocabulary"] = "level"
    """Normalise the generator's scores over a level's codes, or over its whole vocabulary."""

    candidates: Natural = 0
    """Re-ranking: stop decoding once the beams cover at most this many IDs, and rank them all;
    0 decodes all levels."""

    density_weight: NonNegative = DENSITY_WEIGHT
    """Ranking by codes or fused embeddings: weight of the density around an item, which is
    subtracted from its score. exact-fused is never corrected; exact-fused+hubness is exact search
    with the correction."""

    instructions: Literal["hashed", "first", "none"] = "hashed"
    """Instruction of each query: one of the data set's, chosen by a hash; the first; or none."""

    max_queries: Natural = 0
    """Maximum number of queries of each row, spread evenly; 0 means all."""

    max_candidates: Natural = 0
    """Maximum number of candidates of each pool, for a quick estimate; 0 means all. They are the
    right answers of the queries and a random sample of other candidates, so recall is higher than
    in the whole pool."""

    seed: Natural = 0
    """Seed for the choice of instructions and of a sample of candidates."""

    pools: tuple[Pool, ...] = ("local", "global")
    """Pools that each query is searched in: its task's, the union of all pools, or both."""

    methods: tuple[Method, ...] = METHODS
    """Methods to measure."""

    rows: tuple[str, ...] = ()
    """Rows to evaluate, named as in file names (``mscoco_task0``); none means all."""
