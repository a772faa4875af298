"""``genius baseline``: rivals that generate IDs of other kinds, beside GENIUS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.lab.cli.evaluate import pools_of

Data = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Train the model's decoder to write IDs of another kind: GRACE's, DSI's, NCI's, IRGen's.

    Input, decoder and training are the model's, so that a comparison isolates the ID. `genius` trains it on
    our own IDs in the very same way, as the control.
    """

    data: Data
    """Folder of the data set, in M-BEIR's layout."""

    kind: Literal[
        "grace-numeric", "grace-string", "grace-semantic", "grace-structured", "dsi", "nci", "irgen", "genius"
    ]
    """Of the IDs."""

    model: Path
    """Folder of the model, whose encoder, fusion and decoder sizes are used."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the rival."""

    indexing: Literal["yes", "no"] = "yes"
    """Learn the IDs of the pool that will be searched, too; without it they are read off the items
    afterwards, as later additions would be."""

    split: str = "test"
    """Whose pools will be searched."""

    epochs: float = 20.0
    """Passes over the training queries."""

    batch_size: int = 256
    """Pairs in a batch, and with indexing as many items."""

    seed: int = 0
    """Decides IDs, initial weights, batches and augmentation."""

    evaluation: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the features of the pools are or go: what `genius evaluate --out` was given; default: evaluation/
    in the model's folder."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> None:
        """Give IDs and train."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.baselines.train import BaselineConfig, fit_baseline
        from genius_search.model import Genius

        config = BaselineConfig(
            kind=self.kind,
            indexing=self.indexing == "yes",
            split=self.split,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, download=self.download)
            features = _features(model.folder, self.model, self.evaluation)
            fit_baseline(MBeir(self.data), model, self.out, config, evaluation=features, progress=progress)
            progress.say(
                f"next: genius baseline evaluate {self.data} --baseline {self.out} --model {self.model}"
            )


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a fitted rival as `genius evaluate` measures GENIUS: same queries, pools, beam, files."""

    data: Data
    """Folder of the data set."""

    baseline: Path
    """Folder of the rival."""

    model: Path
    """Folder of the model that it was fitted on."""

    split: str = "test"
    """Of the data set."""

    pools: str = "local,global"
    """Each query against its own task's pool (local), against the union (global), or both."""

    rows: str = "all"
    """Of the data set, as in its file names: mscoco_task0,cirr_task7; commas between."""

    beam: int = 50
    """IDs kept at each level."""

    max_queries: int = 0
    """At most this many queries for each row; 0 means all."""

    evaluation: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model's features are or go; default: evaluation/ in its folder."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where runs and results.json go; default: evaluation/ in the rival's folder."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON: {"rows": [...], "ids": {...}}."""

    def run(self) -> None:
        """Search, measure, print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab import results as tables
        from genius_search.lab.baselines.evaluate import evaluate_baseline
        from genius_search.lab.baselines.train import load_baseline
        from genius_search.lab.evaluate import EvaluationConfig
        from genius_search.model import Genius

        names = () if self.rows == "all" else tuple(name.strip() for name in self.rows.split(","))
        config = EvaluationConfig(
            split=self.split,
            pools=pools_of(self.pools),
            rows=names,
            beam=self.beam,
            max_queries=self.max_queries,
        )
        with TerminalProgress() as progress:
            baseline = load_baseline(self.baseline)
            model = Genius.open(self.model, download=self.download)
            result = evaluate_baseline(
                MBeir(self.data),
                model,
                baseline,
                config,
                self.out or self.baseline / "evaluation",
                evaluation=_features(model.folder, self.model, self.evaluation),
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        console = Console()
        console.print(tables.to_rich(result.rows))
        for name, value in result.ids._asdict().items():
            console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)


def _features(found: Path, named: Path, wanted: Path | None) -> Path:
    """Where features of the pools go: never into the hub's cache."""
    from genius_search.errors import UsageError

    if wanted is None and found != named:
        raise UsageError(
            f"{named} is in the hub's cache, and nothing is written there; say where features go with "
            "--evaluation FOLDER"
        )
    return wanted or named / "evaluation"
