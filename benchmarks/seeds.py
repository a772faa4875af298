"""Several evaluations of one recipe with different seeds, as one table: mean, spread, shares of exact search.

Usage: python benchmarks/seeds.py NAME=FOLDER,FOLDER,FOLDER ... > docs/lab/results/seeds.md
A folder is what `genius evaluate --out` wrote, for one seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from genius_search.lab.settings import METHODS

EXACT = "exact-fused"
MEASURES = ("R@1", "R@5", "R@10")


def methods_of(folder: Path) -> dict[str, dict[str, float]]:
    """Measures of each method over the rows of the global pool, every row counting the same."""
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["rows"]
    rows = [row for row in rows if row["pool"] == "global"]
    found = {}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if own:
            found[method] = {name: mean(row[name] for row in own) for name in MEASURES}
            found[method]["touched"] = mean(row["candidates_touched"] / row["pool_size"] for row in own)
    return found


def lines_of(name: str, folders: Sequence[Path]) -> Iterator[str]:
    """A table of one data set."""
    seeds = [methods_of(folder) for folder in folders]
    config = json.loads((folders[0] / "results.json").read_text())["config"]
    settings = ", ".join(
        f"{key} {config[key]}" for key in ("beam", "candidates", "density_weight", "generator_weight")
    )
    yield f"## {name}"
    yield ""
    yield f"Global pool, {config['split']} split, {len(seeds)} seeds; {settings}."
    yield ""
    yield "| method | R@1 | R@5 | R@10 | R@1 of exact | R@5 of exact | pool touched |"
    yield "|---|---|---|---|---|---|---|"
    for method in seeds[0]:
        cells = [_cell([seed[method][measure] for seed in seeds]) for measure in MEASURES]
        cells += [
            _cell([seed[method][measure] / seed[EXACT][measure] for seed in seeds])
            for measure in MEASURES[:2]
        ]
        touched = mean(seed[method]["touched"] for seed in seeds)
        yield f"| `{method}` | {' | '.join(cells)} | {touched:.2%} |"
    yield ""


def _cell(values: Sequence[float]) -> str:
    """Mean and, of several, their standard deviation."""
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def main() -> None:
    """Print the page."""
    print("# Three seeds of one preset\n")
    print("Written by `benchmarks/seeds.py` from evaluations of models that differ in their seed only")
    print(
        "(`recipes/seeds.sh`). Mean ± standard deviation. What the methods are: [evaluation](../../train.md#evaluate); what"
    )
    print("closes the gap to exact search: [quality](../quality.md).\n")
    for argument in sys.argv[1:]:
        name, _, folders = argument.partition("=")
        print("\n".join(lines_of(name, [Path(folder) for folder in folders.split(",")])))


if __name__ == "__main__":
    main()
