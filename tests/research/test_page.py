import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from PIL import Image

from genius_search.index.hits import SearchHit
from genius_search.records import Modality
from research.page import ShownSearch, write_page
from research.results import ResultRow
from research.settings import METHODS

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Reader(HTMLParser):
    """Tags must close in order; collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def picture(kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), "teal").save(out, kind)
    return out.getvalue()


def rows() -> tuple[ResultRow, ...]:
    return tuple(
        ResultRow(
            name=f"catalogue_task{task_id}",
            dataset="catalogue",
            task=task,
            task_id=task_id,
            pool=pool,
            method=method,
            queries=500,
            pool_size=12_000,
            headline_k=5,
            measures={"R@1": 0.5, "R@5": 0.125 + place / 100, "R@10": 0.9},
            bytes_per_item=12.25,
            candidates_touched=61.0,
        )
        for pool in ("local", "global")
        for task_id, task in ((0, "text -> image"), (3, "image -> text"))
        for place, method in enumerate(METHODS)
    )


@pytest.fixture
def page(tmp_path) -> dict[str, Any]:
    for kind in ("PNG", "JPEG"):
        (tmp_path / f"picture.{kind.lower()}").write_bytes(picture(kind))
    hit = SearchHit(
        rank=1,
        id="9:7",
        score=-1.5,
        modality=Modality.IMAGE_TEXT,
        text="A teal ring <script>alert(1)</script>, see https://example.org",
        image=str(tmp_path / "picture.png"),
        fields={},
        codes=(2, 2817, 94),
        log_probabilities=(0.0, -0.2231, -1.6),
    )
    fact = replace(
        hit, id="9:55", modality=Modality.TEXT, score=0.25, text="A fact.", image=None, log_probabilities=()
    )
    return {
        "title": 'Results of "A & B" <i>',
        "subtitle": "Trained here; see http://example.org",
        "facts": {"candidates": "12,000"},
        "rows": rows(),
        "searches": [
            ShownSearch(
                "text -> image",
                "Find a <photo>.",
                "a teal ring",
                None,
                [replace(hit, id="9:1"), hit],
                ["9:7"],
            ),
            ShownSearch("image -> text", "What is it?", None, tmp_path / "picture.jpeg", [fact], ["9:8"]),
        ],
    }


@pytest.fixture
def written(tmp_path, page):
    def write(**changes: Any) -> tuple[str, Reader]:
        write_page(tmp_path / "page.html", **{**page, **changes})
        source = (tmp_path / "page.html").read_text(encoding="utf-8")
        reader = Reader()
        reader.feed(source)
        reader.close()
        assert reader.open == []
        return source, reader

    return write


def test_the_page_names_no_address_and_loads_nothing(written):
    source, reader = written()
    assert not re.search(r"https?://", source)
    assert "see https://example.org" in "".join(reader.texts)
    assert reader.all("link") == []
    assert all(str(image["src"]).startswith("data:image/") for image in reader.all("img"))
    assert not re.search(r"url\(|@import", source)


def test_the_policy_allows_the_pages_own_script_alone(written):
    source, reader = written()
    script = source.partition("<script>")[2].partition("</script>")[0]
    policy = next(str(meta["content"]) for meta in reader.all("meta") if "http-equiv" in meta)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert len(reader.all("script")) == 1


def test_text_is_shown_and_never_run(written):
    source, reader = written()
    assert "<script>alert" not in source
    assert "A teal ring <script>alert(1)</script>" in "".join(reader.texts)
    assert "Find a <photo>." in reader.texts
    assert 'Results of "A & B" <i>' in reader.texts
    assert reader.all("i") == [{}] * 4, "the four of the brand and none of the title's"
