"""Text in pictures: detected and recognised by RapidOCR, whose models are in its package.

Detecting text takes a tenth of recognising it, so a picture is first looked at in a small size.
Only pictures with boxes are read in full. Texts are cached by the contents of the file, so that a
pass that was interrupted, or another index, reads no picture twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from genius_search.data.images import open_image
from genius_search.data.limits import run_with_timeout
from genius_search.errors import BadImage, need_packages
from genius_search.records import composed
from genius_search.text import clean
from genius_search.writing import write_atomically

MAX_GLANCE_SIDE: Final = 640
"""Length of a picture's longer side when text is looked for."""
MAX_READ_SIDE: Final = 1600
"""Length of a picture's longer side when text is read: a photo of a page remains legible."""
MAX_LINES: Final = 200
"""Maximum number of lines of a picture: a dense page has about sixty."""
MAX_LINE_CHARACTERS: Final = 500
MAX_PICTURE_TEXT_SECONDS: Final = 60.0
"""Maximum time for a picture; a dense page takes about five seconds."""
_CACHE_VERSION: Final = 1
"""Version of the cached texts; to be increased when the recognition changes."""


class PictureText(NamedTuple):
    """The text in a picture, as an item stores it."""

    words: str
    """One line per box; empty if there is no text."""
    boxes: str | None
    """Left, top, right and bottom edge of each line, as shares of width and height, as JSON."""


NO_TEXT: Final = PictureText("", None)
"""The text of a picture without text."""


def has_rapidocr() -> bool:
    """Return whether the extra ``ocr`` is installed."""
    return importlib.util.find_spec("rapidocr") is not None


class PictureReader:
    """Reads the texts of pictures.

    Parameters
    ----------
    cache
        Folder of texts that were read before.

    Raises
    ------
    MissingExtra
        The extra ``ocr`` is not installed.
    """

    def __init__(self, cache: Path) -> None:
        need_packages("reading text in pictures needs", "rapidocr")
        self._cache = cache

    def read(self, path: Path, digest: str) -> PictureText:
        """Return the text in a picture, from the cache if possible.

        A picture that cannot be decoded, or takes too long, has no text.

        Parameters
        ----------
        digest
            Hash of the file, which identifies its contents.
        """
        cached = self._cache / f"{digest}-{_CACHE_VERSION}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):
            return PictureText(*json.loads(cached.read_text(encoding="utf-8")))
        text = self._recognise(path)
        with contextlib.suppress(OSError):  # a full disk costs the cache, not the text
            cached.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(cached) as temporary:
                temporary.write_text(json.dumps(text), encoding="utf-8")
        return text

    def _recognise(self, path: Path) -> PictureText:
        lines: list[tuple[str, list[float]]] = []

        def read() -> None:
            picture = open_image(path, shortest_side=MAX_READ_SIDE)
            picture.thumbnail((MAX_READ_SIDE, MAX_READ_SIDE))
            glance = picture.copy()
            glance.thumbnail((MAX_GLANCE_SIDE, MAX_GLANCE_SIDE))
            if self._detects_text(np.asarray(glance)):
                lines.extend(self._read_lines(np.asarray(picture)))

        with contextlib.suppress(BadImage):
            run_with_timeout(read, MAX_PICTURE_TEXT_SECONDS)
        if not lines:
            return NO_TEXT
        words, boxes = zip(*lines, strict=True)
        return PictureText("\n".join(words), json.dumps(boxes))

    @cached_property
    def _engine(self) -> Any:
        """The detector and recogniser, which take half a second to open."""
        from rapidocr import RapidOCR  # noqa: PLC0415  an extra

        return RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.use_cls": False,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_type": "max",
                "Det.limit_side_len": MAX_READ_SIDE,
                "Det.max_candidates": MAX_LINES,
            }
        )

    def _detects_text(self, pixels: np.ndarray) -> bool:
        """Return whether a small picture seems to contain text."""
        found = self._engine(pixels[..., ::-1], use_det=True, use_cls=False, use_rec=False)
        return found.boxes is not None and len(found.boxes) > 0

    def _read_lines(self, pixels: np.ndarray) -> list[tuple[str, list[float]]]:
        """Return the lines of text in a picture with their boxes, from top to bottom."""
        read = self._engine(pixels[..., ::-1], use_det=True, use_cls=False, use_rec=True)
        if read.boxes is None or read.txts is None:
            return []
        height, width = pixels.shape[:2]
        lines = []
        for corners, text in zip(read.boxes[:MAX_LINES], read.txts[:MAX_LINES], strict=True):
            words = " ".join(clean(composed(text[:MAX_LINE_CHARACTERS])).split())
            if words:
                shares = np.asarray(corners, dtype=float) / (width, height)
                edges = np.concatenate([shares.min(axis=0), shares.max(axis=0)]).clip(0, 1)
                lines.append((words, [round(float(edge), 4) for edge in edges]))
        return lines
