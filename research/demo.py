"""``python -m research.demo``: train, index and search a drawn catalogue, and write a web page."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.cli.options import command, read_toml
from genius_search.cli.terminal import TerminalProgress, print_table, print_text
from genius_search.config import DEFAULT_SEARCH, SearchConfig
from genius_search.data.mbeir import MBeir, read_queries
from genius_search.errors import UsageError
from genius_search.index.evaluate import AVERAGE, Evaluated
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.recipe import FitConfig
from genius_search.records import TASKS, task_name
from genius_search.training.fit import fit
from genius_search.training.records import choose_instruction
from research.command import run
from research.synth.catalogue import draw_catalogue

SEARCHES_PER_TASK: Final = 4
PRINTED_SEARCHES: Final = 2
HITS_PER_SEARCH: Final = 5
SETTINGS: Final = read_toml(Path(__file__).parents[1] / "recipes" / "demo.toml")
ITEMS_PER_CANDIDATE: Final = 20
"""Only one item in this many is ranked by its code."""


class ShownSearch(NamedTuple):
    """A query and its hits, best first."""

    task: str
    """Name of the task, such as ``text -> image``."""
    instruction: str
    text: str
    image: Path | None
    hits: list[SearchHit]
    positives: Collection[str]
    """Ids of the right answers."""


class DemoResult(NamedTuple):
    """The results of the demo."""

    rows: list[Evaluated]
    """Results of each method on each task, and the averages."""
    page: Path
    index_folder: Path
    searches: list[ShownSearch]


def demo(
    out: Path,
    *,
    items: int = 10_400,
    train_products: int = 4000,
    queries_per_task: int = 200,
    beam: int = 50,
    seed: int = 0,
    progress: Progress,
    settings: FitConfig | None = None,
) -> DemoResult:
    """Draw, train, index, evaluate, search, and write the page; finished stages are not repeated.

    Parameters
    ----------
    out
        folder that receives the catalogue, the model, the index and the page.
    items, train_products, queries_per_task, seed
        sizes and seed of the catalogue; no product of its pool is in the training data.
    beam
        number of prefixes kept at each level of a search.
    settings
        settings of the training; default: :data:`SETTINGS`.
    """
    progress.say("drawing the catalogue")
    draw_catalogue(
        out / "catalogue",
        items=items,
        seed=seed,
        train_products=train_products,
        queries_per_task=queries_per_task,
    )
    data = MBeir(out / "catalogue")
    page = out / "index.html"
    model = fit(data, "small", out / "model", settings or SETTINGS, progress=progress)
    index_folder = out / "catalogue.index"
    index = open_index(index_folder, data, model, items=items, progress=progress)
    results = index.evaluate(data, progress=progress).rows
    config = replace(
        DEFAULT_SEARCH, router="generator", beam=beam, candidates=items // ITEMS_PER_CANDIDATE
    )
    searches = search_tasks(index, data, config, seed=seed)
    write_page(page, results, searches)
    return DemoResult(results, page, index_folder, searches)


def open_index(
    folder: Path, data: MBeir, model: Genius, *, items: int, progress: Progress
) -> Index:
    """Create the index of the test pool and calibrate it, or open it if that is done."""
    if (folder / "index.json").exists():
        index = Index.open(folder, model=model)
        if index.info().items != items:
            raise UsageError(
                f"{folder} has {index.info().items} items, expected {items}; remove it, or choose "
                "another --out"
            )
    else:
        pool = data.global_pool("test")[0]
        index = Index.create(folder, pool, model=model, embeddings="fused", progress=progress)
    # An earlier run may have been killed before this.
    if index.calibration is None:
        index.calibrate(data.root, split="test", progress=progress)
    return index


def search_tasks(
    index: Index, data: MBeir, config: SearchConfig, *, seed: int
) -> list[ShownSearch]:
    """Search the first queries of each task, which are in random order."""
    searches = []
    for row in data.rows("test"):
        for query in islice(read_queries(row.queries), SEARCHES_PER_TASK):
            modality = TASKS[row.task_id][1]
            instruction = choose_instruction(
                data.instructions, query, modality, "hashed", seed=seed
            )
            image = None if query.image is None else data.image_path(query.image)
            hits = index.search(
                query.text,
                image=image,
                instruction=instruction or "",
                k=HITS_PER_SEARCH,
                config=config,
            )
            searches.append(
                ShownSearch(
                    task=task_name(row.task_id),
                    instruction=instruction or "",
                    text=query.text or "",
                    image=image,
                    hits=hits,
                    positives=query.positives,
                )
            )
    return searches


def write_page(page: Path, rows: Sequence[Evaluated], searches: Sequence[ShownSearch]) -> None:
    """Write results and searches to an HTML file, with links to the pictures of the catalogue."""
    names = ("R@1", "R@5", "R@10")
    averages = [row for row in rows if row.row == AVERAGE]
    scores = [
        _format_row((row.method, *(f"{row.measures[name]:.3f}" for name in names)))
        for row in averages
    ]
    blocks = [_format_search(search, page.parent) for search in searches]
    text = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>GENIUS found these</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark }}
body {{
  font-family: sans-serif; line-height: 1.4; max-width: 60em; margin: 2em auto; padding: 0 1em
}}
th, td {{ padding: .3em .8em .3em 0; text-align: left; vertical-align: top }}
.hits {{ table-layout: fixed; width: 100%; border-spacing: .5em }}
.hits td {{ padding: .5em; overflow-wrap: break-word }}
.right {{ outline: 2px solid #009e73 }}
img, small {{ display: block }}
small {{ opacity: .7 }}
</style>
<h1>GENIUS found these</h1>
<p>A model generated IDs. One item in twenty was then ranked by its ID; the query was not compared
with the other items. Below each hit are its id and its codes; right answers are framed.</p>
{"".join(blocks)}
<h2>Mean of all tasks</h2>
<table>{_format_row(("method", *names), "th")}{"".join(scores)}</table></html>
"""
    page.write_text(text, encoding="utf-8")


def _format_search(search: ShownSearch, folder: Path) -> str:
    """Return the HTML of a query and its hits."""
    request = " ".join(filter(None, (search.instruction, search.text)))
    cells = []
    for hit in search.hits:
        style = "right" if hit.id in search.positives else ""
        codes = " ".join(map(str, hit.codes))
        content = _format_content(hit.image, hit.text, folder)
        cells.append(f'<td class="{style}">{content}<small>{hit.id}: {codes}</small></td>')
    return (
        f"<h3>{escape(search.task)}</h3><p>{_format_content(search.image, request, folder)}</p>"
        f'<table class="hits"><tr>{"".join(cells)}</tr></table>'
    )


def _format_content(image: str | Path | None, text: str | None, folder: Path) -> str:
    """Return the HTML of a picture, by its path in the page's folder, and of a text."""
    if image is None:
        return escape(text or "")
    source = Path(image).resolve().relative_to(folder.resolve()).as_posix()
    return f'<img src="{escape(source)}" alt="">{escape(text or "")}'


def _format_row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


@command
class Demo:
    """Draw a catalogue, train on it, index and search it, and write a web page of the results."""

    out: Path = Path("demo")
    """Folder that receives catalogue/, model/, catalogue.index/ and index.html."""

    items: int = 10_400
    """Candidates in the pool."""

    train_products: int = 4000
    """Products to learn from; none of them is in the pool."""

    beam: int = 50
    """Number of prefixes kept at each level."""

    seed: int = 0
    """Seed of the catalogue."""

    def run(self) -> None:
        """Run all steps, and print a summary."""
        with TerminalProgress() as progress:
            result = demo(
                self.out,
                items=self.items,
                train_products=self.train_products,
                beam=self.beam,
                seed=self.seed,
                progress=progress,
            )
        lines = [
            (row.method, f"{row.measures['R@1']:.3f}", f"{row.measures['R@5']:.3f}")
            for row in result.rows
            if row.row == AVERAGE
        ]
        print_table(("mean of 8 tasks", "R@1", "R@5"), lines, left=("mean of 8 tasks",))
        for search in result.searches[::SEARCHES_PER_TASK][:PRINTED_SEARCHES]:
            verdict = "correct" if search.hits[0].id in search.positives else "wrong"
            query_parts = [search.text, "a picture" if search.image else ""]
            request = " + ".join(filter(None, query_parts))
            print_text(f"{request} -> {search.hits[0].text or 'a picture'} ({verdict})")
        print_text(f"Open {result.page} to see them all. Then try:")
        query = "a striped green umbrella on mint, in a ring"
        print_text(f'  genius search {result.index_folder} "{query}"')


main = partial(run, Demo, "demo")


if __name__ == "__main__":
    sys.exit(main())
