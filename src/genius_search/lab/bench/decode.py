"""``genius bench decode``: what a search costs as the authors do it, and as it is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import Count, Natural, SearchConfig, checked
from genius_search.lab.baselines.generate import Generated, HfGenerate
from genius_search.lab.bench.results import Table
from genius_search.lab.bench.stand_ins import PoolKind, Subject, SyntheticPool, random_queries
from genius_search.lab.bench.timing import (
    CONSTRAINT,
    WATCHED,
    ProfileRow,
    Stopwatch,
    WatchedDecoder,
    interleaved,
    profile,
)
from genius_search.progress import Progress
from genius_search.search.beam import Beams, search
from genius_search.search.decoder import Decoder
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import IdTable, Part

TOLERANCE: Final = 1e-4
"""Scores that differ by no more may stand in either order: the two sum in different orders."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Rankings of some queries, compared place by place."""

    compared: int
    identical: int
    """Queries with the same IDs in the same order."""
    tied: int
    """Others whose rankings differ only among IDs of equal score."""

    @property
    def share(self) -> float:
        """Of the queries: identical, ties excused."""
        return (self.identical + self.tied) / self.compared


class Ranking(NamedTuple):
    """What one query found, best first."""

    ids: Int64[np.ndarray, "beams levels"]
    scores: Float32[np.ndarray, " beams"]


def rankings_of(table: IdTable, beams: Beams) -> list[Ranking]:
    """What our search found in one table, all levels decoded."""
    filled, scores = beams.filled(), beams.scores()
    return [
        Ranking(table.ids[low[places, 0]].astype(np.int64), values[places])
        for low, values, places in zip(beams.low, scores, filled, strict=True)
    ]


def rankings_of_generated(generated: Generated) -> list[Ranking]:
    """What Hugging Face's ``generate`` found."""
    return [
        Ranking(codes[np.isfinite(scores)], scores[np.isfinite(scores)])
        for codes, scores in zip(generated.codes, generated.scores, strict=True)
    ]


def agreement(ours: list[Ranking], theirs: list[Ranking]) -> Agreement:
    """Compare the rankings of the same queries."""
    identical = tied = 0
    for left, right in zip(ours, theirs, strict=True):
        if np.array_equal(left.ids, right.ids):
            identical += 1
        elif _differ_in_ties_only(left, right):
            tied += 1
    return Agreement(compared=len(ours), identical=identical, tied=tied)


def _differ_in_ties_only(left: Ranking, right: Ranking) -> bool:
    """Scores agree place by place and ID by ID; an ID that only one side has ties with the other's last."""
    if len(left.scores) != len(right.scores):
        return False
    if np.abs(left.scores - right.scores).max(initial=0) > TOLERANCE:
        return False
    for one, other in ((left, right), (right, left)):
        known = dict(zip(map(tuple, other.ids.tolist()), other.scores.tolist(), strict=True))
        last = float(other.scores[-1])
        for codes, score in zip(map(tuple, one.ids.tolist()), one.scores.tolist(), strict=True):
            if abs(score - known.get(codes, last)) > TOLERANCE:
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """One way of searching."""

    variant: str
    cpu_ms: float
    """A query."""
    rounds_cpu_ms: tuple[float, ...]
    cheaper: float | None
    """Than Hugging Face's generate, so many times; nothing if that was left out."""
    constraint_share: float | None
    """Of the time: what keeps to IDs that exist."""
    other_share: float | None
    """What is neither the decoder's nor the constraint's: choosing and moving beams, ranking items."""
    full_share: float | None
    """Of the IDs that the full search finds: those among the leaves."""
    leaves: float | None
    """IDs under the beams when it ended, on average."""


@dataclass(frozen=True, kw_only=True)
class AgreementRow:
    """Rankings beside those of Hugging Face's ``generate``."""

    variant: str
    compared: int
    identical: int
    tied: int
    """Different only among IDs whose scores differ by 1e-4 or less."""
    share: float


def decode_table(rows: Sequence[DecodeRow], *, title: str, measured: str) -> Table:
    """What each way of searching costs."""
    return Table(
        name="decode",
        title=title,
        note=f"{measured}. CPU-milliseconds a query on one core, the median of rounds in turns. Constraint: "
        "share of the time that keeps to IDs that exist; other: choosing and moving beams, ranking items; "
        "what is left is the decoder's. Leaves: IDs under the beams at the end; of full: share of the IDs of "
        "the full search with level scores that are among them.",
        columns=(
            ("variant", "variant"),
            ("cpu_ms", "CPU-ms a query"),
            ("cheaper", "times cheaper than HF"),
            ("constraint_share", "constraint"),
            ("other_share", "other"),
            ("leaves", "leaves"),
            ("full_share", "of full"),
        ),
        brief=(
            ("variant", "variant"),
            ("cpu_ms", "CPU-ms"),
            ("cheaper", "times cheaper"),
            ("leaves", "leaves"),
            ("full_share", "of full"),
        ),
        rows=rows,
    )


def agreement_table(found: Mapping[str, Agreement]) -> Table:
    """Whether rankings are those of ``generate``."""
    rows = [
        AgreementRow(
            variant=name, compared=one.compared, identical=one.identical, tied=one.tied, share=one.share
        )
        for name, one in found.items()
    ]
    return Table(
        name="agreement",
        title="The same ranking as Hugging Face's generate",
        note="Queries whose IDs are the same in the same order; tied: different only among IDs whose scores "
        "differ by 1e-4 or less.",
        columns=(
            ("variant", "variant"),
            ("compared", "queries"),
            ("identical", "identical"),
            ("tied", "tied"),
            ("share", "share"),
        ),
        rows=rows,
    )


def profile_table(rows: Sequence[ProfileRow], *, title: str, queries: int) -> Table:
    """Where a single query's time goes."""
    return Table(
        name="profile",
        title=title,
        note=f"CPU-microseconds, the mean of {queries} queries, one at a time. Watching itself takes time, "
        "which the last two lines compare.",
        columns=(
            ("part", "part"),
            ("calls", "calls"),
            ("cpu_us", "CPU-µs a query"),
            ("share", "share"),
        ),
        rows=rows,
    )


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
    small_candidates: Count = 1000
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
        shallow = f"beam {settings.small_beam}, leaf budget {settings.small_candidates:,}, by codes"
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
                beam=beam, rerank="codes", candidates=4 * beam
            ),
            f"level scores, beam {settings.small_beam}, "
            f"leaf budget {settings.small_candidates:,}": self.shallow,
        }

    @property
    def shallow(self) -> SearchConfig:
        return SearchConfig(
            beam=self.settings.small_beam, candidates=self.settings.small_candidates, rerank="codes"
        )

    def answer(self, decoder: Decoder, queries: Float[Tensor, "queries dim"], config: SearchConfig) -> Beams:
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
