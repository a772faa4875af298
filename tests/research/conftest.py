"""What the tests of the laboratory share."""

from __future__ import annotations

import os

import pytest

from genius_search.model import Genius


@pytest.fixture(scope="module", autouse=True)
def _hurried():
    """What is written outlives the process that is killed; these tests need not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def model(trained) -> Genius:
    """The shared model; nobody may change it."""
    return Genius.open(trained.model)
