"""Subtitles: SubRip (``.srt``) and WebVTT (``.vtt``) files, texts with times.

A file is a list of cues. The text of a file without a video has marks of time, which stay in
passages and hits, and from which :func:`genius_search.text.second_at` computes the second of a
passage::

    00:00:01,000 --> 00:00:03,500        [0:00:01] The kite
    The kite                             is red.
                                         [0:00:14] We go home.
    00:00:03,500 --> 00:00:05,000
    is red.

    00:00:14,000 --> 00:00:16,000
    We go home.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.data.captions import normalize_path
from genius_search.data.text_files import read_text
from genius_search.errors import BadImage
from genius_search.text import format_seconds

SUBTITLE_SUFFIXES: Final = (".srt", ".vtt")
"""Endings of subtitles, in order of priority."""
SECONDS_BETWEEN_MARKS: Final = 10.0
"""Minimum time between two marks of time in a text."""
# Hours are optional: 01:02:03,500 --> 1:02:05.000 position:10%
_TIMES: Final = re.compile(
    r"[ \t]*((?:\d{1,4}:)?\d{1,2}:\d{2}[.,]\d{1,3})[ \t]*-->"
    r"[ \t]*((?:\d{1,4}:)?\d{1,2}:\d{2}[.,]\d{1,3})(?:[ \t].*)?"
)
_SPEAKER: Final = re.compile(r"<v(?:\.[^\s<>]*)?\s+([^<>]{1,80})>")
"""The name of a speaker in WebVTT: ``<v Ada>The kite is red.``"""
_MARKUP: Final = re.compile(r"</?[a-zA-Z0-9][^<>]*>|\{\\[^{}]*\}")
"""Tags such as ``<i>``, times inside cues such as ``<00:01.500>``, and positions ``{\\an8}``."""
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}([-_][a-z0-9]{2,8})*|forced|sdh|cc", re.IGNORECASE)
"""The part of a name before the ending that gives a language: ``film.pt-BR.srt``."""


class Cue(NamedTuple):
    """A text that is shown for some time."""

    start: float
    """Seconds from the beginning of the video."""
    end: float
    text: str
    """Without tags; lines are separated by line breaks."""


def is_subtitle_file(path: Path) -> bool:
    """Return whether a file has the ending of subtitles."""
    return path.suffix.lower() in SUBTITLE_SUFFIXES


def match_subtitles(videos: Iterable[Path], files: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the videos, each with its subtitles in order of priority.

    The subtitles of ``film.mp4`` are ``film.mp4.srt``, ``film.srt`` and, for languages,
    ``film.de.srt``, likewise with ``.vtt``. Names are compared without case.
    """
    subtitles: dict[Path, list[tuple[int, int, Path]]] = {video: [] for video in videos}
    videos_by_name: dict[str, Path] = {}
    for video in sorted(subtitles, reverse=True):  # film.mp4 wins over film.webm
        videos_by_name[_spell(video.with_suffix(""))] = video
    for video in subtitles:
        videos_by_name[_spell(video)] = video
    for path in filter(is_subtitle_file, files):
        name = path.with_suffix("")
        match = videos_by_name.get(_spell(name))
        rank = 1
        if match is None and _LANGUAGE.fullmatch(name.suffix[1:]):
            match = videos_by_name.get(_spell(name.with_suffix("")))
            rank = 2
        if match is not None:
            rank = 0 if _spell(name) == _spell(match) else rank
            subtitles[match].append((rank, SUBTITLE_SUFFIXES.index(path.suffix.lower()), path))
    return {video: [path for *_, path in sorted(ranked)] for video, ranked in subtitles.items()}


def _spell(path: Path) -> str:
    return normalize_path(path).lower()


def read_cues(path: Path) -> list[Cue]:
    """Return the cues of a file in the order of their times; at least one.

    Raises
    ------
    BadImage
        The file cannot be read, is too large, or has no cues.
    """
    cues = parse_cues(read_text(path))
    if not cues:
        raise BadImage(path, "has no subtitles: no line such as 00:00:01,000 --> 00:00:03,500")
    return cues


def parse_cues(text: str) -> list[Cue]:
    """Return the cues of a text in SubRip or WebVTT, without empty ones, in order of time.

    Lines that the previous cue already showed are left out, as in captions that roll upwards.
    """
    cues: list[Cue] = []
    shown_lines: list[str] = []
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        times = _TIMES.fullmatch(lines[position])
        position += 1
        if times is None:  # the number of a cue, a comment, or a style
            continue
        content: list[str] = []
        while position < len(lines) and lines[position].strip():
            if _TIMES.fullmatch(lines[position]):  # an empty line is missing between two cues
                if content and content[-1].strip().isdecimal():
                    content.pop()
                break
            content.append(lines[position])
            position += 1
        cue_lines = [line for line in map(_strip_markup, content) if line]
        new_lines = [line for line in cue_lines if line not in shown_lines]
        shown_lines = cue_lines
        start, end = (_seconds(time) for time in times.groups())
        if new_lines:
            cues.append(Cue(start, max(start, end), "\n".join(new_lines)))
    return sorted(cues, key=lambda cue: cue.start)


def _strip_markup(line: str) -> str:
    """Return a line without tags: ``<v Ada>The <i>kite</i>`` becomes ``Ada: The kite``."""
    return html.unescape(_MARKUP.sub("", _SPEAKER.sub(r"\1: ", line))).strip()


def _seconds(time: str) -> float:
    """Return the seconds of ``1:02:03,5`` or ``02:03.500``."""
    clock, fraction = re.split("[.,]", time)
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds + int(fraction.ljust(3, "0")) / 1000


def join_cues(cues: Sequence[Cue]) -> str:
    """Return the text of cues with marks of time, one line for each line of a cue."""
    lines: list[str] = []
    last_mark = -SECONDS_BETWEEN_MARKS
    for cue in cues:
        mark = ""
        if cue.start - last_mark >= SECONDS_BETWEEN_MARKS:
            mark = f"[{format_seconds(cue.start)}] "
            last_mark = cue.start
        lines.append(mark + cue.text)
    return "\n".join(lines)
