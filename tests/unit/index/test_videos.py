"""Videos in an index: one item each, found at their best moments, by frames and by subtitles."""

from __future__ import annotations

import os
import shutil

import pytest

from genius_search.cli import main
from genius_search.data import video as video_module
from genius_search.encoders import open as open_module
from genius_search.index.index import Index
from tests.videos import BLUE, GREEN, RED, YELLOW, ColourEncoder, colour_plugins, draw_video

SUBTITLES = """1
00:00:01,000 --> 00:00:03,000
A violin plays softly.

2
00:00:13,000 --> 00:00:15,000
The submarine dives.
"""


@pytest.fixture(autouse=True)
def _plugins(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_module, "entry_points", colour_plugins)


def draw_folder(parent):
    """Draw two videos, one with subtitles, and write a note."""
    videos = parent / "videos"
    videos.mkdir()
    draw_video(videos / "film.mp4", [(RED, 6), (GREEN, 6), (BLUE, 6)])
    (videos / "film.srt").write_text(SUBTITLES)
    draw_video(videos / "sun.avi", [(YELLOW, 4)], codec="MJPG")
    (videos / "kites.txt").write_text("A note about kites.")
    return videos


@pytest.fixture
def folder(tmp_path):
    return draw_folder(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An index of these files, which no test changes."""
    place = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setattr(open_module, "entry_points", colour_plugins)
        return create(draw_folder(place))


def create(folder, encoder="colours:x"):
    return Index.create(folder.parent / "i", folder, encoder=encoder)


def first(index, query, **options):
    return index.search(query, k=1, **options)[0]


def test_a_colour_is_found_at_the_moment_when_it_is_shown(shared):
    assert (len(shared), shared.last_change.added) == (3, 3)
    for query, start in (("red", 0), ("green", 6), ("blue", 12)):
        hit = first(shared, query, modality="image-text" if query == "red" else "image")
        assert hit.id == "film.mp4"
        assert start <= hit.moment < start + 2
    hit = first(shared, "yellow", modality="image")
    assert (hit.id, hit.modality, hit.text) == ("sun.avi", "image", None)
    assert hit.fields["kind"] == "video"
    assert hit.fields["duration"] == 4.0


def test_a_subtitle_is_found_at_its_time_with_any_encoder(folder):
    for encoder in ("colours:x", "text:wordllama"):
        index = create(folder, encoder)
        hit = first(index, "submarine")
        assert (hit.id, hit.moment, hit.passage) == ("film.mp4", 13.0, "The submarine dives.")
        shutil.rmtree(index.folder)


def test_a_video_is_one_hit_and_one_item(shared):
    hits = shared.search("blue submarine", k=10)
    assert sorted(hit.id for hit in hits) == ["film.mp4", "kites.txt", "sun.avi"]
    assert shared.info().items == 3
    assert shared.info().passages >= 4  # two frames and two subtitles
    videos = shared.search(where={"kind": "video"})
    assert {hit.id for hit in videos} == {"sun.avi", "film.mp4"}
    assert [hit.moment for hit in videos] == [None, None]


def test_moments_stay_when_segments_are_merged_and_an_index_is_refitted(folder):
    index = create(folder)
    index.add([{"id": "a", "text": "red"}])
    index.delete(["kites.txt"])
    index.refit()
    index = Index.open(index.folder)
    assert first(index, "green", modality="image").moment == pytest.approx(6, abs=1.5)
    assert first(index, "submarine", modality="text").moment == 13.0
    index.check()


def test_sync_follows_videos_that_change_move_and_go(folder):
    index = create(folder)
    assert index.sync().unchanged == 3
    (folder / "sub").mkdir()
    (folder / "film.mp4").rename(folder / "sub" / "film.mp4")
    (folder / "film.srt").rename(folder / "sub" / "film.srt")
    summary = index.sync()
    assert (summary.moved, summary.reused) == (1, 1)
    assert first(index, "green", modality="image").moment == pytest.approx(6, abs=1.5)
    draw_video(folder / "sun.avi", [(YELLOW, 4), (GREEN, 4)], codec="MJPG")
    assert index.sync().replaced == 1
    (folder / "sub" / "film.srt").write_text(SUBTITLES.replace("submarine", "crocodile"))
    assert index.sync().replaced == 1
    assert first(index, "crocodile", modality="text").moment == 13.0
    shutil.rmtree(folder / "sub")
    assert index.sync().deleted == 1
    assert [hit.id for hit in index.search("green", modality="image")] == ["sun.avi"]


def test_a_touched_video_is_not_decoded_again(folder, monkeypatch):
    index = create(folder)
    os.utime(folder / "film.mp4", (1, 1))
    modes = []
    decode = video_module._decode
    monkeypatch.setattr(
        video_module,
        "_decode",
        lambda path, place, mode, **options: modes.append(mode) or decode(path, place, mode),
    )
    assert index.sync().added == 0
    assert "frames" not in modes
    assert first(index, "green", modality="image").moment == pytest.approx(6, abs=1.5)


def test_a_damaged_video_is_left_out_with_its_reason_and_the_others_stay_right(folder):
    (folder / "bad.mp4").write_bytes(b"\0" * 9_999)
    index = create(folder)
    [problem] = index.last_change.left_out
    assert problem.file.endswith("bad.mp4")
    assert "is not a video in a supported format, or is damaged" in problem.reason
    assert first(index, "blue", modality="image").moment == pytest.approx(12, abs=1.5)


def test_frames_that_were_encoded_before_an_interruption_are_kept(folder, monkeypatch):
    encoded = []

    def count(encoder, images, keys=()):
        encoded.extend(images)
        if len(encoded) > 2:
            raise KeyboardInterrupt
        return image_features(encoder, images, keys)

    image_features = ColourEncoder.image_features
    with monkeypatch.context() as patch:
        patch.setattr(ColourEncoder, "image_features", count)
        patch.setattr("genius_search.encoders.store.FIRST_BLOCK_ROWS", 2)
        patch.setattr("genius_search.encoders.store.MAX_BLOCK_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            create(folder)
    monkeypatch.setattr(video_module, "_decode", lambda *_, **__: pytest.fail("decoded again"))
    index = create(folder)
    assert first(index, "blue", modality="image").moment == pytest.approx(12, abs=1.5)


def test_the_command_line_shows_the_moment(folder, capsys):
    index = create(folder, "text:wordllama")
    assert main(["search", str(index.folder), "submarine", "-k", "1"]) == 0
    assert "at 0:00:13 The submarine dives." in capsys.readouterr().out
    assert main(["search", str(index.folder), "submarine", "-k", "1", "--json"]) == 0
    assert '"moment": 13.0' in capsys.readouterr().out


def test_frames_come_with_an_encoder_that_an_index_gets_later(folder):
    index = create(folder, "text:wordllama")
    assert index.info().passages == 2  # subtitles
    index.refit(encoder="colours:x")
    assert index.info().passages >= 4
    hit = first(index, "green", modality="image")
    assert (hit.id, 6 <= hit.moment < 8) == ("film.mp4", True)
    assert first(index, "submarine", modality="text").moment == 13.0
    assert index.sync().unchanged == 3


def test_words_of_a_subtitle_choose_its_moment_whatever_the_frames_say(shared):
    assert first(shared, "red submarine").moment == 13.0


def test_a_video_given_by_its_path_has_moments(folder):
    index = create(folder)
    draw_video(folder.parent / "new.avi", [(BLUE, 4), (YELLOW, 4)], codec="MJPG")
    assert index.add([folder.parent / "new.avi"]).added == 1
    moments = {hit.id: hit.moment for hit in index.search("yellow", modality="image", k=2)}
    assert 4 <= moments[(folder.parent / "new.avi").as_posix()] < 6


def test_an_index_of_a_trained_model_has_one_frame_of_a_video(trained, folder):
    index = Index.create(folder.parent / "t", folder, model=trained.model)
    assert len(index) == 3
    assert index.info().passages == 0
    assert index.get("film.mp4").fields["kind"] == "video"
