"""GENIUS: generative multimodal search. A model generates the ID of what matches a query.

>>> from genius import Index  # doctest: +SKIP
>>> index = Index.open("photos.index")  # doctest: +SKIP
>>> for hit in index.search(text="a red leather bag", modality="image", k=3):  # doctest: +SKIP
...     print(hit.item_id, hit.score)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genius.config import FitConfig, SearchConfig
    from genius.data.records import Candidate, Modality, Query
    from genius.errors import GeniusError
    from genius.index import Index, NewItem, SearchHit, SearchPart
    from genius.model import Genius
    from genius.presets import preset

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "FitConfig",
    "Genius",
    "GeniusError",
    "Index",
    "Modality",
    "NewItem",
    "Query",
    "SearchConfig",
    "SearchHit",
    "SearchPart",
    "preset",
]

_HOMES = {
    "Candidate": "genius.data.records",
    "FitConfig": "genius.config",
    "Genius": "genius.pretrained",  # without PyTorch, until a model is opened
    "GeniusError": "genius.errors",
    "Index": "genius.index",
    "Modality": "genius.data.records",
    "NewItem": "genius.index",
    "Query": "genius.data.records",
    "SearchConfig": "genius.config",
    "SearchHit": "genius.index",
    "SearchPart": "genius.index",
    "preset": "genius.presets",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import genius`` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'genius' has no attribute {name!r}")
