"""GENIUS: generative multimodal search, in which a model generates the IDs of matching items.

>>> from genius_search import Index  # doctest: +SKIP
>>> index = Index.create("photos.index", "Pictures", encoder="clip:models/clip")  # doctest: +SKIP
>>> print(index.search("a red leather bag", k=3))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genius_search.config import PAPER_SEARCH, SearchConfig, SearchSettings
    from genius_search.errors import GeniusError
    from genius_search.index.filters import Filter
    from genius_search.index.hits import Hits, SearchHit
    from genius_search.index.index import Index
    from genius_search.index.pool import NewItem
    from genius_search.index.request import SearchOptions, SearchPart, SearchRequest
    from genius_search.model import Genius
    from genius_search.recipe import FitConfig, preset
    from genius_search.records import Candidate, Modality, Query
    from genius_search.training.fit import fit

__version__ = "0.2.0"

__all__ = [
    "PAPER_SEARCH",
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
    "SearchOptions",
    "SearchPart",
    "SearchRequest",
    "SearchSettings",
    "fit",
    "preset",
]

_HOMES = {
    "genius_search.config": ("PAPER_SEARCH", "SearchConfig", "SearchSettings"),
    "genius_search.recipe": ("FitConfig", "preset"),
    "genius_search.errors": ("GeniusError",),
    "genius_search.index.filters": ("Filter",),
    "genius_search.index.index": ("Index",),
    "genius_search.index.pool": ("NewItem",),
    "genius_search.index.hits": ("Hits", "SearchHit"),
    "genius_search.index.request": ("SearchOptions", "SearchPart", "SearchRequest"),
    "genius_search.model": ("Genius",),
    "genius_search.records": ("Candidate", "Modality", "Query"),
    "genius_search.training.fit": ("fit",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import genius_search`` stays light."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'genius_search' has no attribute {name!r}")
