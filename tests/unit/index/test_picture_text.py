"""Text in pictures is read in a second pass, found by words and meaning, and never read twice."""

from __future__ import annotations

import json

import pytest
from PIL import Image, ImageDraw

from genius_search.cli import main
from genius_search.data import picture_text
from genius_search.data.picture_text import NO_TEXT, PictureReader, PictureText
from genius_search.errors import MissingExtra
from genius_search.index.index import Index

BOARDING = PictureText("Boarding pass\nGate B42", "[[0.1, 0.2, 0.6, 0.3], [0.1, 0.5, 0.4, 0.6]]")
PARKING = PictureText("No parking", "[[0, 0, 1, 1]]")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 30), (40 * number, 0, 0)).save(folder / f"IMG_{number}.png")
    (folder / "IMG_5.txt").write_text("a red wall")
    return folder


@pytest.fixture
def read_paths(monkeypatch, tmp_path):
    """Names of the pictures that were recognised, by a reader that knows two of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(picture_text, "need_packages", lambda *_: None)
    names = []

    def recognise(reader, path):
        names.append(path.name)
        return {"IMG_1.png": BOARDING, "IMG_2.png": PARKING}.get(path.name, NO_TEXT)

    monkeypatch.setattr(PictureReader, "_recognise", recognise)
    return names


def create(folder, tmp_path, encoder="text:wordllama"):
    return Index.create(tmp_path / "i", folder, encoder=encoder)


def test_text_in_pictures_is_found_by_words_and_by_meaning(photos, tmp_path, read_paths):
    index = create(photos, tmp_path)
    assert index.info().unread_pictures == 6
    assert index.read_pictures() == 6
    assert sorted(read_paths) == [f"IMG_{number}.png" for number in range(6)]
    assert index.info().unread_pictures == 0
    hit = index.search("gate")[0]
    assert (hit.id, hit.matched) == ("IMG_1.png", ("picture text",))
    assert index.search("where cars may not stay", hybrid=False)[0].id == "IMG_2.png"
    assert [hit.id for hit in index.search(match="boarding")] == ["IMG_1.png"]
    assert index.search("wall")[0].matched == ("caption",)
    lines = index.get("IMG_1.png").picture_text
    assert [line.words for line in lines] == ["Boarding pass", "Gate B42"]
    assert lines[1].box == (0.1, 0.5, 0.4, 0.6)
    assert index.check().items == 6


def test_text_stays_when_files_move_and_is_read_again_when_they_change(
    photos, tmp_path, read_paths
):
    index = create(photos, tmp_path)
    index.read_pictures()
    (photos / "IMG_1.png").rename(photos / "ticket.png")
    Image.new("RGB", (50, 30)).save(photos / "IMG_3.png")
    read_paths.clear()
    index.sync()
    assert index.search("gate")[0].id == "ticket.png"
    assert index.info().unread_pictures == 1
    assert index.read_pictures() == 1
    assert read_paths == ["IMG_3.png"]
    assert index.sync().unchanged == 6


def test_an_encoder_of_pictures_keeps_its_vectors_and_finds_text_by_words(
    photos, tmp_path, read_paths, clip_folder
):
    index = create(photos, tmp_path, f"clip:{clip_folder}")
    before = index.get_vectors("IMG_1.png")
    index.read_pictures()
    assert (index.get_vectors("IMG_1.png") == before).all()
    assert index.search("B42")[0].id == "IMG_1.png"


def test_a_pass_that_was_killed_reads_no_picture_twice(photos, tmp_path, read_paths, monkeypatch):
    index = create(photos, tmp_path)
    real = PictureReader.read

    def read(reader, path, digest):
        if len(read_paths) == 3:
            raise KeyboardInterrupt
        return real(reader, path, digest)

    monkeypatch.setattr(PictureReader, "read", read)
    with pytest.raises(KeyboardInterrupt):
        index.read_pictures()
    monkeypatch.setattr(PictureReader, "read", real)
    assert Index.open(tmp_path / "i").read_pictures() == 6
    assert len(read_paths) == 6


def test_commands_read_pictures_last_unless_they_are_told_not_to(
    photos, tmp_path, read_paths, capsys, monkeypatch
):
    folder = str(tmp_path / "i")
    pool = ["--pool", str(photos), "--encoder", "text:wordllama"]
    assert main(["index", "create", folder, *pool, "--no-ocr"]) == 0
    assert main(["index", "info", folder]) == 0
    output = capsys.readouterr()
    assert "reading text" not in output.err
    assert "unread pictures" in output.out
    monkeypatch.setattr(picture_text, "has_rapidocr", lambda: False)
    assert main(["index", "sync", folder]) == 0
    assert "genius-search[ocr]" in capsys.readouterr().err
    monkeypatch.setattr(picture_text, "has_rapidocr", lambda: True)
    assert main(["index", "sync", folder]) == 0
    assert "reading text in 6 pictures" in capsys.readouterr().err
    assert len(read_paths) == 6


def test_without_the_extra_the_error_names_it(photos, tmp_path, monkeypatch):
    index = create(photos, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(MissingExtra, match=r"genius-search\[ocr\]"):
        index.read_pictures()


def test_drawn_lines_are_read_with_their_boxes(tmp_path):
    pytest.importorskip("rapidocr")
    picture = Image.new("RGB", (480, 160), "white")
    ImageDraw.Draw(picture).text((20, 100), "Gare de Nantes", "black", font_size=28)
    picture.save(tmp_path / "a.png")
    Image.new("RGB", (300, 200), "green").save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no picture")
    reader = PictureReader(tmp_path / "cache")
    text = reader.read(tmp_path / "a.png", "a")
    assert text.words == "Gare de Nantes"
    assert reader.read(tmp_path / "missing.png", "a") == text  # from the cache
    [[left, top, right, bottom]] = json.loads(text.boxes)
    assert 0 < left < 0.1 < 0.4 < right < 0.7
    assert 0.55 < top < 0.7 < bottom < 0.95
    assert reader.read(tmp_path / "b.png", "b") == reader.read(tmp_path / "c.png", "c") == NO_TEXT


def test_a_picture_that_takes_too_long_stays_unread_and_is_read_again(
    photos, tmp_path, read_paths, monkeypatch
):
    recognise = PictureReader._recognise
    monkeypatch.setattr(
        PictureReader,
        "_recognise",
        lambda reader, path: None if path.name == "IMG_1.png" else recognise(reader, path),
    )
    index = create(photos, tmp_path)
    assert index.read_pictures() == 5
    assert index.info().unread_pictures == 1
    monkeypatch.setattr(PictureReader, "_recognise", recognise)
    assert index.read_pictures() == 1
    assert index.search("gate")[0].id == "IMG_1.png"


def test_a_picture_that_the_library_refuses_has_no_text(photos, tmp_path, monkeypatch):
    class Engine:
        def __call__(self, *_, **__):
            raise RuntimeError

    monkeypatch.setattr(picture_text, "need_packages", lambda *_: None)
    monkeypatch.setattr(PictureReader, "_engine", Engine())
    assert PictureReader(tmp_path).read(photos / "IMG_1.png", "digest") == NO_TEXT


@pytest.mark.parametrize(
    ("height", "width"), [(10, 10), (2001, 1000), (9000, 1080), (3000, 1), (16, 4)]
)
def test_each_row_of_a_picture_belongs_to_one_piece(height, width):
    pieces = picture_text.divide_rows(height, width)
    assert len(pieces) <= picture_text.MAX_PIECES
    for row in range(height):
        [piece] = [piece for piece in pieces if piece.first <= row < piece.last]
        assert piece.start <= row < piece.end
