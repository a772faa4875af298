"""``genius bench decode``: what a search costs as the authors do it, and as it is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from genius.baselines.hf_generate import HfGenerate
from genius.bench.agreement import Agreement, agreement, rankings_of, rankings_of_generated
from genius.bench.decode_tables import DecodeRow, agreement_table, decode_table, profile_table
from genius.bench.pools import PoolKind, SyntheticPool
from genius.bench.profile import CONSTRAINT, WATCHED, ProfileRow, profile
from genius.bench.results import Table
from genius.bench.stand_ins import Subject, random_queries
from genius.bench.stopwatch import Stopwatch, WatchedDecoder
from genius.bench.timing import interleaved
from genius.config import Count, Natural, SearchConfig, checked
from genius.search.allowed import Part
from genius.search.beam import Beams, search
from genius.search.decoding import Decoding
from genius.search.searcher import Evidence, rank_items
from genius.search.table import IdTable
from genius.stages.progress import Progress

HF: Final = "HF generate, prefix callback"
FULL: Final = "level scores"
HITS: Final = 50
"""Items ranked for each query."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """What is compared."""

    items: Count = 1_000_000
    """Of the pool, which is invented."""
    pool: PoolKind = "skewed"
    queries: Count = 8
    """In a batch."""
    beam: Count = 50
    rounds: Count = 3
    """Times that each variant is timed, in turns with the others."""
    hf: bool = True
    """Also as the authors do it; needs transformers, and about 1.5 KB of memory an item."""
    compared: Natural = 40
    """Queries whose rankings are compared with those of Hugging Face's ``generate``."""
    small_beam: Count = 10
    small_leaves: Count = 1000
    """Beam and leaf budget of the shallow search."""
    profiled: Natural = 0
    """Single queries of the shallow search whose time is taken apart; 0 leaves that out."""
    seed: Natural = 0


def bench_decode(settings: DecodeSettings, subject: Subject, *, progress: Progress) -> list[Table]:
    """Measure every variant on the same queries."""
    settings = checked(settings)
    num_queries = max(settings.queries, settings.compared, settings.profiled)
    queries = random_queries(num_queries, subject.dim, seed=settings.seed + 1)
    progress.say(f"pool of {settings.items:,} items, {subject.name} decoder")
    table = _table(settings, subject)
    bench = _Bench(settings, subject, table, queries)
    hf = None
    if settings.hf:
        progress.say("the pointer trie that generate needs")
        hf = HfGenerate(subject.generator, table.ids)
    progress.begin("decode", 2)
    rows = bench.rows(hf)
    progress.advance(1, {})
    tables = [
        decode_table(
            rows,
            title=f"Decoding: {settings.queries} queries together, beam {settings.beam}",
            measured=f"{subject.name} decoder, {settings.pool} pool of {settings.items:,} invented items "
            f"({len(table):,} IDs)",
        )
    ]
    if hf is not None and settings.compared:
        tables.append(agreement_table(bench.agreement(hf)))
    progress.advance(2, {})
    if settings.profiled:
        shallow = f"beam {settings.small_beam}, leaf budget {settings.small_leaves:,}, by codes"
        title = f"Where a single query's time goes: {shallow}"
        tables.append(profile_table(bench.profile(), title=title, queries=settings.profiled))
    return tables


class _Bench:
    """One pool, one decoder, some queries."""

    def __init__(
        self,
        settings: DecodeSettings,
        subject: Subject,
        table: IdTable,
        queries: Float[Tensor, "queries dim"],
    ) -> None:
        self.settings = settings
        self.subject = subject
        self.table = table
        self.queries = queries
        self.batch = queries[: settings.queries]
        beam = settings.beam
        self.variants: Mapping[str, SearchConfig] = {
            "vocabulary scores": SearchConfig(beam=beam, scores="vocabulary"),
            FULL: SearchConfig(beam=beam),
            f"level scores, leaf stop at {beam}": SearchConfig(beam=beam, rerank="codes"),
            f"level scores, leaf stop at {4 * beam}": SearchConfig(
                beam=beam, rerank="codes", leaves=4 * beam
            ),
            f"level scores, beam {settings.small_beam}, leaf budget {settings.small_leaves:,}": self.shallow,
        }

    @property
    def shallow(self) -> SearchConfig:
        return SearchConfig(beam=self.settings.small_beam, leaves=self.settings.small_leaves, rerank="codes")

    def answer(self, decoder: Decoding, queries: Float[Tensor, "queries dim"], config: SearchConfig) -> Beams:
        """Search, and rank the items where that is part of the way."""
        parts = [Part(self.table)]
        beams = search(decoder, parts, queries, config)
        if config.rerank == "codes":
            evidence = Evidence(self.subject.ranker)
            for number, query in enumerate(queries):
                rank_items(parts, beams, number, query, config=config, evidence=evidence, k=HITS)
        return beams

    def rows(self, hf: HfGenerate | None) -> list[DecodeRow]:
        decoder = self.subject.decoder
        calls: dict[str, Callable[[], object]] = {}
        if hf is not None:
            calls[HF] = partial(hf.search, self.batch, beam=self.settings.beam)
        for name, config in self.variants.items():
            calls[name] = partial(self.answer, decoder, self.batch, config)
        timed = interleaved(calls, rounds=self.settings.rounds, per=len(self.batch))
        full = self.answer(decoder, self.batch, self.variants[FULL])
        rows = []
        for name, took in timed.items():
            is_level = name != HF and self.variants[name].scores == "level"
            found = None if name == HF else self.answer(decoder, self.batch, self.variants[name])
            shares = None if name == HF else self._shares(self.variants[name])
            rows.append(
                DecodeRow(
                    variant=name,
                    cpu_ms=took.cpu_ms,
                    rounds_cpu_ms=took.rounds_cpu_ms,
                    cheaper=timed[HF].cpu_ms / took.cpu_ms if HF in timed else None,
                    constraint_share=None if shares is None else shares.constraint,
                    other_share=None if shares is None else shares.other,
                    full_share=share_found(full, found) if is_level and found else None,
                    leaves=None if found is None else float((found.high - found.low).sum()) / len(self.batch),
                )
            )
        return rows

    def agreement(self, hf: HfGenerate) -> dict[str, Agreement]:
        """Compare rankings, a batch at a time."""
        ours, theirs = [], []
        config = self.variants["vocabulary scores"]
        for start in range(0, self.settings.compared, self.settings.queries):
            stop = min(start + self.settings.queries, self.settings.compared)
            batch = self.queries[start:stop]
            ours += rankings_of(self.table, search(self.subject.decoder, [Part(self.table)], batch, config))
            theirs += rankings_of_generated(hf.search(batch, beam=self.settings.beam))
        return {"vocabulary scores": agreement(ours, theirs)}

    def profile(self) -> list[ProfileRow]:
        watch = Stopwatch()
        watched = WatchedDecoder(self.subject.decoder, watch)
        return profile(
            lambda number: self.answer(self.subject.decoder, self.queries[number : number + 1], self.shallow),
            lambda number: self.answer(watched, self.queries[number : number + 1], self.shallow),
            watch,
            self.settings.profiled,
        )

    def _shares(self, config: SearchConfig) -> _Shares:
        watch = Stopwatch()
        decoder = WatchedDecoder(self.subject.decoder, watch)
        with watch.watching(WATCHED):
            began = time.process_time()
            self.answer(decoder, self.batch, config)
            whole = time.process_time() - began
        constraint = sum(watch.seconds.get(part, 0.0) for part in CONSTRAINT)
        decoding = sum(seconds for part, seconds in watch.seconds.items() if part.startswith("decoder"))
        return _Shares(constraint / whole, (whole - constraint - decoding) / whole)


class _Shares(NamedTuple):
    constraint: float
    other: float


def share_found(full: Beams, found: Beams) -> float:
    """Share of the IDs of one search of one table that lie under the beams of another, over all queries."""
    inside = total = 0
    for rows, is_filled, lows, highs in zip(full.low, full.filled(), found.low, found.high, strict=True):
        wanted = rows[is_filled, 0]
        held = np.flatnonzero(highs[:, 0] > lows[:, 0])
        held = held[np.argsort(lows[held, 0], kind="stable")]
        low, high = lows[held, 0], highs[held, 0]
        place = np.searchsorted(low, wanted, side="right") - 1
        inside += int(((place >= 0) & (wanted < high[place])).sum()) if len(held) else 0
        total += len(wanted)
    return inside / total


def _table(settings: DecodeSettings, subject: Subject) -> IdTable:
    pool = SyntheticPool(items=settings.items, sizes=subject.sizes, kind=settings.pool, seed=settings.seed)
    blocks = list(pool.blocks())
    return IdTable.build(
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.typicality for block in blocks]),
    )
