"""Adding and deleting items with the page."""

from __future__ import annotations

import io
import re
import shutil

import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow


def picture_bytes(colour: str, kind: str = "PNG") -> bytes:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((16, 16, 80, 80), fill=colour)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def changing(browser, serve, small_index, tmp_path_factory):
    """A server whose items may be changed."""
    return serve(shutil.copytree(small_index, tmp_path_factory.mktemp("own") / "things.index"))


@pytest.fixture
def page(open_page, changing) -> Page:
    return open_page(changing.address)


def add(page: Page, *files: dict[str, object]) -> None:
    page.get_by_role("link", name="Add", exact=True).click()
    page.locator("#files").set_input_files(list(files))
    page.get_by_role("button", name=re.compile(r"Add \d+ item")).click()


def test_dropped_files_are_shown_named_added_and_found(page):
    page.get_by_role("link", name="Add", exact=True).click()
    expect(page.get_by_role("heading", name="Add items")).to_be_focused()
    page.evaluate(
        """([picture, words]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(picture)], "disc.png", { type: "image/png" }));
          data.items.add(new File([words], "disc.txt", { type: "text/plain" }));
          document.getElementById("add").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        [list(picture_bytes("crimson")), "a crimson disc"],
    )
    rows = page.get_by_role("list", name="Items to add").get_by_role("listitem")
    expect(rows).to_have_count(1)
    expect(rows.get_by_role("textbox", name="Text of disc.png")).to_have_value("a crimson disc")
    rows.get_by_role("textbox", name="Name of disc.png").fill("crimson-disc")
    page.get_by_role("button", name="Add 1 item").click()
    expect(page.locator("#added")).to_contain_text("1 item added")
    expect(page.locator("#status")).to_contain_text("1 item added")
    page.get_by_role("link", name="Show it and similar items").click()
    expect(page.locator('.grid [data-id="crimson-disc"]')).to_be_visible()


def test_an_item_that_cannot_be_read_is_left_out_with_the_reason_and_the_others_are_added(page):
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": picture_bytes("teal")[:90]}
    phone = {"name": "phone.heic", "mimeType": "", "buffer": picture_bytes("teal", "HEIF")}
    whole = {"name": "whole.png", "mimeType": "image/png", "buffer": picture_bytes("teal")}
    add(page, broken, phone, whole)
    expect(page.locator("#added")).to_contain_text("2 items added")
    expect(page.locator("#added .warn li")).to_contain_text(re.compile("broken.png: .+"))


def test_a_written_text_is_added_and_deleted_again(page):
    page.get_by_role("link", name="Add", exact=True).click()
    page.get_by_role("textbox", name="Or write a text").fill("A lighthouse on a rock.")
    page.get_by_role("button", name="Add to list").click()
    page.get_by_role("textbox", name=re.compile("Name of text-")).fill("lighthouse")
    page.get_by_role("button", name="Add 1 item").click()
    page.get_by_role("link", name="Show it and similar items").click()
    card = page.locator('.grid [data-id="lighthouse"]')
    card.get_by_role("link").click()
    page.get_by_role("dialog", name="Item").get_by_role("button", name="Delete").click()
    asking = page.get_by_role("dialog", name="Delete this item?")
    expect(asking).to_contain_text("the file stays")
    expect(asking.get_by_role("button", name="Keep it")).to_be_focused()
    asking.get_by_role("button", name="Keep it").click()
    page.get_by_role("dialog", name="Item").get_by_role("button", name="Delete").click()
    asking.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("#status")).to_contain_text("lighthouse was deleted")
    page.get_by_role("textbox", name="Search query").fill("A lighthouse on a rock.")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("^[0-9]+ hits$"))).to_be_visible()
    expect(card).to_have_count(0)
