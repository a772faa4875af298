"""How an index is searched unless one says otherwise: settings found by measuring, and kept with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from genius.config import SearchConfig, from_json, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What ``genius tune`` chose, and what it measured."""

    search: SearchConfig
    wish: str
    """What was asked for, in words."""
    data: str
    """Which queries it was measured with."""
    queries: int
    items: int
    """In the index at that time."""
    recall: float
    """Share of queries with a right answer among the first five hits."""
    share: float
    """Of what ordering all items by the same evidence finds."""
    cpu_ms: float
    """CPU-milliseconds of a query, without the encoder."""


def tuned_to_json(tuned: Tuned) -> dict[str, Any]:
    """As ``index.json`` keeps it; of the settings only those that are not the usual ones."""
    usual = to_json(SearchConfig())
    chosen = {name: value for name, value in to_json(tuned.search).items() if value != usual[name]}
    return {**dataclasses.asdict(tuned), "search": chosen}


def tuned_from_json(told: object) -> Tuned:
    """What :func:`tuned_to_json` wrote.

    Raises
    ------
    UsageError, TypeError, ValueError
        it is something else.
    """
    if not isinstance(told, Mapping) or not isinstance(told.get("search"), Mapping):
        raise TypeError(f"{told!r} are no settings for a search")
    names = {field.name for field in dataclasses.fields(Tuned)}
    if set(told) != names:
        raise ValueError(f"settings of a search have {sorted(told)}, expected {sorted(names)}")
    texts, counts, numbers = ("wish", "data"), ("queries", "items"), ("recall", "share", "cpu_ms")
    kinds = {**dict.fromkeys(texts, str), **dict.fromkeys(counts, int), **dict.fromkeys(numbers, float)}
    odd = [name for name, kind in kinds.items() if type(told[name]) is not kind]
    if odd:
        raise ValueError(f"{odd[0]} of the settings is {told[odd[0]]!r}")
    return Tuned(**{**told, "search": from_json(SearchConfig, told["search"])})
