"""Encoders of other packages, by name.

A package declares one in its ``pyproject.toml``::

    [project.entry-points."genius_search.encoders"]
    letters = "my_package.letters:open_encoder"

The entry is a function that opens an encoder (:func:`genius_search.encoders.base.load_encoder`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

from genius_search.errors import UsageError

GROUP: Final = "genius_search.encoders"


def find_encoder(kind: str) -> Callable[..., Any]:
    """Return the function that opens a kind of encoder.

    Raises
    ------
    UsageError
        no installed package declares the kind (the message lists those that are), or it cannot be imported.
    """
    for point in entry_points(group=GROUP, name=kind):
        try:
            opener: Callable[..., Any] = point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{kind!r} ({point.value}) cannot be imported: {error}") from error
        return opener
    known = sorted({point.name for point in entry_points(group=GROUP)})
    raise UsageError(
        f"there is no encoder {kind!r}; known are small, clip, siglip, text, precomputed, uniir"
        + "".join(f", {name}" for name in known)
    )
