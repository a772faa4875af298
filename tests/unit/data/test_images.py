"""Pictures of every kind become upright RGB; damaged, enormous and hostile ones are refused with the reason."""

from __future__ import annotations

import io
import json
import struct
import time
import zlib
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, TiffImagePlugin, features

from genius_search.data import images
from genius_search.data.images import SAFE_FORMATS, is_image_file, open_image
from genius_search.data.photo_metadata import read_photo
from genius_search.errors import BadImage

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)
SERVICE = {"max_pixels": 25_000_000, "shortest_side": 256}


def saved(mode: str, size: tuple[int, int], kind: str, **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def halves(left=RED, right=GREEN, size=(40, 20)):
    """Red on the left, green on the right: turning it is visible."""
    image = Image.new("RGB", size, left)
    image.paste(right, (size[0] // 2, 0, size[0], size[1]))
    return image


def near(
    image: Image.Image, at: tuple[int, int], colour: tuple[int, int, int], tolerance=12
) -> bool:
    pixel = image.getpixel(at)
    return all(abs(int(a) - b) <= tolerance for a, b in zip(pixel, colour, strict=True))


def bomb_png(path: Path, width: int, height: int) -> Path:
    """A PNG of a few bytes whose header claims any size."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )
    return path


def refused(path: Path, **settings) -> str:
    with pytest.raises(BadImage) as caught:
        open_image(path, **settings)
    assert caught.value.file == path
    assert str(path) in str(caught.value)
    return caught.value.reason


def test_an_orientation_is_undone(tmp_path):
    want = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40).convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    want.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(open_image(tmp_path / "a.png")), np.asarray(want))


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.jfif", "a.jpe", "a.apng"])
def test_rarer_endings_of_common_formats_are_pictures(tmp_path, name):
    halves(WHITE, (0, 0, 0)).save(tmp_path / name)
    assert is_image_file(tmp_path / name)
    assert near(open_image(tmp_path / name), (3, 3), WHITE)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_every_colour_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode in {"CMYK", "YCbCr"} else "a.png")
    image = halves(WHITE, (0, 0, 0))
    (image if mode == "HSV" else image.convert(mode)).save(path)
    opened = open_image(path)
    assert opened.mode == "RGB"
    assert near(opened, (3, 3), WHITE)
    assert near(opened, (36, 16), (0, 0, 0))


@pytest.mark.parametrize(
    ("name", "values", "kind", "shades"),
    [
        ("a.png", [0, 257 * 100, 65535], np.uint16, [0, 100, 255]),
        ("a.tiff", [0, 257 * 100, 65535], np.uint16, [0, 100, 255]),
        ("a.tiff", [-1.0, 0.0, 1.0], np.float32, [0, 128, 255]),
        ("a.tiff", [7.0, 7.0, 7.0], np.float32, [0, 0, 0]),
    ],
)
def test_deep_grey_keeps_its_shades(tmp_path, name, values, kind, shades):
    Image.fromarray(np.array([values], dtype=kind)).save(tmp_path / name)
    assert np.asarray(open_image(tmp_path / name))[0, :, 0].tolist() == shades


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(tmp_path, mode):
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (10, 0, 20, 10))
    image.convert(mode).save(tmp_path / "a.png")
    opened = open_image(tmp_path / "a.png")
    assert near(opened, (2, 2), (0, 0, 0))
    assert near(opened, (17, 5), WHITE)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tiff"])
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_a_cut_off_picture_is_refused_as_such(tmp_path, suffix, share):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = tmp_path / f"whole.{suffix}"
    Image.fromarray(noise).save(whole)
    data = whole.read_bytes()
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(data[: max(24, int(len(data) * share))])
    reason = refused(cut)
    assert "damaged" in reason
    assert str(tmp_path) not in reason  # the name is said once


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty.jpg", "empty"),
        ("page.jpg", "not a picture"),
        ("gone.jpg", "missing"),
        (".", "not a file"),
        ("parts.jpg", "too many parts"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(tmp_path, name, reason):
    (tmp_path / "parts.jpg").write_bytes(b"\xff\xd8" + b"\xff\xe5\x00\x02" * 100_000)
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    assert reason in refused(tmp_path / name)


@pytest.mark.parametrize("size", [(9_000, 9_000), (11_000, 11_000), (65_000, 65_000)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, size):
    path = bomb_png(tmp_path / "bomb.png", *size)
    start = time.process_time()
    with pytest.raises(BadImage, match="pixels"):
        open_image(path)
    assert time.process_time() - start < 1


def test_a_picture_is_reduced_as_long_as_its_shorter_side_is_long_enough(tmp_path):
    halves(size=(1600, 800)).save(tmp_path / "a.jpg")
    assert near(open_image(tmp_path / "a.jpg", shortest_side=100), (20, 50), RED)
    Image.new("RGB", (900, 520), "red").save(tmp_path / "x.png")
    for name, sizes in {
        "a.jpg": {900: (1600, 800), 101: (400, 200), 100: (200, 100)},
        "x.png": {
            None: (900, 520),
            521: (900, 520),
            260: (450, 260),
            130: (225, 130),
            4: (113, 65),
        },
    }.items():
        assert {
            side: open_image(tmp_path / name, shortest_side=side).size for side in sizes
        } == sizes


def numbers(*shape: int, kind: type = np.uint8, most: int = 255) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most + 1, shape).astype(kind)


@pytest.mark.parametrize(
    "pixels",
    [
        numbers(37, 23, 3),
        numbers(37, 23, 4),
        numbers(37, 23, 2),
        numbers(37, 23, kind=np.uint16, most=65535),
        numbers(37, 23, kind=np.int32, most=100_000),
    ],
    ids=["RGB", "RGBA", "LA", "16 bits", "32 bits"],
)
def test_a_picture_read_in_strips_is_the_one_read_whole(tmp_path, monkeypatch, pixels):
    path = tmp_path / "x.tiff"
    Image.fromarray(pixels).save(path)
    for side in (None, 5):
        whole = open_image(path, shortest_side=side)
        with monkeypatch.context() as patch:
            patch.setattr(images, "STRIP_PIXELS", 100)
            strips = open_image(path, shortest_side=side)
        assert (whole.mode, whole.size) == ("RGB", (23, 37) if side is None else (6, 10))
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(strips))


def in_scans(side: int, components: int = 3) -> bytes:
    """A grey JPEG that is not progressive and whose colours come one after the other."""

    def segment(kind: int, data: bytes) -> bytes:
        return bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2) + data

    numbers = range(1, components + 1)
    frame = struct.pack(">BHHB", 8, side, side, components) + b"".join(
        bytes([n, 0x11, 0]) for n in numbers
    )
    tables = [segment(0xC4, bytes([kind, 1, *[0] * 15, 0])) for kind in (0x00, 0x10)]
    zeros = bytes((-(-side // 8)) ** 2 // 4 + 1)
    scans = [segment(0xDA, bytes([1, n, 0, 0, 63, 0])) + zeros for n in numbers]
    head = segment(0xE1, b"a \xff\xda in a comment") + segment(0xDB, bytes([0] + [1] * 64))
    return b"\xff\xd8" + head + segment(0xC0, frame) + b"".join(tables + scans) + b"\xff\xd9"


def test_a_jpeg_in_several_scans_counts_whole_since_it_is_held_whole():
    side = 5_200
    with pytest.raises(BadImage):
        open_image(in_scans(side), name="x", **SERVICE)
    assert open_image(in_scans(640), name="x", **SERVICE).size == (320, 320)
    with pytest.raises(BadImage):
        open_image(saved("RGB", (side, side), "JPEG", progressive=True), name="x", **SERVICE)
    whole = saved("RGB", (side, side), "JPEG")
    assert open_image(whole, name="x", **SERVICE).size == (650, 650)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_formats_whose_decoders_make_copies_may_have_fewer_pixels(kind):
    if not features.check(kind.lower()):
        pytest.skip(f"this Pillow has no {kind}")
    limits = {"max_pixels": 60_000, "shortest_side": 64}
    assert open_image(saved("RGB", (140, 140), kind), name="x", **limits).size == (70, 70)
    with pytest.raises(BadImage, match=r"at most 30,000 are allowed"):
        open_image(saved("RGB", (240, 240), kind), name="x", **limits)
    assert open_image(saved("RGB", (240, 240), "PNG"), name="x", **limits).size == (120, 120)


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
def test_strangers_pictures_are_of_formats_that_keep_to_their_header(kind):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    with pytest.raises(BadImage, match="supported format"):
        open_image(saved("RGB", (30, 30), kind), name="x", formats=SAFE_FORMATS)


def test_a_very_long_picture_is_squeezed():
    image = open_image(saved("RGB", (256, 60_000), "PNG"), name="x", **SERVICE)
    assert image.width == 256
    assert 4_096 <= image.height <= 8_192


def test_the_service_limits_the_texts_of_a_png():
    from genius_search.serve import service  # noqa: F401, PLC0415

    text = zlib.compress("\U0001f600".encode() + b"a" * 1_000_000)
    texts = b"".join(chunk(b"iTXt", b"k%d\0\1\0\0\0" % number + text) for number in range(10))
    plain = saved("L", (30, 30), "PNG")
    with pytest.raises(BadImage, match="text"):
        open_image(plain[:33] + texts + plain[33:], name="x")


HOSTILE = [0, 1, 2**31, 2**32 - 1]


def entry(order: str, tag: int, kind: int, count: int, value: bytes | int) -> bytes:
    value = value if isinstance(value, bytes) else struct.pack(order + "I", value)
    return struct.pack(order + "HHI", tag, kind, count) + value.ljust(4, b"\0")[:4]


def hostile_exif(
    order: str, text: bytes, rational: tuple[int, int], kind: int, count: int
) -> bytes:
    """EXIF data whose numbers, texts and dates are whatever is given, and whose types may be wrong."""
    numbers = struct.pack(order + "II", *rational) * count
    texts = text + b"\0"
    data = numbers + texts
    at = 8 + 2 + 5 * 12 + 4
    place = at + len(data)
    details = place + 2 + 4 * 12 + 4
    tags = [
        entry(order, 0x010F, 2, len(texts), at + len(numbers)),
        entry(order, 0x0110, kind, count, at),
        entry(order, 0x0112, kind, count, at),
        entry(order, 0x8769, 4, 1, details),
        entry(order, 0x8825, 4, 1, place),
    ]
    gps = [
        entry(order, 1, 2, 2, b"S\0"),
        entry(order, 2, kind, count, at),
        entry(order, 3, kind, 1, text[:4]),
        entry(order, 4, kind, count, at),
    ]
    dates = [entry(order, tag, 2, len(texts), at + len(numbers)) for tag in (0x9003, 0x9004)]
    lists = (struct.pack(order + "H", len(one)) + b"".join(one) + bytes(4) for one in (gps, dates))
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return (
        head
        + struct.pack(order + "H", len(tags))
        + b"".join(tags)
        + bytes(4)
        + data
        + b"".join(lists)
    )


@given(
    order=st.sampled_from("<>"),
    text=st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [
                b"x" * 60_000,
                b"\x1b]0;x\7",
                b"9999:99:99 99:99:99",
                b"0001:01:01 00:00:00",
                b"\xff" * 19,
            ]
        ),
    ),
    rational=st.tuples(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE)),
    kind=st.sampled_from([*range(14), 99, 65_535]),
    count=st.sampled_from([0, 1, 2, 3, 4, 9]),
    ending=st.sampled_from(
        ["JPEG", "PNG", "WEBP", *(["HEIF"] if "HEIF" in images.FORMATS else [])]
    ),
)
def test_hostile_exif_data_change_no_picture_and_give_no_nonsense(
    tmp_path_factory, order, text, rational, kind, count, ending
):
    file = io.BytesIO()
    data = hostile_exif(order, text, rational, kind, count)
    Image.new("RGB", (32, 24), "red").save(file, ending, exif=data)
    assert sorted(open_image(file.getvalue(), name="x").size) == [24, 32]
    path = tmp_path_factory.getbasetemp() / "hostile"
    path.write_bytes(file.getvalue())
    fields = read_photo(path).fields
    assert abs(fields.get("latitude", 0)) <= 90
    assert abs(fields.get("longitude", 0)) <= 180
    assert len(fields.get("camera", "")) <= 161
    if "taken" in fields:
        assert datetime.fromisoformat(fields["taken"]).year >= 1
    json.dumps(fields, allow_nan=False)


def many_rationals(count: int) -> bytes:
    """EXIF data with a resolution of very many numbers."""
    tags = [entry("<", 0x011A, 5, count, 8 + 2 + 2 * 12 + 4), entry("<", 0x0128, 3, 1, 2)]
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(tags) + bytes(4)
    return head + struct.pack("<II", 72, 1) * count


def test_the_service_ignores_large_exif_data_before_anything_is_made_of_them(monkeypatch):
    from genius_search.serve import service  # noqa: F401, PLC0415

    plain = saved("RGB", (40, 20), "JPEG")
    exif = many_rationals(300_000)
    pieces = (b"Exif\0\0" + exif[start : start + 65_000] for start in range(0, len(exif), 65_000))
    segments = b"".join(b"\xff\xe1" + (len(one) + 2).to_bytes(2) + one for one in pieces)
    start = 4 + int.from_bytes(plain[4:6])  # without JFIF's own resolution
    made = []
    original = TiffImagePlugin.IFDRational.__init__
    monkeypatch.setattr(
        TiffImagePlugin.IFDRational,
        "__init__",
        lambda *words: (made.append(1), original(*words))[1],
    )
    assert open_image(plain[:2] + segments + plain[start:], name="x").size == (40, 20)
    assert len(made) < 10
    small = b"Exif\0\0" + many_rationals(1)
    small = b"\xff\xe1" + (len(small) + 2).to_bytes(2) + small
    open_image(plain[:2] + small + plain[start:], name="x")
    assert made


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
    assert read_photo(photo(tmp_path / name, **FULL)).fields == {
        "camera": "Canon EOS 90D",
        "taken": "2024-05-01T12:30:00",
        "latitude": -33.858333,
        "longitude": 151.21,
    }


def test_what_is_unknown_or_damaged_is_absent(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    assert read_photo(tmp_path / "plain.png").fields == {}
    assert read_photo(tmp_path / "gone.jpg").fields == {}
    (tmp_path / "text.jpg").write_text("no picture")
    assert read_photo(tmp_path / "text.jpg").fields == {}
    blank = photo(
        tmp_path / "blank.jpg",
        base={ExifTags.Base.Make: "Nikon", ExifTags.Base.Model: "Z 6"},
        details={
            ExifTags.Base.DateTimeOriginal: "0000:00:00 00:00:00",
            ExifTags.Base.DateTimeDigitized: "2023:01:02 03:04:05",
        },
        place={ExifTags.GPS.GPSLatitude: (200.0, 0.0, 0.0)},
    )
    assert read_photo(blank).fields == {"camera": "Nikon Z 6", "taken": "2023-01-02T03:04:05"}


def with_iptc(path, *values):
    """Write a picture with IPTC data."""
    data = b"".join(b"\x1c\x02" + bytes([n]) + len(text).to_bytes(2) + text for n, text in values)
    data = (
        b"Photoshop 3.0\08BIM\x04\x04\0\0" + len(data).to_bytes(4) + data + b"\0" * (len(data) % 2)
    )
    plain = saved("RGB", (40, 20), "JPEG")
    path.write_bytes(plain[:2] + b"\xff\xed" + (len(data) + 2).to_bytes(2) + data + plain[2:])
    return path


XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<r:Description xmlns:d="d" xmlns:e="e" e:Rating="4" e:GPSLatitude="33,51.5S" e:GPSLongitude="151,12,36E"
e:City="Sydney" e:DateCreated="2024-05-01T12:30:00+10:00"><d:title>Gulls</d:title><d:subject><r:Bag><r:li>gull</r:li>
<r:li>quay</r:li></r:Bag></d:subject></r:Description><r:Description/></r:RDF></x:xmpmeta>"""


@pytest.mark.parametrize(
    ("base", "details", "text", "fields"),
    [
        ({0x010E: "Swans on the lake"}, {}, "Swans on the lake", {}),
        ({0x010E: "OLYMPUS DIGITAL CAMERA  "}, {}, None, {}),
        (
            {
                0x9C9B: "Holiday\0".encode("utf-16le"),
                0x9C9E: "lake; swan;lake".encode("utf-16le"),
                0x4746: 3,
            },
            {},
            "Holiday\nlake, swan",
            {"title": "Holiday", "keywords": ["lake", "swan"], "rating": 3},
        ),
        ({}, {0x9286: b"UNICODE\0" + "\ufeffSchwäne".encode("utf-16be")}, "Schwäne", {}),
        ({}, {0x9286: b"ASCII\0\0\0swans"}, "swans", {}),
        ({0x0132: "2020:02:03 04:05:06"}, {}, None, {"taken": "2020-02-03T04:05:06"}),
    ],
)
def test_captions_and_keywords_of_exif_are_read(tmp_path, base, details, text, fields):
    found = read_photo(photo(tmp_path / "a.jpg", base=base, details=details))
    assert (found.text, found.fields) == (text, fields)


def test_captions_and_keywords_of_iptc_are_read(tmp_path):
    values = (
        (120, "Möwen".encode()),
        (25, b"gull"),
        (25, "“Café”".encode("cp1252")),
        (5, b"Kai"),
        (90, b"Kiel"),
    )
    found = read_photo(with_iptc(tmp_path / "a.jpg", *values))
    assert found.text == "Möwen\ngull, “Café”"
    assert found.fields == {"title": "Kai", "keywords": ["gull", "“Café”"], "city": "Kiel"}


@pytest.mark.parametrize("name", ["a.jpg", "a.webp"])
def test_captions_and_keywords_of_xmp_are_read(tmp_path, name):
    pytest.importorskip("defusedxml")
    Image.new("RGB", (32, 24)).save(tmp_path / name, xmp=XMP)
    found = read_photo(tmp_path / name)
    assert found.text == "Gulls\ngull, quay"
    assert found.fields == {
        "title": "Gulls",
        "keywords": ["gull", "quay"],
        "rating": 4,
        "city": "Sydney",
        "taken": "2024-05-01T12:30:00+10:00",
        "latitude": -33.858333,
        "longitude": 151.21,
    }


def test_heic_is_read_with_its_fields(tmp_path):
    pytest.importorskip("pillow_heif")
    path = photo(tmp_path / "a.heic", **FULL)
    assert open_image(path).size == (32, 24)
    assert open_image(path.read_bytes(), name="a").size == (32, 24)
    assert read_photo(path).fields["taken"] == "2024-05-01T12:30:00"
