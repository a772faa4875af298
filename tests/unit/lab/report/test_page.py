import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from genius_search.errors import BadData
from genius_search.lab.report.page import Fact, ResultsPage, ShownHit, ShownSearch, write_page
from genius_search.lab.results import ResultRow
from genius_search.lab.settings import METHODS

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


HIT = ShownHit(
    item_id="9:7",
    modality="image-text",
    score=-1.5,
    text="A teal ring <script>alert(1)</script>, see https://example.org",
    image=picture(),
    is_relevant=True,
    codes=(2, 2817, 94),
    log_probabilities=(0.0, -0.2231, -1.6),
)
PAGE = ResultsPage(
    title='Results of "A & B" <i>',
    subtitle="Trained here; see http://example.org",
    facts=(Fact("candidates", "12,000"),),
    rows=rows(),
    searches=(
        ShownSearch(
            task="text -> image",
            instruction="Find a <photo>.",
            query_text="a teal ring",
            hits=(replace(HIT, item_id="9:1", is_relevant=False), HIT),
        ),
        ShownSearch(
            task="image -> text",
            instruction="What is it?",
            query_image=picture("JPEG"),
            hits=(ShownHit(item_id="9:55", modality="text", score=0.25, text="A fact.", is_relevant=False),),
        ),
    ),
)


def written(tmp_path: Path, page: ResultsPage = PAGE) -> tuple[str, Reader]:
    write_page(tmp_path / "page.html", page)
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    reader.close()
    assert reader.open == []
    return source, reader


def test_the_page_names_no_address_and_loads_nothing(tmp_path: Path):
    source, reader = written(tmp_path)
    assert not re.search(r"https?://", source)
    assert "see https://example.org" in "".join(reader.texts)
    assert reader.all("link") == []
    assert all(str(image["src"]).startswith("data:image/") for image in reader.all("img"))
    assert not re.search(r"url\(|@import", source)


def test_the_policy_allows_the_pages_own_script_alone(tmp_path: Path):
    source, reader = written(tmp_path)
    script = source.partition("<script>")[2].partition("</script>")[0]
    policy = next(str(meta["content"]) for meta in reader.all("meta") if "http-equiv" in meta)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert len(reader.all("script")) == 1


def test_text_is_shown_and_never_run(tmp_path: Path):
    source, reader = written(tmp_path)
    assert "<script>alert" not in source
    assert "A teal ring <script>alert(1)</script>" in "".join(reader.texts)
    assert "Find a <photo>." in reader.texts
    assert 'Results of "A & B" <i>' in reader.texts
    assert reader.all("i") == [{}] * 4, "the four of the brand and none of the title's"


def test_every_hit_is_on_the_page_with_its_code_and_log_probabilities(tmp_path: Path):
    _, reader = written(tmp_path)
    for search in PAGE.searches:
        for hit in search.hits:
            assert hit.item_id in reader.texts
            assert f"{hit.score:.3f}" in reader.texts
    for text in ("image-text", "2817", "94", "−0.22", "−1.60"):
        assert text in reader.texts
    tips = [item["title"] for item in reader.all("li") if "title" in item]
    assert "level 1: code 2817, log-probability −0.22, probability 0.800" in tips


def test_right_answers_are_marked_and_the_query_says_where_the_first_is(tmp_path: Path):
    _, reader = written(tmp_path)
    assert [item["class"] for item in reader.all("li") if str(item.get("class")).startswith("hit")] == [
        "hit",
        "hit right",
        "hit",
    ]
    assert "✓ right answer at rank 2" in reader.texts
    assert "No right answer in the first 1" in reader.texts


def test_nothing_is_claimed_where_the_right_answers_are_not_known(tmp_path: Path):
    hit = replace(HIT, is_relevant=None)
    source, _ = written(tmp_path, replace(PAGE, searches=(replace(PAGE.searches[0], hits=(hit,)),)))
    assert 'class="verdict' not in source
    assert "1 query, best hit first.</p>" in source
    assert "2 queries, best hit first. Right answers are marked.</p>" in written(tmp_path)[0]


def test_scores_stand_side_by_side_for_each_pool_and_task(tmp_path: Path):
    source, reader = written(tmp_path)
    for name in ("generative", "+ codes", "+ embeddings", "exact", "average"):
        assert source.count(f">{name}</th>") == 2
    assert reader.texts.index("Global pool ") < reader.texts.index("Local pool ")
    generative = f"{0.125 + METHODS.index('generative') / 100:.3f}"
    assert reader.texts.count(generative) == 2 * (2 + 1) + 4, (
        "generative in two tasks and average, and once in all rows"
    )
    assert all(method in reader.texts for method in METHODS)


def test_pictures_say_what_they_show_and_the_page_its_language(tmp_path: Path):
    _, reader = written(tmp_path)
    assert all(image["alt"] for image in reader.all("img"))
    assert reader.all("html") == [{"lang": "en"}]
    assert [tag for tag, _ in reader.tags if re.fullmatch(r"h[1-6]", tag)][:3] == ["h1", "h2", "h2"]
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [
        attributes["aria-labelledby"] for _, attributes in reader.tags if "aria-labelledby" in attributes
    ]
    assert set(labels) <= set(ids)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_each_kind_of_picture_is_named_in_its_address(tmp_path: Path, kind: str):
    search = replace(PAGE.searches[1], query_image=picture(kind))
    source, _ = written(tmp_path, replace(PAGE, searches=(search,)))
    assert f"data:image/{kind.lower()};base64,{base64.b64encode(picture(kind)).decode()}" in source


def test_bytes_that_are_no_picture_are_refused(tmp_path: Path):
    search = replace(PAGE.searches[1], query_image=b"%PDF-1.7")
    with pytest.raises(BadData, match="expected a PNG, JPEG, GIF or WebP"):
        write_page(tmp_path / "page.html", replace(PAGE, searches=(search,)))
    assert not (tmp_path / "page.html").exists()


def test_codes_that_were_not_decoded_say_so(tmp_path: Path):
    search = replace(PAGE.searches[0], hits=(replace(HIT, log_probabilities=(0.0,)),))
    _, reader = written(tmp_path, replace(PAGE, searches=(search,)))
    tips = [item["title"] for item in reader.all("li") if "title" in item]
    assert "level 1: code 2817, not decoded" in tips
    assert sum("not decoded" in tip for tip in tips) == 2


def test_more_log_probabilities_than_codes_are_refused(tmp_path: Path):
    search = replace(PAGE.searches[0], hits=(replace(HIT, log_probabilities=(0.0,) * 4),))
    with pytest.raises(BadData, match="3 codes with 4 log-probabilities"):
        write_page(tmp_path / "page.html", replace(PAGE, searches=(search,)))


def test_a_search_that_found_nothing_says_so(tmp_path: Path):
    _, reader = written(tmp_path, replace(PAGE, rows=(), searches=(replace(PAGE.searches[0], hits=()),)))
    assert "Nothing was found." in reader.texts
    assert reader.all("table") == []


def test_the_filter_offers_every_task_and_points_at_its_section(tmp_path: Path):
    _, reader = written(tmp_path)
    chosen = [button["data-task"] for button in reader.all("button")]
    sections = [section["id"] for section in reader.all("section") if section.get("class") == "task"]
    assert chosen == ["", *sections]
