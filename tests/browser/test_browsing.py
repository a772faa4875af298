"""Browsing photos with the page: shapes, months, values, order, stacks, and the viewer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Page, Route, expect

from genius_search.index.index import Index

pytestmark = pytest.mark.slow

TAKEN = 0x9003
EXIF = 0x8769
SHAPES = [(160, 80), (80, 120), (100, 100), (60, 130)]
COLOURS = ("red", "green", "blue", "orange", "purple")


def draw_photo(file: Path, number: int, day: str | None) -> None:
    """Draw a photo; each number has another picture."""
    image = Image.new("RGB", SHAPES[number % len(SHAPES)], "white")
    corner = (number % 40, number // 2)
    ImageDraw.Draw(image).rectangle((*corner, 50, 70), fill=COLOURS[number % len(COLOURS)])
    exif = image.getexif()
    exif[0x0110] = ("Boxy", "Snappy")[number % 2]  # the camera
    if day is not None:
        exif.get_ifd(EXIF)[TAKEN] = f"{day} 12:00:00"
    image.save(file, exif=exif)


@pytest.fixture(scope="module")
def photos(serve, trained, tmp_path_factory):
    """Serve 66 photos of three months, and of one month two copies; one photo has no date."""
    root = tmp_path_factory.mktemp("browse")
    folder = root / "photos"
    folder.mkdir()
    for number in range(66):
        month = ("2024:05", "2024:04", "2023:12")[number // 22]
        draw_photo(folder / f"p{number:02}.jpg", number, f"{month}:{number % 22 + 1:02}")
    draw_photo(folder / "undated.jpg", 66, None)
    (folder / "p00 copy.jpg").write_bytes((folder / "p00.jpg").read_bytes())
    (folder / "p01.txt").write_text("a green box")
    Index.create(root / "photos.index", folder, model=trained.model, embeddings="fused")
    return serve(root / "photos.index")


@pytest.fixture
def page(open_page, photos) -> Page:
    page = open_page(photos.address)
    expect(page.get_by_role("heading", name="68 items, newest first")).to_be_visible()
    return page


def card(page: Page, item_id: str):
    return page.locator(f'.card[data-id="{item_id}"]')


def test_months_go_on_as_one_scrolls_and_can_be_reached_at_once(page):
    months = page.get_by_role("navigation", name="Months").get_by_role("link")
    expect(months).to_have_text(
        ["May 2024 23", "April 2024 22", "December 2023 22", "Without a date 1"]
    )
    expect(page.get_by_role("heading", name="May 2024")).to_be_visible()
    page.mouse.move(600, 600)
    for _ in range(12):
        page.mouse.wheel(0, 2_000)
        page.wait_for_timeout(100)
    expect(page.get_by_role("list", name="Without a date").get_by_role("listitem")).to_have_count(1)
    months.nth(2).click()
    expect(page.locator(".pages h3").first).to_have_text("December 2023")
    assert "month=2023-12" in page.url
    page.get_by_role("link", name="From the beginning").click()
    expect(page.locator(".pages h3").first).to_have_text("May 2024")


def test_each_picture_keeps_its_shape_and_has_a_name_and_a_date(page):
    expect(card(page, "p20.jpg").locator("img")).not_to_have_js_property("naturalWidth", 0)
    page.wait_for_timeout(300)
    for number, (width, height) in zip(range(18, 22), SHAPES[2:] + SHAPES[:2], strict=True):
        shown = card(page, f"p{number}.jpg").locator(".frame")
        box = shown.bounding_box()
        assert box["width"] / box["height"] == pytest.approx(max(width / height, 0.62), rel=0.03)
        assert shown.locator("img").evaluate("image => getComputedStyle(image).objectFit") == (
            "contain"
        )
    expect(card(page, "p20.jpg")).to_contain_text("p20.jpg")
    expect(card(page, "p20.jpg")).to_contain_text("May 21, 2024")
    expect(card(page, "p01.jpg")).to_contain_text("a green box")


def test_values_with_counts_narrow_the_items_and_can_be_combined(page):
    page.get_by_role("button", name="Filters").click()
    cameras = page.get_by_role("group", name="camera").get_by_role("button")
    expect(cameras).to_have_text(["Boxy 35", "Snappy 33"])
    page.get_by_role("group", name="taken").get_by_role("button", name="2023").click()
    expect(page.get_by_role("heading", name="22 items, newest first")).to_be_visible()
    cameras.first.click()
    expect(cameras.first).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("heading", name="11 items, newest first")).to_be_visible()
    cameras.last.click()
    expect(page.get_by_role("heading", name="22 items, newest first")).to_be_visible()
    page.get_by_role("button", name="Remove all filters").click()
    expect(page.get_by_role("heading", name="68 items, newest first")).to_be_visible()


def test_hits_are_sorted_by_match_or_by_date(page):
    box = page.get_by_role("textbox", name="Search query")
    box.fill("a green box")
    box.press("Enter")
    order = page.get_by_role("combobox", name="Order")
    hits = page.get_by_role("list", name=re.compile("^Hits")).get_by_role("listitem")
    best = hits.first.get_attribute("data-id")
    order.select_option("Oldest first")
    expect(page.get_by_role("list", name="Hits, oldest first")).to_be_visible()
    expect(hits.first).to_contain_text("2023")
    order.select_option("Best match")
    expect(hits.first).to_have_attribute("data-id", best)


def test_copies_are_stacked_and_can_be_shown(page):
    first_copy = page.locator('.card[data-id^="p00"]')
    expect(first_copy).to_have_count(1)
    first_copy.get_by_role("button", name="1 alike").click()
    expect(page.get_by_role("list", name="Hits, best first")).to_be_visible()
    expect(page.locator('.card[data-id^="p00"]')).to_have_count(2)
    page.get_by_role("checkbox", name="Stack near-duplicates").check()
    expect(page.locator('.card[data-id^="p00"]')).to_have_count(1)


def test_arrow_keys_lead_through_the_viewer_and_the_focus_returns_to_the_last_item(page):
    card(page, "p21.jpg").get_by_role("link").click()
    viewer = page.get_by_role("dialog", name="Item")
    expect(viewer.get_by_role("heading", name="p21.jpg")).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(viewer.get_by_role("heading", name="p19.jpg")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(viewer.get_by_role("heading", name="p20.jpg")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("2 of")
    page.keyboard.press("+")
    expect(viewer.get_by_label("Zoom", exact=True)).to_have_text("150 %")
    expect(viewer.locator(".original img")).not_to_have_js_property("naturalWidth", 0)
    viewer.get_by_role("button", name="Zoom out").click()
    expect(viewer.get_by_label("Zoom", exact=True)).to_have_text("100 %")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    expect(card(page, "p20.jpg").get_by_role("link")).to_be_focused()
    expect(page.get_by_role("heading", name="May 2024")).to_be_visible()
    assert "item=" not in page.url


def test_a_new_query_starts_with_the_first_hits_again(page):
    box = page.get_by_role("textbox", name="Search query")
    box.fill("a green box")
    box.press("Enter")
    page.get_by_role("checkbox", name="Stack near-duplicates").uncheck()
    expect(page.get_by_role("heading", name="20 hits")).to_be_visible()
    page.get_by_role("button", name="Show more").click()
    expect(page.get_by_role("heading", name="50 hits")).to_be_visible()
    box.fill("a blue box")
    box.press("Enter")
    expect(page.get_by_role("heading", name="20 hits")).to_be_visible()


def test_buttons_have_plain_words_and_the_beam_is_for_experts(page):
    page.get_by_role("textbox", name="Search query").fill("a green box")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=re.compile("hits$"))).to_be_visible()
    buttons = page.get_by_role("button").all_inner_texts()
    assert not [text for text in buttons if re.search(r"…|✓|[Bb]eam", text)]
    expect(
        page.get_by_text(re.compile("beam", re.IGNORECASE)).locator("visible=true")
    ).to_have_count(0)
    page.get_by_role("button", name="Expert").click()
    expect(page.get_by_role("slider", name=re.compile("^Beam"))).to_be_visible()


def test_words_of_the_query_are_marked_in_the_picture(page):
    def with_text(route: Route) -> None:
        item = route.fetch().json()
        item["picture_text"] = [
            {"words": "Boarding pass", "box": [0.1, 0.2, 0.6, 0.3]},
            {"words": "Gate B42", "box": [0.1, 0.5, 0.4, 0.6]},
        ]
        route.fulfill(json=item)

    page.route(re.compile(r"/v1/items\?"), with_text)
    page.goto(f"{page.url}?q=which+gate&item=p02.jpg")
    viewer = page.get_by_role("dialog", name="Item")
    expect(viewer.get_by_role("listitem").filter(has_text="Boarding pass")).to_be_visible()
    mark = viewer.locator(".sheet mark")
    expect(mark).to_have_count(1)
    expect(viewer.locator(".lines mark")).to_have_text("Gate B42")
    page.wait_for_timeout(300)
    picture, box = viewer.locator(".sheet").bounding_box(), mark.bounding_box()
    assert box["x"] - picture["x"] == pytest.approx(0.1 * picture["width"], abs=1)
    assert box["height"] == pytest.approx(0.1 * picture["height"], abs=1)


def test_a_video_plays_from_the_moment_that_was_found(page, tmp_path):
    cv2 = pytest.importorskip("cv2", reason="needs the extra video")
    film = tmp_path / "film.webm"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter_fourcc(*"VP80"), 10, (64, 48))
    for grey in range(0, 250, 5):
        writer.write(np.full((48, 64, 3), grey, dtype=np.uint8))
    writer.release()

    data = film.read_bytes()

    def send_part(route: Route) -> None:
        start = int(re.match(r"bytes=(\d+)", route.request.headers.get("range", "bytes=0"))[1])
        headers = {
            "Content-Type": "video/webm",
            "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}",
        }
        route.fulfill(status=206, body=data[start:], headers=headers)

    def as_video(route: Route) -> None:
        answer = route.fetch().json()
        for hit in answer.get("hits", []):
            fields = {"kind": "video", "duration": 65.0}
            hit |= {"moment": 2.5, "fields": fields, "matched": ["caption", "picture text"]}
        route.fulfill(json=answer)

    page.route("**/v1/search", as_video)
    page.route(re.compile(r"/v1/items\?"), lambda route: route.fulfill(json={}))
    page.route("**/v1/items/original*", send_part)
    page.goto(f"{page.url}?q=a+box")
    shown = page.locator(".card").first
    expect(shown.locator(".length")).to_have_text("0:02 of 1:05")
    expect(shown.locator(".acts")).to_contain_text("in its picture text")
    shown.get_by_role("link").click()
    video = page.get_by_role("dialog", name="Item").locator("video")
    expect(video).to_have_js_property("currentTime", 2.5)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_serious_while_browsing(open_page, photos, serious, width, scheme):
    page = open_page(
        photos.address,
        color_scheme=scheme,
        viewport={"width": width, "height": 850},
        reduced_motion="reduce",
    )
    expect(page.get_by_role("heading", name="May 2024")).to_be_visible()
    assert ("timeline", serious(page)) == ("timeline", [])
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("group", name="camera").get_by_role("button", name="Boxy").click()
    expect(page.get_by_role("heading", name="35 items, newest first")).to_be_visible()
    assert ("values", serious(page)) == ("values", [])
    page.locator(".card .open").first.click()
    page.keyboard.press("+")
    expect(page.get_by_label("Zoom", exact=True)).to_have_text("150 %")
    assert ("viewer", serious(page)) == ("viewer", [])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
