"""``genius report``: the paper's tables and figures from runs on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Final, get_args

import numpy as np
import pandas as pd
import torch

from genius_search.data.mbeir import MBeir, read_qrels
from genius_search.errors import BadData, UsageError
from genius_search.lab.report import figures, tables
from genius_search.lab.report.analysis import (
    first_hits,
    group_by_code,
    outcomes,
    read_encoded_pool,
    read_items,
)
from genius_search.lab.report.evaluated import SYSTEMS, Gathered, System
from genius_search.lab.report.figures import Drawing
from genius_search.lab.report.statistics import Pair, PerTask, interval
from genius_search.lab.runs import Run, evaluate, read_run
from genius_search.lab.settings import METHODS, POOLS, IdKind, Pool
from genius_search.lab.table import Cell, Estimate, Table
from genius_search.nn.quantizer import load_quantizer
from genius_search.progress import Progress
from genius_search.records import Modality, did_of
from genius_search.writing import write_file

DOCUMENT: Final = "report.md"
NO_CONTRASTIVE: Final = "no-contrastive"
"""The recipe's row whose vectors are drawn beside those of the base system."""
CLOUD_ITEMS: Final = 3000
CONTROL: Final = "genius"
"""Our IDs, trained as the rivals' are: only the ID differs from theirs."""
BY_CODES: Final = "generative+codes"
WITHIN_SYSTEM: Final = (
    ("generative", "exact-fused"),
    (BY_CODES, "exact-fused"),
    (BY_CODES, "routing+codes"),
    ("generative+raw", "exact-raw"),
    ("generative+raw", "generative"),
)
"""Methods of one system that are tested against each other."""
ACROSS_SYSTEMS: Final = ("exact-fused", "generative", BY_CODES)
"""Methods on which systems are tested against each other."""
RUN_MEASURES: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
MAX_RUNS: Final = 30
"""The number of pairs grows with the square."""

Parts = Iterator[Table | Drawing | None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tables and figures in reading order."""

    title: str
    about: tuple[str, ...]
    """Paragraphs at the beginning: what was measured, on which machine."""
    parts: tuple[Table | Drawing, ...]


def write(folder: Path, report: Report) -> list[Path]:
    """Write ``report.md``, ``tables/`` and ``figures/``; return the files, ``report.md`` first."""
    for name in ("tables", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    blocks = [f"# {report.title}", *report.about]
    files: dict[Path, bytes] = {folder / DOCUMENT: b""}
    seen: Counter[tuple[type, str]] = Counter()
    for one in report.parts:
        seen[type(one), one.name] += 1
        count = seen[type(one), one.name]
        part = one if count == 1 else replace(one, name=f"{one.name}-{count}")
        if isinstance(part, Table):
            files[folder / "tables" / f"{part.name}.csv"] = part.csv().encode()
            files[folder / "tables" / f"{part.name}.tex"] = part.latex().encode()
            blocks.append(part.markdown())
        else:
            files[folder / "figures" / f"{part.name}.png"] = part.save("png")
            files[folder / "figures" / f"{part.name}.svg"] = part.save("svg")
            blocks += [f"![{part.alt}](figures/{part.name}.png)", f"*{part.title}.*"]
    files[folder / DOCUMENT] = ("\n\n".join(blocks) + "\n").encode()
    for path, data in files.items():
        write_file(path, data)
    return list(files)


def report(found: Gathered, *, data: MBeir | None, progress: Progress) -> Report:
    """Return every table and figure that there is enough evidence for; items are shown only with ``data``."""
    makers: list[Parts] = [
        *(make(found) for make in (_recall, _significance, _ablations, _costs, _misses, _reliability)),
        _codes(found, data),
        _clouds(found),
    ]
    parts: list[Table | Drawing] = []
    progress.begin("report", len(makers))
    for number, make in enumerate(makers, start=1):
        parts += [part for part in make if part is not None]
        progress.advance(number, {})
    names = sorted({one.data for system in found.systems for one in system.seeds})
    about = [f"Data: {', '.join(names) or 'none'}."]
    if found.made:
        parts.append(tables.rows_table(found.made))
        hours = sum(row.seconds for row in found.made) / 3600
        dates = sorted({row.date for row in found.made})
        failed = sum(row.state != "done" for row in found.made)
        about.append(
            f"{len(found.made)} rows, {failed or 'none'} failed; {hours:.1f} hours of work, "
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. "
            "The commands that made the numbers are in the last table."
        )
    about += [f"Machine: {machine}." for machine in sorted({row.machine for row in found.made})]
    return Report(title="Report", about=tuple(about), parts=tuple(parts))


def _recall(found: Gathered) -> Parts:
    systems = found.in_table(SYSTEMS)
    for make in (tables.task_table, tables.first_table, tables.kept_table):
        for pool in _pools(systems):
            yield make(systems, pool)


def _significance(found: Gathered) -> Parts:
    systems = found.in_table(SYSTEMS)
    pool = _main_pool(systems)
    if pool is None:
        return
    methods = {system.name: system.methods(pool) for system in systems}
    # Methods that `genius evaluate` does not have; of an encoder exact search comes first.
    foreign = {name: [method for method in own if method not in METHODS] for name, own in methods.items()}
    base = next((system for system in systems if "generative" in methods[system.name]), None)
    compared: list[tuple[tuple[System, str], tuple[System, str]]] = []
    for system in systems:
        own = methods[system.name]
        compared += [((system, a), (system, b)) for a, b in WITHIN_SYSTEM if a in own and b in own]
    for first, second in pairwise(systems):
        compared += [
            ((second, method), (first, method))
            for method in (*ACROSS_SYSTEMS, *(foreign[first.name][:1] if base is None else ()))
            if method in methods[first.name] and method in methods[second.name]
        ]
    for rival in systems:
        own = foreign[rival.name]
        compared += [((base, "generative"), (rival, method)) for method in own[:1] if base is not None]
        if rival.name in found.models:  # indexes of these systems' own encoder
            ours = [(system, BY_CODES) for system in systems if BY_CODES in methods[system.name]]
            compared += [(one, (rival, method)) for method in own[1:] for one in ours]
    kinds = get_args(IdKind)
    by_kind = {kind: system for system in systems for kind in methods[system.name] if kind in kinds}
    if CONTROL in by_kind:
        control = (by_kind.pop(CONTROL), CONTROL)
        compared += [(control, (rival, kind)) for kind, rival in by_kind.items()]
    pairs = [
        Pair(f"{one.title}: {a}", f"{other.title}: {b}", measure,
             (one.per_query(pool, a, measure), other.per_query(pool, b, measure)))
        for (one, a), (other, b) in compared
        for measure in ("R@1", "R@5")
    ]  # fmt: skip
    yield tables.significance_table(pairs, name="significance", title=f"Paired tests, {pool} pool")


def _ablations(found: Gathered) -> Parts:
    finished = [system for system in found.systems if "generative" in system.methods("global")]
    for kind in tables.ABLATIONS:
        by_base: dict[str, list[System]] = {}
        for system in found.in_table(kind):
            by_base.setdefault(system.like, []).append(system)
        for like, changed in by_base.items():
            # Where a recipe does not say, changes are of the first system that generates.
            bases = [one for one in finished if (one.name == like if like else one.table == SYSTEMS)]
            yield tables.ablation_table(kind, bases[0] if bases else None, changed)
    beams = found.in_table("beam")
    yield tables.beam_table(beams)
    yield figures.beam_figure(beams)


def _costs(found: Gathered) -> Parts:
    systems = found.in_table(SYSTEMS)
    pool = _main_pool(systems)
    if pool is not None:
        yield tables.storage_table(systems, pool)
    for benchmark in found.benchmarks:
        if benchmark.kind == "speed":
            yield tables.speed_table(benchmark)
            yield figures.speed_figure(benchmark)
        else:
            yield tables.quality_table(benchmark)
            yield tables.latency_table(benchmark)
            yield figures.quality_figure(benchmark)


def _misses(found: Gathered) -> Parts:
    systems = found.in_table(SYSTEMS)
    if "global" not in _pools(systems):
        return
    encoded = read_encoded_pool(systems[0].seeds[0].folder)
    if encoded is None:
        return
    features, _ = encoded
    modalities = {
        did_of(int(number)): int(code) for number, code in zip(features.ids, features.modality, strict=True)
    }
    chosen = []
    for system in systems:
        methods = system.methods("global")
        foreign = [method for method in methods if method not in METHODS]
        chosen += [(system, one) for one in methods if one in (*ACROSS_SYSTEMS, *foreign[:1])]
    ablated = [system for kind in tables.ABLATIONS for system in found.in_table(kind)]
    chosen += [(system, "generative") for system in ablated if "generative" in system.methods("global")]
    shares = pd.DataFrame([outcomes(*one, "global", modalities) for one in chosen])
    yield tables.misses_table(shares)
    yield figures.misses_figure(shares)


def _reliability(found: Gathered) -> Parts:
    systems = found.in_table(SYSTEMS)
    pool = _main_pool(systems)
    if pool is None:
        return
    hits = [
        first_hits(system, pool, method)
        for system in systems[:3]
        for method in ("generative", BY_CODES)
        if method in system.methods(pool) and system.seeds[0].scores == "level"
    ]
    hits = [one for one in hits if len(one.scores)]  # some find nothing for any query
    if hits:
        yield tables.reliability_table(hits)
        yield figures.reliability_figure(hits)


def _codes(found: Gathered, data: MBeir | None) -> Parts:
    system = next((one for one in found.in_table(SYSTEMS) if one.name in found.models), None)
    if system is None or data is None:
        return
    one = system.seeds[0]
    encoded = read_encoded_pool(one.folder)
    if encoded is None:
        return
    features, codes = encoded
    quantizer = load_quantizer(found.models[system.name] / "quantizer").quantizer
    has_picture = features.modality != Modality.TEXT.code
    groups = group_by_code(codes, has_picture, first=1 if quantizer.has_modality_level else 0)
    items = read_items(data, one.split, features, groups)
    yield figures.codes_figure(groups, items, title=f"Items that share codes ({system.title})")
    yield tables.codes_table(groups, items)


def _clouds(found: Gathered) -> Parts:
    clouds = []
    for system in found.in_table(SYSTEMS)[:1] + [one for one in found.systems if one.name == NO_CONTRASTIVE]:
        if not system.seeds or system.name not in found.models:
            continue
        encoded = read_encoded_pool(system.seeds[0].folder)
        if encoded is None:
            continue
        features, codes = encoded
        quantizer = load_quantizer(found.models[system.name] / "quantizer").quantizer
        rows = np.linspace(0, len(codes) - 1, min(CLOUD_ITEMS, len(codes))).astype(np.int64)
        vectors = quantizer.decode(torch.from_numpy(codes[rows].astype(np.int64)))
        clouds.append(figures.Cloud(system.title, vectors.numpy(), features.modality[rows]))
    if clouds:
        yield figures.clouds_figure(clouds)


def _pools(systems: Sequence[System]) -> list[Pool]:
    return [pool for pool in POOLS if any(system.methods(pool) for system in systems)]


def _main_pool(systems: Sequence[System]) -> Pool | None:
    """Return the global pool, or the local one where nothing else was evaluated."""
    return next(reversed(_pools(systems)), None)


def report_runs(runs: Sequence[Path], qrels: Path, *, progress: Progress) -> Report:
    """Measure TREC runs of any system over one qrels file, with intervals, and test all pairs.

    Raises UsageError for no run, two of one name, or too many; BadData where the qrels have no right answer,
    or a run answers none of their queries.
    """
    if not 0 < len(runs) <= MAX_RUNS:
        raise UsageError(f"{len(runs)} runs; expected between 1 and {MAX_RUNS}")
    judged = {
        qid: answers
        for qid, answers in read_qrels(qrels, layout="trec").items()
        if any(relevance > 0 for relevance in answers.values())
    }
    if not judged:
        raise BadData(
            f"{qrels} has no query with a right answer (a relevance above 0), so nothing can be measured"
        )
    names = [path.stem for path in runs]
    if len(set(names)) < len(names):
        raise UsageError("two runs have the same file name, which is their name in tables; rename one")
    values: dict[str, dict[str, PerTask]] = {}
    lines: list[tuple[Cell, ...]] = []
    progress.begin("runs", len(runs))
    for number, (name, path) in enumerate(zip(names, runs, strict=True), start=1):
        run = read_run(path, order="scores")
        unanswered = sum(qid not in run.hits for qid in judged)
        if unanswered == len(judged):
            raise BadData(f"{path} answers none of the {len(judged)} queries of {qrels}; take its own qrels")
        measures = evaluate(judged, Run(run.name, {qid: run.hits.get(qid, ()) for qid in judged}))
        means = measures.means
        values[name] = {
            measure: {"": {qid: own[measure] for qid, own in measures.per_query.items()}}
            for measure in RUN_MEASURES
        }
        bounds = {measure: 100 * np.array(interval(own)) for measure, own in values[name].items()}
        estimates = [Estimate(100 * means[measure], None, *own.tolist()) for measure, own in bounds.items()]
        lines.append((name, unanswered, *estimates, "{:.1f} to {:.1f}".format(*bounds["R@5"])))
        progress.advance(number, {})
    table = Table(
        name="runs",
        title="Runs",
        note=f"{len(judged)} queries of {qrels.name}, in percent. R@k: share of queries with a right answer "
        "among the first k (M-BEIR's). Runs are read as trec_eval orders them. Unanswered queries count 0. "
        "The interval is a bootstrap over queries (95 %) of R@5; the CSV has those of all measures.",
        headings=("run", "unanswered", *RUN_MEASURES, "95 % interval of R@5"),
        lines=lines,
    )
    pairs = [
        Pair(first, second, measure, (values[first][measure], values[second][measure]))
        for measure in ("R@5", "nDCG@10")
        for first, second in combinations(names, 2)
    ]
    progress.begin("tests", len(pairs))
    tests = tables.significance_table(
        pairs, name="significance", title="Paired tests", advance=lambda done: progress.advance(done, {})
    )
    return Report(title="Report of runs", about=(), parts=(table,) if tests is None else (table, tests))
