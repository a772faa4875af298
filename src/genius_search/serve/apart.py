"""Decodes an AVIF picture from stdin to a smaller PNG on stdout, in a process whose memory is limited.

Usage: python apart.py BYTES SIDE. An AVIF file may contain pictures of any size, whatever its header says,
and their decoder cannot be told a limit.
"""

from __future__ import annotations

import contextlib
import io
import sys

from PIL import AvifImagePlugin, Image


def main() -> None:
    """Write the picture with its shorter side at least SIDE pixels, and its EXIF data if they are small."""
    limit, side = map(int, sys.argv[1:])
    with contextlib.suppress(ImportError):  # not on Windows
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each needs memory
    opened = Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=["AVIF"])
    exif = opened.info.get("exif", b"")
    small = opened.reduce(max(1, min(opened.size) // side))
    small.save(sys.stdout.buffer, "PNG", compress_level=1, exif=exif)


if __name__ == "__main__":
    main()
