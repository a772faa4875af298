"""Searching with the page: words, a picture, both, parts with weights; filters, dials, the address."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect


def hits(page: Page):
    return page.get_by_role("list", name="Hits, best first").get_by_role("listitem")


def address_query(page: Page) -> dict[str, list[str]]:
    """Return the query of the address."""
    return parse_qs(urlsplit(page.url).query)


def search(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Search query").fill(text)
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits?$"))).to_be_visible()


def picture_of(small_index, item):
    return small_index.parent / item["img_path"]


@pytest.mark.slow
def test_hits_that_come_late_do_not_take_the_place_of_those_one_went_back_to(page):
    search(page, "a blue leaf")
    first = hits(page).first.get_by_role("link").get_attribute("aria-label")
    held = []
    page.route("**/v1/search", lambda route: held.append(route))  # noqa: PLW0108  its argument is asked for
    page.get_by_role("textbox", name="Search query").fill("Quaver. Item 2420-41")
    page.keyboard.press("Enter")
    expect(page.locator("#results")).to_have_attribute("aria-busy", "true")
    page.go_back()
    expect(page.get_by_role("textbox", name="Search query")).to_have_value("a blue leaf")
    for route in held:
        route.continue_()
    page.wait_for_timeout(300)
    expect(page.locator("#results")).to_have_attribute("aria-busy", "false")
    expect(hits(page).first.get_by_role("link")).to_have_attribute("aria-label", first)


@pytest.mark.slow
def test_before_the_first_search_the_items_are_shown(page):
    shown = page.get_by_role("list", name="Items").get_by_role("listitem")
    expect(page.get_by_role("heading", name="36 items, newest first")).to_be_visible()
    expect(shown).to_have_count(36)
    shown.first.get_by_role("link").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Similar")).to_be_visible()


def test_words_find_items_with_their_pictures(page):
    search(page, "a blue leaf")
    expect(hits(page)).to_have_count(20)
    shown = page.locator(".grid .frame img")
    expect(shown.first).to_be_visible()
    expect(shown.first).not_to_have_js_property("naturalWidth", 0)
    expect(page.get_by_role("heading", name="20 hits")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("20 hits")


def test_the_address_says_the_search_and_back_goes_to_the_one_before(page, open_page):
    search(page, "a blue leaf")
    first = hits(page).first.get_by_role("link").get_attribute("aria-label")
    search(page, "a red anchor")
    assert address_query(page) == {"q": ["a red anchor"]}
    page.go_back()
    expect(page.get_by_role("textbox", name="Search query")).to_have_value("a blue leaf")
    expect(hits(page).first.get_by_role("link")).to_have_attribute("aria-label", first)
    again = open_page(page.url)
    expect(hits(again).first.get_by_role("link")).to_have_attribute("aria-label", first)


@pytest.mark.slow
def test_a_picture_searches_and_stays_with_the_words(page, small_index, items):
    page.locator("#file").set_input_files(picture_of(small_index, items["image"][0]))
    expect(
        page.get_by_role("list", name="Parts of the query").get_by_role("img", name="Your picture")
    ).to_be_visible()
    expect(hits(page).first).to_be_visible()
    with page.expect_request("**/v1/search") as sent:
        search(page, "in red")
    assert sent.value.headers["content-type"].startswith("multipart/form-data")
    page.get_by_role("button", name="Remove your picture").click()
    expect(page.get_by_role("list", name="Parts of the query")).to_be_hidden()


@pytest.mark.slow
def test_more_like_this_finds_the_item_itself(page, items):
    search(page, items["text"][0]["txt"])
    first = hits(page).first
    item_id = first.get_attribute("data-id")
    with page.expect_request("**/v1/search") as sent:
        first.get_by_role("button", name="Similar").click()
    assert sent.value.post_data_json["parts"] == [{"id": item_id, "weight": 1}]
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()
    expect(page.locator(f'.grid [data-id="{item_id}"]')).to_be_visible()


@pytest.mark.slow
def test_a_hit_is_added_to_the_query_and_weighed(page):
    search(page, "a leaf")
    added = hits(page).nth(2)
    item_id = added.get_attribute("data-id")
    added.get_by_role("link").click()
    page.get_by_role("dialog", name="Item").get_by_role("button", name="Add to the search").click()
    parts = page.get_by_role("list", name="Parts of the query").get_by_role("listitem")
    expect(parts).to_have_count(1)
    assert address_query(page)["part"] == [f"1*{item_id}"]
    for weight in ("0.75", "0.5", "0.25", "-0.25"):
        parts.get_by_role("button", name="Less").click()
        page.wait_for_url(lambda url, weight=weight: f"part={weight}*" in url)
    expect(parts).to_contain_text("without")
    expect(parts.get_by_role("button", name="Less")).to_be_focused()


@pytest.mark.parametrize(
    ("operator", "value", "condition"),
    [("is", "image", "kind=image"), ("is one of", "image, card", "kind in image,card")],
)
def test_a_condition_narrows_and_survives_in_the_address(
    page, open_page, operator, value, condition
):
    search(page, "a leaf")
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("combobox", name="Field").select_option("kind")
    page.get_by_role("combobox", name="Comparison").select_option(operator)
    with page.expect_request(lambda sent: "where" in (sent.post_data_json or {})) as sent:
        page.get_by_role("textbox", name="Value", exact=True).fill(value)
    assert sent.value.post_data_json["where"] == [condition]
    expect(page.locator(".grid .text.alone")).to_have_count(0)
    again = open_page(page.url)
    again.get_by_role("button", name="Filters").click()
    expect(again.get_by_role("textbox", name="Value", exact=True)).to_have_value(value)


@pytest.mark.slow
def test_filters_without_a_query_show_what_they_allow(page):
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("combobox", name="Field").select_option("kind")
    page.get_by_role("textbox", name="Value", exact=True).fill("image")
    expect(page.get_by_role("heading", name=re.compile("items, newest first"))).to_be_visible()
    expect(page.locator(".grid .text.alone")).to_have_count(0)


@pytest.mark.slow
def test_filters_that_nothing_passes_say_so_and_can_be_removed(page):
    search(page, "a leaf")
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("textbox", name="Words in the text").fill("xylophone")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Nothing found")).to_be_visible()
    page.get_by_role("button", name="Search without filters").click()
    expect(hits(page)).to_have_count(20)


@pytest.mark.slow
def test_the_beam_is_a_dial_and_the_answer_says_how_it_was_searched(page):
    search(page, "a leaf")
    page.get_by_role("button", name="Expert").click()
    page.get_by_role("slider", name=re.compile("Beam")).focus()
    for beam in (10, 20, 50, 100):
        page.keyboard.press("ArrowRight")
        page.wait_for_url(lambda url, beam=beam: url.endswith(f"beam={beam}"))
    page.get_by_role("combobox", name="Re-ranking").select_option("embeddings")
    page.locator("#results").get_by_text("About this search").click()
    expect(page.get_by_text(re.compile(r"\d+ ms, beam 100, re-ranking embeddings"))).to_be_visible()


@pytest.mark.slow
def test_hits_appear_as_one_types_and_back_leaves_them_in_one_step(page):
    search(page, "a leaf")
    first = hits(page).first.get_by_role("link").get_attribute("aria-label")
    box = page.get_by_role("textbox", name="Search query")
    box.fill("")
    for words in ("a red", "a red anchor"):
        box.fill(words)
        page.wait_for_url(lambda url, words=words: f"q={words.replace(' ', '+')}" in url)
    expect(box).to_be_focused()
    expect(page.locator("#results")).to_have_attribute("aria-busy", "false")
    page.keyboard.press("Enter")
    page.go_back()
    expect(box).to_have_value("a leaf")
    expect(hits(page).first.get_by_role("link")).to_have_attribute("aria-label", first)


@pytest.mark.slow
def test_the_original_of_a_picture_can_be_opened_and_downloaded(page, small_index, items):
    item = items["image"][0]
    page.goto(f"{page.url}?item={item['did']}")
    sheet = page.get_by_role("dialog", name="Item")
    with page.expect_download() as downloaded:
        sheet.get_by_role("link", name="Download").click()
    assert downloaded.value.path().read_bytes() == picture_of(small_index, item).read_bytes()
    with page.expect_popup() as opened:
        sheet.get_by_role("link", name="Open the original").click()
    opened.value.wait_for_load_state()
    assert "/v1/items/original" in opened.value.url
