"""What the page shows when a request fails, and what it does then."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, Route, expect


def search(page: Page, text: str = "a leaf") -> None:
    page.get_by_role("textbox", name="Search query").fill(text)
    page.get_by_role("button", name="Search", exact=True).click()


@pytest.mark.slow
def test_a_key_is_asked_for_and_a_server_that_has_gone_is_said_to_be(
    open_page, serve, small_index, write_keys
):
    key = "secret" * 4
    server = serve(small_index, "--keys", str(write_keys(f"reader read {key}")))
    page = open_page(server.address)
    asking = page.get_by_role("dialog", name="API key")
    expect(asking.get_by_role("textbox", name="API key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(asking).to_contain_text("was not accepted")
    asking.get_by_role("textbox", name="API key").fill(key)
    page.keyboard.press("Enter")
    search(page)
    picture = page.locator(".grid .frame img").first
    expect(picture).to_have_attribute("src", re.compile("^blob:"))
    expect(picture).not_to_have_js_property("naturalWidth", 0)
    expect(
        page.get_by_role("link", name="Add", exact=True)
    ).to_be_hidden()  # a key that may only read
    assert page.evaluate("[localStorage.length, Object.values(sessionStorage)]") == [0, [key]]
    assert key not in page.url
    server.process.kill()
    search(page, "something else")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


@pytest.mark.slow
def test_a_busy_server_is_asked_again_when_it_said(page):
    answers = []

    def busy_once(route: Route) -> None:
        if "text" not in route.request.post_data_json:  # the items before the search
            route.continue_()
            return
        answers.append(route)
        if len(answers) > 1:
            route.continue_()
            return
        problem = {
            "title": "Too Many Requests",
            "detail": "256 searches wait.",
            "request_id": "r-1",
        }
        route.fulfill(
            status=429,
            content_type="application/problem+json",
            headers={"Retry-After": "1"},
            body=json.dumps(problem),
        )

    page.route("**/v1/search", busy_once)
    search(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("256 searches wait.")
    expect(alert).to_contain_text("Request r-1")
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()
    expect(alert).to_have_count(0)
    assert len(answers) == 2


@pytest.mark.slow
def test_a_mistake_in_the_search_is_answered_in_the_servers_words(page, server):
    page.goto(f"{server.address}/?q=leaf&where=price")
    expect(page.get_by_role("alert")).to_contain_text("expected a field and an operator")
    search(page)
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("button", name="Remove this condition").click()
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()


@pytest.mark.slow
def test_a_file_that_is_no_picture_is_dropped_from_the_query(page):
    search(page)
    broken = {"name": "broken.jpg", "mimeType": "image/jpeg", "buffer": b"no picture"}
    page.locator("#file").set_input_files([broken])
    expect(page.get_by_role("alert")).to_contain_text("The file is not a picture")
    expect(page.get_by_role("button", name="Try again")).to_have_count(0)
    expect(page.get_by_role("list", name="Parts of the query")).to_be_hidden()
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()


@pytest.mark.slow
def test_no_good_match_is_said_and_the_nearest_are_shown_as_doubtful(page):
    def doubtful(route: Route) -> None:
        answer = route.fetch().json()
        answer["good_match"] = False
        for hit in answer["hits"]:
            hit["probability"] = 0.04
        route.fulfill(json=answer)

    page.route("**/v1/search", doubtful)
    search(page)
    expect(page.get_by_role("heading", name="No good match")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("No good match")
    expect(
        page.get_by_text("The best hit is right with a probability of only 4.0 %.")
    ).to_be_visible()
    expect(page.locator(".doubtful .card")).to_have_count(20)
    expect(page.locator(".doubtful .meter")).to_have_count(0)


def test_words_of_an_item_are_never_part_of_the_page(page):
    def hostile(route: Route) -> None:
        answer = route.fetch().json()
        answer["hits"][0] |= {
            "text": "<img src=x onerror=document.title='taken'>",
            "id": '"><script>',
            "image": None,
        }
        route.fulfill(json=answer)

    page.route("**/v1/search", hostile)
    search(page)
    expect(page.locator(".card .text").first).to_have_text(
        "<img src=x onerror=document.title='taken'>"
    )
    assert page.title() == "a leaf · genius"
    assert page.locator(".card img[src$=x], .card script").count() == 0
