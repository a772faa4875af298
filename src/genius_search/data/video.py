"""Frames of videos, which stand for their moments, and the texts of subtitles with their times.

A video is decoded in a separate process (``video_decoder.py``), since decoders may crash on
damaged files. Its frames are cached, and so is the reason why a file cannot be read::

    ~/.cache/genius-search/videos/5f0c…/result.json    duration, size and times of the frames
                                       /7320.jpg       the frame at 7.32 seconds
                                 /5f0c….json           duration and size alone
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from filelock import FileLock
from PIL import Image

from genius_search.data.cache import user_cache
from genius_search.data.images import VIDEO_SUFFIXES, is_video_file, open_image, require_file
from genius_search.data.subtitles import Cue, match_subtitles, read_cues
from genius_search.errors import BadImage
from genius_search.records import composed
from genius_search.text import clean
from genius_search.writing import make_folder, new_folder, write_file

_MEDIA_TYPES: Final = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",  # the same container, which browsers play under this name only
    ".webm": "video/webm",
    ".mkv": "video/webm",  # likewise
    ".ogv": "video/ogg",
}
"""Media types by ending; browsers play no other videos."""
UNKNOWN_TYPE: Final = "application/octet-stream"
MAX_WALL_SECONDS: Final = 1_800.0
"""Maximum time for a video. The decoder's own limit of processor time is far below."""
MAX_FRAMES: Final = 1_000
"""Maximum number of frames of a video."""
SECONDS_BETWEEN_FRAMES: Final = 5.0
"""A scene that goes on has a frame every five seconds, unless nothing changes."""
FRAME_SIDE: Final = 320
"""Maximum length of the shorter side of frames, in pixels."""
MAX_CUES: Final = 5_000
"""Maximum number of cues of a video's subtitles."""
FRAMES: Final = "videos"
"""Name of the folder of frames in the cache."""
RESULT: Final = "result.json"
"""Name of the file with the times of frames."""
_CACHE_VERSION: Final = 1
"""Version of the cached frames; to be increased when others are chosen."""
_DECODER: Final = Path(__file__).with_name("video_decoder.py")
_Mode: TypeAlias = Literal["frames", "probe", "frame"]


class VideoFacts(NamedTuple):
    """Facts about a video that its container states."""

    duration: float
    """Seconds."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Video:
    """A video whose frames are in the cache."""

    facts: VideoFacts
    moments: tuple[int, ...]
    """Times of the frames in milliseconds, ascending; at least one."""
    folder: Path
    """Folder of the frames."""

    def frame(self, moment: int) -> Path:
        """Return the file of the frame at a moment."""
        return self.folder / f"{moment}.jpg"


def frame_file(path: Path, moment: int) -> Path:
    """Return the file of a video's frame, which does not exist if the video cannot be read."""
    try:
        return read_video(path).frame(moment)
    except BadImage:
        return path.with_name(f"{path.name}@{moment}")


def video_type(path: Path) -> str | None:
    """Return the media type of a file with an ending of videos; None for other files."""
    suffix = path.suffix.lower()
    return _MEDIA_TYPES.get(suffix, UNKNOWN_TYPE) if suffix in VIDEO_SUFFIXES else None


def read_video(path: Path) -> Video:
    """Return a video with its frames, from the cache if possible.

    Raises
    ------
    BadImage
        The file is missing or cannot be decoded.
    """
    folder = _cached_name(path)
    result_file = folder / RESULT
    if not result_file.is_file():
        # One video at a time, since a decoder may need gigabytes.
        with _writable_cache(path), FileLock(folder.parent / ".lock"):
            if not result_file.is_file():
                shutil.rmtree(folder, ignore_errors=True)
                with new_folder(folder) as temporary:
                    result = _decode(path, temporary, "frames")
                    (temporary / RESULT).write_text(json.dumps(result), encoding="utf-8")
    result = json.loads(result_file.read_text(encoding="utf-8"))
    return Video(_facts(path, result), tuple(result["moments"]), folder)


def probe_video(path: Path) -> VideoFacts:
    """Return facts about a video without decoding it, from the cache if possible.

    Raises
    ------
    BadImage
        The file is missing, or is not a video.
    """
    name = _cached_name(path)
    for cached in (name / RESULT, name.with_suffix(".json")):
        if cached.is_file():
            return _facts(path, json.loads(cached.read_text(encoding="utf-8")))
    with _writable_cache(path):
        result = _decode(path, name.parent, "probe")
        write_file(name.with_suffix(".json"), json.dumps(result).encode())
    return _facts(path, result)


@contextlib.contextmanager
def _writable_cache(path: Path) -> Iterator[None]:
    """Create the folder of frames; raise :class:`BadImage` if nothing can be written there."""
    try:
        make_folder(user_cache() / FRAMES)
        yield
    except OSError as error:
        reason = f"cannot be decoded: {user_cache() / FRAMES}: {error.strerror}; set XDG_CACHE_HOME"
        raise BadImage(path, reason) from None


def video_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a video: ``kind``, ``duration`` in seconds, ``width`` and ``height``.

    Once its frames are read, the field ``poster`` is the second of the one that stands for it.
    """
    fields: dict[str, Any] = {"kind": "video"}
    with contextlib.suppress(BadImage):  # a reader of the frames reports it
        fields |= probe_video(path)._asdict()
        if (_cached_name(path) / RESULT).is_file():
            fields["poster"] = read_video(path).moments[0] / 1000
    return fields


def _cached_name(path: Path) -> Path:
    """Return the folder of a video's frames, which need not exist."""
    require_file(path)
    status = path.stat()
    name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {_CACHE_VERSION}"
    return user_cache() / FRAMES / hashlib.sha256(name.encode()).hexdigest()[:24]


def _facts(path: Path, result: dict[str, Any]) -> VideoFacts:
    """Return the facts of a result; raise :class:`BadImage` if it is an error."""
    if "error" in result:
        raise BadImage(path, result["error"])
    return VideoFacts(result["duration"], result["width"], result["height"])


def _decode(path: Path, folder: Path, mode: _Mode, *, moment: float = 0.0) -> dict[str, Any]:
    """Run the decoder, which writes into a folder; return its result, or the reason for none."""
    options = {
        "mode": mode,
        "side": FRAME_SIDE,
        "gap": SECONDS_BETWEEN_FRAMES,
        "frames": MAX_FRAMES,
        "moment": moment,
    }
    # -P: modules of this folder must not hide others. Logs of damaged files are no use to anybody.
    command = [sys.executable, "-P", str(_DECODER), str(path), str(folder), json.dumps(options)]
    quiet = {"OPENCV_LOG_LEVEL": "SILENT", "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    try:
        process = subprocess.run(  # noqa: S603  no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **quiet},
            timeout=MAX_WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:  # not cached, since the disk or the machine was slow
        raise BadImage(path, f"takes more than {MAX_WALL_SECONDS:,.0f} seconds to decode") from None
    except OSError as error:
        raise BadImage(path, f"cannot be decoded: {error.strerror}") from None
    if process.returncode or not process.stdout:
        return {"error": "makes the decoder crash, or takes too much time or memory; convert it"}
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def open_frame(path: Path, seconds: float | None = None) -> Image.Image:
    """Return a frame of a video: the cached one nearest to a time, or else the frame at that time.

    Parameters
    ----------
    seconds
        None for the frame that stands for the video: the first one that shows anything.

    Raises
    ------
    BadImage
        The file is missing or cannot be decoded.
    """
    if (_cached_name(path) / RESULT).is_file():
        video = read_video(path)
        requested = video.moments[0] if seconds is None else 1000 * seconds
        nearest = min(video.moments, key=lambda moment: abs(moment - requested))
        return open_image(video.frame(nearest))
    if seconds is None:
        seconds = min(1.0, probe_video(path).duration / 2)
    with tempfile.TemporaryDirectory() as folder:
        _facts(path, _decode(path, Path(folder), "frame", moment=seconds))
        return open_image(Path(folder, "frame.jpg"))


def open_still(path: Path, *, shortest_side: int | None = None) -> Image.Image:
    """Return a picture, or of a video the frame that stands for it.

    Raises
    ------
    BadImage
        The file cannot be read.
    """
    if not is_video_file(path):
        return open_image(path, shortest_side=shortest_side)
    video = read_video(path)
    return open_image(video.frame(video.moments[0]))


def find_cues(video: Path) -> list[Cue]:
    """Return the cues of all subtitles of a video; a damaged file of subtitles has none."""
    try:
        neighbours = sorted(video.parent.iterdir())
    except OSError:
        return []
    cues: list[Cue] = []
    for file in match_subtitles([video], neighbours)[video]:
        try:
            cues += read_cues(file)
        except BadImage:  # it is reported when the folder is read
            continue
    return cues[:MAX_CUES]


def cue_text(cue: Cue) -> str:
    """Return the text of a cue in one line, as items store texts."""
    return " ".join(clean(composed(cue.text)).split())


def find_cue_spans(text: str, cues: Sequence[Cue]) -> list[tuple[int, int, int]]:
    """Return start and end of each cue in the text of a video, and its time in milliseconds."""
    spans = []
    position = 0
    for cue in cues:
        line = cue_text(cue)
        start = text.find(line, position) if line else -1
        if start >= 0:
            position = start + len(line)
            spans.append((start, position, round(1000 * cue.start)))
    return spans
