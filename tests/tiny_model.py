"""The tiny drawn world that many tests share, and the model trained on it, in tests/model.

    python -m tests.tiny_model

trains the model again: when its format, its settings or the drawn world have changed.
"""

# ruff: noqa: PLC0415  (packages are imported once the hook that checks types is there)

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genius_search.recipe import FitConfig

MODEL = Path(__file__).with_name("model")
SETTINGS = """\
preset = "tiny"
encoder.training.checkpoint_seconds = 0
quantizer.training.checkpoint_seconds = 0
generator.training.checkpoint_seconds = 0
"""
"""Those of `tiny`, and a checkpoint after every step."""


def settings() -> FitConfig:
    """Return the settings as they are read today."""
    from genius_search.cli.options import read_toml

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.toml")
        file.write_text(SETTINGS)
        return read_toml(file)


def draw(data: Path) -> None:
    """Draw the world: a thousand items of all modalities, and queries of every task."""
    from research.synth.catalogue import draw_catalogue

    draw_catalogue(data, items=1_000, train_products=60, queries_per_task=12)


def train(data: Path, settings: Path, model: Path) -> int:
    """Train the model by the command that anybody would use; return its exit status."""
    from genius_search.cli import main

    settings.write_text(SETTINGS)
    words = ("fit", data, "--encoder", "small", "--config", settings, "--out", model)
    return main([str(word) for word in words])


def main_program() -> int:
    """Replace the model of this folder."""
    with tempfile.TemporaryDirectory() as folder:
        data, settings, model = (Path(folder, name) for name in ("data", "settings.toml", "model"))
        draw(data)
        if status := train(data, settings, model):
            return status
        shutil.rmtree(MODEL, ignore_errors=True)
        shutil.copytree(model, MODEL, ignore=shutil.ignore_patterns("queries"))
    return 0


if __name__ == "__main__":
    sys.exit(main_program())
