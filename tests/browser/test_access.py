"""The page without a mouse, with a screen reader, on a phone: keys, names, focus, contrast."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

VIEWS = [
    "/",
    "/?q=a+leaf",
    "/?q=a+leaf&part=-0.5*50:1&where=kind%3D%22image%22",
    "/?q=a+leaf&match=xylophone",
    "/?view=add",
]


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_serious(open_page, server, serious, scheme, width):
    page = open_page(
        server.address,
        color_scheme=scheme,
        viewport={"width": width, "height": 850},
        reduced_motion="reduce",
    )
    for view in VIEWS:
        page.goto(server.address + view)
        expect(page.locator("main")).not_to_be_empty()
        page.wait_for_load_state("networkidle")
        assert (view, serious(page)) == (view, [])
    page.goto(f"{server.address}/?q=a+leaf")
    for panel in ("Filters", "Expert"):
        page.get_by_role("button", name=panel).click()
        assert (panel, serious(page)) == (panel, [])
    page.locator(".card .open").first.click()
    page.get_by_role("dialog").get_by_text("Expert").click()
    expect(
        page.get_by_role("dialog").get_by_role("heading", name="Path through the codes")
    ).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    assert ("item", serious(page)) == ("item", [])


def test_a_search_and_a_look_at_a_hit_need_no_mouse(page):
    box = page.get_by_role("textbox", name="Search query")
    expect(box).to_be_focused()
    page.keyboard.type("a leaf")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()
    first = page.get_by_role("link", name=re.compile("^Hit 1: "))
    first.focus()
    page.keyboard.press("Enter")
    sheet = page.get_by_role("dialog", name="Item")
    expect(sheet.get_by_role("button", name="Similar")).to_be_visible()
    page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()
    expect(first).to_be_focused()
    page.keyboard.press("/")
    expect(box).to_be_focused()


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/?q=a+leaf",
        "/?view=add",
        "/?q=a+leaf&part=1*50:1&part=-0.5*50:201",
    ],
)
def test_a_phone_does_not_scroll_sideways_and_its_buttons_can_be_hit(open_page, server, address):
    page = open_page(
        server.address + address,
        viewport={"width": 360, "height": 740},
        is_mobile=True,
        has_touch=True,
    )
    expect(page.locator("main")).not_to_be_empty()
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        """() => [...document.querySelectorAll("main button, nav a")].filter((one) => one.offsetParent)
          .map((one) => [one.textContent || one.ariaLabel, one.getBoundingClientRect()])
          .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""
    )
    assert small == []
