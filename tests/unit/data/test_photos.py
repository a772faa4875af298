"""What a photo's EXIF data say, and pictures in HEIC, which need an extra."""

from __future__ import annotations

import pytest
from PIL import ExifTags, Image

from genius_search.data.images import open_image, read_image, read_photo_fields


def photo(path, *, base=(), details=(), place=()):
    """Write a picture with EXIF data."""
    exif = Image.Exif()
    exif.update(base)
    exif.get_ifd(ExifTags.IFD.Exif).update(details)
    exif.get_ifd(ExifTags.IFD.GPSInfo).update(place)
    Image.new("RGB", (32, 24), "red").save(path, exif=exif)
    return path


FULL = {
    "base": {ExifTags.Base.Make: "Canon", ExifTags.Base.Model: "Canon EOS 90D\0"},
    "details": {ExifTags.Base.DateTimeOriginal: "2024:05:01 12:30:00"},
    "place": {
        ExifTags.GPS.GPSLatitudeRef: "S",
        ExifTags.GPS.GPSLatitude: (33.0, 51.0, 30.0),
        ExifTags.GPS.GPSLongitudeRef: "E",
        ExifTags.GPS.GPSLongitude: (151.0, 12.0, 36.0),
    },
}


@pytest.mark.parametrize("name", ["a.jpg", "a.webp", "a.png"])
def test_date_camera_and_place_are_read(tmp_path, name):
    assert read_photo_fields(photo(tmp_path / name, **FULL)) == {
        "camera": "Canon EOS 90D",
        "taken": "2024-05-01T12:30:00",
        "latitude": -33.858333,
        "longitude": 151.21,
    }


def test_what_is_unknown_or_damaged_is_absent(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    assert read_photo_fields(tmp_path / "plain.png") == {}
    assert read_photo_fields(tmp_path / "gone.jpg") == {}
    (tmp_path / "text.jpg").write_text("no picture")
    assert read_photo_fields(tmp_path / "text.jpg") == {}
    blank = photo(
        tmp_path / "blank.jpg",
        base={ExifTags.Base.Make: "Nikon", ExifTags.Base.Model: "Z 6"},
        details={
            ExifTags.Base.DateTimeOriginal: "0000:00:00 00:00:00",
            ExifTags.Base.DateTimeDigitized: "2023:01:02 03:04:05",
        },
        place={ExifTags.GPS.GPSLatitude: (200.0, 0.0, 0.0)},
    )
    assert read_photo_fields(blank) == {"camera": "Nikon Z 6", "taken": "2023-01-02T03:04:05"}


def test_heic_is_read_with_its_fields(tmp_path):
    pytest.importorskip("pillow_heif")
    path = photo(tmp_path / "a.heic", **FULL)
    assert open_image(path).size == (32, 24)
    assert read_image(path.read_bytes(), name="a").size == (32, 24)
    assert read_photo_fields(path)["taken"] == "2024-05-01T12:30:00"
