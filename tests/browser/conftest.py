"""A browser and a server for the page: the real one, on a small index whose pictures were drawn."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from genius_search.data.mbeir import read_candidates
from genius_search.index.index import Index
from genius_search.records import Modality
from research.mbeir_files import write_candidates

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

EACH = 12
"""Items of each modality."""
_GENIUS = "import sys; from genius_search.cli import main; sys.exit(main())"


class Server(NamedTuple):
    """A server that was started for the tests."""

    address: str
    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of Debian's chromium; without one the tests are skipped before anything is built."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs a chromium in the PATH (Debian: apt-get install chromium)")
    return path


@pytest.fixture(scope="session")
def serve(chromium) -> Iterator[Callable[..., Server]]:
    """Start `genius serve` on an index and wait until it says where it listens."""
    with contextlib.ExitStack() as stack:

        def start(index: Path, *arguments: str) -> Server:
            command = [
                sys.executable,
                "-c",
                _GENIUS,
                "serve",
                str(index),
                "--port",
                "0",
                *arguments,
            ]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
            stack.enter_context(process)
            stack.callback(process.kill)
            for line in process.stderr:
                if found := re.search(r"http://\S+:\d+", line):
                    return Server(found[0], process)
            pytest.fail("the server did not start")

        yield start


@pytest.fixture(scope="session")
def small_index(chromium, trained, tmp_path_factory) -> Path:
    """Twelve items of each modality, whose pictures and texts were drawn."""
    root = tmp_path_factory.mktemp("browser")
    pool = list(
        read_candidates(trained.data / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl")
    )
    (root / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    (root / "cand_pool").mkdir()
    few = [
        one for modality in Modality for one in [c for c in pool if c.modality is modality][:EACH]
    ]
    write_candidates(root / "cand_pool" / "some.jsonl", few)
    folder = root / "things.index"
    Index.create(folder, root / "cand_pool" / "some.jsonl", model=trained.model, embeddings="fused")
    return folder


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[playwright.Browser]:
    """Open a browser.

    Per file: its event loop runs as long as it is open, and would break tests of other files that start their own.
    """
    playwright.expect.set_options(timeout=15_000)  # as long as an action waits
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=chromium)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def server(serve, small_index) -> Server:
    """One server for all tests that leave its items as they are."""
    return serve(small_index)


@pytest.fixture
def open_page(browser):
    """Open the page at an address; a test fails if it breaks its own policy or has an uncaught error."""
    contexts, broken = [], []

    def open_at(address: str, **context) -> playwright.Page:
        made = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        made.set_default_timeout(15_000)
        contexts.append(made)
        page = made.new_page()
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on(
            "console",
            lambda message: (
                broken.append(message.text)
                if message.type == "error" and "Failed to load resource" not in message.text
                else None
            ),
        )
        page.goto(address)
        if "about:" not in address:
            playwright.expect(page.locator("#size:not(:empty), dialog")).not_to_have_count(0)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert broken == []


@pytest.fixture
def page(open_page, server) -> playwright.Page:
    """The page of the common server, as it is before the first search."""
    return open_page(server.address)


@pytest.fixture(scope="session")
def items(small_index) -> dict[str, list[dict[str, object]]]:
    """Return the items of the index by modality."""
    found: dict[str, list[dict[str, object]]] = {}
    with (small_index.parent / "cand_pool" / "some.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            found.setdefault(item["modality"].replace(",", "-"), []).append(item)
    return found


@pytest.fixture
def serious(request):
    """Ask axe what is wrong with a page; serious and critical findings only."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
    )

    def find(page: playwright.Page) -> list[str]:
        found = axe.Axe().run(page).response["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    return find
