"""A look inside the codes: the tree, what is alike, and the path of a hit."""

from __future__ import annotations

import re

from playwright.sync_api import expect


def test_the_tree_is_walked_from_modality_to_level_and_back(page):
    page.get_by_role("link", name="Explore").click()
    expect(page.get_by_role("heading", name="Codes", level=1)).to_be_focused()
    expect(page.locator(".facts")).to_contain_text("36")
    page.locator(".branches a").first.click()
    expect(page.locator(".trail li")).to_have_count(2)
    assert re.search(r"prefix=\d+$", page.url)
    expect(page.locator(".facts")).to_contain_text(re.compile(r"Depth\s*1 of \d+"))
    page.get_by_role("link", name="All items").click()
    expect(page.locator(".trail li")).to_have_count(1)
    page.go_back()
    expect(page.locator(".trail li")).to_have_count(2)


def test_a_hit_shows_its_path_how_near_its_codes_are_and_what_else_could_have_been_chosen(page):
    page.get_by_role("textbox", name="What to look for").fill("a leaf")
    page.keyboard.press("Enter")
    page.get_by_role("list", name="Hits, best first").locator(".open").first.click()
    sheet = page.get_by_role("dialog", name="Item")
    levels = sheet.locator(".levels > li")
    expect(levels.first).to_be_visible()
    shares = [
        one.evaluate("e => Number(getComputedStyle(e).getPropertyValue('--share'))")
        for one in sheet.locator(".levels .meter").all()
    ]
    assert all(0 < share <= 1 for share in shares)
    expect(levels.nth(1).locator(".number")).to_have_text(re.compile(r"^\d+ of \d+$"))
    expect(sheet.locator(".path")).to_contain_text("the fewer codes are closer to the query")
    expect(sheet.locator(".path")).not_to_contain_text("%")
    levels.nth(1).locator("summary").click()
    link = levels.nth(1).get_by_role("link", name=re.compile("below it"))
    expect(link).to_be_visible()
    link.click()
    expect(page.locator(".trail li")).to_have_count(3)
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_what_is_alike_and_what_is_the_same_is_listed(page, server):
    page.goto(f"{server.address}/?view=explore&list=collisions")
    expect(page.get_by_text(re.compile(r"^\d+ groups?$"))).to_be_visible()
    page.get_by_role("link", name="Near-duplicates").click()
    dial = page.get_by_role("slider", name="Last codes that may differ")
    dial.focus()
    page.keyboard.press("End")
    expect(page.locator(".groups > li").first.locator(".card").nth(1)).to_be_visible()
    expect(dial).to_be_focused()
