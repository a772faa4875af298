"""``genius demo``: the whole method on a drawn catalogue, from nothing to a page of pictures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.config import USUAL_SEARCH, FitConfig, SearchConfig, preset
from genius_search.data.mbeir import EvaluationRow, MBeir, read_queries
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.lab import short_queries
from genius_search.lab.evaluate import evaluate
from genius_search.lab.report.page import ShownSearch, write_page
from genius_search.lab.results import ResultRow
from genius_search.lab.settings import EvaluationConfig
from genius_search.lab.short_queries import QuerySetResult
from genius_search.lab.synth.catalogue import draw_catalogue
from genius_search.model import Genius
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import TASKS, Query, task_name
from genius_search.training.features import choose_instruction
from genius_search.training.fit import fit

SEARCHES_PER_TASK: Final = 4
HITS_SHOWN: Final = 5
REFRESH_SECONDS: Final = 5
"""Seconds between two states of the page during training."""
SETTINGS: Final = dataclasses.replace(
    preset("small"),
    quantizer=dataclasses.replace(
        preset("small").quantizer,
        training=dataclasses.replace(preset("small").quantizer.training, epochs=3.0),
    ),
    generator=dataclasses.replace(
        preset("small").generator,
        training=dataclasses.replace(preset("small").generator.training, epochs=3.0),
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
    short_queries: list[QuerySetResult]
    """What words, few words and "the same in COLOUR" find among the pictures."""


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
    progress = _ShownProgress(progress, data, page)
    progress.say(f"{page} shows pictures of the catalogue now, and what is found when training has ended")
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
        EvaluationConfig(pools=("global",), beam=beam, candidates=candidates, seed=seed),
        out / "model" / "evaluation",
        progress=progress,
    )
    search_config = dataclasses.replace(USUAL_SEARCH, router="generator", beam=beam, candidates=candidates)
    searches = [
        _search(data, index, row, query, search_config, seed=seed)
        for row in data.rows("test")
        for query in islice(read_queries(row.queries), SEARCHES_PER_TASK)  # in random order already
    ]
    measured = short_queries.measure(
        data, model, out / "model" / "evaluation", search_config, seed=seed, progress=progress
    )
    write_page(
        page,
        title="GENIUS found these",
        subtitle="A model generated IDs. One item in twenty was then ranked by its ID; the query was not "
        "compared with the other items.",
        facts=_facts(index, model, result.health, time.monotonic() - began),
        rows=result.rows,
        searches=searches,
    )
    return DemoResult(result.rows, result.health, page, folder, searches, measured)


class _ShownProgress:
    """Progress that is also written to the demo's page, beside its queries, until there are results."""

    def __init__(self, progress: Progress, data: MBeir, page: Path) -> None:
        self._progress = progress
        self._page = page
        self._began = time.monotonic()
        self._written = -float(REFRESH_SECONDS)
        self._searches = [
            ShownSearch(
                task_name(row.task_id),
                "",
                query.text,
                None if query.image is None else data.image_path(query.image),
                [],
                (),
            )
            for row in data.rows("test")
            for query in islice(read_queries(row.queries), SEARCHES_PER_TASK)
        ]

    def begin(self, stage: str, total: int) -> None:
        """Start a stage, which the page names."""
        self._progress.begin(stage, total)
        self._stage, self._total, self._stage_began = stage, total, time.monotonic()
        self._write(0)

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Report finished steps, on the page every few seconds."""
        self._progress.advance(done, measures)
        if time.monotonic() - self._written >= REFRESH_SECONDS:
            self._write(done)

    def say(self, message: str) -> None:
        """Show a message, but not on the page."""
        self._progress.say(message)

    def _write(self, done: int) -> None:
        self._written = time.monotonic()
        spent = self._written - self._stage_began
        left = f"about {spent / done * (self._total - done):.0f} s" if done else "not known yet"
        write_page(
            self._page,
            title="GENIUS is learning",
            subtitle="These are some of the queries. Their answers appear here when training has ended.",
            facts={"now": self._stage, "left of it": left, "so far": f"{self._written - self._began:.0f} s"},
            rows=[],
            searches=self._searches,
            refresh=REFRESH_SECONDS,
        )


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
    parameters = sum(weight.numel() for weight in model.trained_generator.parameters())
    return {
        "items in the pool": f"{info.items:,}",
        "bytes per ID": f"{info.bytes_per_item['ids']:.0f}",
        "items that share an ID": f"{info.collision_rate:.1%}",
        "right modality code": "no such code" if health.purity is None else f"{health.purity:.1%}",
        "generator's parameters": f"{parameters / 1e6:.1f} M",
        "this run": f"{seconds:.0f} s",
    }
