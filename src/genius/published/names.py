"""Are a published file's tensors the ones we expect, by name and shape? All of them, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from genius.errors import ArtifactMismatch

SHOWN: Final = 8
"""Names listed of each kind of difference; the rest are counted."""


def check_names(
    found: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tolerated: Sequence[re.Pattern[str]] = (),
    what: str,
) -> None:
    """Nothing missing, nothing unknown, every shape right; ``tolerated`` names (matched whole) may be there.

    Parameters
    ----------
    what
        what the tensors are and where they were read, for the message.

    Raises
    ------
    ArtifactMismatch
        lists what differs.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not is_tolerated(name, tolerated)]
    misshapen = [
        f"{name} {tuple(found[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise ArtifactMismatch(
            f"{what}: of {len(expected)} tensors expected, {'; '.join(problems)}. This is another model, or "
            "another version of it"
        )


def is_tolerated(name: str, tolerated: Sequence[re.Pattern[str]]) -> bool:
    """Whether a tensor may be there without being used."""
    return any(pattern.fullmatch(name) for pattern in tolerated)
