"""Readers of texts: whatever a file holds, they return a text or refuse it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.documents import READERS, read_document
from genius_search.data.markdown import split_front_matter
from genius_search.data.subtitles import join_cues, parse_cues
from genius_search.data.values import fields_to_json
from genius_search.errors import BadImage
from genius_search.text import second_at

SUFFIXES = [reader.suffixes[0] for reader in READERS if reader.extra is None]
PIECES = st.sampled_from(
    [
        "<p>",
        "</div>",
        "<!--",
        "&amp;",
        "---\n",
        "+++\n",
        "a: b\n",
        "title = 1\n",
        "#+TITLE: x\n",
        "Subject: x\n",
        "Content-Type: multipart/mixed; boundary=b\n",
        "--b\n",
        "\n\n",
        "PK\x03\x04",
        '{"cells": [',
        '"source": "x"',
        "]}",
        "00:01.000 --> 00:02.000\n",
        "é",
        "\x00",
        "x y",
    ]
)
CONTENTS = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")),
    st.lists(PIECES, max_size=20).map(lambda pieces: "".join(pieces).encode()),
    st.lists(PIECES, max_size=20).map(lambda pieces: "".join(pieces).encode("latin-1")),
)


@given(st.sampled_from(SUFFIXES), CONTENTS)
def test_any_file_gives_a_text_and_fields_or_is_refused(suffix, content):
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=folder),
    ):
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(content)
        try:
            document = read_document(path, [])
        except BadImage:
            return
        assert document.text.strip()
        document.text.encode()
        source, problems = fields_to_json(document.fields)
        assert isinstance(json.loads(source or "{}"), dict)
        assert problems == [] or suffix == ".md"


@given(st.text(max_size=300), st.sampled_from(["---\n", "+++\n"]))
def test_front_matter_is_taken_off_or_stays(text, fence):
    whole = fence + text + "\n" + fence + "the text"
    fields, body = split_front_matter(whole)
    assert body == whole if not fields and body.startswith(fence) else body.endswith("the text")


@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.text("abc", min_size=1, max_size=5)), max_size=20)
)
def test_each_line_of_subtitles_has_its_time(lines):
    file = "\n".join(
        f"{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02},000 --> 20:00:00,000\n{text}{n:02}\n"
        for n, (s, text) in enumerate(lines)
    )
    cues = parse_cues(file)
    assert [cue.start for cue in cues] == sorted(second for second, _ in lines)
    text = join_cues(cues)
    for cue in cues:
        second = second_at(text, text.index(cue.text))
        assert second <= cue.start < second + 10
