"""Packages that only the rivals need, imported when one is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from genius.errors import MissingExtra


def imported(name: Literal["faiss", "transformers"]) -> ModuleType:
    """The package of this name.

    Raises
    ------
    MissingExtra
        it is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"this rival needs {name}, which cannot be imported ({error}): "
            "pip install 'genius-retrieval[bench]'"
        ) from error
