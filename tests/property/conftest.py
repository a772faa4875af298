"""The plain search that the real one is compared with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "plain_search", Path(__file__).with_name("plain_search.py")
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)


@pytest.fixture(scope="session")
def plain():
    """A slow search that is obviously right, and cases to ask it."""
    return _module
