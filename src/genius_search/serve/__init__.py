"""The HTTP service: an index, or several, behind an API and a page; and its client.

>>> from genius_search.serve import Client  # doctest: +SKIP
>>> Client("http://localhost:8000").search("a red leather bag").hits  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genius_search.errors import MissingExtra

if TYPE_CHECKING:
    from genius_search.serve.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """Import the client when it is first used: the service needs none."""
    if name == "Client":
        try:
            from genius_search.serve.client import Client  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name != "httpx":
                raise
            raise MissingExtra(
                "the client needs httpx, which is not installed: pip install 'genius-retrieval[serve]'"
            ) from None
        return Client
    raise AttributeError(f"module 'genius_search.serve' has no attribute {name!r}")
