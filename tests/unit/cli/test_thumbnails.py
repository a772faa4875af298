"""Thumbnails of hits in a terminal."""

from __future__ import annotations

import sys
import types

import pytest
from PIL import Image
from rich.segment import Segment

from genius_search.cli import thumbnails
from genius_search.index.hits import SearchHit
from genius_search.records import Modality


@pytest.fixture
def hits(tmp_path) -> list[SearchHit]:
    """Eight hits: two wide pictures, a text, a file that is no picture, and four pictures."""
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.png")
        Image.new("RGB", (400, 100), "red").save(files[-1])
    (tmp_path / "broken.png").write_bytes(b"no picture")
    images = [*files[:2], None, tmp_path / "broken.png", *files[2:]]
    return [
        SearchHit(rank, str(rank), 0.0, Modality.TEXT, "words", image and str(image), {}, (), ())
        for rank, image in enumerate(images, 1)
    ]


def test_each_picture_is_whole_and_in_its_cell(hits):
    sheet = thumbnails.draw_sheet(hits)
    assert sheet.size == (6 * 168, 2 * 168)
    row = [sheet.getpixel((168 * column + 84, 84)) for column in range(6)]
    assert row == [(255, 0, 0)] * 2 + [(211, 211, 211)] + [(255, 0, 0)] * 3
    assert sheet.getpixel((84, 20)) == (255, 255, 255)  # above a wide picture
    assert sheet.getpixel((84, 168 + 84)) == (255, 0, 0)


def test_only_a_terminal_that_shows_pictures_gets_them(hits, monkeypatch, capsys):
    class Sixel:
        def __init__(self, image: Image.Image, **_: object) -> None:
            self.image = image

        def __rich_console__(self, *_: object):
            yield Segment(f"a sheet of {self.image.size}")

    library = types.SimpleNamespace(Image=Sixel, SixelImage=Sixel, TGPImage=None)
    monkeypatch.setitem(sys.modules, "textual_image", types.SimpleNamespace(renderable=library))
    monkeypatch.setattr(thumbnails.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(thumbnails, "terminal_width", lambda: 80)
    thumbnails.print_thumbnails(hits)
    assert capsys.readouterr().out == ""
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    thumbnails.print_thumbnails(hits[:2])
    assert "a sheet of (336, 168)" in capsys.readouterr().out
    thumbnails.print_thumbnails(hits[2:3])  # texts alone
    library.Image = None  # half blocks
    thumbnails.print_thumbnails(hits)
    assert capsys.readouterr().out == ""
