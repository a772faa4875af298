"""``genius report``: the paper's tables and figures from what is on disk, with statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, get_args

import numpy as np
import torch

from genius.baselines.id_kinds import Kind as IdKind
from genius.data.mbeir import MBeir
from genius.data.records import Modality, did_of
from genius.evaluation.tables import METHODS
from genius.report.ablations import TITLES, ablation_table, beam_figure, beam_table
from genius.report.codes import codes_figure, codes_table, groups_of
from genius.report.costs import (
    latency_table,
    quality_figure,
    quality_table,
    speed_figure,
    speed_table,
    storage_table,
)
from genius.report.document import Report, appendix
from genius.report.drawing import Drawing
from genius.report.embeddings import Cloud, clouds_figure
from genius.report.evaluated import Pool, System
from genius.report.misses import misses_figure, misses_of, misses_table
from genius.report.recall import first_table, kept_table, task_table
from genius.report.reliability import answers_of, reliability_figure, reliability_table
from genius.report.significance import Pair, significance_table
from genius.report.table import Table
from genius.stages.gather import SYSTEMS, Gathered
from genius.stages.progress import Progress
from genius.stages.report_items import encoded_pool, shown_items
from genius.stages.train_quantizer import load_quantizer

BEAM: Final = "beam"
WITHOUT_CONTRASTIVE: Final = "no-contrastive"
"""The recipe's row whose vectors are drawn beside those of the whole system."""
CLOUD: Final = 3000
"""Items in a drawing of vectors."""
CONTROL: Final = "genius"
"""Our IDs, trained as the rivals' are: what differs from theirs is the ID alone."""
TESTED: Final = ("R@1", "R@5")
WITHIN: Final = (
    ("generative", "exact-fused"),
    ("generative+codes", "exact-fused"),
    ("generative+codes", "routing+codes"),
    ("generative+raw", "exact-raw"),
    ("generative+raw", "generative"),
)
"""Methods of one system that are tested against each other."""
BY_CODES: Final = "generative+codes"
"""What is tested against indexes that keep codes or links, too."""
ACROSS: Final = ("exact-fused", "generative", BY_CODES)
"""Methods on which systems are tested against each other."""


def report(found: Gathered, *, data: MBeir | None, progress: Progress) -> Report:
    """Every table and figure that what was found is enough for.

    Parameters
    ----------
    data
        for pictures and words of items; without it none are shown.
    """
    makers: list[Callable[[], Iterator[Table | Drawing | None]]] = [
        lambda: _recall(found),
        lambda: _significance(found),
        lambda: _ablations(found),
        lambda: _costs(found),
        lambda: _misses(found),
        lambda: _reliability(found),
        lambda: _code_parts(found, data),
        lambda: _clouds(found),
        lambda: _rows(found),
    ]
    parts: list[Table | Drawing] = []
    progress.begin("report", len(makers))
    for number, make in enumerate(makers, start=1):
        parts += [part for part in make() if part is not None]
        progress.advance(number, {})
    names = sorted({one.data for system in found.systems for one in system.seeds})
    machines = sorted({row.machine for _, row in found.made})
    about = (
        f"Data: {', '.join(names) or 'none'}.",
        *_made(found),
        *(f"Machine: {machine}." for machine in machines),
    )
    return Report(title="Report", about=about, parts=tuple(parts))


def _made(found: Gathered) -> Iterator[str]:
    """What a sweep took, where the numbers are of one."""
    rows = [row for _, row in found.made]
    if rows:
        hours = sum(row.seconds for row in rows) / 3600
        dates = " to ".join(sorted({min(row.date for row in rows), max(row.date for row in rows)}))
        failed = sum(row.state != "done" for row in rows)
        yield (
            f"{len(rows)} rows, {failed or 'none'} failed; {hours:.1f} hours of work, {dates}. "
            "The commands that made the numbers are in the last table."
        )


def _recall(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)
    for pool in _pools(systems):
        yield task_table(systems, pool)
    for pool in _pools(systems):
        yield first_table(systems, pool)
    for pool in _pools(systems):
        yield kept_table(systems, pool)


def _significance(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)
    pool = _main_pool(systems)
    if pool is None:
        return
    compared: list[tuple[tuple[System, str], tuple[System, str]]] = []
    for system in systems:
        methods = system.methods(pool)
        compared += [((system, a), (system, b)) for a, b in WITHIN if a in methods and b in methods]
    base = next((system for system in systems if "generative" in system.methods(pool)), None)
    for first, second in pairwise(systems):
        compared += [
            ((second, method), (first, method))
            for method in (*ACROSS, *(_of_rivals(first, pool)[:1] if base is None else ()))
            if method in first.methods(pool) and method in second.methods(pool)
        ]
    for rival in systems:
        own = _of_rivals(rival, pool)
        compared += [((base, "generative"), (rival, method)) for method in own[:1] if base is not None]
        if rival.name in found.models:  # indexes of these systems' own encoder
            compared += [
                ((system, BY_CODES), (rival, method))
                for method in own[1:]
                for system in systems
                if BY_CODES in system.methods(pool)
            ]
    by_kind = {kind: one for one in systems for kind in one.methods(pool) if kind in get_args(IdKind)}
    if CONTROL in by_kind:
        control = (by_kind[CONTROL], CONTROL)
        compared += [(control, (rival, kind)) for kind, rival in by_kind.items() if kind != CONTROL]
    pairs = [
        Pair(
            f"{one.title}: {a}",
            f"{other.title}: {b}",
            name,
            (one.per_query(pool, a, name), other.per_query(pool, b, name)),
        )
        for (one, a), (other, b) in compared
        for name in TESTED
    ]
    yield significance_table(pairs, name="significance", title=f"Paired tests, {pool} pool")


def _ablations(found: Gathered) -> Iterator[Table | Drawing | None]:
    for kind in TITLES:
        by_base: dict[str, list[System]] = {}
        for system in found.of(kind):
            by_base.setdefault(system.like, []).append(system)
        for like, changed in by_base.items():
            yield ablation_table(kind, _whole(found, like), changed)
    yield beam_table(found.of(BEAM))
    yield beam_figure(found.of(BEAM))


def _costs(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)
    pool = _main_pool(systems)
    if pool is not None:
        yield storage_table(systems, pool)
    for benchmark in found.benchmarks:
        if benchmark.kind == "scale":
            yield speed_table(benchmark)
            yield speed_figure(benchmark)
        else:
            yield quality_table(benchmark)
            yield latency_table(benchmark)
            yield quality_figure(benchmark)


def _misses(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)
    pool: Pool = "global"
    if not systems or pool not in _pools(systems):
        return
    encoded = encoded_pool(systems[0].seeds[0].folder)
    if encoded is None:
        return
    modalities = {
        did_of(int(number)): int(code)
        for number, code in zip(encoded.features.ids, encoded.features.modality, strict=True)
    }
    chosen = [
        (system, method)
        for system in systems
        for method in system.methods(pool)
        if method in (*ACROSS, *_of_rivals(system, pool)[:1])
    ]
    chosen += [
        (system, "generative")
        for kind in TITLES
        for system in found.of(kind)
        if "generative" in system.methods(pool)
    ]
    shares = [
        misses_of(system, pool, method, modalities, label=f"{system.title}: {method}")
        for system, method in chosen
    ]
    yield misses_table(shares)
    yield misses_figure(shares)


def _reliability(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)
    pool = _main_pool(systems)
    if pool is None:
        return
    answers = [
        answers_of(system, pool, method, label=system.title)
        for system in systems[:3]
        for method in ("generative", "generative+codes")
        if method in system.methods(pool) and system.seeds[0].scores == "level"
    ]
    answers = [one for one in answers if len(one.scores)]  # some find nothing for any query
    if answers:
        yield reliability_table(answers)
        yield reliability_figure(answers)


def _code_parts(found: Gathered, data: MBeir | None) -> Iterator[Table | Drawing | None]:
    system = next((one for one in found.of(SYSTEMS) if one.name in found.models), None)
    if system is None or data is None:
        return
    one = system.seeds[0]
    encoded = encoded_pool(one.folder)
    quantizer = load_quantizer(found.models[system.name] / "quantizer").quantizer
    if encoded is None:
        return
    has_picture = encoded.features.modality != Modality.TEXT.code
    groups = groups_of(encoded.codes, has_picture, first=1 if quantizer.has_modality_level else 0)
    items = shown_items(data, one.split, encoded.features, groups)
    yield codes_figure(groups, items, title=f"Items that share codes ({system.title})")
    yield codes_table(groups, items)


def _clouds(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)[:1] + [one for one in found.systems if one.name == WITHOUT_CONTRASTIVE]
    clouds = []
    for system in systems:
        encoded = (
            encoded_pool(system.seeds[0].folder) if system.seeds and system.name in found.models else None
        )
        if encoded is None:
            continue
        quantizer = load_quantizer(found.models[system.name] / "quantizer").quantizer
        rows = np.linspace(0, len(encoded.codes) - 1, min(CLOUD, len(encoded.codes))).astype(np.int64)
        vectors = quantizer.decode(torch.from_numpy(encoded.codes[rows].astype(np.int64)))
        clouds.append(Cloud(system.title, vectors.numpy(), encoded.features.modality[rows]))
    if clouds:
        yield clouds_figure(clouds)


def _rows(found: Gathered) -> Iterator[Table | Drawing | None]:
    if found.made:
        yield appendix(
            [
                (
                    row.title,
                    str(row.seed),
                    row.state if row.state == "done" else f"failed: {row.error}",
                    f"{row.seconds:.0f}",
                    "; ".join(row.commands),
                )
                for _, row in found.made
            ]
        )


def _whole(found: Gathered, like: str) -> System | None:
    """The system that others are changes of; where they do not say, the first that generates."""
    finished = [system for system in found.systems if "generative" in system.methods("global")]
    if like:
        return next((system for system in finished if system.name == like), None)
    return next((system for system in finished if system.table == SYSTEMS), None)


def _of_rivals(system: System, pool: Pool) -> list[str]:
    """Methods that `genius evaluate` does not have; of an encoder exact search comes first."""
    return [method for method in system.methods(pool) if method not in METHODS]


def _pools(systems: Sequence[System]) -> list[Pool]:
    pools: tuple[Pool, ...] = ("local", "global")
    return [pool for pool in pools if any(system.methods(pool) for system in systems)]


def _main_pool(systems: Sequence[System]) -> Pool | None:
    """The global pool, or the local one where nothing else was evaluated."""
    pools = _pools(systems)
    return pools[-1] if pools else None
