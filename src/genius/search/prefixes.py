"""Prefixes of IDs in several tables at once: their continuations, and how many IDs lie under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from genius.search.allowed import Allowed, Part

Restriction = tuple[Allowed | None, ...]
"""What a query may find in each part; None: everything there."""


class Continuations(NamedTuple):
    """Prefixes one code longer, those of one prefix next to one another and in order of their code."""

    parent: Int64[np.ndarray, " children"]
    """Which of the given prefixes it continues."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, "children parts"]
    """In each part the first row that begins with it."""
    high: Int64[np.ndarray, "children parts"]
    """One past the last; equal to ``low`` where a part has none."""

    def take(self, chosen: np.ndarray) -> Continuations:
        """Some of them."""
        return Continuations(self.parent[chosen], self.code[chosen], self.low[chosen], self.high[chosen])


def continuations(
    parts: Sequence[Part],
    level: int,
    low: Int64[np.ndarray, "prefixes parts"],
    high: Int64[np.ndarray, "prefixes parts"],
) -> Continuations:
    """All codes that continue these prefixes at ``level`` in any of the parts."""
    found = [part.table.children(level, low[:, number], high[:, number]) for number, part in enumerate(parts)]
    if len(found) == 1:
        only = found[0]
        return Continuations(only.parent, only.code, only.low[:, None], only.high[:, None])
    span = 1 + max((int(part.code.max(initial=0)) for part in found), default=0)
    keys = np.concatenate([part.parent * span + part.code for part in found])
    distinct, place = np.unique(keys, return_inverse=True)
    merged_low = np.zeros((len(distinct), len(parts)), dtype=np.int64)
    merged_high = np.zeros_like(merged_low)
    start = 0
    for number, part in enumerate(found):
        here = place[start : start + len(part.parent)]
        start += len(part.parent)
        merged_low[here, number], merged_high[here, number] = part.low, part.high
    return Continuations(distinct // span, distinct % span, merged_low, merged_high)


def count_ids(
    low: Int64[np.ndarray, "prefixes parts"],
    high: Int64[np.ndarray, "prefixes parts"],
    restrictions: Sequence[Restriction | None],
    owner: Int64[np.ndarray, " prefixes"],
) -> Int64[np.ndarray, " prefixes"]:
    """IDs under each prefix that may be found; one in several parts counts in each.

    ``restrictions[owner]`` is what holds for a prefix.
    """
    counts: np.ndarray = (high - low).sum(axis=1)
    groups: dict[int, list[int]] = {}
    for number, restriction in enumerate(restrictions):
        if restriction is not None:
            groups.setdefault(id(restriction), []).append(number)
    for members in groups.values():
        restriction = restrictions[members[0]] or ()
        is_member = np.zeros(len(restrictions), dtype=bool)
        is_member[members] = True
        chosen = np.flatnonzero(is_member[owner])
        total = np.zeros(len(chosen), dtype=np.int64)
        for number, allowed in enumerate(restriction):
            first, last = low[chosen, number], high[chosen, number]
            total += last - first if allowed is None else allowed.ids.count(first, last)
        counts[chosen] = total
    return counts
