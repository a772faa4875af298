"""Raw photos: previews inside files of the shape that cameras write."""

from __future__ import annotations

import io
import random
import struct

import pytest
from PIL import ExifTags, Image

from genius_search.data.folder import read_folder
from genius_search.data.images import image_type, open_image
from genius_search.data.photo_metadata import read_photo
from genius_search.errors import BadImage

RAW_DATA = random.Random(0).randbytes(200_000).replace(b"\xff\xd8", b"\xff\x00")


def jpeg(width, height, colour="red", **settings):
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "JPEG", **settings)
    return file.getvalue()


def tags(orientation=6):
    """TIFF data with an orientation, a camera, a time and a place."""
    exif = Image.Exif()
    exif.endian = "<"
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.Make] = "Canon"
    exif[ExifTags.Base.Model] = "Canon EOS R5"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:05:01 12:30:00"
    gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
    gps[ExifTags.GPS.GPSLatitudeRef], gps[ExifTags.GPS.GPSLatitude] = "N", (48.0, 30.0, 0.0)
    gps[ExifTags.GPS.GPSLongitudeRef], gps[ExifTags.GPS.GPSLongitude] = "E", (11.0, 0.0, 0.0)
    return exif.tobytes()[6:]


def raw(header, *jpegs):
    return header + b"".join(b"\0" * 7 + one + RAW_DATA[:50_000] for one in jpegs) + RAW_DATA


HEADERS = {
    "a.cr2": tags(),
    "a.NEF": tags(),
    "a.orf": b"IIRO" + tags()[4:],
    "a.rw2": b"IIU\0" + tags()[4:],
    "a.cr3": b"\0\0\0\x18ftypcrx " + b"\0" * 40 + b"CMT1" + tags(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_largest_jpeg_is_the_preview_and_gets_the_tags_of_the_header(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(raw(HEADERS[name], jpeg(160, 120), jpeg(600, 400, "blue"), jpeg(300, 300)))
    picture = open_image(path)
    assert picture.size == (400, 600)  # turned upright
    assert picture.getpixel((5, 5))[2] > 200
    assert image_type(path) == "image/jpeg"
    fields = read_photo(path).fields
    assert fields["camera"] == "Canon EOS R5"
    assert fields["taken"] == "2024-05-01T12:30:00"
    assert (fields["latitude"], fields["longitude"]) == (48.5, 11.0)


def test_tags_inside_the_preview_count(tmp_path):
    path = tmp_path / "a.raf"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 8
    path.write_bytes(raw(b"FUJIFILMCCD-RAW ", jpeg(600, 400, exif=exif)))
    assert open_image(path).size == (400, 600)


def test_a_raw_photo_is_an_item_unless_its_picture_is_there(tmp_path):
    (tmp_path / "a.cr2").write_bytes(raw(tags(), jpeg(600, 400)))
    (tmp_path / "b.cr2").write_bytes(raw(tags(), jpeg(600, 400)))
    (tmp_path / "b.JPG").write_bytes(jpeg(60, 40))
    (tmp_path / "a.cr2.txt").write_text("A caption.")
    scan = read_folder(tmp_path)
    assert scan.problems == ()
    assert [(one.did, one.text) for one in scan.candidates] == [
        ("a.cr2", "A caption."),
        ("b.JPG", None),
    ]


@pytest.mark.parametrize(
    "content",
    [
        tags() + RAW_DATA,
        b"\xff\xd8\xff" * 300_000,
        raw(tags(), jpeg(100, 100)),
        jpeg(600, 400).replace(b"\xff\xc0", b"\xff\xc3"),
        b"\xff\xd8" + b"\xff\xe1\x00\x02" * 50_000,
    ],
)
def test_files_without_a_preview_are_named(tmp_path, content):
    path = tmp_path / "a.dng"
    path.write_bytes(content)
    with pytest.raises(BadImage, match="without a preview"):
        open_image(path)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_headers_cost_only_the_tags(tmp_path, seed):
    numbers = random.Random(seed)
    header = bytearray(tags())
    for _ in range(8):
        header[numbers.randrange(8, len(header))] = numbers.randrange(256)
    path = tmp_path / "a.nef"
    path.write_bytes(raw(bytes(header), jpeg(600, 400)))
    assert sorted(open_image(path).size) == [400, 600]
    read_photo(path)


def test_a_preview_that_ends_early_is_damaged(tmp_path):
    path = tmp_path / "a.arw"
    picture = jpeg(600, 400)
    path.write_bytes(struct.pack("<4sI", b"II*\0", 8) + picture[: len(picture) // 2])
    with pytest.raises(BadImage):
        open_image(path)
