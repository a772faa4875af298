"""``genius report``: the paper's tables and figures from what is on disk, with statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Int16

from genius.artifact import open_artifact
from genius.data.features import Features
from genius.data.images import open_image
from genius.data.mbeir import MBeir, read_pool
from genius.data.qrels import read_qrels
from genius.data.records import Candidate, Modality, candidate_number, did_of
from genius.errors import ArtifactMissing, BadData, UsageError
from genius.evaluation.measures import evaluate as measure
from genius.evaluation.runs import Run, read_run
from genius.evaluation.tables import METHODS
from genius.models.marks import NUM_MARKS
from genius.report.ablations import TITLES, ablation_table, beam_figure, beam_table
from genius.report.codes import Group, Shown, codes_figure, codes_table, groups_of
from genius.report.costs import (
    Benchmark,
    latency_table,
    quality_figure,
    quality_table,
    read_benchmark,
    speed_figure,
    speed_table,
    storage_table,
)
from genius.report.document import Report, appendix
from genius.report.drawing import Drawing
from genius.report.embeddings import Cloud, clouds_figure
from genius.report.evaluated import RESULTS, Evaluated, Pool, System, read_evaluation
from genius.report.misses import misses_figure, misses_of, misses_table
from genius.report.recall import first_table, kept_table, task_table
from genius.report.reliability import answers_of, reliability_figure, reliability_table
from genius.report.significance import Pair, significance_table
from genius.report.statistics import interval
from genius.report.table import Cell, Estimate, Table
from genius.stages.encode import KIND as CODES
from genius.stages.model_file import MODEL_FILE
from genius.stages.progress import Progress
from genius.stages.recipe import EVALUATION
from genius.stages.sweep import ROW, MadeRow, read_rows
from genius.stages.train_quantizer import load_quantizer

SYSTEMS: Final = "systems"
BEAM: Final = "beam"
COSTS: Final = "costs"
WITHOUT_CONTRASTIVE: Final = "no-contrastive"
"""The recipe's row whose vectors are drawn beside those of the whole system."""
CLOUD: Final = 3000
"""Items in a drawing of vectors."""
PICTURE: Final = 96
"""Pixels of a picture's side."""
TESTED: Final = ("R@1", "R@5")
WITHIN: Final = (
    ("generative", "exact-fused"),
    ("generative+codes", "exact-fused"),
    ("generative+codes", "routing+codes"),
    ("generative+raw", "exact-raw"),
    ("generative+raw", "generative"),
)
"""Methods of one system that are tested against each other."""
ACROSS: Final = ("exact-fused", "generative", "generative+codes")
"""Methods on which systems are tested against each other."""
MOST_RUNS: Final = 30
"""Of somebody else's: pairs grow with the square."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What there is to report on."""

    systems: Sequence[System]
    benchmarks: Sequence[Benchmark] = ()
    made: Sequence[tuple[Path, MadeRow]] = ()
    """Rows of a sweep."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Name of a system -> folder of its first seed's model."""

    def of(self, table: str) -> list[System]:
        """Those that stand in one table."""
        return [system for system in self.systems if system.table == table and system.seeds]


class _Codes(NamedTuple):
    """IDs of a pool's candidates, from an evaluation's folder."""

    features: Features
    codes: Int16[np.ndarray, "items levels"]


def gather(sources: Sequence[str], *, model: Path | None = None) -> Gathered:
    """Read sources: folders of sweeps, of evaluations or of models, or ``NAME=FOLDER,FOLDER`` (seeds).

    Raises
    ------
    ArtifactMissing
        a folder holds none of these.
    """
    systems: list[System] = []
    benchmarks: list[Benchmark] = []
    made: list[tuple[Path, MadeRow]] = []
    models: dict[str, Path] = {}
    for source in sources:
        name, is_named, folders = source.partition("=")
        places = [Path(place) for place in (folders if is_named else source).split(",")]
        if not is_named and any(places[0].glob(f"*/*/{ROW}")):
            rows = read_rows(places[0])
            made += rows
            models |= {row.name: places[0] / row.model for _, row in reversed(rows) if row.model}
            systems += _systems_of(rows)
            benchmarks += _benchmarks_of(rows)
            continue
        if not (places[0] / RESULTS).exists() and (places[0] / MODEL_FILE).exists():
            models[name] = places[0]
            places = [place / EVALUATION for place in places]
        benchmark = read_benchmark(places[0]) if (places[0] / RESULTS).exists() else None
        if benchmark is not None:
            benchmarks.append(benchmark)
            continue
        title = name if is_named else places[0].resolve().name
        seeds = tuple(read_evaluation(place, seed=seed) for seed, place in enumerate(places))
        systems.append(System(name=title, title=title, table=SYSTEMS, seeds=seeds))
        if (places[0].parent / MODEL_FILE).exists():
            models[title] = places[0].parent
    if model is not None and systems:
        models[systems[0].name] = model
    if not systems and not benchmarks:
        raise ArtifactMissing(f"there is nothing to report on in {', '.join(sources)}: no row is finished")
    return Gathered(systems=systems, benchmarks=benchmarks, made=made, models=models)


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
        f"Data: {', '.join(names) or 'none'}."
        + (" The commands that made the numbers are in the last table." if found.made else ""),
        *(f"Machine: {machine}." for machine in machines),
    )
    return Report(title="Report", about=about, parts=tuple(parts))


def report_runs(runs: Sequence[Path], qrels: Path, *, progress: Progress) -> Report:
    """Somebody else's TREC runs over one qrels file: measures, intervals, all pairs tested.

    Raises
    ------
    UsageError
        no run, two of one name, or too many.
    """
    if not 0 < len(runs) <= MOST_RUNS:
        raise UsageError(f"{len(runs)} runs; expected between 1 and {MOST_RUNS}")
    judged = read_qrels(qrels, layout="trec")
    judged = {qid: answers for qid, answers in judged.items() if any(value > 0 for value in answers.values())}
    names = [path.stem for path in runs]
    if len(set(names)) < len(names):
        raise UsageError("two runs have the same file name, which is their name in tables; rename one")
    values: dict[str, dict[str, dict[str, float]]] = {}
    lines: list[tuple[Cell, ...]] = []
    progress.begin("runs", len(runs))
    for number, (name, path) in enumerate(zip(names, runs, strict=True), start=1):
        run = read_run(path, order="scores")
        lost = sum(qid not in run.hits for qid in judged)
        if lost == len(judged):
            raise BadData(f"{path} answers none of the {len(judged)} queries of {qrels}; take its own qrels")
        whole = Run(run.name, {qid: run.hits.get(qid, ()) for qid in judged})
        measures = measure(judged, whole)
        shown = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
        values[name] = {one: {qid: own[one] for qid, own in measures.per_query.items()} for one in shown}
        bounds = {one: interval({"": values[name][one]}) for one in shown}
        flat = measures.flat()
        lines.append(
            (
                name,
                lost,
                *(
                    Estimate(100 * flat[one], None, 100 * bounds[one].low, 100 * bounds[one].high)
                    for one in shown
                ),
                f"{100 * bounds['R@5'].low:.1f} to {100 * bounds['R@5'].high:.1f}",
            )
        )
        progress.advance(number, {})
    table = Table(
        name="runs",
        title="Runs",
        note=f"{len(judged)} queries of {qrels.name}, in percent. R@k: share of queries with a right answer "
        "among the first k (M-BEIR's). Runs are read as trec_eval orders them. Unanswered queries count 0. "
        "The interval is a bootstrap over queries (95 %) of R@5; the CSV has those of all measures.",
        headings=("run", "unanswered", "R@1", "R@5", "R@10", "MRR", "nDCG@10", "95 % interval of R@5"),
        lines=lines,
    )
    pairs = [
        Pair(first, second, one, ({"": values[first][one]}, {"": values[second][one]}))
        for one in ("R@5", "nDCG@10")
        for first, second in combinations(names, 2)
    ]
    tests = significance_table(pairs, name="significance", title="Paired tests")
    parts = (table, tests) if tests is not None else (table,)
    return Report(title="Report of runs", about=(), parts=parts)


def _systems_of(rows: Sequence[tuple[Path, MadeRow]]) -> list[System]:
    """Rows of one name are one system; those of benchmarks are none."""
    by_name: dict[str, list[tuple[Path, MadeRow]]] = {}
    for folder, row in rows:
        if row.table != COSTS:
            by_name.setdefault(row.name, []).append((folder, row))
    systems = []
    for name, own in by_name.items():
        seeds: list[Evaluated] = []
        failed: dict[int, str] = {}
        for folder, row in sorted(own, key=lambda one: one[1].seed):
            if row.state == "done":
                seeds.append(read_evaluation(folder / EVALUATION, seed=row.seed))
            else:
                failed[row.seed] = row.error
        first = own[0][1]
        systems.append(
            System(name=name, title=first.title, table=first.table, seeds=tuple(seeds), failed=failed)
        )
    return systems


def _benchmarks_of(rows: Sequence[tuple[Path, MadeRow]]) -> list[Benchmark]:
    found = [
        read_benchmark(folder / EVALUATION)
        for folder, row in rows
        if row.table == COSTS and row.state == "done"
    ]
    return [one for one in found if one is not None]


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
    for first, second in pairwise(systems):
        compared += [
            ((second, method), (first, method))
            for method in ACROSS
            if method in first.methods(pool) and method in second.methods(pool)
        ]
    for rival in systems[1:]:
        own = [method for method in rival.methods(pool) if method not in METHODS]
        compared += [((systems[0], "generative"), (rival, method)) for method in own]
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
    systems = found.of(SYSTEMS)
    if systems:
        for kind in TITLES:
            yield ablation_table(kind, systems[0], found.of(kind))
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
    encoded = _encoded(systems[0].seeds[0].folder)
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
        if method in ("exact-fused", "generative", "generative+codes") or method not in METHODS
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
    if answers:
        yield reliability_table(answers)
        yield reliability_figure(answers)


def _code_parts(found: Gathered, data: MBeir | None) -> Iterator[Table | Drawing | None]:
    system = next((one for one in found.of(SYSTEMS) if one.name in found.models), None)
    if system is None or data is None:
        return
    one = system.seeds[0]
    encoded = _encoded(one.folder)
    quantizer = load_quantizer(found.models[system.name] / "quantizer").quantizer
    if encoded is None:
        return
    has_picture = encoded.features.modality != Modality.TEXT.code
    groups = groups_of(encoded.codes, has_picture, first=1 if quantizer.has_modality_level else 0)
    items = _shown(data, one.split, encoded.features, groups)
    yield codes_figure(groups, items, title=f"Items that share codes ({system.title})")
    yield codes_table(groups, items)


def _clouds(found: Gathered) -> Iterator[Table | Drawing | None]:
    systems = found.of(SYSTEMS)[:1] + [one for one in found.systems if one.name == WITHOUT_CONTRASTIVE]
    clouds = []
    for system in systems:
        encoded = _encoded(system.seeds[0].folder) if system.seeds and system.name in found.models else None
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


def _pools(systems: Sequence[System]) -> list[Pool]:
    pools: tuple[Pool, ...] = ("local", "global")
    return [pool for pool in pools if any(system.methods(pool) for system in systems)]


def _main_pool(systems: Sequence[System]) -> Pool | None:
    """The global pool, or the local one where nothing else was evaluated."""
    pools = _pools(systems)
    return pools[-1] if pools else None


def _encoded(evaluation: Path) -> _Codes | None:
    """The candidates that an evaluation encoded; nothing where it kept none of the union."""
    folder = evaluation / "candidates"
    for place in sorted(folder.glob("codes-*")):
        manifest = open_artifact(place, kind=CODES)
        features = Features.open(folder / "features")
        if manifest.inputs.get("features") == features.manifest.fingerprint:
            columns = np.load(place / "codes.npy", mmap_mode="r")
            return _Codes(features, columns[:, : columns.shape[1] - NUM_MARKS])
    return None


def _shown(data: MBeir, split: str, features: Features, groups: Sequence[Group]) -> list[list[Shown]]:
    """The items of groups, with their pictures."""
    wanted = {int(features.ids[row]) for group in groups for row in group.rows}
    found = {
        number: _item(data, candidate)
        for candidate in read_pool([*data.global_pool(split), *data.local_pools_of(split)])
        if (number := candidate_number(candidate.did)) in wanted
    }
    return [[found[int(features.ids[row])] for row in group.rows] for group in groups]


def _item(data: MBeir, candidate: Candidate) -> Shown:
    image = None
    if candidate.image is not None:
        picture = open_image(data.image_path(candidate.image), shortest_side=PICTURE)
        picture.thumbnail((PICTURE, PICTURE))
        image = np.asarray(picture)
    return Shown(image=image, text=candidate.text or candidate.did)
