"""``genius tune``: choose beam, leaf budget and mix for an index by asking it validation queries."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

from annotated_types import Gt, Le
from pydantic import ConfigDict

from genius.config import Count, Natural, NonNegative, SearchConfig, checked
from genius.data.mbeir import MBeir
from genius.errors import BadData, UsageError
from genius.index import Index
from genius.search.beam import Beams, search
from genius.search.opened import OpenedIndex
from genius.search.searcher import Evidence, rank_items
from genius.search.tuned import Tuned
from genius.stages.evaluate import EvaluationConfig
from genius.stages.progress import Progress
from genius.stages.tune_queries import FIRST, Asked, answerable, is_found, order_everything

K: Final = 10
"""Hits asked for, as a search does that does not say how many; no beam is narrower."""
BEAMS: Final = (10, 20, 50, 100)
LEAVES: Final = (0, 150, 300, 600, 1200, 2500, 5000)
"""0 decodes all levels."""
MIXES: Final = (0.0, 0.003, 0.01, 0.03, 0.1)
NOISE: Final = 0.05
"""By which measured times differ without a reason."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is wanted, and what is tried."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    recall: Annotated[float, Gt(0), Le(1)] | None = None
    """The cheapest settings that find so much of what ordering all items by the same evidence finds (R@5)."""

    milliseconds: Annotated[float, Gt(0)] | None = None
    """The best settings that take at most so many CPU-milliseconds a query. One of the two has to be said."""

    rerank: Literal["codes", "embeddings"] = "codes"
    """The evidence."""

    split: str = "val"
    """Of the data set."""

    rows: tuple[str, ...] = ()
    """Of the data set, named as in its files; none named means all."""

    queries: Count = 300
    """Of each row at most so many, spread evenly."""

    batch: Count = 64
    """Queries asked together; with 1 the time is that of single searches."""

    beams: tuple[Count, ...] = BEAMS
    leaves: tuple[Natural, ...] = LEAVES
    mixes: tuple[NonNegative, ...] = MIXES
    """Tried with each other; one mix is chosen for all, since single settings would choose by luck."""

    seed: Natural = 0
    """Of the choice of instructions."""

    @property
    def wish(self) -> str:
        """In words."""
        if self.recall is not None:
            return f"recall {self.recall:g}"
        return f"{self.milliseconds:g} CPU-ms"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings, and what they did."""

    search: SearchConfig
    recall: float
    """R@5."""
    share: float
    """Of what ordering all items finds."""
    touched: float
    """Items that were ordered, on average."""
    cpu_ms: float
    """Of a query, without the encoder."""


class TuneResult(NamedTuple):
    """What was found; nothing has been changed yet."""

    best: Tuned
    tried: list[Tried]
    """One for each beam and leaf budget, with the mix that was chosen."""
    ceiling: float
    """R@5 of ordering all items by the evidence."""
    left_out: int
    """Queries whose right answers are not in the index."""


def tune(index: Index, data: MBeir, config: TuneConfig, *, progress: Progress) -> TuneResult:
    """Measure settings on the index's own items, and choose; the data set's candidate ids are the item ids.

    Recall is measured against what the same evidence finds when it orders every item: no beam can do better
    but by luck, and what quantization costs is not the search's doing.

    Raises
    ------
    UsageError
        neither or both of recall and milliseconds are asked for; no settings are good enough; the evidence is
        not in the index.
    BadData
        no query of the split has a right answer in the index.
    """
    config = checked(config)
    if (config.recall is None) is (config.milliseconds is None):
        raise UsageError("say either what recall is wanted or how many milliseconds a query may take")
    if not (config.beams and config.leaves and config.mixes):
        raise UsageError("beams, leaves and mixes: name at least one of each to try")
    opened = index.opened
    stored = opened.state.facts.embeddings
    if config.rerank == "embeddings" and stored == "none":
        raise UsageError(f"{index.folder} stores no embeddings; tune it for --rerank codes")
    settings = EvaluationConfig(split=config.split, max_queries=config.queries, seed=config.seed)
    asked = answerable(index, data, config.rows, settings, rerank=config.rerank, progress=progress)
    ceiling = order_everything(index, asked, SearchConfig(rerank=config.rerank))
    if not ceiling:
        raise BadData(
            f"even with all items ordered by {config.rerank}, none of {len(asked.right)} queries has a right "
            f"answer among its first {FIRST}: this model was not trained for such queries"
        )
    mixes = config.mixes if config.rerank == "codes" else (0.0,)
    found = _measure(index, opened, asked, config, mixes, ceiling, progress)
    by_mix = {mix: [one for one in found if one.search.mix == mix] for mix in mixes}
    chosen = max(by_mix, key=lambda mix: (sum(one.recall for one in by_mix[mix]), -mix))
    tried = sorted(by_mix[chosen], key=lambda one: one.cpu_ms)
    best = _choose(tried, config)
    tuned = Tuned(
        search=best.search,
        wish=config.wish,
        data=f"{data.name} {config.split}",
        queries=len(asked.right),
        items=opened.state.num_alive,
        recall=best.recall,
        share=best.share,
        cpu_ms=best.cpu_ms,
    )
    return TuneResult(tuned, tried, ceiling, asked.left_out)


def _measure(
    index: Index,
    opened: OpenedIndex,
    asked: Asked,
    config: TuneConfig,
    mixes: Sequence[float],
    ceiling: float,
    progress: Progress,
) -> list[Tried]:
    """Every setting, in turns, a batch of queries at a time; the first batch once more, for nothing."""
    routes = [
        SearchConfig(beam=beam, leaves=leaves, rerank=config.rerank)
        for beam in config.beams
        for leaves in config.leaves
    ]
    settings = [dataclasses.replace(route, mix=mix) for route in routes for mix in mixes]
    tallies = {setting: _Tally() for setting in settings}
    batches = list(asked.batches(config.batch))
    progress.begin("tune", len(batches) + 1)
    for turn, here in enumerate([batches[0], *batches]):
        for route in routes:
            began = time.process_time()
            beams = search(
                index.model.decoder,
                opened.parts,
                asked.fused[here],
                route,
                widths=[max(route.beam, K)] * (here.stop - here.start),
            )
            took = time.process_time() - began
            for mix in mixes:
                setting = dataclasses.replace(route, mix=mix)
                one = _rank(index, opened, asked, beams, here, setting)
                if turn:
                    tallies[setting] = tallies[setting].plus(one, took)
        progress.advance(turn + 1, {})
    count = len(asked.right)
    return [
        Tried(
            search=setting,
            recall=tally.found / count,
            share=tally.found / count / ceiling,
            touched=tally.touched / count,
            cpu_ms=1000 * tally.seconds / count,
        )
        for setting, tally in tallies.items()
    ]


class _Tally(NamedTuple):
    """What settings have done so far."""

    found: int = 0
    touched: int = 0
    seconds: float = 0.0

    def plus(self, other: _Tally, seconds: float) -> _Tally:
        """Both together, and so much more time."""
        return _Tally(
            self.found + other.found, self.touched + other.touched, self.seconds + other.seconds + seconds
        )


def _rank(
    index: Index, opened: OpenedIndex, asked: Asked, beams: Beams, here: slice, setting: SearchConfig
) -> _Tally:
    """Order what is under the beams of some queries."""
    is_raw = opened.state.facts.embeddings == "raw"
    evidence = Evidence(index.model.ranker, opened.vectors, is_raw, opened.densities)
    began = time.process_time()
    answers = [
        rank_items(opened.parts, beams, number, query, config=setting, evidence=evidence, k=K)
        for number, query in enumerate(asked.evidence[here])
    ]
    seconds = time.process_time() - began
    found = sum(
        is_found(right, answer.parts, answer.items)
        for right, answer in zip(asked.right[here], answers, strict=True)
    )
    return _Tally(found, sum(answer.touched for answer in answers), seconds)


def _choose(tried: Sequence[Tried], config: TuneConfig) -> Tried:
    """The cheapest that is good enough, or the best that is cheap enough.

    Of several that take about as long (:data:`NOISE`) the best, and of equal ones that with the least budget.
    """
    if config.recall is not None:
        enough = [one for one in tried if one.share >= config.recall]
        if enough:
            limit = (1 + NOISE) * min(one.cpu_ms for one in enough)
            return _best([one for one in enough if one.cpu_ms <= limit])
        best = max(tried, key=lambda one: (one.share, -one.cpu_ms))
        raise UsageError(
            f"no settings reach {config.recall:g} of what ordering all items by {config.rerank} finds; the "
            f"best reach {best.share:.3f} (beam {best.search.beam}, leaves {best.search.leaves}): ask for "
            "less with --recall"
        )
    limit = config.milliseconds or 0.0
    quick = [one for one in tried if one.cpu_ms <= limit]
    if quick:
        most = max(one.share for one in quick)
        cheapest = min(one.cpu_ms for one in quick if one.share == most)
        return _best([one for one in quick if one.cpu_ms <= (1 + NOISE) * cheapest])
    fastest = min(tried, key=lambda one: one.cpu_ms)
    raise UsageError(
        f"no settings take at most {limit:g} CPU-ms a query; the quickest take {fastest.cpu_ms:.2g}: ask for "
        "more with --milliseconds"
    )


def _best(tried: Sequence[Tried]) -> Tried:
    return max(
        tried, key=lambda one: (one.share, one.search.leaves > 0, -one.search.leaves, -one.search.beam)
    )
