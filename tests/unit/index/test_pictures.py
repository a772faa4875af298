"""A picture on its way into an index: its file is read once, and gives all that is needed."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from PIL import ExifTags, Image

from genius_search.index.index import Index
from genius_search.index.pictures import read_picture
from genius_search.index.roots import hash_picture

OPENED: Counter[str] = Counter()
"""How often each picture was opened; an audit hook cannot be removed, so it counts all the time."""


def count_open(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".jpg"):
        OPENED[str(arguments[0])] += 1


@pytest.fixture(scope="module", autouse=True)
def _hook():
    sys.addaudithook(count_open)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(5):
        exif = Image.Exif()
        exif[ExifTags.Base.ImageDescription] = f"a red anchor {number}"
        pixels = random.integers(0, 256, (30, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", exif=exif)
    return folder


@pytest.mark.parametrize("kind", ["clip", "text"])
def test_a_picture_is_opened_once(photos, clip_folder, sentence_folder, tmp_path, kind):
    OPENED.clear()
    spec = {"clip": f"clip:{clip_folder}", "text": f"text:{sentence_folder}"}[kind]
    index = Index.create(tmp_path / "i", photos, encoder=spec)
    assert {str(photos / f"{number}.jpg"): 1 for number in range(5)} == OPENED
    assert index.get("3.jpg").text == "a red anchor 3"
    OPENED.clear()
    assert index.sync().unchanged == 5
    assert not OPENED


def test_a_picture_whose_file_is_damaged_still_has_a_hash(photos):
    whole = (photos / "0.jpg").read_bytes()
    (photos / "0.jpg").write_bytes(whole[:-100])
    picture = read_picture(photos / "0.jpg", decodes=True)
    assert picture.digest == hash_picture(photos / "0.jpg")
    assert picture.caption.text == "a red anchor 0"
    assert picture.pixels is None
    assert "damaged" in picture.problem.reason
    assert read_picture(photos / "gone.jpg", decodes=True).digest is None
