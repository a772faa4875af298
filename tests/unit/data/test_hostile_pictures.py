"""Small files whose pictures would take much memory or time."""

import io
import json
import struct
import tempfile
import threading
import zlib
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, TiffImagePlugin, features

from genius_search.data import images
from genius_search.data.images import TooManyPixels, read_image, read_photo_fields
from genius_search.errors import BadImage

SERVICE = {"max_pixels": 25_000_000, "shortest_side": 256}


def saved(mode: str, size: tuple[int, int], kind: str, **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def in_scans(side: int, components: int = 3) -> bytes:
    """A grey JPEG that is not progressive and whose colours come one after the other."""

    def segment(kind: int, data: bytes) -> bytes:
        return bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2) + data

    numbers = range(1, components + 1)
    frame = struct.pack(">BHHB", 8, side, side, components) + b"".join(bytes([n, 0x11, 0]) for n in numbers)
    tables = [segment(0xC4, bytes([kind, 1, *[0] * 15, 0])) for kind in (0x00, 0x10)]
    zeros = bytes((-(-side // 8)) ** 2 // 4 + 1)
    scans = [segment(0xDA, bytes([1, n, 0, 0, 63, 0])) + zeros for n in numbers]
    head = segment(0xE1, b"a \xff\xda in a comment") + segment(0xDB, bytes([0] + [1] * 64))
    return b"\xff\xd8" + head + segment(0xC0, frame) + b"".join(tables + scans) + b"\xff\xd9"


def tiff(tags: list[tuple[int, int, int, int]], before: bytes = b"") -> bytes:
    """A TIFF with tags (number, type, count, value), after other data from byte 8 on."""
    before += b"\0" * (len(before) % 2)
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(before))
        + before
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )


def of_size(width: int, height: int) -> list[tuple[int, int, int, int]]:
    return [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]


def test_a_jpeg_in_several_scans_counts_whole_since_it_is_held_whole():
    side = 5_200
    with pytest.raises(TooManyPixels):
        read_image(in_scans(side), name="x", **SERVICE)
    assert read_image(in_scans(640), name="x", **SERVICE).size == (320, 320)
    with pytest.raises(TooManyPixels):
        read_image(saved("RGB", (side, side), "JPEG", progressive=True), name="x", **SERVICE)
    whole = saved("RGB", (side, side), "JPEG")
    assert read_image(whole, name="x", **SERVICE).size == (650, 650)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_formats_whose_decoders_make_copies_may_have_fewer_pixels(kind):
    if not features.check(kind.lower()):
        pytest.skip(f"this Pillow has no {kind}")
    limits = {"max_pixels": 60_000, "shortest_side": 64}
    assert read_image(saved("RGB", (140, 140), kind), name="x", **limits).size == (70, 70)
    with pytest.raises(TooManyPixels, match=rf"decoding this {kind} takes .* at most 0 MB"):
        read_image(saved("RGB", (240, 240), kind), name="x", **limits)
    assert read_image(saved("RGB", (240, 240), "PNG"), name="x", **limits).size == (120, 120)


def test_the_tiles_of_a_tiff_count_however_small_the_picture_is():
    data = zlib.compress(bytes(300 * 300))
    tags = [*of_size(300, 300), (259, 3, 1, 8), (324, 4, 1, 8), (325, 4, 1, len(data))]
    with pytest.raises(TooManyPixels, match="256 MB"):
        read_image(tiff([*tags, (322, 4, 1, 16_000), (323, 4, 1, 16_000)], data), name="x", **SERVICE)
    small = tiff([*tags, (322, 4, 1, 304), (323, 4, 1, 304)], zlib.compress(bytes(304 * 304)))
    assert read_image(small, name="x", **SERVICE).size == (300, 300)


@pytest.mark.parametrize("tag", [273, 258])
def test_a_tiff_with_a_tag_of_very_many_numbers_is_refused_before_they_are_made(tag):
    many = 250_000
    data = tiff([*of_size(30, 30), (tag, 4, many, 8)], bytes(4 * many))
    with pytest.raises(BadImage, match="the tags of this TIFF have 250,"):
        read_image(data, name="x")
    half = tiff([*of_size(30, 30), (tag, 4, many // 2, 8), (282, 5, many // 2, 8)], bytes(4 * many))
    with pytest.raises(BadImage, match="values"):
        read_image(half, name="x")
    nested = struct.pack("<H", 1) + struct.pack("<HHII", 0x829A, 4, many, 30) + bytes(4 + 4 * many)
    with pytest.raises(BadImage, match="values"):
        read_image(tiff([*of_size(30, 30), (0x8769, 4, 1, 8)], nested), name="x")


@pytest.mark.parametrize("place", [8, 10**6, 2**32 - 1])
def test_a_tiff_whose_tags_are_elsewhere_or_go_in_a_circle_is_refused(place):
    circle = tiff([(0x8769, 4, 1, 8)] * 3)
    for data in (b"II*\0" + struct.pack("<I", place) + circle[8:], b"MM\0+" + struct.pack(">Q", place)):
        with pytest.raises(BadImage):
            read_image(data, name="x")


def test_a_very_long_picture_is_squeezed_and_an_absurdly_long_one_refused():
    image = read_image(saved("RGB", (256, 60_000), "PNG"), name="x", **SERVICE)
    assert image.width == 256
    assert 4_096 <= image.height <= 8_192
    with pytest.raises(TooManyPixels, match="200,000 pixels long"):
        read_image(saved("1", (1, 200_000), "PNG"), name="x", **SERVICE)


def test_pictures_that_together_take_too_much_are_decoded_one_after_the_other(monkeypatch):
    running: list[int] = []
    at_most = 0
    together = threading.Barrier(2)
    original = images._to_rgb

    def slow(*arguments):
        nonlocal at_most
        running.append(1)
        at_most = max(at_most, len(running))
        try:
            together.wait(0.3 if limit else 30)
        except threading.BrokenBarrierError:
            together.reset()
        running.pop()
        return original(*arguments)

    def read():
        assert read_image(data, name="x").size == (100, 100)

    data = saved("RGB", (100, 100), "PNG")
    monkeypatch.setattr(images, "_to_rgb", slow)
    for limit, expected in ((100_000, 1), (0, 2)):
        monkeypatch.setattr(images, "DECODING", images._Budget(limit or 1_000_000))
        at_most = 0
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert at_most == expected


def test_the_service_limits_the_texts_of_a_png():
    from genius_search.serve import service  # noqa: F401, PLC0415

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    text = zlib.compress("\U0001f600".encode() + b"a" * 1_000_000)
    texts = b"".join(chunk(b"iTXt", b"k%d\0\1\0\0\0" % number + text) for number in range(10))
    plain = saved("L", (30, 30), "PNG")
    with pytest.raises(BadImage, match="text"):
        read_image(plain[:33] + texts + plain[33:], name="x")


HOSTILE = [0, 1, 2**31, 2**32 - 1]


def entry(order: str, tag: int, kind: int, count: int, value: bytes | int) -> bytes:
    value = value if isinstance(value, bytes) else struct.pack(order + "I", value)
    return struct.pack(order + "HHI", tag, kind, count) + value.ljust(4, b"\0")[:4]


def hostile_exif(order: str, text: bytes, rational: tuple[int, int], kind: int, count: int) -> bytes:
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
    return head + struct.pack(order + "H", len(tags)) + b"".join(tags) + bytes(4) + data + b"".join(lists)


@settings(max_examples=200)
@given(
    order=st.sampled_from("<>"),
    text=st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [b"x" * 60_000, b"\x1b]0;x\7", b"9999:99:99 99:99:99", b"0001:01:01 00:00:00", b"\xff" * 19]
        ),
    ),
    rational=st.tuples(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE)),
    kind=st.sampled_from([*range(14), 99, 65_535]),
    count=st.sampled_from([0, 1, 2, 3, 4, 9]),
    ending=st.sampled_from(["JPEG", "PNG", "WEBP", *(["HEIF"] if "HEIF" in images._FORMATS else [])]),
)
def test_hostile_exif_data_change_no_picture_and_give_no_nonsense(order, text, rational, kind, count, ending):
    file = io.BytesIO()
    data = hostile_exif(order, text, rational, kind, count)
    Image.new("RGB", (32, 24), "red").save(file, ending, exif=data)
    assert sorted(read_image(file.getvalue(), name="x").size) == [24, 32]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(file.getvalue())
        fields = read_photo_fields(path)
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
        TiffImagePlugin.IFDRational, "__init__", lambda *words: (made.append(1), original(*words))[1]
    )
    assert read_image(plain[:2] + segments + plain[start:], name="x").size == (40, 20)
    assert len(made) < 10
    small = b"Exif\0\0" + many_rationals(1)
    small = b"\xff\xe1" + (len(small) + 2).to_bytes(2) + small
    read_image(plain[:2] + small + plain[start:], name="x")
    assert made


def test_the_small_picture_in_a_heic_file_is_not_decoded():
    pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    Image.new("RGB", (400, 300)).save(file, "HEIF", thumbnails=[200])
    assert b"thmb" in file.getvalue()
    with Image.open(io.BytesIO(file.getvalue())) as opened:
        assert opened.draft(None, (64, 64)) is None
    assert read_image(file.getvalue(), name="x", shortest_side=64).size == (100, 75)
