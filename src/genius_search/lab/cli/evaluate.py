"""``genius evaluate`` and ``genius doctor``: the quality of a model and of its IDs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from genius_search.cli.options import (
    DataArgument,
    DeviceOptions,
    JsonOption,
    OptionalFolder,
    command,
    split_names,
)
from genius_search.cli.terminal import TerminalProgress, print_facts, print_json, print_table, print_text
from genius_search.lab.settings import METHODS, POOLS, EvaluationConfig, EvaluationSettings, choose

if TYPE_CHECKING:
    from genius_search.lab.results import ResultRow
    from genius_search.lab.table import Table


@command
class RowOptions(JsonOption):
    """A command that evaluates rows of a data set."""

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    pools: str = "local,global"
    """Search each query in its own task's pool (local), in the union (global), or in both."""

    rows: str = "all"
    """Rows of the data set, as in its file names: mscoco_task0,cirr_task7; separated by commas."""

    def chosen(self) -> dict[str, Any]:
        """Return the pools and rows as settings of an evaluation."""
        return {
            "pools": choose("--pools", self.pools, POOLS),
            "rows": () if self.rows == "all" else split_names(self.rows),
        }


@command
class Evaluate(DeviceOptions, RowOptions):
    """Evaluate a model on a data set, beside exact search over the same candidates.

    R@k is M-BEIR's: the share of queries with any right answer among the first k. M-BEIR's own rows are
    printed in the papers' layout, in percent; published numbers stand beside ours if they are for the same
    numbers of queries and candidates. Those with a star are misprinted in the paper.
    """

    model: Path
    """Folder of the model."""

    methods: str = "all"
    """exact-raw, exact-fused, exact-fused+hubness, exact-codes; routing+codes, routing+embeddings (the same
    beam, led by the distance of code vectors instead of the generator); generative, generative+codes,
    generative+embeddings, generative+raw; separated by commas."""

    options: Annotated[EvaluationSettings, tyro.conf.arg(name="")] = EvaluationSettings()

    out: OptionalFolder = None
    """Folder for features and runs; default: evaluation/ in the model's folder."""

    json: bool = False
    """Print JSON: {"rows": [...]}."""

    markdown: bool = False
    """Print a Markdown table."""

    def run(self) -> None:
        """Evaluate and print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.errors import UsageError
        from genius_search.lab.evaluate import evaluate
        from genius_search.model import Genius

        if self.json and self.markdown:
            raise UsageError("--json and --markdown exclude each other")
        config = EvaluationConfig(
            methods=METHODS if self.methods == "all" else split_names(self.methods),
            **self.chosen(),
            **vars(self.options),
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            if self.out is None and model.folder != self.model:
                raise UsageError(
                    f"{self.model} is in the hub's cache, which is never written to; give a folder for "
                    "features and runs with --out FOLDER"
                )
            folder = self.out or self.model / "evaluation"
            result = evaluate(MBeir(self.data), model, config, folder, progress=progress)
            progress.say(f"IDs of the candidates: {result.health.verdict}")
        if self.json:
            print_json(result.to_json())
        else:
            print_results(
                result.rows,
                markdown=self.markdown,
                beam=config.beam,
                scores=config.scores,
                instructions=config.instructions,
            )


def print_results(
    rows: list[ResultRow], *, beam: int, scores: str, instructions: str, markdown: bool = False
) -> None:
    """Print M-BEIR's rows in the papers' layout, and other data in a block for each task."""
    from genius_search.lab import results

    if results.applies_to(rows):
        tables = results.paper_tables(rows, beam=beam, scores=scores, instructions=instructions)
    else:
        tables = results.task_tables(rows)
    if markdown:
        print_text("\n\n".join(table.markdown() for table in tables))
    else:
        print_tables(tables)


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables with as many columns as the terminal has room for."""
    for table in tables:
        print_text(table.text(Console().width))
    print_text("all columns: in a wider terminal, or with --json", error=True)


@command
class Doctor(JsonOption):
    """Examine a model's IDs: use of the codes, collisions, purity of the modality level, reconstruction.

    Exit status 1 if there is a problem.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model."""

    data: OptionalFolder = None
    """Examine the global test pool of this data set; default: the report written after training."""

    split: str = "test"
    """Split of the data set."""

    def run(self) -> int:
        """Examine the IDs and print the report."""
        from genius_search.lab.evaluate import doctor

        with TerminalProgress() as progress:
            health = doctor(self.model, self.data, split=self.split, progress=progress)
        status = 1 if health.problems else 0
        if self.json:
            print_json({**dataclasses.asdict(health), "verdict": health.verdict})
            return status
        facts: dict[str, object] = {
            "candidates": health.candidates,
            "distinct IDs": health.distinct_ids,
            "collisions": f"{health.collision_rate:.2%} (largest bucket {health.largest_bucket})",
        }
        if health.purity is not None:
            meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(health.level0_modality))
            facts["level-0 purity"] = f"{health.purity:.2%} ({meaning})"
        facts["reconstruction"] = f"mean cosine {health.reconstruction:.3f}"
        print_facts(facts)
        rows = [
            (
                f"{one.level}",
                f"{one.size}",
                f"{one.used}",
                f"{one.perplexity:.0f}",
                f"{one.largest_share:.1%}",
            )
            for one in health.levels
        ]
        print_table(("level", "codes", "used", "perplexity", "largest share"), rows)
        print(f"verdict: {health.verdict}")
        return status
