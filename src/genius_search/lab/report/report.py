"""``genius report --runs``: somebody else's TREC runs over one qrels file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Final, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Int16

from genius_search.artifact import open_artifact, write_file
from genius_search.data.features import Features
from genius_search.data.images import open_image
from genius_search.data.mbeir import MBeir, read_pool, read_qrels
from genius_search.encode import KIND as CODES
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.lab.baselines.ids import Kind as IdKind
from genius_search.lab.report.evaluated import RESULTS, Evaluated, Pool, System, check_seeds, read_evaluation
from genius_search.lab.report.parts import (
    TITLES,
    Benchmark,
    Cloud,
    Group,
    Shown,
    ablation_table,
    answers_of,
    beam_figure,
    beam_table,
    clouds_figure,
    codes_figure,
    codes_table,
    first_table,
    groups_of,
    kept_table,
    latency_table,
    misses_figure,
    misses_of,
    misses_table,
    quality_figure,
    quality_table,
    read_benchmark,
    reliability_figure,
    reliability_table,
    speed_figure,
    speed_table,
    storage_table,
    task_table,
)
from genius_search.lab.report.statistics import Pair, interval, significance_table
from genius_search.lab.report.table import Cell, Drawing, Estimate, Table
from genius_search.lab.results import METHODS
from genius_search.lab.runs import Run, read_run
from genius_search.lab.runs import evaluate as measure
from genius_search.lab.sweep import EVALUATION, MadeRow, read_rows
from genius_search.lab.sweep import SWEEP_ROW as ROW
from genius_search.model_file import MODEL_FILE
from genius_search.nn.density import NUM_MARKS
from genius_search.progress import Progress
from genius_search.records import Candidate, Modality, candidate_number, did_of
from genius_search.training.quantizer import load_quantizer

DOCUMENT: Final = "report.md"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, in the order in which it is read."""

    title: str
    about: tuple[str, ...]
    """Paragraphs before all else: what was measured, on which machine."""
    parts: tuple[Table | Drawing, ...]


def write(folder: Path, report: Report) -> list[Path]:
    """Write everything; the files that were written, ``report.md`` first."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    blocks = [f"# {report.title}", *report.about]
    files: list[tuple[Path, bytes]] = []
    for part in _named(report.parts):
        match part:
            case Table():
                files += [
                    (folder / "tables" / f"{part.name}.csv", part.csv().encode()),
                    (folder / "tables" / f"{part.name}.tex", part.latex().encode()),
                ]
                blocks.append(part.markdown())
            case Drawing():
                files += [
                    (folder / "figures" / f"{part.name}.png", part.save("png")),
                    (folder / "figures" / f"{part.name}.svg", part.save("svg")),
                ]
                blocks += [f"![{part.alt}](figures/{part.name}.png)", f"*{part.title}.*"]
    files.insert(0, (folder / DOCUMENT, ("\n\n".join(blocks) + "\n").encode()))
    for path, data in files:
        write_file(path, data)
    return [path for path, _ in files]


def _named(parts: Sequence[Table | Drawing]) -> Iterator[Table | Drawing]:
    """Each with files of its own: the second table of a name is ``name-2``."""
    seen: Counter[tuple[type, str]] = Counter()
    for part in parts:
        seen[type(part), part.name] += 1
        count = seen[type(part), part.name]
        yield part if count == 1 else replace(part, name=f"{part.name}-{count}")


def appendix(lines: Sequence[tuple[str, str, str, str, str]]) -> Table:
    """Every row with what made it."""
    return Table(
        name="rows",
        title="What made each row",
        headings=("row", "seed", "state", "seconds", "commands"),
        lines=lines,
        text_columns=5,
    )


SYSTEMS: Final = "systems"
COSTS: Final = "costs"


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What there is to report on."""

    systems: Sequence[System]
    benchmarks: Sequence[Benchmark] = ()
    made: Sequence[tuple[Path, MadeRow]] = ()
    """Rows of a sweep."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Name of a system -> folder of the model of its first seed that is finished."""

    def of(self, table: str) -> list[System]:
        """Those that stand in one table."""
        return [system for system in self.systems if system.table == table and system.seeds]


def gather(sources: Sequence[str], *, model: Path | None = None) -> Gathered:
    """Read sources: folders of sweeps, of evaluations or of models, or ``NAME=FOLDER,FOLDER`` (seeds).

    Raises
    ------
    ArtifactMissing
        a folder holds none of these.
    UsageError
        two systems have one name.
    BadData
        seeds of one system were evaluated on different queries.
    """
    systems: list[System] = []
    benchmarks: list[Benchmark] = []
    made: list[tuple[Path, MadeRow]] = []
    models: dict[str, Path] = {}
    for source in sources:
        name, places = _places(source)
        if not name and any(places[0].glob(f"*/*/{ROW}")):
            rows = read_rows(places[0])
            made += rows
            models |= {
                row.name: places[0] / row.model
                for _, row in sorted(rows, key=lambda one: -one[1].seed)
                if row.model and row.state == "done"
            }
            systems += _systems_of(rows)
            benchmarks += _benchmarks_of(rows)
            continue
        if not (places[0] / RESULTS).exists() and (places[0] / MODEL_FILE).exists():
            places = [place / EVALUATION for place in places]
        benchmark = read_benchmark(places[0]) if (places[0] / RESULTS).exists() else None
        if benchmark is not None:
            benchmarks.append(benchmark)
            continue
        is_models = (places[0].parent / MODEL_FILE).exists()
        title = name or (places[0].parent if is_models else places[0]).resolve().name
        seeds = tuple(read_evaluation(place, seed=seed) for seed, place in enumerate(places))
        systems.append(System(name=title, title=title, table=SYSTEMS, seeds=seeds))
        if is_models:
            models[title] = places[0].parent
    _check(systems)
    if model is not None and systems:
        models[systems[0].name] = model
    if not systems and not benchmarks:
        raise ArtifactMissing(f"there is nothing to report on in {', '.join(sources)}: no row is finished")
    return Gathered(systems=systems, benchmarks=benchmarks, made=made, models=models)


def _places(source: str) -> tuple[str, list[Path]]:
    """``NAME=FOLDER,FOLDER`` as name and folders; one folder has no name."""
    name, is_named, folders = source.partition("=")
    if not (name and is_named) or Path(source).exists():  # a folder's name may have such a sign itself
        return "", [Path(source)]
    return name, [Path(place) for place in folders.split(",")]


def _check(systems: Sequence[System]) -> None:
    twice = [name for name, count in Counter(system.name for system in systems).items() if count > 1]
    if twice:
        raise UsageError(f"two systems are named {twice[0]!r}; give them others, as NAME=FOLDER")
    for system in systems:
        check_seeds(system)


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
            System(
                name=name,
                title=first.title,
                table=first.table,
                seeds=tuple(seeds),
                failed=failed,
                like=first.like,
            )
        )
    return systems


def _benchmarks_of(rows: Sequence[tuple[Path, MadeRow]]) -> list[Benchmark]:
    found = [
        read_benchmark(folder / EVALUATION)
        for folder, row in rows
        if row.table == COSTS and row.state == "done"
    ]
    return [one for one in found if one is not None]


PICTURE: Final = 96
"""Pixels of a picture's side."""


class EncodedPool(NamedTuple):
    """IDs of a pool's candidates, from an evaluation's folder."""

    features: Features
    codes: Int16[np.ndarray, "items levels"]


def encoded_pool(evaluation: Path) -> EncodedPool | None:
    """The candidates that an evaluation encoded; nothing where it kept none of the union."""
    folder = evaluation / "candidates"
    for place in sorted(folder.glob("codes-*")):
        manifest = open_artifact(place, kind=CODES)
        features = Features.open(folder / "features")
        if manifest.inputs.get("features") == features.manifest.fingerprint:
            columns = np.load(place / "codes.npy", mmap_mode="r")
            return EncodedPool(features, columns[:, : columns.shape[1] - NUM_MARKS])
    return None


def shown_items(data: MBeir, split: str, features: Features, groups: Sequence[Group]) -> list[list[Shown]]:
    """The items of groups, with their pictures.

    Raises
    ------
    BadData
        the data set is not the one that was evaluated.
    """
    wanted = {int(features.ids[row]) for group in groups for row in group.rows}
    found = {
        number: _item(data, candidate)
        for candidate in read_pool([*data.global_pool(split), *data.local_pools_of(split)])
        if (number := candidate_number(candidate.did)) in wanted
    }
    if len(found) < len(wanted):
        raise BadData(
            f"{data.root} has no candidate {did_of(min(wanted - found.keys()))}, which was evaluated; give "
            "--data the data set of the evaluations, or leave it out"
        )
    return [[found[int(features.ids[row])] for row in group.rows] for group in groups]


def _item(data: MBeir, candidate: Candidate) -> Shown:
    image = None
    if candidate.image is not None:
        picture = open_image(data.image_path(candidate.image), shortest_side=PICTURE)
        picture.thumbnail((PICTURE, PICTURE))
        image = np.asarray(picture)
    return Shown(image=image, text=candidate.text or candidate.did)


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


MOST_RUNS: Final = 30
"""Of somebody else's: pairs grow with the square."""


def report_runs(runs: Sequence[Path], qrels: Path, *, progress: Progress) -> Report:
    """Somebody else's TREC runs over one qrels file: measures, intervals, all pairs tested.

    Raises
    ------
    UsageError
        no run, two of one name, or too many.
    BadData
        the qrels have no right answer, or a run answers none of their queries.
    """
    if not 0 < len(runs) <= MOST_RUNS:
        raise UsageError(f"{len(runs)} runs; expected between 1 and {MOST_RUNS}")
    judged = read_qrels(qrels, layout="trec")
    judged = {qid: answers for qid, answers in judged.items() if any(value > 0 for value in answers.values())}
    if not judged:
        raise BadData(
            f"{qrels} has no query with a right answer (a relevance above 0), so nothing can be measured"
        )
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
    progress.begin("tests", len(pairs))
    tests = significance_table(
        pairs,
        name="significance",
        title="Paired tests",
        advance=lambda done: progress.advance(done, {}),
    )
    parts = (table, tests) if tests is not None else (table,)
    return Report(title="Report of runs", about=(), parts=parts)
