"""Subtitles: cues, their times, and the videos that they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.data.subtitles import (
    Cue,
    join_cues,
    match_subtitles,
    parse_cues,
    read_cues,
)
from genius_search.errors import BadImage
from genius_search.text import format_seconds, second_at

SRT = """1
00:00:01,000 --> 00:00:03,500
The <i>kite</i>
is red &amp; large.

2
00:00:03,500 --> 00:00:05,000
{\\an8}It flies.

3
01:00:14,250 --> 01:00:16,000
We go home.
"""
VTT = """WEBVTT - a film
Kind: captions

STYLE
::cue { color: red }

NOTE a comment

intro
00:01.000 --> 00:03.500 position:10% align:start
<v.loud Ada>The <c.x>kite</c>
is<00:02.000> red &amp; large.

00:03.500 --> 00:05.000
It flies.

01:00:14.250 --> 01:00:16.000
We go home.
"""
CUES = [
    Cue(1.0, 3.5, "The kite\nis red & large."),
    Cue(3.5, 5.0, "It flies."),
    Cue(3614.25, 3616.0, "We go home."),
]


def test_cues_have_times_and_texts_without_tags():
    assert parse_cues(SRT) == CUES
    assert parse_cues(SRT.replace("\n", "\r\n")) == CUES
    speaker = CUES[0]._replace(text="Ada: The kite\nis red & large.")
    assert parse_cues(VTT) == [speaker, *CUES[1:]]


def test_missing_empty_lines_wrong_ends_and_disorder_lose_nothing():
    text = "1\n0:00:09,5 --> 0:00:01,000\nlast\n2\n00:00:01.000-->00:00:02.000\nfirst\n\n3\n"
    assert parse_cues(text) == [Cue(1.0, 2.0, "first"), Cue(9.5, 9.5, "last")]


def test_lines_that_roll_upwards_count_once():
    text = "00:01.000 --> 00:02.000\na\nb\n\n00:02.000 --> 00:03.000\nb\nc\n\n00:03.000 --> 00:04.000\nc\n"
    assert [cue.text for cue in parse_cues(text)] == ["a\nb", "c"]


def test_a_text_of_cues_knows_the_second_of_each_position():
    text = join_cues([*CUES, Cue(3620, 3621, "By train.")])
    assert text == (
        "[0:00:01] The kite\nis red & large.\nIt flies.\n[1:00:14] We go home.\nBy train."
    )
    assert second_at(text, 0) == 1
    assert second_at(text, text.index("flies")) == 1
    assert second_at(text, text.index("[1:")) == 3614
    assert second_at(text, text.index("train")) == 3614
    assert second_at("no marks", 3) is None
    assert format_seconds(5025.9) == "1:23:45"


def test_a_file_without_cues_is_named(tmp_path):
    file = tmp_path / "a.srt"
    file.write_text("just a text")
    with pytest.raises(BadImage, match="no subtitles"):
        read_cues(file)
    file.write_text(SRT)
    assert read_cues(file) == CUES


def test_subtitles_belong_to_the_video_of_their_name():
    names = ["Film.srt", "film.de.srt", "film.mp4.vtt", "film.part.two.srt", "other.srt", "g.vtt"]
    files = [Path("v", name) for name in names]
    film, other = Path("v/film.mp4"), Path("v/g.webm")
    assert match_subtitles([film, other], files) == {
        film: [Path("v/film.mp4.vtt"), Path("v/Film.srt"), Path("v/film.de.srt")],
        other: [Path("v/g.vtt")],
    }
    assert match_subtitles([Path("a/film.mp4")], files) == {Path("a/film.mp4"): []}
