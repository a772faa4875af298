"""Files as items: the fields that they bring, and one file alone."""

from __future__ import annotations

import pytest
from PIL import ExifTags, Image

from genius_search.cli import main
from genius_search.errors import BadData
from genius_search.index import pictures
from genius_search.index.index import Index

COLOURS = ("red", "green", "blue", "gold")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "2024" / "Rome").mkdir(parents=True)
    for number, colour in enumerate(COLOURS):
        exif = Image.Exif()
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = (
            f"2024:0{number + 3}:01 12:00:00"
        )
        Image.new("RGB", (20, 20), colour).save(
            folder / "2024" / "Rome" / f"the_{colour}-one.jpg", exif=exif
        )
    (folder / "2024" / "Rome" / "the_red-one.json").write_text(
        '{"caption": "red", "taken": "long ago"}'
    )
    (folder / "note.txt").write_text("a red anchor")
    return folder


@pytest.fixture
def index(photos, clip_folder, tmp_path):
    return Index.create(tmp_path / "i", photos, encoder=f"clip:{clip_folder}")


def found(index, **settings):
    return {hit.id.rpartition("/")[2]: hit.fields for hit in index.search("red", **settings)}


def test_folder_name_and_date_are_fields(index):
    fields = found(index, where=["taken>=2024-05-01", "taken<2024-05-02"])
    assert fields == {
        "the_blue-one.jpg": {
            "folder": "2024/Rome",
            "name": "the blue one",
            "taken": "2024-05-01T12:00:00",
        }
    }
    assert len(found(index, where=["folder~rome"])) == 4
    assert found(index)["note.txt"] == {"name": "note"}
    assert (
        found(index)["the_red-one.jpg"]["taken"] == "long ago"
    )  # a file beside the picture knows better


def test_a_caption_inside_a_picture_is_its_text_unless_captions_are_ignored(clip_folder, tmp_path):
    exif = Image.Exif()
    comment = (
        b"UNICODE\0" + "a red anchor".encode("utf-16-be") + 20 * b" "
    )  # filled up as cameras do
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 20), "red").save(tmp_path / "photos" / "a.jpg", exif=exif)
    for captions, text, modality in ((True, "a red anchor", "image-text"), (False, None, "image")):
        place = tmp_path / f"{modality}.index"
        index = Index.create(
            place, tmp_path / "photos", encoder=f"clip:{clip_folder}", captions=captions
        )
        [hit] = index.search("red", modality=modality)
        assert (hit.text, hit.modality) == (text, modality)
        assert index.sync().unchanged == 1


def test_what_is_excluded_stays_so(photos, clip_folder, tmp_path):
    place = tmp_path / "i"
    index = Index.create(place, photos, encoder=f"clip:{clip_folder}", exclude=["*red*", "*.txt"])
    assert set(found(index)) == {"the_green-one.jpg", "the_blue-one.jpg", "the_gold-one.jpg"}
    assert Index.open(place).sync().unchanged == 3
    (photos / ".geniusignore").write_text("*gold*\n")
    assert index.sync().deleted == 1


def test_captions_that_are_cut_are_named_and_other_kinds_once(clip_folder, tmp_path, capsys):
    notes = tmp_path / "notes"
    notes.mkdir()
    for n in range(9):
        Image.new("RGB", (20, 20), "red").save(notes / f"{n}.png")
        (notes / f"{n}.txt").write_text("a red anchor " * (20 if n < 7 else 1))
        (notes / f"{n}.xyz").write_bytes(b"x")
    assert (
        main(
            [
                "index",
                "create",
                str(tmp_path / "i"),
                "--pool",
                str(notes),
                "--encoder",
                f"clip:{clip_folder}",
            ]
        )
        == 0
    )
    said = capsys.readouterr().err
    assert "7 texts longer than the encoder reads" in said
    assert "0.png, 1.png, 2.png, 3.png, 4.png and 2 more" in said
    assert "0.xyz and 8 other files: files with the ending '.xyz'" in said
    assert main(["index", "sync", str(tmp_path / "i")]) == 0
    said = capsys.readouterr().err
    assert "9 files left out" in said
    assert ".xyz" not in said


def test_unchanged_photos_are_not_opened_again(index, photos, monkeypatch):
    monkeypatch.setattr(pictures, "read_picture", None)
    assert index.sync(photos).unchanged == 5


def test_one_file_is_followed_without_its_folder(index, tmp_path):
    Image.new("RGB", (20, 20), "pink").save(tmp_path / "new.png")
    (tmp_path / "new.txt").write_text("a ground on red")
    assert index.add(tmp_path / "new.png").added == 1
    assert found(index, match="ground") == {"new.png": {"name": "new"}}
    assert index.sync().unchanged == 6
    (tmp_path / "film.mp4").write_bytes(b"x")
    with pytest.raises(BadData, match="mp4"):
        index.add(tmp_path / "film.mp4")
