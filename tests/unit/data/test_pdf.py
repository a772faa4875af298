"""PDF files as texts of a folder."""

from __future__ import annotations

import time

import pytest

from genius_search import Index
from genius_search.cli import main
from genius_search.data import documents, limits, pdf
from genius_search.data.folder import read_folder
from genius_search.data.text_files import Document


def make_pdf(*pages: str) -> bytes:
    """A file with a line of text on each page; byte 1 is a ligature."""
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding<</Differences[1/fi]>>>>"
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", font]
    kids = []
    for page in pages:
        stream = f"BT /F1 12 Tf 50 700 Td ({page}) Tj ET".encode()
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
        font = b"/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(b"<</Type/Page/Parent 2 0 R/Contents %d 0 R%s>>" % (len(objects), font))
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<</Type/Pages/Kids[%s]/Count %d/MediaBox[0 0 600 800]>>" % (
        b" ".join(kids),
        len(kids),
    )
    body, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    root = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(body))
    return body + head + table + root


@pytest.fixture
def papers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "papers"
    place.mkdir()
    (place / "kites.pdf").write_bytes(make_pdf("On kites", "and their \\001ns"))
    return place


def test_the_pages_of_a_file_are_one_text(papers):
    [candidate] = read_folder(papers).candidates
    assert candidate.did == "kites.pdf"
    assert candidate.text.split() == ["On", "kites", "and", "their", "fins"]


def test_a_file_is_read_again_only_when_it_changes(papers, monkeypatch):
    before = read_folder(papers)
    again = Document("read again")
    readers = {".pdf": documents.READERS_BY_SUFFIX[".pdf"]._replace(read=lambda _: again)}
    monkeypatch.setattr(documents, "READERS_BY_SUFFIX", readers)
    assert read_folder(papers) == before
    (papers / "kites.pdf").write_bytes(make_pdf("On anchors"))
    assert read_folder(papers).candidates[0].text == "read again"


def test_files_without_text_and_damaged_ones_are_named(papers):
    (papers / "scan.pdf").write_bytes(make_pdf(""))
    (papers / "torn.pdf").write_bytes(make_pdf("torn")[:60])
    scan = read_folder(papers)
    assert [one.did for one in scan.candidates] == ["kites.pdf"]
    assert {problem.file.name: problem.reason.split(":")[0] for problem in scan.problems} == {
        "scan.pdf": "is a PDF without text; scanned pages need text recognition first",
        "torn.pdf": "cannot be read as a PDF",
    }


def test_without_the_extra_it_is_named(papers, monkeypatch):
    monkeypatch.setattr(documents.Reader, "is_installed", lambda _: False)
    scan = read_folder(papers)
    assert not scan.candidates
    assert "genius-search[pdf]" in scan.problems[0].reason


def test_divided_words_are_joined(papers):
    (papers / "kites.pdf").write_bytes(make_pdf("A light-) Tj 0 -14 Td (house in the \\001eld"))
    assert read_folder(papers).candidates[0].text.split() == [
        "A",
        "lighthouse",
        "in",
        "the",
        "field",
    ]


@pytest.mark.parametrize(
    ("name", "most", "text", "said"),
    [
        (
            "MAX_PDF_PAGES",
            2,
            ["one", "two"],
            "only 2 of 4 pages are read: the limit of a PDF is 2 pages",
        ),
        (
            "MAX_DOCUMENT_CHARACTERS",
            7,
            ["one", "tw"],
            "only 3 of 4 pages are read: the limit of a PDF is 7 characters",
        ),
    ],
)
def test_what_is_longer_than_a_limit_is_said_each_time(papers, monkeypatch, name, most, text, said):
    (papers / "kites.pdf").write_bytes(make_pdf("one", "two", "three", "four"))
    monkeypatch.setattr(pdf, name, most)
    for _ in range(2):
        scan = read_folder(papers)
        assert scan.candidates[0].text.split() == text
        assert [one.reason for one in scan.problems] == [f"{said}; split the file"]


# The timeout may be raised in Hypothesis's callback of the garbage collector, which swallows it with
# a warning; it is raised again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_page_that_takes_too_long_is_interrupted(papers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = " ".join(["(an anchor and a kite) Tj 0 -14 Td"] * 100_000)
    (papers / "bomb.pdf").write_bytes(make_pdf("On anchors", f") Tj {page} (", "after it"))
    monkeypatch.setattr(
        pdf, "MAX_DOCUMENT_SECONDS", 1.5
    )  # the first page takes .01 s, the second half a minute
    assert (
        main(["index", "create", "t.index", "--pool", str(papers), "--encoder", "text:wordllama"])
        == 0
    )
    said = "bomb.pdf: only 1 of 3 pages are read: the limit of a PDF is 1.5 seconds; split the file"
    assert said in capsys.readouterr().err
    assert Index.open("t.index").get("bomb.pdf").text == "On anchors"


def test_a_file_of_which_no_page_can_be_read_in_time_is_left_out(papers, monkeypatch):
    def read_for_ever() -> None:
        while True:
            time.sleep(0.001)

    began = time.monotonic()
    limits.run_with_timeout(read_for_ever, 0.1)
    assert time.monotonic() - began < 30
    monkeypatch.setattr(pdf, "run_with_timeout", lambda work, seconds: False)
    scan = read_folder(papers)
    assert not scan.candidates
    assert scan.problems[0].reason.startswith(
        "only 0 pages are read: the limit of a PDF is 20 seconds"
    )
