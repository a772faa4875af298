"""Pluggable parts by name: those of this package first, then the entry points of installed packages.

A package adds a part of its own in its ``pyproject.toml``::

    [project.entry-points."genius_search.encoders"]
    siglip = "my_package.siglip:open_encoder"

Each group has one kind of part, described where the part is used:

- ``encoders``: a function that opens an encoder (:func:`genius_search.encoders.base.load_encoder`);
- ``quantizers``: a class with the interface of :class:`genius_search.nn.quantizer.Quantizer`;
- ``generators``: a class with the interface of :class:`genius_search.nn.generator.Generator`;
- ``id_schemes``: a class with the interface of :class:`genius_search.nn.ids.IdScheme`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Literal, TypeVar

from genius_search.errors import UsageError

__all__ = ["Group", "find_part", "known_parts"]

Group = Literal["encoders", "quantizers", "generators", "id_schemes"]
Part = TypeVar("Part")


def find_part(group: Group, name: str, built_in: Mapping[str, Part]) -> Part:
    """Return the part of this name.

    Parameters
    ----------
    group
        which kind of part is wanted.
    built_in
        the parts that come with this package, by name; they win over entry points.

    Raises
    ------
    UsageError
        no part has this name (the message lists those that exist), or its package cannot be imported.

    >>> find_part("encoders", "small", {"small": len})
    <built-in function len>
    """
    if name in built_in:
        return built_in[name]
    for point in entry_points(group=f"genius_search.{group}", name=name):
        try:
            part: Part = point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{name!r} ({point.value}) cannot be imported: {error}") from error
        return part
    kind = group.removesuffix("s").replace("_", " ").replace("id", "ID")
    raise UsageError(f"there is no {kind} {name!r}; known are {', '.join(known_parts(group, built_in))}")


def known_parts(group: Group, built_in: Mapping[str, object]) -> list[str]:
    """Return the names of all parts of a group, those of this package first."""
    installed = {point.name for point in entry_points(group=f"genius_search.{group}")}
    return [*built_in, *sorted(installed - built_in.keys())]
