"""The process that decodes a video: it writes frames as JPEG files, and their times as JSON.

A decoder may crash on a damaged file or never end, so it runs as a separate program, which knows
nothing of the package (:mod:`genius_search.data.video` starts it)::

    python video_decoder.py FILE FOLDER '{"mode": "frames", "seconds": 60, ...}'

A key frame of a video can be decoded without any other frame. Most encoders write one at every
scene change, and another after a few seconds. So frames are read in two steps:

1. All packets are read but not decoded, which takes about a second for an hour. The key frames
   among them, at least 1.5 seconds apart, become small videos, which alone are decoded.
2. Longer gaps are filled by seeking, the longest first, as long as time remains.

::

    packets      K..........K.....K...............................K.....
    1. decoded   0          4     6                               19        seconds
    2. filled                          8.6   11   13.6   16.4
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import os
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import cv2
import numpy as np

CONTAINERS: Final = (
    "mov,matroska,webm,avi,mpegts,mpeg,asf,flv,ogg,ivf,h264,hevc,m4v,mjpeg,mpegvideo,mp4"
)
"""Containers that are opened. Playlists are not among them, since they name further files."""
MIN_SPACING: Final = 1.5
"""Minimum number of seconds between decoded frames."""
MAX_GAP: Final = 5.0
"""Number of seconds without a decoded frame above which a gap is filled."""
MAX_EASY_GAP: Final = 2.0
EASY_SECONDS: Final = 5.0
"""Shorter gaps, above two seconds, are filled if a video has taken at most this processor time."""
CUT_WEIGHT: Final = 2.5
"""A gap in which the scene changes counts as this many times its length."""
GROUP_SIZE: Final = 16
"""Number of key frames that are decoded together."""
MAX_DECODED_FRAMES: Final = 4_000
"""Maximum number of decoded frames; those of a longer video are further apart."""
MAX_PACKETS: Final = 10_000_000
"""Maximum number of packets that are read."""
MAX_MEMORY_BYTES: Final = 4 << 30
MIN_BUDGET_SECONDS: Final = 8.0
SECONDS_PER_SECOND: Final = 1 / 45
MAX_SECONDS: Final = 600.0
"""Processor time for a video: 8 seconds, and 40 seconds for each half hour, up to ten minutes."""
MIN_CUT_SHARE: Final = 0.2
"""If at least this share of the pixels has other colours than before, a new scene has begun."""
SAME_DIFFERENCE: Final = 5.0
"""A frame that differs by less from the last chosen one is left out."""
MIN_CONTRAST: Final = 5.0
"""Standard deviation of brightness below which a frame shows nothing, such as a black one."""
SMALL_SIZE: Final = (32, 18)
"""Width and height at which frames are compared."""
MAX_FRAME_PIXELS: Final = 50_000_000
MAX_DURATION: Final = 1e6
"""Seconds; later times are damaged."""
NO_FRAMES: Final = "has no frame that can be decoded; it is damaged, or its codec is unknown"
STREAM_ENDINGS: Final = {
    "H264": "h264",
    "h264": "h264",
    "avc1": "h264",
    "HEVC": "hevc",
    "hevc": "hevc",
    "hev1": "hevc",
    "hvc1": "hevc",
    "FMP4": "m4v",
    "mp4v": "m4v",
    "MJPG": "mjpeg",
    "mjpg": "mjpeg",
    "VP80": "ivf",
    "VP90": "ivf",
    "vp09": "ivf",
    "AV01": "ivf",
    "av01": "ivf",
}
"""Codecs of which a key frame alone is a file that FFmpeg reads, and the ending of that file."""
IVF_CODES: Final = {"vp09": "VP90", "av01": "AV01"}
"""Names that the container IVF has for codecs, where they differ from OpenCV's."""


PARENT: Final = os.getppid()
"""The process that waits for the result."""


class Refused(Exception):
    """The file cannot be used; the message says why."""


class Stream(NamedTuple):
    """Facts about the video that its container states."""

    duration: float
    """Seconds."""
    width: int
    height: int
    codec: str
    rotation: int
    """Clockwise, in degrees."""


class KeyFrame(NamedTuple):
    """A frame that is not decoded yet."""

    seconds: float
    packet: bytes


class Picture(NamedTuple):
    """A decoded frame, reduced, as JPEG, and still smaller for comparisons."""

    seconds: float
    jpeg: bytes
    small: np.ndarray
    colours: np.ndarray
    """Number of pixels of each of 64 colours."""


def main(arguments: Sequence[str]) -> None:
    """Decode a video; write a result, or the reason why there is none, to the standard output."""
    file, folder, written_options = arguments
    options = json.loads(written_options)
    limit_memory_and_time(MIN_BUDGET_SECONDS)
    try:
        match options["mode"]:
            case "probe":
                result = probe(file)
            case "frame":
                result = write_frame(file, Path(folder), options)
            case _:
                result = write_frames(file, Path(folder), options)
    except Refused as refused:
        result = {"error": str(refused)}
    except (cv2.error, MemoryError, ValueError) as error:
        result = {"error": f"cannot be decoded: {type(error).__name__}"}
    sys.stdout.write(json.dumps(result))


def limit_memory_and_time(seconds: float) -> None:
    """Let the system end this process if it takes too much memory or time."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource  # noqa: PLC0415

        # A hard limit could not be raised when the length of the video is known.
        for name, limit in (
            (resource.RLIMIT_CPU, int(2 * seconds) + 5),
            (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            hard_limit = resource.getrlimit(name)[1]
            is_lower = hard_limit != resource.RLIM_INFINITY and hard_limit < limit
            resource.setrlimit(name, (hard_limit if is_lower else limit, hard_limit))


def is_time_up(deadline: float) -> bool:
    """Return whether the processor time is spent; end if the process that waits was killed."""
    if os.getppid() != PARENT:
        raise SystemExit(1)
    return time.process_time() > deadline


def probe(file: str) -> dict[str, Any]:
    """Return the facts about a video, after one frame was read without being decoded."""
    packets, stream = open_packets(file)
    if not packets.grab():
        raise Refused("has no frames")
    return described(stream)


def described(stream: Stream) -> dict[str, Any]:
    """Return the facts about a video as it is seen, upright."""
    width, height = stream.width, stream.height
    if stream.rotation in (90, 270):
        width, height = height, width
    return {"duration": round(stream.duration, 3), "width": width, "height": height}


def write_frames(file: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Write the frames of a video that stand for its moments, and return their times."""
    packets, stream = open_packets(file)
    seconds = min(MAX_SECONDS, MIN_BUDGET_SECONDS + SECONDS_PER_SECOND * stream.duration)
    limit_memory_and_time(seconds)
    deadline = time.process_time() + seconds
    decoder = KeyFrameDecoder(packets, stream, folder, options["side"], deadline)
    pictures = decoder.decode()
    stream = stream._replace(duration=max(stream.duration, decoder.last_seconds))
    gap = max(MAX_GAP, 2 * decoder.spacing)
    pictures += fill_gaps(file, stream, pictures, gap, options["side"], deadline)
    pictures.sort(key=lambda picture: picture.seconds)
    chosen = choose_frames(pictures, options["gap"], options["frames"])
    if not chosen:
        raise Refused(NO_FRAMES)
    moments = {round(1000 * picture.seconds): picture.jpeg for picture in chosen}
    for moment, jpeg in moments.items():
        (folder / f"{moment}.jpg").write_bytes(jpeg)
    return described(stream) | {"moments": [*moments]}


def write_frame(file: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Write the frame at a time."""
    _, stream = open_packets(file)
    frames = open_frames(file)
    frames.set(cv2.CAP_PROP_POS_MSEC, 1000 * options["moment"])
    picture = read_picture(frames, stream.rotation, options["side"])
    if picture is None:  # the time is after the last frame
        frames = open_frames(file)
        picture = read_picture(frames, stream.rotation, options["side"])
    if picture is None:
        raise Refused(NO_FRAMES)
    (folder / "frame.jpg").write_bytes(picture.jpeg)
    return described(stream)


def open_packets(file: str) -> tuple[cv2.VideoCapture, Stream]:
    """Open a video whose packets are read but not decoded."""
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = (
        f"protocol_whitelist;file|format_whitelist;{CONTAINERS}"
    )
    packets = cv2.VideoCapture(file, cv2.CAP_FFMPEG, [cv2.CAP_PROP_FORMAT, -1])
    if not packets.isOpened():
        raise Refused("is not a video in a supported format, or is damaged")
    width = int(packets.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(packets.get(cv2.CAP_PROP_FRAME_HEIGHT))
    rate = packets.get(cv2.CAP_PROP_FPS)
    count = packets.get(cv2.CAP_PROP_FRAME_COUNT)
    code = int(packets.get(cv2.CAP_PROP_FOURCC))
    codec = code.to_bytes(4, "little", signed=code < 0).decode("latin-1")
    rotation = int(packets.get(cv2.CAP_PROP_ORIENTATION_META)) % 360
    duration = min(count / rate, MAX_DURATION) if rate > 0 and count > 0 else 0.0
    if width < 1 or height < 1:
        raise Refused("has no pictures; it is damaged, or contains sound alone")
    if width * height > MAX_FRAME_PIXELS:
        raise Refused(
            f"is {width:,} x {height:,} pixels; at most {MAX_FRAME_PIXELS:,} pixels are allowed"
        )
    return packets, Stream(duration, width, height, codec, rotation)


def open_frames(file: str) -> cv2.VideoCapture:
    """Open a video whose frames are decoded, in one thread, and not turned."""
    frames = cv2.VideoCapture(file, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    frames.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    return frames


class KeyFrameDecoder:
    """Decodes the key frames of a video while its packets are read.

    They are at least :attr:`spacing` seconds apart, and further apart while decoding takes more
    than its share of the time, so that the end of a video is read as its beginning.
    """

    def __init__(
        self,
        packets: cv2.VideoCapture,
        stream: Stream,
        folder: Path,
        side: int,
        deadline: float,
    ) -> None:
        self.spacing = max(MIN_SPACING, stream.duration / MAX_DECODED_FRAMES)
        self.last_seconds = 0.0
        """The time of the last packet."""
        self._packets = packets
        self._stream = stream
        self._side = side
        self._deadline = deadline
        self._ending = STREAM_ENDINGS.get(stream.codec)
        # Frames are decoded from a file, because FFmpeg's probing needs to seek.
        self._file = folder / f"group-{os.getpid()}.{self._ending}"
        index = int(packets.get(cv2.CAP_PROP_CODEC_EXTRADATA_INDEX))
        has_header, header = packets.retrieve(flag=index)
        self._header = header.tobytes() if has_header and header is not None else b""

    def decode(self) -> list[Picture]:
        """Return the key frames, by time."""
        pictures: list[Picture] = []
        group: list[KeyFrame] = []
        start = time.process_time()
        pace = (self._deadline - start) / (2 * self._stream.duration or math.inf)
        spacing = self.spacing
        next_seconds = 0.0
        for _ in range(MAX_PACKETS):
            if not self._packets.grab() or is_time_up(self._deadline):
                break
            seconds = self._packets.get(cv2.CAP_PROP_POS_MSEC) / 1000
            if not 0 <= seconds < MAX_DURATION:
                continue
            self.last_seconds = max(self.last_seconds, seconds)
            is_key = self._packets.get(cv2.CAP_PROP_LRF_HAS_KEY_FRAME)
            if self._ending is None or not is_key or seconds < next_seconds:
                continue
            is_read, packet = self._packets.retrieve()
            if is_read:
                group.append(KeyFrame(seconds, packet.tobytes()))
                next_seconds = seconds + spacing
            if len(group) == GROUP_SIZE:
                pictures += self._decode_group(group)
                group = []
                is_late = time.process_time() - start > MIN_BUDGET_SECONDS + pace * seconds
                spacing = 2 * spacing if is_late else self.spacing
        pictures += self._decode_group(group)
        self._file.unlink(missing_ok=True)
        return sorted(pictures, key=lambda picture: picture.seconds)

    def _decode_group(self, group: Sequence[KeyFrame]) -> list[Picture]:
        """Decode key frames together, or each alone if the number of pictures is another."""
        if not group:
            return []
        write_stream(self._file, group, self._stream, self._header)
        frames = open_frames(str(self._file))
        pictures: list[Picture] = []
        while len(pictures) <= len(group):
            picture = read_picture(frames, self._stream.rotation, self._side)
            if picture is None:
                break
            pictures.append(picture)
        if len(pictures) == len(group):
            pairs = zip(group, pictures, strict=True)
            return [picture._replace(seconds=frame.seconds) for frame, picture in pairs]
        if len(group) == 1:
            return []
        return [picture for frame in group for picture in self._decode_group([frame])]


def write_stream(file: Path, group: Sequence[KeyFrame], stream: Stream, prefix: bytes) -> None:
    """Write key frames as a small video without a container, or in the simplest one, IVF."""
    if file.suffix != ".ivf":
        file.write_bytes(prefix + b"".join(frame.packet for frame in group))
        return
    code = IVF_CODES.get(stream.codec, stream.codec).encode("latin-1")
    size = (min(stream.width, 65535), min(stream.height, 65535))
    parts = [struct.pack("<4sHH4sHHIIII", b"DKIF", 0, 32, code, *size, 25, 1, len(group), 0)]
    for number, frame in enumerate(group):
        parts += [struct.pack("<IQ", len(frame.packet), number), frame.packet]
    file.write_bytes(b"".join(parts))


def fill_gaps(
    file: str,
    stream: Stream,
    pictures: Sequence[Picture],
    max_gap: float,
    side: int,
    deadline: float,
) -> list[Picture]:
    """Return frames inside of long gaps, the longest first, as long as time remains.

    The middle of a gap is decoded, and then those of both halves. A gap counts more if the
    scene changes in it.
    """
    filled: list[Picture] = []
    gaps: list[tuple[float, int, Picture | None, Picture | None]] = []

    numbers = itertools.count()

    def bounds(before: Picture | None, after: Picture | None) -> tuple[float, float]:
        start = 0.0 if before is None else before.seconds
        return start, stream.duration if after is None else after.seconds

    def add_gap(before: Picture | None, after: Picture | None) -> None:
        start, end = bounds(before, after)
        is_cut = before is not None and after is not None and is_new_scene(after, before)
        # Gaps of the same length are ordered by a number, since pictures cannot be compared.
        length = (end - start) * (CUT_WEIGHT if is_cut else 1)
        heapq.heappush(gaps, (-length, next(numbers), before, after))

    frames = open_frames(file)
    if not pictures:
        first = read_picture(frames, stream.rotation, side)
        filled = [] if first is None else [first]
    decoded = [*pictures, *filled]
    for before, after in zip([None, *decoded], [*decoded, None], strict=True):
        add_gap(before, after)
    while gaps and not is_time_up(deadline):
        negative_length, _, before, after = heapq.heappop(gaps)
        is_easy = time.process_time() < EASY_SECONDS
        if -negative_length <= (MAX_EASY_GAP if is_easy else max_gap):
            break
        start, end = bounds(before, after)
        frames.set(cv2.CAP_PROP_POS_MSEC, 500 * (start + end))
        picture = read_picture(frames, stream.rotation, side)
        if picture is None or not start < picture.seconds < end:
            continue
        filled.append(picture)
        add_gap(before, picture)
        add_gap(picture, after)
    return filled


def read_picture(frames: cv2.VideoCapture, rotation: int, side: int) -> Picture | None:
    """Decode the next frame, reduce it so that its shorter side has ``side`` pixels, and turn it.

    None at the end of the video.
    """
    is_read, pixels = frames.read()
    if not is_read or pixels is None:
        return None
    seconds = frames.get(cv2.CAP_PROP_POS_MSEC) / 1000
    height, width = pixels.shape[:2]
    factor = side / min(width, height)
    if factor < 1:
        # A side of a very long frame is still at least one pixel.
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    turns = {90: cv2.ROTATE_90_CLOCKWISE, 180: cv2.ROTATE_180, 270: cv2.ROTATE_90_COUNTERCLOCKWISE}
    if rotation in turns:
        pixels = cv2.rotate(pixels, turns[rotation])
    small = cv2.resize(pixels, SMALL_SIZE, interpolation=cv2.INTER_AREA)
    colours = cv2.calcHist([small], [0, 1, 2], None, [4, 4, 4], [0, 256] * 3).ravel()
    return Picture(seconds, encode_jpeg(pixels), small.astype(np.float32), colours)


def choose_frames(pictures: Sequence[Picture], gap: float, max_frames: int) -> list[Picture]:
    """Choose the frames at scene changes, and one every ``gap`` seconds, without near-equal ones.

    The first frame after a change is chosen at once; frames that show nothing, such as black ones,
    only if there are no others.
    """
    visible = [picture for picture in pictures if picture.small.std() >= MIN_CONTRAST]
    chosen: list[Picture] = []
    previous: Picture | None = None
    for picture in visible or pictures[:1]:
        last = chosen[-1] if chosen else None
        if previous is None or last is None:
            chosen.append(picture)
        elif difference(picture, last) >= SAME_DIFFERENCE:
            is_cut = is_new_scene(picture, previous)
            if is_cut or picture.seconds >= last.seconds + gap:
                chosen.append(picture)
        previous = picture
    if len(chosen) > max_frames:
        chosen = [chosen[row] for row in np.linspace(0, len(chosen) - 1, max_frames).astype(int)]
    return chosen


def difference(first: Picture, second: Picture) -> float:
    """Return the mean absolute difference of two small pictures, from 0 to 255."""
    return float(np.abs(first.small - second.small).mean())


def is_new_scene(picture: Picture, previous: Picture) -> bool:
    """Return whether many pixels have colours that the previous picture does not have."""
    num_new = np.maximum(picture.colours - previous.colours, 0).sum()
    return bool(num_new >= MIN_CUT_SHARE * picture.colours.sum())


def encode_jpeg(pixels: np.ndarray) -> bytes:
    """Return a picture as JPEG."""
    is_encoded, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 88])
    if not is_encoded:
        raise Refused("has a frame that cannot be written as JPEG")
    return bytes(data.tobytes())


if __name__ == "__main__":
    main(sys.argv[1:])
