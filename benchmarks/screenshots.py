"""The picture of the page for the documents, from a calibrated index of the demo.

Usage: python benchmarks/screenshots.py CATALOGUE.index [--model FOLDER] [--out docs/pictures/page-light.png]

Starts `genius serve` on a copy of the index and looks at it with Debian's chromium (package playwright).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serve import serving

MOST_BYTES = 200_000
DESKTOP = {"width": 1280, "height": 860}
SEARCH = "/?q=a+striped+green+umbrella+with+a+mint+background,+in+a+ring&find=image"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/page-light.png"))
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium in the PATH; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    flags = () if given.model is None else ("--model", str(given.model))
    with serving(given.index, *flags) as server, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium)
        take(browser, server.address + SEARCH, given.out)
        browser.close()
    return 0


def take(browser: Browser, address: str, path: Path) -> None:
    """Take a picture once the hits have probabilities, and make it small."""
    page = browser.new_page(viewport=DESKTOP, reduced_motion="reduce")
    page.goto(address)
    page.locator(".rating").first.wait_for()
    settle(page)
    page.screenshot(path=path)
    with Image.open(path) as whole:
        # A palette of 256 colours shows drawn pictures and text as they are, in a third of the bytes.
        whole.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


def settle(page: Page) -> None:
    """Until the pictures that can be seen are there; those in what is folded up are never fetched."""
    page.wait_for_load_state("networkidle")
    for picture in page.locator("img:visible").all():
        box = picture.bounding_box()
        if box is not None and -box["height"] < box["y"] < page.viewport_size["height"]:
            expect(picture).not_to_have_js_property("naturalWidth", 0)


if __name__ == "__main__":
    sys.exit(main())
