"""Videos: frames at changes of scene, within limits, from files that may be damaged."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from genius_search.data import images
from genius_search.data import video as video_module
from genius_search.data.folder import read_folder
from genius_search.data.images import is_video_file
from genius_search.data.video import (
    find_cue_spans,
    find_cues,
    open_frame,
    open_still,
    probe_video,
    read_video,
    video_fields,
)
from genius_search.errors import BadImage
from tests.videos import BLACK, BLUE, GREEN, RED, YELLOW, draw_video


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mean_colours(video):
    return [np.asarray(open_frame(video, m / 1000)).mean(axis=(0, 1)) for m in moments(video)]


def moments(path):
    return read_video(path).moments


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "mp4v"), ("a.avi", "MJPG"), ("a.webm", "VP80"), ("a.avi", "FFV1")]
)
def test_a_frame_stands_for_each_scene_within_two_seconds_of_its_beginning(tmp_path, name, codec):
    scenes = [(RED, 5), (GREEN, 7.5), (BLUE, 3), (YELLOW, 4)]
    draw_video(tmp_path / name, scenes, codec=codec)
    starts = [0.0, 5.0, 12.5, 15.5]
    seconds = [moment / 1000 for moment in moments(tmp_path / name)]
    for start, (colour, length) in zip(starts, scenes, strict=True):
        first = min(second for second in seconds if second >= start - 0.05)
        assert first < start + min(2.0, length)
        mean = np.asarray(open_frame(tmp_path / name, first)).mean(axis=(0, 1))
        assert np.abs(mean - colour).max() < 60


def test_a_scene_that_goes_on_has_few_frames_and_one_without_movement_a_single_one(tmp_path):
    draw_video(tmp_path / "still.avi", [(BLACK, 2), (RED, 0.1), (BLACK, 30)], codec="MJPG")
    assert len(moments(tmp_path / "still.avi")) <= 2
    draw_video(tmp_path / "moving.avi", [(RED, 30)], codec="MJPG")
    gaps = np.diff(moments(tmp_path / "moving.avi"))
    assert len(gaps) == 0 or gaps.min() >= 5_000


def test_black_frames_do_not_stand_for_a_video_unless_there_are_no_others(tmp_path):
    draw_video(tmp_path / "intro.avi", [(BLACK, 4), (BLUE, 4)], codec="MJPG")
    assert read_video(tmp_path / "intro.avi").moments[0] >= 4_000
    assert np.asarray(open_still(tmp_path / "intro.avi")).mean() > 30
    draw_video(tmp_path / "black.avi", [(BLACK, 4)], codec="MJPG")
    assert moments(tmp_path / "black.avi") == (0,)


def test_facts_come_from_the_container_and_a_poster_once_the_frames_are_read(tmp_path):
    path = tmp_path / "a.mp4"
    draw_video(path, [(RED, 3)])
    facts = {"kind": "video", "duration": 3.0, "width": 160, "height": 120}
    assert video_fields(path) == facts
    assert probe_video(path).duration == 3.0
    read_video(path)
    assert video_fields(path) == facts | {"poster": 0.0}
    assert open_frame(path, 99.0).size == (160, 120)


def test_frames_are_read_once_and_again_if_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.avi"
    draw_video(path, [(RED, 3)], codec="MJPG")
    first = read_video(path)
    calls = []
    decode = video_module._decode
    monkeypatch.setattr(
        video_module, "_decode", lambda *values, **options: calls.append(1) or decode(*values)
    )
    assert read_video(path) == first
    assert not calls
    draw_video(path, [(RED, 3), (BLUE, 3)], codec="MJPG")
    assert len(read_video(path).moments) == 2
    shutil.rmtree(first.folder.parent)
    assert len(read_video(path).moments) == 2
    assert len(calls) == 2


def test_an_interrupted_decoding_begins_again(tmp_path, monkeypatch):
    path = tmp_path / "a.avi"
    draw_video(path, [(RED, 3)], codec="MJPG")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(video_module.subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            read_video(path)
    assert moments(path) == (0,)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\0" * 5_000, "is not a video in a supported format"),
        (b"#EXTM3U\n#EXTINF:9,\n/etc/passwd\n", "is not a video in a supported format"),
        (b"ffconcat version 1.0\nfile other.avi\n", "is not a video in a supported format"),
    ],
)
def test_a_file_that_is_no_video_is_named_with_the_reason(tmp_path, content, reason):
    (tmp_path / "bad.mp4").write_bytes(content)
    for read in (read_video, probe_video, open_frame, open_still):
        with pytest.raises(BadImage, match=reason):
            read(tmp_path / "bad.mp4")


def test_a_damaged_video_has_the_frames_before_the_damage_or_a_reason(tmp_path):
    draw_video(tmp_path / "whole.avi", [(RED, 5), (BLUE, 5)], codec="MJPG")
    whole = (tmp_path / "whole.avi").read_bytes()
    (tmp_path / "half.avi").write_bytes(whole[: len(whole) // 2])
    assert moments(tmp_path / "half.avi")[0] == 0
    draw_video(tmp_path / "whole.mp4", [(RED, 5)])
    whole = (tmp_path / "whole.mp4").read_bytes()  # its index is at the end
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage, match="damaged"):
        read_video(tmp_path / "half.mp4")


@pytest.mark.parametrize("program", ["import os; os.abort()", "while True: pass"])
def test_a_decoder_that_crashes_or_hangs_ends_with_a_reason(tmp_path, monkeypatch, program):
    draw_video(tmp_path / "a.avi", [(RED, 1)], codec="MJPG")
    (tmp_path / "decoder.py").write_text(program)
    monkeypatch.setattr(video_module, "_DECODER", tmp_path / "decoder.py")
    monkeypatch.setattr(video_module, "MAX_WALL_SECONDS", 0.3 if "while" in program else 60)
    for _ in range(2):
        with pytest.raises(BadImage, match=r"crash|seconds to decode"):
            read_video(tmp_path / "a.avi")
        monkeypatch.setattr(video_module, "_DECODER", tmp_path / "missing.py")


def test_subtitles_beside_a_video_are_its_text_and_not_items(tmp_path):
    draw_video(tmp_path / "talk.mp4", [(RED, 1)])
    (tmp_path / "talk.txt").write_text("My talk")
    (tmp_path / "talk.srt").write_text(
        "1\n00:00:01,000 --> 00:00:02,000\n<i>Good</i>\nmorning.\n\n"
        "2\n00:00:07,500 --> 00:00:09,000\nGood morning.\n"
    )
    (tmp_path / "talk.de.vtt").write_text("WEBVTT\n\n00:01.000 --> 00:02.000\nGuten Morgen.\n")
    (tmp_path / "lone.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nAlone.\n")
    scan = read_folder(tmp_path)
    texts = {candidate.did: candidate.text for candidate in scan.candidates}
    assert [*texts] == ["lone.srt", "talk.mp4"]
    text = texts["talk.mp4"]
    assert text == "My talk\nGood morning.\nGood morning.\nGuten Morgen."
    spans = find_cue_spans(text, find_cues(tmp_path / "talk.mp4"))
    assert [(text[start:end], moment) for start, end, moment in spans] == [
        ("Good morning.", 1_000),
        ("Good morning.", 7_500),
        ("Guten Morgen.", 1_000),
    ]


def test_without_the_extra_videos_are_left_out_and_their_texts_are_items(tmp_path, monkeypatch):
    draw_video(tmp_path / "talk.mp4", [(RED, 1)])
    (tmp_path / "talk.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello.\n")
    (tmp_path / "talk.txt").write_text("My talk")
    monkeypatch.setattr(images, "has_opencv", lambda: False)
    assert not is_video_file(tmp_path / "talk.mp4")
    scan = read_folder(tmp_path)
    assert [candidate.did for candidate in scan.candidates] == ["talk.srt", "talk.txt"]
    [problem] = scan.problems
    assert "genius-search[video]" in problem.reason


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    draw_video(tmp_path / "a.avi", [(RED, 1)], codec="MJPG")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for read in (read_video, probe_video):
        with pytest.raises(BadImage, match="XDG_CACHE_HOME"):
            read(tmp_path / "a.avi")
    assert video_fields(tmp_path / "a.avi") == {"kind": "video"}
