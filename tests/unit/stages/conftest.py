"""Watching and killing a stage."""

from __future__ import annotations

import json

import pytest


class _Killer:
    def __init__(self, steps):
        self.steps = steps

    def begin(self, stage, total):
        pass

    def advance(self, done, measures):
        if done >= self.steps:
            raise KeyboardInterrupt

    def say(self, message):
        pass


@pytest.fixture(scope="session")
def killed_after():
    """A progress that interrupts the stage after so many steps."""
    return _Killer


@pytest.fixture(scope="session")
def read_losses():
    """One measure of every step that a folder's log holds."""

    def read(folder, name="loss"):
        return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
