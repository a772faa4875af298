import struct
import threading
import time
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genius_search.data import images
from genius_search.data.images import TooManyPixels, open_image
from genius_search.errors import BadImage

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def halves(left=RED, right=GREEN, size=(40, 20)):
    """Red on the left, green on the right: turning it is visible."""
    image = Image.new("RGB", size, left)
    image.paste(right, (size[0] // 2, 0, size[0], size[1]))
    return image


def near(image: Image.Image, at: tuple[int, int], colour: tuple[int, int, int], tolerance=12) -> bool:
    pixel = image.getpixel(at)
    return all(abs(int(a) - b) <= tolerance for a, b in zip(pixel, colour, strict=True))


def bomb_png(path: Path, width: int, height: int) -> Path:
    """A PNG of a few bytes whose header claims any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

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


def exif_with(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(tmp_path, orientation):
    ops = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    want = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40).convert("RGB")
    stored = want
    for op in ops[orientation]:
        stored = stored.transpose(op)
    stored.save(tmp_path / "a.png", exif=exif_with(orientation))
    assert np.array_equal(np.asarray(open_image(tmp_path / "a.png")), np.asarray(want))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_every_colour_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode in {"CMYK", "YCbCr"} else "a.png")
    image = halves(WHITE, (0, 0, 0))
    (image if mode == "HSV" else image.convert(mode)).save(path)
    opened = open_image(path)
    assert opened.mode == "RGB"
    assert near(opened, (3, 3), WHITE)
    assert near(opened, (36, 16), (0, 0, 0))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bit_grey_keeps_its_shades(tmp_path, suffix):
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16)).save(path)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 100, 255]


@pytest.mark.parametrize(
    ("values", "shades"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
    ],
)
def test_floating_point_grey_is_scaled(tmp_path, values, shades):
    Image.fromarray(np.array([values], dtype=np.float32)).save(tmp_path / "a.tiff")
    assert np.asarray(open_image(tmp_path / "a.tiff"))[0, :, 0].tolist() == shades


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(tmp_path, mode):
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (10, 0, 20, 10))
    image.convert(mode).save(tmp_path / "a.png")
    opened = open_image(tmp_path / "a.png")
    assert near(opened, (2, 2), (0, 0, 0))
    assert near(opened, (17, 5), WHITE)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_an_animation_shows_its_first_frame(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert near(open_image(path), (8, 8), RED)


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
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(tmp_path, name, reason):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    assert reason in refused(tmp_path / name)


@pytest.mark.parametrize("size", [(9_000, 9_000), (11_000, 11_000), (65_000, 65_000)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, size):
    path = bomb_png(tmp_path / "bomb.png", *size)
    start = time.process_time()
    with pytest.raises(TooManyPixels, match="pixels"):
        open_image(path)
    assert time.process_time() - start < 1


def test_the_limit_is_the_last_size_allowed(tmp_path):
    halves(size=(40, 20)).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png", max_pixels=800).size == (40, 20)
    assert "40 x 20 = 800 pixels; at most 799" in refused(tmp_path / "a.png", max_pixels=799)


def test_a_jpeg_is_decoded_no_larger_than_needed(tmp_path):
    halves(size=(1600, 800)).save(tmp_path / "a.jpg")
    small = open_image(tmp_path / "a.jpg", shortest_side=100)
    assert small.size == (200, 100)
    assert near(small, (20, 50), RED)
    assert open_image(tmp_path / "a.jpg", shortest_side=101).size == (400, 200)
    assert open_image(tmp_path / "a.jpg", shortest_side=900).size == (1600, 800)


def test_a_huge_photograph_is_welcome_when_a_small_copy_suffices(tmp_path):
    Image.new("L", (9_000, 6_000), 128).save(tmp_path / "huge.jpg", quality=5)
    assert "54,000,000 pixels" in refused(tmp_path / "huge.jpg")
    assert open_image(tmp_path / "huge.jpg", shortest_side=224).size == (1125, 750)


def test_threads_read_at_once_and_leave_the_warning_filters_alone(tmp_path):
    path = tmp_path / "a.jpg"
    halves(size=(256, 256)).save(path)
    before = list(warnings.filters)
    start = threading.Barrier(4)

    def read(_):
        start.wait()
        return [open_image(path).getpixel((3, 3)) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        seen = {pixel for pixels in pool.map(read, range(4)) for pixel in pixels}
    assert len(seen) == 1
    assert list(warnings.filters) == before


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


def test_a_large_picture_is_converted_with_little_more_memory_than_its_result(tmp_path):
    path = tmp_path / "x.png"
    Image.fromarray(np.zeros((4_000, 4_000), np.uint16)).save(path)
    tracemalloc.start()  # NumPy's share: float64 of all pixels would be 128 MB
    assert open_image(path, shortest_side=256).size == (500, 500)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20


def test_a_picture_is_reduced_as_long_as_its_shorter_side_is_long_enough(tmp_path):
    Image.new("RGB", (900, 520), "red").save(tmp_path / "x.png")
    sizes = [open_image(tmp_path / "x.png", shortest_side=side).size for side in (None, 521, 260, 130, 4)]
    assert sizes == [(900, 520), (900, 520), (450, 260), (225, 130), (113, 65)]
