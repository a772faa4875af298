import codecs
import json
import os
import sys

import pytest
from PIL import Image

from genius_search.data import images
from genius_search.data.folder import read_file, read_folder
from genius_search.data.text_files import MAX_TEXT_BYTES
from genius_search.errors import BadImage, UsageError
from genius_search.records import Modality

XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<r:Description xmlns:d="http://purl.org/dc/elements/1.1/"><d:description><r:Alt><r:li xml:lang="x-default">the text\
</r:li><r:li xml:lang="de">der Text</r:li></r:Alt></d:description></r:Description></r:RDF></x:xmpmeta>"""


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def problems_of(root):
    return {
        problem.file.relative_to(root).as_posix(): problem.reason
        if isinstance(problem, BadImage)
        else problem.problem
        for problem in read_folder(root).problems
    }


def found_in(root, **settings):
    return [candidate.did for candidate in read_folder(root, **settings).candidates]


def test_pictures_and_texts_of_all_subfolders_come_by_name_but_hidden_ones(tmp_path):
    for name in ("b.png", "a/z.JPG", "a/b/c.webp", ".hidden.png", ".cache/a.png"):
        picture(tmp_path / name)
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    scan = read_folder(tmp_path)
    *pictures, notes = scan.candidates
    assert [candidate.did for candidate in pictures] == ["a/b/c.webp", "a/z.JPG", "b.png"]
    assert all(candidate.image == candidate.did for candidate in pictures)
    assert {candidate.modality for candidate in pictures} == {Modality.IMAGE}
    assert (notes.did, notes.modality, notes.text, notes.image) == (
        "notes.md",
        Modality.TEXT,
        "# Notes",
        None,
    )
    assert scan.problems == ()


def test_programs_folders_and_excluded_files_are_left_out(tmp_path):
    for name in (
        "a.png",
        "@eaDir/a.png/SYNO_M.jpg",
        "b/#recycle/c.png",
        "$RECYCLE.BIN/d.png",
        "__MACOSX/e.png",
    ):
        picture(tmp_path / name)
    picture(tmp_path / "photos.index" / "a.png")
    (tmp_path / "photos.index" / "segments").mkdir()
    (tmp_path / "photos.index" / "index.json").touch()
    for name in (
        "b/ra\u0308w/f.png",
        "b/g.draft.png",
        "b/keep.draft.png",
        "raw/h.png",
        "o\u0308.webp",
    ):
        picture(tmp_path / name)
    (tmp_path / "b" / ".geniusignore").write_text("# mine\nr\u00e4w/\n*.draft.png\n!keep.*\n")
    assert found_in(tmp_path, exclude=["\u00f6.*"]) == ["a.png", "b/keep.draft.png", "raw/h.png"]
    assert "__MACOSX/e.png" in found_in(tmp_path, exclude=["!__MACOSX"])
    with pytest.raises(UsageError, match="gitignore"):
        read_folder(tmp_path, exclude=["!"])
    (tmp_path / ".geniusignore").write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in problems_of(tmp_path)[".geniusignore"]


@pytest.mark.parametrize("pattern", ["*" * 50 + "b", "*a*a*a*a*b", "**/x/" * 4 + "y", "a" * 2000])
def test_a_pattern_that_could_take_long_to_match_is_named(tmp_path, pattern):
    picture(tmp_path / f"{'a' * 200}.png")
    (tmp_path / ".geniusignore").write_text(pattern)
    assert "asterisks" in problems_of(tmp_path)[".geniusignore"]
    with pytest.raises(UsageError, match="asterisks"):
        read_folder(tmp_path, exclude=[pattern])


def test_a_linked_folder_is_followed_once(tmp_path):
    picture(tmp_path / "mine" / "z" / "a.png")
    picture(tmp_path / "elsewhere" / "b.png")
    for name, target in (
        ("again", "mine"),
        ("z/up", "mine"),
        ("away", "elsewhere"),
        ("too", "elsewhere"),
        ("b", "mine/z"),
    ):
        (tmp_path / "mine" / name).symlink_to(tmp_path / target)
    assert found_in(tmp_path / "mine") == ["away/b.png", "z/a.png"]


@pytest.mark.parametrize(
    ("name", "content", "text", "source"),
    [
        ("a.TXT", "\ufeffA red square.\n", "A red square.", None),
        *(
            ("a.json", json.dumps({key: " Red. ", "price": 3}), "Red.", {"price": 3})
            for key in ("caption", "text", "title", "description")
        ),
    ],
)
def test_a_file_beside_a_picture_gives_caption_and_source(tmp_path, name, content, text, source):
    picture(tmp_path / "a.png")
    (tmp_path / name).write_text(content, encoding="utf-8")
    [candidate] = read_folder(tmp_path).candidates
    assert (candidate.modality, candidate.text) == (Modality.IMAGE_TEXT, text)
    assert source == (candidate.source and json.loads(candidate.source))


def test_keys_and_names_are_known_in_other_spellings(tmp_path):
    for name in ("a/1.JPG", "a/2.jpg", "3.jpg", "b.jpg", "B.jpg"):
        picture(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("File_Name, Caption\na\\1.jpg, one\nA/2.jpg, two\n")
    (tmp_path / "3.jpg.json").write_text('[{"SourceFile": "3.jpg", "XMP:Description": "three"}]')
    (tmp_path / "B.txt").write_text("large")
    (tmp_path / "b.jpg.txt").write_text("small")
    texts = {one.did: (one.text, one.source) for one in read_folder(tmp_path).candidates}
    assert texts == {
        "a/1.JPG": ("one", None),
        "a/2.jpg": ("two", None),
        "3.jpg": ("three", None),
        "B.jpg": ("large", None),
        "b.jpg": ("small", None),
    }


def test_captions_of_other_kinds_stay_as_a_field(tmp_path):
    picture(tmp_path / "1.png")
    (tmp_path / "1.json").write_text('{"captions": ["a", {"caption": "b", "id": 1}]}')
    [candidate] = read_folder(tmp_path).candidates
    assert (candidate.text, candidate.source) == (
        "a\nb",
        '{"captions": ["a", {"caption": "b", "id": 1}]}',
    )


@pytest.mark.parametrize("column", ["text", "caption"])
def test_a_metadata_list_names_pictures_relative_to_itself(tmp_path, column):
    picture(tmp_path / "train" / "cats" / "a.png")
    rows = [{"file_name": "cats/a.png", column: "A cat.", "label": 3}]
    (tmp_path / "train" / "metadata.jsonl").write_text(
        "".join(json.dumps(row) + "\n\n" for row in rows)
    )
    [candidate] = read_folder(tmp_path).candidates
    assert (candidate.did, candidate.text) == ("train/cats/a.png", "A cat.")
    assert json.loads(candidate.source) == {"label": 3}


LONG = "IMG_20200101_121212_a_name_that_is_longer_than_others"


@pytest.mark.parametrize(
    ("photo", "beside"),
    [
        *(
            ("p.JPG", f"p.{ending}")
            for ending in ("JPG.txt", "txt", "JPG.json", "json", "JPG.xmp", "xmp")
        ),
        ("p.JPG", "p.JPG.supplemental-metadata.json"),
        ("p.JPG", "p.JPG.suppl.json"),
        ("p.JPG", "p.JPG..json"),
        ("p-edited.JPG", "p.JPG.json"),
        ("p-edited(1).JPG", "p.JPG.supplemental-metadata(1).json"),
        ("p(2).JPG", "p.JPG(2).json"),
        ("p(2).JPG", "p.JPG.supplemental-metadata(2).json"),
        (f"{LONG}.jpg", f"{LONG[:46]}.json"),
        (f"{LONG}(1).jpg", f"{LONG[:46]}(1).json"),
        ("caf\u00e9.jpg", "cafe\u0301.jpg.json"),
    ],
)
def test_a_side_car_may_have_the_whole_name_or_that_of_google_takeout(tmp_path, photo, beside):
    content = "the text"
    if beside.endswith("json"):
        content = json.dumps(
            {"title": photo, "description": "the text", "photoTakenTime": {"timestamp": "1"}}
        )
    elif beside.endswith("xmp"):
        pytest.importorskip("defusedxml")
        content = XMP
    for name in (photo, "another.jpg"):
        picture(tmp_path / name)
    (tmp_path / beside).write_text(content)
    scan = read_folder(tmp_path)
    assert [(one.did, one.text) for one in scan.candidates if one.text] == [(photo, "the text")]
    assert len(scan.candidates) == 2
    assert scan.problems == ()
    assert read_file(tmp_path / photo).candidates[0].text == "the text"


def test_what_google_takeout_knows_becomes_fields(tmp_path):
    picture(tmp_path / "p.jpg")
    about = {
        "title": "p.MOV",
        "description": "",
        "photoTakenTime": {"timestamp": "1258375918", "formatted": "16.11.2009"},
        "geoData": {"latitude": 30.65, "longitude": 104.07, "altitude": 0.0},
        "people": [{"name": "Ann"}, {"name": "Ben"}],
        "favorited": True,
    }
    (tmp_path / "p.jpg.json").write_text(json.dumps(about))
    [candidate] = read_folder(tmp_path).candidates
    assert candidate.text is None
    fields = json.loads(candidate.source)
    assert (fields["taken"], fields["people"]) == ("2009-11-16T12:51:58+00:00", ["Ann", "Ben"])
    assert (fields["latitude"], fields["longitude"], fields["favorited"]) == (30.65, 104.07, True)
    about["photoTakenTime"] = {"timestamp": "in May"}
    (tmp_path / "p.jpg.json").write_text(json.dumps(about))
    assert '"in May"' in read_folder(tmp_path).candidates[0].source


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("metadata.csv", "file_name,text,n\np.jpg,one,1\np.jpg,two,2\n", "utf-8"),
        ("metadata.csv", ",file_name,text,n\n0,p.jpg,one,1\n10,p.jpg,two,2\n", "utf-8"),
        ("metadata.csv", "file_name;text;n\np.jpg;one;1\np.jpg;two;2\n", "utf-8-sig"),
        ("captions.tsv", "image\tcaption\tn\np.jpg\tone\t1\np.jpg\ttwo\t2\n", "utf-16"),
        ("metadata.csv", "file_name|Caption|Caption|n\np.jpg|one|two|1\np.jpg|||nan\n", "utf-8"),
        ("captions.txt", "image,caption,n\np.jpg#0,one,1\np.jpg#1,two,2\n", "utf-8"),
        ("captions.jsonl", '{"image": "./p.jpg", "captions": ["one", "two"], "n": "1"}', "utf-16"),
        (
            "metadata.jsonl",
            '{"file": "p.jpg", "text": "one", "n": "1"}\n{"file": "p.jpg", "text": "two"}',
            "utf-8",
        ),
        ("metadata.parquet", "", ""),
    ],
)
def test_all_captions_of_a_list_count(tmp_path, name, text, encoding):
    picture(tmp_path / "p.jpg")
    if encoding:
        (tmp_path / name).write_text(text, encoding=encoding)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = {"file_name": ["p.jpg"] * 2, "text": ["one", "two"], "n": ["1", "2"]}
        parquet.write_table(pytest.importorskip("pyarrow").table(table), tmp_path / name)
    scan = read_folder(tmp_path)
    assert [(one.text, one.source) for one in scan.candidates] == [("one\ntwo", '{"n": "1"}')]
    assert scan.problems == ()


@pytest.mark.parametrize(
    ("names", "pictures", "texts"),
    [
        (["a.png", "B.png"], ["in/a.png", "in/b.png"], ["A", "B"]),
        (["a.png", "b.png"], ["in/a.png", "in/b.png", "out/b.png"], ["A", None, None]),
        (["C:\\in\\a.png", "/elsewhere/in/b.png"], ["in/a.png", "b.png"], ["B", "A"]),
        (["a.png", "b.png"], ["a.png", "in/b.png"], ["A", None]),
    ],
)
def test_a_list_from_elsewhere_means_the_pictures_whose_ends_fit(tmp_path, names, pictures, texts):
    for one in pictures:
        picture(tmp_path / one)
    rows = [{"file_name": name, "text": text} for name, text in zip(names, "AB", strict=True)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scan = read_folder(tmp_path)
    assert [one.text for one in scan.candidates] == texts
    assert len(scan.problems) == 2 - len([text for text in texts if text])


def test_a_list_in_parquet_names_the_extra_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "captions.parquet").write_bytes(b"PAR1")
    assert "[parquet]" in problems_of(tmp_path)["captions.parquet"]


def test_a_caption_with_commas_needs_no_quotes_and_broken_rows_cost_only_themselves(tmp_path):
    picture(tmp_path / "p.jpg")
    for header, last in (("image,caption\n", 3), ("", 2)):
        rows = f"{header}p.jpg,one,two\ngone.jpg,three\n"
        (tmp_path / "captions.txt").write_text(f'{rows}q,"four\np.jpg,five\n')
        assert "unclosed quote" in problems_of(tmp_path)["captions.txt"]
        (tmp_path / "captions.txt").write_text(f'{rows}q,"{"x" * 1_000_001}')
        scan = read_folder(tmp_path)
        assert [one.text for one in scan.candidates] == ["one,two"]
        assert [getattr(one, "line", None) for one in scan.problems] == [last, None]


def test_captions_txt_is_a_text_if_it_is_no_list(tmp_path):
    (tmp_path / "captions.txt").write_text("what captions are for")
    assert found_in(tmp_path) == ["captions.txt"]


def test_a_side_car_goes_before_a_list_and_txt_before_json(tmp_path):
    for name in ("a", "b", "c"):
        picture(tmp_path / f"{name}.png")
    (tmp_path / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": f"{name}.png", "text": "list"}) for name in "abc")
    )
    (tmp_path / "a.txt").write_text("txt")
    (tmp_path / "a.json").write_text('{"caption": "json"}')
    (tmp_path / "b.json").write_text('{"caption": "json"}')
    assert [candidate.text for candidate in read_folder(tmp_path).candidates] == [
        "txt",
        "json",
        "list",
    ]


def test_every_file_that_cannot_be_used_is_named_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "has_opencv", lambda: False)
    picture(tmp_path / "good.png")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "photo.psd").write_bytes(b"x")
    (tmp_path / "film.mp4").write_bytes(b"x")
    (tmp_path / "plain").write_bytes(b"x")
    (tmp_path / "lone.json").write_text("{}")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "greek.txt").write_bytes("καφές".encode("iso8859-7"))
    (tmp_path / "log.txt").write_bytes(b"x" * (MAX_TEXT_BYTES + 1))
    (tmp_path / "dangling.png").symlink_to(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    problems = problems_of(tmp_path)
    expected = {
        "empty.jpg": "empty",
        "photo.psd": "export them as PNG",
        "film.mp4": "are videos",
        "plain": "ending ''",
        "lone.json": ".json",
        "blank.txt": "without words",
        "greek.txt": "UTF-8",
        "log.txt": "split it",
        "dangling.png": "no such file",
        "pipe.png": "not a file",
    }
    assert set(problems) == set(expected)
    for name, reason in expected.items():
        assert reason in problems[name]
    assert [candidate.did for candidate in read_folder(tmp_path).candidates] == ["good.png"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{broken", "cannot be used"),
        ("a.json", b"[1]", "expected an object"),
        ("a.json", b"[" * 100_000, "cannot be used"),
        ("a.txt", b"\x81\xff", "UTF-8"),
        ("metadata.jsonl", b"{broken", "not valid JSON"),
        ("metadata.jsonl", b"[1]", "expected an object"),
        ("metadata.jsonl", b'{"text": "x"}', "file_name"),
        ("metadata.jsonl", b'{"file_name": "gone.png", "text": "x"}', "no picture 'gone.png'"),
        ("metadata.jsonl", b'{"file_name": "../a.png", "text": "x"}', "no picture"),
        ("metadata.jsonl", b"\xff\xff", "UTF-8"),
        ("metadata.csv", b"text\nx\n", "has the columns text; expected file_name"),
        ("metadata.csv", b"file_name;bild\na.png;x\n", "has the columns file_name, bild; expected"),
        ("metadata.csv", b"file_name,text\nb.png,\xe9\x81\n", "UTF-8"),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": "x"}\n\n'.encode("utf-16-le"),
            "save it as UTF-8",
        ),
        ("metadata.jsonl", codecs.BOM_UTF16 + b"\0", "UTF-16"),
        ("captions.txt", "image,caption\na.png,x\n".encode("utf-16-le"), "save it as UTF-8"),
        ("metadata.jsonl", b'{"name": "a.png"}\n' * 9, "has the columns name; expected file_name"),
        ("metadata.parquet", b"PAR1", "cannot be read"),
        ("a.xmp", b"<x", "cannot be used"),
        ("a.xmp", b"<x/>", "cannot be used"),
        ("a.json", b'{"caption": "\\ud800"}', "cannot be used"),
    ],
)
def test_a_broken_caption_file_is_named_and_costs_only_the_caption(tmp_path, name, content, reason):
    if name.endswith("xmp"):
        pytest.importorskip("defusedxml")
    picture(tmp_path / "a.png")
    (tmp_path / name).write_bytes(content)
    assert len(read_folder(tmp_path).problems) == 1
    assert reason in problems_of(tmp_path)[name]
    [candidate] = read_folder(tmp_path).candidates
    assert candidate.modality is Modality.IMAGE


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "captions.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_list_that_would_never_end_is_named_and_not_read(tmp_path, name, make):
    picture(tmp_path / "a.png")
    make(tmp_path / name)
    assert problems_of(tmp_path) == {name: "is not a file"}


def test_one_file_is_read_with_what_belongs_to_it(tmp_path):
    one = picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "Red."}\n{"file_name": "gone.png"}'
    )
    scan = read_file(one)
    assert [(found.did, found.text) for found in scan.candidates] == [("a.png", "Red.")]
    assert scan.problems == ()
    (tmp_path / "a.txt").write_text("A square.")
    assert read_file(one).candidates[0].text == "A square."
    assert read_file(tmp_path / "a.txt").candidates[0].did == "a.txt"
    (tmp_path / "sound.mp3").write_bytes(b"x")
    assert [problem.file.name for problem in read_file(tmp_path / "sound.mp3").problems] == [
        "sound.mp3"
    ]
