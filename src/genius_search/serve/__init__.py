"""The HTTP service: one or several indexes behind an API and a page; and its client.

>>> from genius_search.serve import Client  # doctest: +SKIP
>>> Client("http://localhost:8000").search("a red leather bag").hits  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genius_search.errors import need_packages

if TYPE_CHECKING:
    from genius_search.serve.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """Import the client on first use; the service does not need it."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need_packages("the client needs", "httpx")
    from genius_search.serve.client import Client  # noqa: PLC0415

    return Client
