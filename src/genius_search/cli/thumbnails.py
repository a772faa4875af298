"""A sheet of thumbnails of hits, in terminals that show pictures (kitty, or any with Sixel)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genius_search.errors import BadImage
from genius_search.index.hits import SearchHit

if TYPE_CHECKING:
    from PIL import Image

LIBRARY: Final = "textual_image"
SIDE: Final = 160
"""Width and height of a cell, in pixels."""
MARGIN: Final = 8
CELL_WIDTH: Final = 8
"""Width of a character of the terminal, in pixels; approximate."""
THUMBNAILS_PER_ROW: Final = 6
MAX_THUMBNAILS: Final = 12


def print_thumbnails(hits: Sequence[SearchHit]) -> None:
    """Print the pictures of the first hits, with their ranks, if the terminal can show them."""
    if not any(hit.image for hit in hits[:MAX_THUMBNAILS]):
        return
    renderable = picture_protocol()
    if renderable is None:
        return
    from rich.console import Console

    sheet = draw_sheet(hits[:MAX_THUMBNAILS])
    width = min(terminal_width(), sheet.width // CELL_WIDTH)
    Console().print(renderable(sheet, width=width, height="auto"))


def picture_protocol() -> Any:
    """Return the class of the library that prints pictures in this terminal, or None."""
    is_terminal = sys.stdout.isatty() and sys.stdin.isatty()
    # The library divides by the size of the terminal, which some do not know.
    if not (is_terminal and terminal_width() and importlib.util.find_spec(LIBRARY)):
        return None
    # The import asks the terminal what it supports.
    from textual_image import renderable

    supported = (renderable.SixelImage, renderable.TGPImage)
    return renderable.Image if renderable.Image in supported else None


def terminal_width() -> int:
    """Return the number of columns of the terminal; 0 if it is unknown."""
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 0


def draw_sheet(hits: Sequence[SearchHit]) -> Image.Image:
    """Draw the pictures of hits in rows, each whole and with its rank; a text has no picture.

    A picture that cannot be read leaves its cell empty.
    """
    from PIL import Image, ImageDraw

    from genius_search.data.video import open_still

    shown = [hit for hit in hits if hit.image]
    num_rows = -(-len(shown) // THUMBNAILS_PER_ROW)
    step = SIDE + MARGIN
    num_columns = min(len(shown), THUMBNAILS_PER_ROW)
    sheet = Image.new("RGB", (num_columns * step, num_rows * step), "white")
    draw = ImageDraw.Draw(sheet)
    for number, hit in enumerate(shown):
        row, column = divmod(number, THUMBNAILS_PER_ROW)
        try:
            picture = open_still(Path(hit.image or ""), shortest_side=SIDE)
        except BadImage:
            picture = Image.new("RGB", (SIDE, SIDE), "lightgrey")
        picture.thumbnail((SIDE, SIDE))
        corner = (column * step + MARGIN // 2, row * step + MARGIN // 2)
        space = ((SIDE - picture.width) // 2, (SIDE - picture.height) // 2)
        sheet.paste(picture, (corner[0] + space[0], corner[1] + space[1]))
        label = str(hit.rank)
        draw.rectangle((*corner, corner[0] + 6 + 7 * len(label), corner[1] + 13), fill="black")
        draw.text((corner[0] + 3, corner[1] + 1), label, fill="white")
    return sheet
