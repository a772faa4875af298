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
def measured(reference, tmp_path_factory):
    """Every array of the reference, computed by the imported model."""
    with compare.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        return compare.measure(reference, *compare.imported(reference, Path(folder)))
