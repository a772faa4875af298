"""Kinds of text in a folder: the text and the fields of each, and what happens to hostile files."""

from __future__ import annotations

import json
import time
import zipfile

import pytest

from genius_search.data import documents, limits, office
from genius_search.data.folder import read_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def read(folder, name, content):
    """Write a file, and return text and fields of the only candidate."""
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    scan = read_folder(folder)
    assert scan.problems == ()
    [candidate] = scan.candidates
    return candidate.text, json.loads(candidate.source or "{}")


def reason(folder, name, content=None):
    """Write a file that cannot be read, and return the reason."""
    if content is not None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    scan = read_folder(folder)
    assert scan.candidates == ()
    [problem] = scan.problems
    return problem.reason


def archive(path, **files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name.replace("__", "/").replace("_xml", ".xml"), content)


def test_of_a_header_without_end_the_beginning_is_read(folder):
    (folder / "a.eml").write_text("Subject: " + "=?utf-8?q?a?= " * 80_000 + "\n\nan anchor")
    scan = read_folder(folder)
    assert "50,000 characters of a header" in scan.problems[0].reason
    [candidate] = scan.candidates
    assert candidate.text.startswith("aaaa")
    assert candidate.text.endswith("an anchor")


@pytest.mark.parametrize("name", ["a.md", "a.markdown"])
def test_front_matter_becomes_fields_and_its_title_the_first_line(folder, name):
    front = (
        "---\ntitle: The kite\ndate: 2024-05-01\ntags: [wind, red]\ndraft: true\n---\n\nIt flies.\n"
    )
    text, fields = read(folder, name, front)
    assert text == "The kite\n\nIt flies."
    assert fields == {
        "title": "The kite",
        "date": "2024-05-01",
        "tags": ["wind", "red"],
        "draft": True,
    }


def test_front_matter_may_be_toml_and_have_windows_line_ends(folder):
    front = '+++\ntitle = "The kite"\nweight = 3\n[extra]\nby = "Ada"\n+++\n# The kite\nIt flies.'
    text, fields = read(folder, "a.md", front.replace("\n", "\r\n"))
    assert text.splitlines() == ["# The kite", "It flies."]
    assert fields == {"title": "The kite", "weight": 3, "extra": {"by": "Ada"}}


@pytest.mark.parametrize(
    "front",
    [
        "---\nA line between rules\n---\nand text",
        "---\na: [\n---\ntext",
        "---\nno end",
        "---\na: &a [x]\nb: [*a, *a]\n---\ntext",
        "---\n" + "[" * 9000 + "\n---\ntext",
        "---\n" + "- " * 4000 + "\n---\ntext",
        "---\n" + "? " * 4000 + "\n---\ntext",
        "---\n" + "a: b\n" * 1900 + "[\n---\ntext",
        "+++\na = \n+++\ntext",
        "---\na: !!python/name:os.system\n---\ntext",
    ],
)
def test_what_is_no_front_matter_stays_in_the_text(folder, front):
    text, fields = read(folder, "a.md", front)
    assert text == front
    assert fields == {}


def test_keywords_of_org_become_fields(folder):
    org = "#+TITLE: The kite\n#+DATE: <2024-05-01 Wed>\n#+filetags: :wind:red:\n#+STARTUP: x\n* It flies"
    text, fields = read(folder, "a.org", org)
    assert text == "The kite\n\n#+STARTUP: x\n* It flies"
    assert fields == {"title": "The kite", "date": "2024-05-01", "tags": ["wind", "red"]}


@pytest.mark.parametrize(
    "name", ["a.rst", "README", "license", "a.py", "a.tex", "Makefile", "a.RS"]
)
def test_texts_source_code_and_files_without_an_ending_are_texts(folder, name):
    assert read(folder, name, "It flies.\n") == ("It flies.", {})


def test_subtitles_are_a_text_with_times(folder):
    cues = (
        "1\n00:00:01,000 --> 00:00:02,000\nIt flies.\n\n2\n00:01:00,000 --> 00:01:02,500\nHome.\n"
    )
    assert read(folder, "a.srt", cues) == (
        "[0:00:01] It flies.\n[0:01:00] Home.",
        {"kind": "subtitles", "seconds": 62},
    )


def test_a_web_page_gives_its_main_text_title_and_fields(folder):
    page = """<!doctype html><html lang=en><head><title>The &amp; kite</title><style>p {}</style>
    <meta name=author content="Ada"><meta property="article:published_time" content="2024-05-01">
    <script>var a = "<p>no</p>";</script></head><body><nav><a href=/>Menu</a></nav>
    <main><h1>Wind</h1><p>It <b>fl</b>ies
    high.<br>Red.</p><table><tr><td>1</td><td>2</td></tr></table></main><footer>Imprint</footer>"""
    text, fields = read(folder, "a.html", page)
    assert text == "The & kite\n\nWind\nIt flies high.\nRed.\n1 2"
    assert fields == {
        "title": "The & kite",
        "language": "en",
        "author": "Ada",
        "date": "2024-05-01",
    }


def test_a_web_page_without_a_main_element_gives_all_text_in_its_encoding(folder):
    page = "<head><title></title><meta charset=iso-8859-2><p>zażółć<template>no</template><div>gęślą".encode(
        "iso-8859-2"
    )
    assert read(folder, "a.htm", page) == ("zażółć\ngęślą", {})


def test_an_email_gives_subject_body_people_and_names_of_attachments(folder):
    mail = """From: =?utf-8?q?Ad=C3=A4?= <ada@example.org>
To: Ben <ben@example.org>, c@example.org
Subject: The
 kite
Date: Wed, 01 May 2024 12:30:00 +0200
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=x

--x
Content-Type: multipart/alternative; boundary=y

--y
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

It fl=FCgelt.
--y
Content-Type: text/html

<p>no</p>
--y--
--x
Content-Type: text/plain; name=a.txt
Content-Disposition: attachment; filename=a.txt

attached
--x--
"""
    text, fields = read(folder, "a.eml", mail)
    assert text == "The kite\n\nIt flügelt."
    assert fields == {
        "title": "The kite",
        "from": "Adä <ada@example.org>",
        "to": ["Ben <ben@example.org>", "c@example.org"],
        "date": "2024-05-01T12:30:00+02:00",
        "attachments": ["a.txt"],
    }


def test_an_email_in_html_and_an_unknown_encoding_is_read(folder):
    mail = b"Subject: a\nContent-Type: text/html; charset=nonsense\n\n<p>It fl\xfcgelt.</p>"
    assert read(folder, "a.eml", mail) == ("a\n\nIt flügelt.", {"title": "a"})


def test_a_notebook_gives_texts_and_code_but_no_outputs(folder):
    cells = [
        {"cell_type": "markdown", "source": ["# Wind\n", "It flies."]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"text": "no"}]},
        {"cell_type": "raw", "source": 5},
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"language": "python"}}}
    assert read(folder, "a.ipynb", json.dumps(notebook)) == (
        "# Wind\nIt flies.\n\nprint(1)",
        {"language": "python"},
    )


W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def test_a_word_text_gives_paragraphs_tables_notes_and_fields(folder):
    body = """<w:body><w:p><w:r><w:t>It fl</w:t></w:r><w:r><w:t xml:space="preserve">ies </w:t><w:tab/>
    <w:t>high.</w:t></w:r></w:p><w:p><w:del><w:r><w:delText>no</w:delText></w:r></w:del></w:p>
    <w:tbl><w:tr><w:tc><w:p><w:r><w:t>cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body>"""
    core = """<c:coreProperties xmlns:c="a" xmlns:d="b" xmlns:t="c"><d:title>The kite</d:title>
    <d:creator>Ada</d:creator><t:created>2024-05-01T12:30:00Z</t:created></c:coreProperties>"""
    archive(
        folder / "a.docx",
        word__document_xml=f"<w:document {W}>{body}</w:document>",
        word__footnotes_xml=f"<w:footnotes {W}><w:p><w:r><w:t>note</w:t></w:r></w:p></w:footnotes>",
        docProps__core_xml=core,
    )
    [candidate] = read_folder(folder).candidates
    assert candidate.text == "The kite\n\nIt flies high.\ncell\nnote"
    assert json.loads(candidate.source) == {
        "title": "The kite",
        "author": "Ada",
        "date": "2024-05-01T12:30:00Z",
    }


def test_an_opendocument_text_gives_paragraphs_and_fields(folder):
    content = """<o:document-content xmlns:o="o" xmlns:t="t"><o:body><t:tracked-changes><t:p>no</t:p>
    </t:tracked-changes><t:h>Wind</t:h><t:p>It <t:span>fl</t:span>ies<t:s/>high.<t:line-break/>Red.</t:p>
    </o:body></o:document-content>"""
    meta = """<o:document-meta xmlns:o="o" xmlns:d="d" xmlns:m="m"><d:title>The kite</d:title>
    <m:keyword>wind</m:keyword><m:keyword>red</m:keyword></o:document-meta>"""
    archive(folder / "a.odt", content_xml=content, meta_xml=meta)
    [candidate] = read_folder(folder).candidates
    assert candidate.text == "The kite\n\nWind\nIt flies high.\nRed."
    assert json.loads(candidate.source) == {"title": "The kite", "keywords": ["wind", "red"]}


def test_western_texts_are_decoded_and_say_so(folder):
    text, fields = read(folder, "a.txt", "“Müller” kostet 5 €".encode("cp1252"))
    assert text == "“Müller” kostet 5 €"
    assert fields == {"encoding": "windows-1252"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"PK\x03\x04\xff\xfe data", "binary data"),
        ("Привет, мир".encode("cp1251"), "unknown encoding"),
        (b"caf\xe9 \x81 and so on", "neither a UTF-8 nor a Windows-1252"),
    ],
)
def test_data_and_other_encodings_are_not_read_as_western_texts(folder, content, expected):
    assert expected in reason(folder, "a.txt", content)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.mp3", "are sounds"),
        ("a.doc", "save as .docx"),
        ("a.xlsx", "spreadsheets"),
        ("a.svg", "export them as PNG or JPEG"),
        ("a.xyz", "are not known as pictures or texts"),
        ("a.yaml", "settings of programs"),
    ],
)
def test_reasons_fit_the_kind_of_file(folder, name, expected):
    assert expected in reason(folder, name, "x")


def test_a_source_tree_gives_what_people_wrote(folder):
    for name in (
        *("README.md", "src/a.py", "src/a.min.js", "src/style.css", "src/big.js", "src/api_pb2.py"),
        *("node_modules/b/index.js", ".git/HEAD", "env/pyvenv.cfg", "env/lib/c.py"),
        *("target/CACHEDIR.TAG", "target/d.rs", "package-lock.json", "src/gen.go"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("It flies.")
    (folder / "src/big.js").write_text("var a=1;" * 1000)
    (folder / "src/gen.go").write_text("// Code generated by x. DO NOT EDIT.\n")
    scan = read_folder(folder)
    assert [candidate.did for candidate in scan.candidates] == [
        "README.md",
        "src/a.py",
        "src/style.css",
    ]
    assert {problem.file.name for problem in scan.problems} == {"big.js", "gen.go"}


def test_archives_that_unpack_to_gigabytes_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(office, "FREE_UNPACKED_BYTES", 100_000)
    bomb = f"<w:document {W}><w:t>" + "a" * 1_000_000 + "</w:t></w:document>"
    archive(folder / "a.docx", word__document_xml=bomb)
    assert "unpacks to far more" in reason(folder, "a.docx")


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        ('<!DOCTYPE x [<!ENTITY a "aa">]><x>&a;</x>', "XML that cannot be read"),
        ("<p>" * 1000, "nested too deeply"),
        ("<p>unclosed", "XML that cannot be read"),
        ("<p/>", "without text"),
    ],
)
@pytest.mark.parametrize("ending", ["docx", "odt"])
def test_hostile_and_damaged_xml_is_named(folder, ending, xml, expected):
    if ending == "docx":
        archive(folder / "a.docx", word__document_xml=xml)
    else:
        archive(folder / "a.odt", content_xml=xml)
    assert expected in reason(folder, f"a.{ending}")


def test_files_that_are_no_archives_or_other_ones_are_named(folder):
    assert "damaged" in reason(folder, "a.docx", b"PK\x03\x04" + b"x" * 100)
    archive(folder / "a.docx", other_xml="<x/>")
    assert "is not a .docx file" in reason(folder, "a.docx")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", "<div>" * 200_000),
        ("a.html", "<" * 500_000),
        ("a.html", "<a " * 200_000),
        ("a.html", "<!--" * 100_000),
        ("a.html", "&" * 500_000),
        ("a.eml", "Content-Type: multipart/mixed; boundary=a\n\n" + "--a\n\n" * 100_000),
        ("a.eml", "Subject: " + "=?utf-8?q?" * 50_000 + "\n\n"),
        ("a.eml", ("Content-Type: multipart/mixed; boundary=a%d\n\n--a%d\n" * 400) % ((1,) * 800)),
        ("a.ipynb", "[" * 100_000),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n" * 20_000),
    ],
)
# The timeout may be raised in Hypothesis's callback of the garbage collector, which swallows it with
# a warning; it is raised again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hostile_texts_take_a_bounded_time(folder, monkeypatch, name, content):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_SECONDS", 0.5)
    (folder / name).write_text(content)
    began = time.process_time()
    read_folder(folder)
    assert time.process_time() - began < 5


def test_long_documents_are_read_up_to_a_limit_and_named(folder, monkeypatch):
    monkeypatch.setattr(limits.shorten, "__defaults__", (10,))
    (folder / "a.html").write_text("<p>0123456789 and more")
    scan = read_folder(folder)
    assert [candidate.text for candidate in scan.candidates] == ["0123456789"]
    assert "only the first 10 characters" in scan.problems[0].reason


def test_slow_texts_are_read_once(folder, monkeypatch):
    before = read(folder, "a.html", "<title>a</title><p>It flies.")
    monkeypatch.setattr(documents, "_read_in_time", lambda *_: pytest.fail("read again"))
    [candidate] = read_folder(folder).candidates
    assert (candidate.text, json.loads(candidate.source)) == before
