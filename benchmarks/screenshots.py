"""Pictures of the page for the documents, from an index of the drawn catalogue (`genius demo`, `genius calibrate`).

Usage: python benchmarks/screenshots.py CATALOGUE.index [--model FOLDER] [--out docs/pictures] [--only NAME ...]

Starts `genius serve` on a copy of the index and looks at it with Debian's chromium (package playwright).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serve import serving

MOST_BYTES = 200_000
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 780}


class Shot(NamedTuple):
    """One picture: where it is taken, and what is done before."""

    name: str
    address: str
    wait_for: str
    scheme: str = "light"
    size: dict[str, int] = DESKTOP
    open: tuple[str, ...] = ()
    """What is clicked first, one after the other."""
    show: str | None = None
    """What is scrolled to the top."""


SHOTS = (
    Shot(
        "page-light", "/?q=a+striped+green+umbrella+with+a+mint+background,+in+a+ring&find=image", ".rating"
    ),
    Shot(
        "page-dark",
        "/?q=a+striped+green+umbrella+with+a+mint+background,+in+a+ring&find=image&part=-0.5*text:a+frame",
        ".rating",
        scheme="dark",
        open=(".panels [aria-controls=panel-filters]",),
    ),
    Shot(
        "page-phone",
        "/?q=a+striped+green+umbrella+with+a+mint+background,+in+a+ring&find=image",
        ".rating",
        size=PHONE,
    ),
    Shot("page-explorer", "/?view=explore&prefix=0", ".branches"),
    Shot(
        "page-path",
        "/?q=a+striped+green+umbrella+with+a+mint+background,+in+a+ring&find=image",
        ".rating",
        open=(".card .open", ".levels li:nth-child(2) summary"),
        show=".path",
    ),
    Shot("page-no-match", "/?q=quarterly+report+of+a+bank&find=image", ".rating"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[shot.name for shot in SHOTS])
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium in the PATH; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    flags = () if given.model is None else ("--model", str(given.model))
    with serving(given.index, *flags) as server, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium)
        for shot in (one for one in SHOTS if one.name in given.only):
            size = take(browser, server.address, shot, given.out / f"{shot.name}.png")
            print(f"{shot.name}.png {size:,} bytes")
        browser.close()
    return 0


def take(browser: Browser, address: str, shot: Shot, path: Path) -> int:
    """Take a picture and make it small; returns its bytes."""
    context = browser.new_context(viewport=shot.size, color_scheme=shot.scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address + shot.address)
    page.locator(shot.wait_for).first.wait_for()
    for clicked in shot.open:
        page.locator(clicked).first.click()
    if shot.show is not None:
        page.locator(shot.show).evaluate("element => element.scrollIntoView()")
    settle(page)
    page.screenshot(path=path)
    context.close()
    with Image.open(path) as whole:
        # A palette of 256 colours shows drawn pictures and text as they are, in a third of the bytes.
        whole.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}")
    return size


def settle(page: Page) -> None:
    """Until the pictures that can be seen are there; those in what is folded up are never fetched."""
    page.wait_for_load_state("networkidle")
    for picture in page.locator("img:visible").all():
        box = picture.bounding_box()
        if box is not None and -box["height"] < box["y"] < page.viewport_size["height"]:
            expect(picture).not_to_have_js_property("naturalWidth", 0)


if __name__ == "__main__":
    sys.exit(main())
