"""``python -m research.demo``: the whole method on a drawn catalogue, from nothing to a page of pictures."""

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
from genius_search.config import DEFAULT_SEARCH
from genius_search.data.mbeir import MBeir, read_queries
from genius_search.errors import UsageError
from genius_search.index.evaluate import AVERAGE, Evaluated
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.progress import Progress
from genius_search.recipe import FitConfig
from genius_search.records import TASKS, task_name
from genius_search.training.fit import fit
from genius_search.training.records import choose_instruction
from research.command import run
from research.synth.catalogue import draw_catalogue

SEARCHES_PER_TASK: Final = 4
SEARCHES_PRINTED: Final = 2
HITS_SHOWN: Final = 5
SETTINGS: Final = read_toml(Path(__file__).parents[1] / "recipes" / "demo.toml")
CANDIDATE_SHARE: Final = 20
"""One item in so many is ranked by its code; the others are not looked at."""


class ShownSearch(NamedTuple):
    """One query and its hits, best first."""

    task: str
    """Its name, ``text -> image``."""
    instruction: str
    text: str
    image: Path | None
    hits: list[SearchHit]
    positives: Collection[str]
    """Ids of the right answers."""


class DemoResult(NamedTuple):
    """The results of the demo."""

    rows: list[Evaluated]
    """Each task by each method, and the averages."""
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
        the size of the catalogue and the seed it is drawn from; none of its pool's products is in training.
    beam
        IDs kept at each level of a search.
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
    folder = out / "catalogue.index"
    if (folder / "index.json").exists():
        index = Index.open(folder, model=model)
        if index.info().items != items:
            raise UsageError(
                f"{folder} was added to since the demo; remove it, or choose another --out"
            )
    else:
        pool = data.global_pool("test")[0]
        index = Index.create(folder, pool, model=model, embeddings="fused", progress=progress)
    # Also after a run that was killed between the two.
    if index.calibration is None:
        index.calibrate(data.root, split="test", progress=progress)
    results = index.evaluate(data, progress=progress).rows
    search_config = replace(
        DEFAULT_SEARCH, router="generator", beam=beam, candidates=items // CANDIDATE_SHARE
    )
    searches = []
    for row in data.rows("test"):
        for query in islice(
            read_queries(row.queries), SEARCHES_PER_TASK
        ):  # in random order already
            wanted = TASKS[row.task_id][1]
            instruction = (
                choose_instruction(data.instructions, query, wanted, "hashed", seed=seed) or ""
            )
            image = None if query.image is None else data.image_path(query.image)
            hits = index.search(
                query.text, image=image, instruction=instruction, k=HITS_SHOWN, config=search_config
            )
            name, text = task_name(row.task_id), query.text or ""
            searches.append(ShownSearch(name, instruction, text, image, hits, query.positives))
    write_page(page, results, searches)
    return DemoResult(results, page, folder, searches)


def write_page(page: Path, rows: Sequence[Evaluated], searches: Sequence[ShownSearch]) -> None:
    """Write what was measured and found as one HTML file beside the catalogue, whose pictures it shows."""

    def show(image: str | Path | None, text: str | None) -> str:
        source = (
            ""
            if image is None
            else escape(Path(image).resolve().relative_to(page.parent.resolve()).as_posix())
        )
        return (source and f'<img src="{source}" alt="">') + escape(text or "")

    def line(cells: Iterable[str], kind: str = "td") -> str:
        return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"

    names = ("R@1", "R@5", "R@10")
    scores = [
        line((one.method, *(f"{one.measures[name]:.3f}" for name in names)))
        for one in rows
        if one.row == AVERAGE
    ]
    blocks = []
    for one in searches:
        asked = show(one.image, " ".join(filter(None, (one.instruction, one.text))))
        hits = (
            f'<td class="{"right" if hit.id in one.positives else ""}">{show(hit.image, hit.text)}'
            f"<small>{hit.id}: {' '.join(map(str, hit.codes))}</small></td>"
            for hit in one.hits
        )
        found = f'<table class="hits"><tr>{"".join(hits)}</tr></table>'
        blocks.append(f"<h3>{escape(one.task)}</h3><p>{asked}</p>{found}")
    text = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>GENIUS found these</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark }}
body {{ font-family: sans-serif; line-height: 1.4; max-width: 60em; margin: 2em auto; padding: 0 1em }}
th, td {{ padding: .3em .8em .3em 0; text-align: left; vertical-align: top }}
.hits {{ table-layout: fixed; width: 100%; border-spacing: .5em }}
.hits td {{ padding: .5em; overflow-wrap: break-word }}
.right {{ outline: 2px solid #009e73 }}
img, small {{ display: block }}
small {{ opacity: .7 }}
</style>
<h1>GENIUS found these</h1>
<p>A model generated IDs. One item in twenty was then ranked by its ID; the query was not compared with the
other items. Below each hit are its id and its codes; right answers are framed.</p>
{"".join(blocks)}
<h2>Mean of all tasks</h2><table>{line(("method", *names), "th")}{"".join(scores)}</table></html>
"""
    page.write_text(text, encoding="utf-8")


@command
class Demo:
    """Draw a catalogue, train on it, index it, search it; writes a page of pictures to open."""

    out: Path = Path("demo")
    """Folder that receives catalogue/, model/, catalogue.index/ and index.html."""

    items: int = 10_400
    """Candidates in the pool."""

    train_products: int = 4000
    """Products to learn from; none of them is in the pool."""

    beam: int = 50
    """IDs kept at each level."""

    seed: int = 0
    """Seed of the catalogue."""

    def run(self) -> None:
        """Run all steps, and print what was found in a few lines."""
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
            (one.method, f"{one.measures['R@1']:.3f}", f"{one.measures['R@5']:.3f}")
            for one in result.rows
            if one.row == AVERAGE
        ]
        print_table(("mean of 8 tasks", "R@1", "R@5"), lines, left=("mean of 8 tasks",))
        for search in result.searches[::SEARCHES_PER_TASK][:SEARCHES_PRINTED]:
            mark = "correct" if search.hits[0].id in search.positives else "wrong"
            asked = " + ".join(filter(None, (search.text, "a picture" if search.image else "")))
            print_text(f"{asked} -> {search.hits[0].text or 'a picture'} ({mark})")
        print_text(f"Open {result.page} to see them all. Then try:")
        query = "a striped green umbrella on mint, in a ring"
        print_text(f'  genius search {result.index_folder} "{query}"')


main = partial(run, Demo, "demo")


if __name__ == "__main__":
    sys.exit(main())
