"""Videos that tests draw: scenes of one colour each, in which a circle moves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")

RED, GREEN, BLUE, YELLOW, BLACK = (220, 0, 0), (0, 200, 0), (0, 0, 220), (220, 220, 0), (0, 0, 0)
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE, "yellow": YELLOW}


def draw_video(
    path: Path,
    scenes: Sequence[tuple[tuple[int, int, int], float]],
    *,
    codec: str = "mp4v",
    rate: float = 10.0,
    size: tuple[int, int] = (160, 120),
) -> None:
    """Write a video of scenes, each with its colour and its length in seconds."""
    video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), rate, size)
    for colour, seconds in scenes:
        for number in range(round(seconds * rate)):
            frame = np.full((size[1], size[0], 3), colour[::-1], dtype=np.uint8)
            grey = (128, 128, 128) if any(colour) else (0, 0, 0)
            cv2.circle(frame, (20 + 4 * number % size[0], size[1] // 2), 16, grey, -1)
            video.write(frame)
    video.release()


class ColourEncoder:
    """Pictures are their mean colours, and texts the colours that they name."""

    needs_pixels = True
    dim = 8

    def __init__(self, source: str, *, download: bool, device: str) -> None:
        del download, device
        self.spec = f"colours:{source}"
        self.fingerprint = self.spec

    def image_features(self, images, keys=()):
        del keys
        rows = np.zeros((len(images), self.dim), dtype=np.float32)
        for row, image in zip(rows, images, strict=True):
            row[:3] = np.asarray(image).mean(axis=(0, 1)) / 255 - 0.3
            row[3] = 0.3
        return rows

    def text_features(self, texts, keys=()):
        del keys
        rows = np.full((len(texts), self.dim), 0.01, dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().strip(".").split():
                if word in COLOURS:
                    row[:3] += np.array(COLOURS[word]) / 255 - 0.3
                    row[3] = 0.3
                else:
                    row[4 + len(word) % 4] += 1.0
        return rows


def colour_plugins(*, group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a package with :class:`ColourEncoder`."""
    point = importlib.metadata.EntryPoint("colours", "tests.videos:ColourEncoder", group)
    return importlib.metadata.EntryPoints([point])
