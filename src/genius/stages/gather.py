"""What ``genius report`` is about: rows of sweeps, evaluations, models and benchmarks, found on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from genius.errors import ArtifactMissing, UsageError
from genius.report.costs import Benchmark, read_benchmark
from genius.report.evaluated import RESULTS, Evaluated, System, check_seeds, read_evaluation
from genius.stages.model_file import MODEL_FILE
from genius.stages.recipe import EVALUATION
from genius.stages.sweep import ROW, MadeRow, read_rows

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
