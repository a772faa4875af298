"""``python -m research.demo``: the whole method on a drawn catalogue, from nothing to a page of pictures."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.cli.options import command
from genius_search.cli.terminal import TerminalProgress, print_table, print_text
from genius_search.config import USUAL_SEARCH, FitConfig, SearchConfig, preset
from genius_search.data.mbeir import EvaluationRow, MBeir, read_queries
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import TASKS, Query, task_name
from genius_search.training.features import choose_instruction
from genius_search.training.fit import fit
from research.command import run
from research.evaluate import evaluate
from research.page import ShownSearch, write_page
from research.results import ResultRow, averages
from research.settings import EvaluationConfig
from research.synth.catalogue import draw_catalogue

SEARCHES_PER_TASK: Final = 4
SEARCHES_PRINTED: Final = 4
HITS_SHOWN: Final = 5
METHODS: Final = ("exact-fused", "routing+codes", "generative", "generative+codes", "generative+embeddings")
"""Exact search; what distances to codes find, ranked by codes; and what the generator finds,
in its own order, by codes and by embeddings."""
_SMALL: Final = preset("small")
SETTINGS: Final = dataclasses.replace(
    _SMALL,
    encoder=dataclasses.replace(
        _SMALL.encoder, training=dataclasses.replace(_SMALL.encoder.training, epochs=7.0)
    ),
    quantizer=dataclasses.replace(
        _SMALL.quantizer, training=dataclasses.replace(_SMALL.quantizer.training, epochs=2.0)
    ),
    generator=dataclasses.replace(
        _SMALL.generator, training=dataclasses.replace(_SMALL.generator.training, epochs=2.0)
    ),
)
"""The preset ``small`` with fewer passes, which are enough for drawings."""
CANDIDATE_SHARE: Final = 20
"""One item in so many is ranked by its code; the others are not looked at."""


class DemoResult(NamedTuple):
    """The results of the demo."""

    rows: list[ResultRow]
    health: Health
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
    began = time.monotonic()
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
            raise UsageError(f"{folder} was added to since the demo; remove it, or choose another --out")
    else:
        pool = data.global_pool("test")[0]
        index, _ = Index.create(folder, model=model, pool=pool, embeddings="fused", progress=progress)
    candidates = items // CANDIDATE_SHARE
    result = evaluate(
        data,
        model,
        EvaluationConfig(pools=("global",), methods=METHODS, beam=beam, candidates=candidates, seed=seed),
        out / "model" / "evaluation",
        progress=progress,
    )
    search_config = dataclasses.replace(USUAL_SEARCH, router="generator", beam=beam, candidates=candidates)
    searches = [
        _search(data, index, row, query, search_config, seed=seed)
        for row in data.rows("test")
        for query in islice(read_queries(row.queries), SEARCHES_PER_TASK)  # in random order already
    ]
    write_page(
        page,
        title="GENIUS found these",
        subtitle="A model generated IDs. One item in twenty was then ranked by its ID; the query was not "
        "compared with the other items.",
        facts=_facts(index, model, result.health, time.monotonic() - began),
        rows=result.rows,
        searches=searches,
    )
    return DemoResult(result.rows, result.health, page, folder, searches)


def _search(
    data: MBeir, index: Index, row: EvaluationRow, query: Query, config: SearchConfig, *, seed: int
) -> ShownSearch:
    target = TASKS[row.task_id][1]
    instruction = choose_instruction(data.instructions, query, target, "hashed", seed=seed)
    image = None if query.image is None else data.image_path(query.image)
    hits = index.search(query.text, image=image, instruction=instruction, k=HITS_SHOWN, config=config)
    return ShownSearch(task_name(row.task_id), instruction or "", query.text, image, hits, query.positives)


def _facts(index: Index, model: Genius, health: Health, seconds: float) -> dict[str, str]:
    info = index.info()
    parameters = 0 if model.generator is None else sum(one.numel() for one in model.generator.parameters())
    return {
        "items in the pool": f"{info.items:,}",
        "bytes per ID": f"{info.bytes_per_item['ids']:.0f}",
        "items that share an ID": f"{info.collision_rate:.1%}",
        "right modality code": "no such code" if health.purity is None else f"{health.purity:.1%}",
        "generator's parameters": f"{parameters / 1e6:.1f} M",
        "this run": f"{seconds:.0f} s",
    }


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
    """Seed of the catalogue and the training."""

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
            for one in averages(result.rows)
        ]
        print_table(("mean of 8 tasks", "R@1", "R@5"), lines, left=("mean of 8 tasks",))
        for search in result.searches[::SEARCHES_PER_TASK][:SEARCHES_PRINTED]:
            mark = "correct" if search.hits[0].id in search.positives else "wrong"
            asked = " + ".join(filter(None, (search.query_text, "a picture" if search.query_image else "")))
            print_text(f"{asked} -> {search.hits[0].text or 'a picture'} ({mark})")
        print_text(f"Open {result.page} to see them all. Then try:")
        query = "a striped green umbrella"
        print_text(f'  genius search {result.index_folder} "{query}" --modality image')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo as the command line says."""
    return run(Demo, "demo", arguments)


if __name__ == "__main__":
    sys.exit(main())
