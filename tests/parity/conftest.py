"""The authors' numbers, the model imported from files that give them, and how far apart they are.

``GENIUS_PARITY=FOLDER`` points at another folder with `golden.npz`, `keys.json` and, when its weights were drawn
from another seed, a text file `seed`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "parity_compare", Path(__file__).with_name("compare.py")
)
compare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compare)


@pytest.fixture(scope="session")
def reference():
    """The golden numbers."""
    return compare.Reference.chosen()


@pytest.fixture(scope="session")
def networks(reference):
    """The reference's weights in our networks."""
    return compare.converted(reference)


@pytest.fixture(scope="session")
def measured(reference, networks):
    """Every array of the reference, computed by our networks."""
    return compare.measure(reference, networks)


@pytest.fixture(scope="session")
def imported(reference, tmp_path_factory):
    """The reference's weights in our networks, by way of the published files."""
    return compare.imported(reference, tmp_path_factory.mktemp("published"))
