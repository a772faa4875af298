"""Text in pictures: detected and recognised by RapidOCR, whose models are in its package.

A picture is first looked at in a small size, and read in full only if text is detected there. Tall
pictures, such as scrolled screenshots, are read in overlapping pieces, since text would be
illegible in the size of the whole::

    piece 0    [================]                     of 1080 x 5000 pixels: 0 to 2160
    piece 1                  [================]       1890 to 4050
    read for   [--------------|-------------|-----]   a line belongs to one piece, by its centre

Texts are cached by the contents of the file, so that a pass that was interrupted, or another index,
reads no picture twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from genius_search.data.images import open_image
from genius_search.data.limits import run_with_timeout
from genius_search.errors import need_packages
from genius_search.records import composed
from genius_search.text import clean
from genius_search.writing import write_atomically

MAX_GLANCE_SIDE: Final = 640
"""Length of a picture's longer side when text is looked for."""
MAX_READ_SIDE: Final = 1600
"""Length of a picture's longer side when text is read: a photo of a page remains legible."""
MAX_PIECE_RATIO: Final = 2
"""Pictures whose height is more than this many times their width are read in pieces."""
MAX_PIECES: Final = 16
"""Maximum number of pieces of a picture."""
MAX_LINES: Final = 200
"""Maximum number of lines of a piece: a dense page has about sixty."""
MAX_LINE_CHARACTERS: Final = 500
MAX_PICTURE_TEXT_SECONDS: Final = 60.0
"""Maximum time for a picture; a dense page takes about five seconds."""
_TEXTS_VERSION: Final = 2
"""Version of the cached texts; to be increased when the recognition changes."""


class PictureText(NamedTuple):
    """The text in a picture, as an item stores it."""

    words: str
    """One line per box; empty if there is no text."""
    boxes: str | None
    """Left, top, right and bottom edge of each line, as shares of width and height, as JSON."""


NO_TEXT: Final = PictureText("", None)
"""The text of a picture without text."""


class Piece(NamedTuple):
    """Rows of pixels of a picture that are read together."""

    start: int
    end: int
    first: int
    """Lines of text belong to the piece if their centres are at least here,"""
    last: int
    """and before here."""


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

    def read(self, path: Path, digest: str) -> PictureText | None:
        """Return the text in a picture, from the cache if possible.

        A picture that cannot be decoded has no text. None is returned for one that takes too long,
        which may be the machine's fault, so that it can be read again.

        Parameters
        ----------
        digest
            Hash of the file, which identifies its contents.
        """
        cached = self._cache / f"{digest}-{_TEXTS_VERSION}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):
            return PictureText(*json.loads(cached.read_text(encoding="utf-8")))
        text = self._recognise(path)
        if text is None:
            return None
        with contextlib.suppress(OSError):  # a full disk costs the cache, not the text
            cached.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(cached) as temporary:
                temporary.write_text(json.dumps(text), encoding="utf-8")
        return text

    def _recognise(self, path: Path) -> PictureText | None:
        """Return the text in a picture, or None if that takes too long."""
        lines: list[tuple[str, list[float]]] = []
        _ = self._engine  # a broken installation is an error, and not a picture without text

        def read() -> None:
            picture = open_image(path, shortest_side=MAX_READ_SIDE)
            for piece in divide_rows(picture.height, picture.width):
                lines.extend(self._read_piece(picture, piece))

        try:
            is_complete = run_with_timeout(read, MAX_PICTURE_TEXT_SECONDS)
        except Exception:  # noqa: BLE001  several libraries raise for pictures of odd shapes
            return NO_TEXT
        if not is_complete:
            return None
        if not lines:
            return NO_TEXT
        words, boxes = zip(*lines, strict=True)
        return PictureText("\n".join(words), json.dumps(boxes))

    def _read_piece(self, picture: Image.Image, piece: Piece) -> Iterator[tuple[str, list[float]]]:
        """Yield the lines of a piece, with boxes as shares of the whole picture."""
        part = picture.crop((0, piece.start, picture.width, piece.end))
        part.thumbnail((MAX_READ_SIDE, MAX_READ_SIDE))
        glance = part.copy()
        glance.thumbnail((MAX_GLANCE_SIDE, MAX_GLANCE_SIDE))
        if not self._detects_text(np.asarray(glance)):
            return
        for words, (left, top, right, bottom) in self._read_lines(np.asarray(part)):
            rows = [piece.start + share * (piece.end - piece.start) for share in (top, bottom)]
            if piece.first <= sum(rows) / 2 < piece.last:
                shares = [round(row / picture.height, 4) for row in rows]
                yield words, [left, shares[0], right, shares[1]]

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


def divide_rows(height: int, width: int) -> list[Piece]:
    """Return overlapping pieces of a picture, from top to bottom.

    >>> divide_rows(1500, 1000)
    [Piece(start=0, end=1500, first=0, last=1501)]
    >>> [piece[:2] for piece in divide_rows(5000, 1080)]
    [(0, 2160), (1890, 4050), (3780, 5000)]
    """
    if height <= MAX_PIECE_RATIO * width:
        return [Piece(0, height, 0, height + 1)]
    size = max(MAX_PIECE_RATIO * width, -(-height // (MAX_PIECES - 2)))
    overlap = size // 8
    pieces = []
    for start in range(0, height - overlap, size - overlap):
        end = min(start + size, height)
        first = start + overlap // 2 if start else 0
        last = end - overlap + overlap // 2 if end < height else height + 1
        pieces.append(Piece(start, end, first, last))
    return pieces
