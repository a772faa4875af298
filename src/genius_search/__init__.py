"""GENIUS: generative multimodal search. A model generates the ID of what matches a query.

>>> from genius_search import Index  # doctest: +SKIP
>>> index = Index.open("photos.index")  # doctest: +SKIP
>>> for hit in index.search(text="a red leather bag", modality="image", k=3):  # doctest: +SKIP
...     print(hit.id, hit.score)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genius_search.config import FitConfig, SearchConfig, preset
    from genius_search.errors import GeniusError
    from genius_search.index.adding import NewItem
    from genius_search.index.filters import Filter
    from genius_search.index.hits import Hits, SearchHit
    from genius_search.index.index import Index
    from genius_search.index.request import SearchPart, SearchRequest
    from genius_search.model import Genius
    from genius_search.records import Candidate, Modality, Query
    from genius_search.training.fit import fit

__version__ = "0.2.0"

__all__ = [
    "Candidate",
    "Filter",
    "FitConfig",
    "Genius",
    "GeniusError",
    "Hits",
    "Index",
    "Modality",
    "NewItem",
    "Query",
    "SearchConfig",
    "SearchHit",
    "SearchPart",
    "SearchRequest",
    "fit",
    "preset",
]

_HOMES = {
    "Candidate": "genius_search.records",
    "Filter": "genius_search.index.filters",
    "FitConfig": "genius_search.config",
    "Genius": "genius_search.model",
    "GeniusError": "genius_search.errors",
    "Hits": "genius_search.index.hits",
    "Index": "genius_search.index.index",
    "Modality": "genius_search.records",
    "NewItem": "genius_search.index.adding",
    "Query": "genius_search.records",
    "SearchConfig": "genius_search.config",
    "SearchHit": "genius_search.index.hits",
    "SearchPart": "genius_search.index.request",
    "SearchRequest": "genius_search.index.request",
    "fit": "genius_search.training.fit",
    "preset": "genius_search.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import genius_search`` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'genius_search' has no attribute {name!r}")
