"""The commands and the Python of README.md, of the pages in docs/ and of the skill are run in their order.

A comment on the line above a block says otherwise: ``<!-- not run: REASON -->``; ``<!-- slow -->`` if it waits for
`pytest -m slow`; ``<!-- served -->`` if it needs a running service
(``test_http_examples.py``). Commands that are not run are parsed (``test_docs.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import huggingface_hub.constants
import numpy as np
import pytest
from PIL import ExifTags, Image

from genius_search.cli import main
from genius_search.index.index import Index

ROOT = Path(__file__).parents[2]
REFERENCE = {"http.md", "python.md"}
"""The examples of the first are run by ``test_http_examples.py``; the second lists names."""
PAGES = [
    ROOT / "README.md",
    ROOT / "skills/genius-search/SKILL.md",
    *sorted(page for page in ROOT.glob("docs/*.md") if page.name not in REFERENCE),
]
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CAPTION = "a red anchor on green ground"


class Block(NamedTuple):
    """A block of a page, and what the comment above it says."""

    remark: str
    language: str
    body: str

    @property
    def is_run(self) -> bool:
        return self.language in {"console", "python"} and not re.match(
            "not run: |served$", self.remark
        )


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def is_slow(page: Path) -> bool:
    return any(block.remark == "slow" for block in blocks_of(page))


def steps(*, slow: bool) -> list:
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if slow else [])
        for page in PAGES
        if any(block.is_run for block in blocks_of(page)) and (is_slow(page) or not slow)
    ]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, trained, clip_folder, siglip_folder, export_onnx):
    """What the pages assume: the demo, a folder of pictures, encoders on this machine, captions of Flickr30K."""
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "demo").mkdir()
    shutil.copytree(trained.data, folder / "demo" / "catalogue")
    shutil.copytree(trained.model, folder / "demo" / "model")
    pool = folder / "demo/catalogue/cand_pool/global/mbeir_union_test_cand_pool.jsonl"
    Index.create(folder / "demo/catalogue.index", pool, model=folder / "demo/model")
    shutil.copytree(clip_folder, folder / "models/clip")
    graphs = export_onnx(siglip_folder, folder / "models/onnx", ("pooler_output",) * 2)
    for name, source in {
        "onnx-community/siglip2-base-patch16-224-ONNX": graphs,
        "google/siglip2-base-patch16-224": siglip_folder,
        "openai/clip-vit-base-patch32": clip_folder,
    }.items():
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(source, cached / "snapshots" / "1")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("1")
    for place in ("Pictures/holiday", "more-pictures", "flickr30k-images", "Notes"):
        (folder / place).mkdir(parents=True)
    draw(folder / "Pictures" / "beach.jpg", 0)
    draw(folder / "Pictures" / "holiday" / "blurred.jpg", 1)
    draw(folder / "Pictures" / "anchor.jpg", 2)
    (folder / "Pictures" / "anchor.txt").write_text(CAPTION)
    draw(folder / "more-pictures" / "kite.jpg", 3)
    pairs = []
    for number in range(120):
        note, text = "anchor" if not number else f"note-{number}", f"{CAPTION} {number}"
        (folder / "Notes" / f"{note}.txt").write_text(text)
        pairs.append(json.dumps({"text": f"ground with {text}", "id": f"{note}.txt"}))
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    (folder / "no-modality.toml").write_text('preset = "tiny"\nquantizer.level0 = "none"\n')
    images = []
    for number in range(60):
        draw(folder / "flickr30k-images" / f"{number}.jpg", number)
        sentences = [{"raw": f"{CAPTION} {number} {copy}"} for copy in range(5)]
        split = ("train", "train", "train", "val", "test")[number % 5]
        images.append(
            {"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": sentences}
        )
    (folder / "dataset_flickr30k.json").write_text(json.dumps({"images": images}))
    return folder


def draw(path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:05:01 12:00:00"
    Image.fromarray(noise).save(path, exif=exif)


@pytest.fixture
def desk(shelf, tmp_path, monkeypatch):
    """A copy of the shelf, which a page may change."""
    desk = tmp_path / "desk"
    shutil.copytree(shelf, desk)
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HOME", str(desk))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(desk / "hub"))
    # Later pages use the index that the first one creates.
    Index.create("photos.index", "Pictures", encoder="siglip:google/siglip2-base-patch16-224")
    return desk


def run_page(page: Path, *, slow: bool) -> None:
    names: dict[str, object] = {}
    for block in blocks_of(page):
        if block.remark == "slow" and not slow:
            continue
        if block.is_run and block.language == "python":
            exec(compile(block.body, page.name, "exec"), names)  # noqa: S102  our own examples
        elif block.is_run:
            for line in block.body.splitlines():
                if line.startswith("$ "):
                    run_line(line.removeprefix("$ "))


def run_line(line: str) -> None:
    """Run a command without a shell; what it makes anew is removed first."""
    words = [
        str(Path(word).expanduser()) if word.startswith("~") else word
        for word in shlex.split(line, comments=True)
    ]
    if words == ["source", ".venv/bin/activate"]:
        return
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return
    if words[:2] == ["python", "-m"]:
        # The doctor may find the codes of such a small model unhealthy.
        assert importlib.import_module(words[2]).main(words[3:]) in (0, 1), line
        return
    assert words.pop(0) == "genius", f"{line}: only genius is run; mark the block as not run"
    if words[:2] == ["index", "create"]:
        shutil.rmtree(words[2], ignore_errors=True)
    with contextlib.ExitStack() as stack:
        if ">" in words:
            words, (target,) = words[: words.index(">")], words[words.index(">") + 1 :]
            stack.enter_context(
                contextlib.redirect_stdout(stack.enter_context(Path(target).open("w")))
            )
        status = main(words)
        assert status == 0, line


@pytest.mark.parametrize("page", steps(slow=False))
def test_what_a_page_shows_works(page, desk):
    run_page(page, slow=False)


@pytest.mark.parametrize("page", steps(slow=True))
def test_what_takes_longer_works_too(page, desk):
    run_page(page, slow=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_remark_about_a_block_is_one_that_is_understood(page):
    for block in blocks_of(page):
        assert re.fullmatch(r"|slow|served|not run: .+", block.remark), block


def num_words(page: Path) -> int:
    """Tables are looked up, not read, and do not count."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_pages_are_short():
    assert {
        page.name: num_words(page)
        for page in [*PAGES, ROOT / "docs/http.md"]
        if num_words(page) > 1_100
    } == {}


def test_all_documents_together_are_short():
    words = {
        page.name: len(page.read_text(encoding="utf-8").split())
        for page in ROOT.glob("docs/**/*.md")
    }
    assert sum(words.values()) <= 24_000, words
    assert max(words.values()) <= 3_000, words


def test_there_are_at_most_ten_pages():
    """Beside these, what one looks up: formats, deviations, and how a part is added."""
    looked_up = {"formats.md", "deviations.md", "extending.md"}
    assert (
        len([page for page in PAGES if page.parent == ROOT / "docs" and page.name not in looked_up])
        <= 10
    )
