"""``genius baseline``: rivals that write IDs of other kinds, and rivals that search embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DataArgument, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_facts, print_json, print_table
from genius_search.lab.cli.evaluate import RowOptions, print_tables
from genius_search.lab.settings import BaselineConfig, DenseConfig, EvaluationConfig


@command
class EvaluationOptions(RowOptions):
    """A command that measures a rival."""

    split: str = "test"
    """Split of the data set."""

    max_queries: int = 0
    """Queries of each row at most; 0 means all."""

    evaluation: OptionalFolder = None
    """Folder for the features of pools and queries; default: evaluation/ in the model's folder."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def config(self, *, beam: int = 50, seed: int = 0) -> EvaluationConfig:
        """Return the settings of the evaluation."""
        return EvaluationConfig(
            split=self.split, max_queries=self.max_queries, beam=beam, seed=seed, **self.chosen()
        )


@command
class Fit:
    """Train the model's decoder to write IDs of another kind: GRACE's, DSI's, NCI's, IRGen's.

    Input, decoder and training are the model's, so that a comparison isolates the ID. `genius` trains it on
    the model's own IDs in the same way, as the control.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    model: Path
    """Folder of the model, whose encoder, fusion and decoder sizes are used."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the rival."""

    options: Annotated[BaselineConfig, tyro.conf.arg(name="")]

    evaluation: OptionalFolder = None
    """Folder for the features of the pools: the --out of `genius evaluate`; default: evaluation/ of the
    model's folder."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> None:
        """Give IDs and train."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.baselines.generative import fit_baseline
        from genius_search.model import Genius

        with TerminalProgress() as progress:
            model = Genius.open(self.model, download=self.download)
            features = _features_folder(model.folder, self.model, self.evaluation)
            fit_baseline(
                MBeir(self.data), model, self.out, self.options, evaluation=features, progress=progress
            )
            progress.say_next(
                *("genius", "baseline", "evaluate", self.data, "--baseline", self.out, "--model", self.model)
            )


@command
class Evaluate(EvaluationOptions):
    """Measure a fitted rival as `genius evaluate` measures a model: same queries, pools, beam, files."""

    baseline: Path
    """Folder of the rival."""

    model: Path
    """Folder of the model that it was fitted on."""

    beam: int = 50
    """IDs kept at each level."""

    out: OptionalFolder = None
    """Folder for runs and results.json; default: evaluation/ in the rival's folder."""

    json: bool = False
    """Print JSON: {"rows": [...], "ids": {...}}."""

    def run(self) -> None:
        """Search, measure, print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.baselines.generative import evaluate_baseline, load_baseline
        from genius_search.lab.results import task_tables
        from genius_search.model import Genius

        with TerminalProgress() as progress:
            model = Genius.open(self.model, download=self.download)
            result = evaluate_baseline(
                MBeir(self.data),
                model,
                load_baseline(self.baseline, model.quantizer),
                self.config(beam=self.beam),
                self.out or self.baseline / "evaluation",
                evaluation=_features_folder(model.folder, self.model, self.evaluation),
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        print_tables(task_tables(result.rows))
        print_facts(result.ids._asdict())


@command
class Dense(EvaluationOptions):
    """Measure embedding search as `genius evaluate` measures a model: same queries, pools, files.

    The encoder is a model's, or one that `genius train encoder` or `genius embed` left in a folder: small of
    any kind (clip-sf, clip-ff, blip-sf, blip-ff), or published weights. Centroids and codes are learned from
    the training candidates, as IDs are.
    """

    encoder_model: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """The --out of `genius train encoder`, `genius embed` or `genius fit`."""

    options: Annotated[DenseConfig, tyro.conf.arg(name="")] = DenseConfig()

    out: OptionalFolder = None
    """Folder for runs and results.json; default: dense/ in the encoder's folder."""

    device: str = "cpu"
    """Device of the encoder: cpu or cuda."""

    json: bool = False
    """Print JSON: {"rows": [...], "timings": [...]}."""

    def run(self) -> None:
        """Index, search, measure, print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.baselines.dense import evaluate_dense
        from genius_search.lab.results import task_tables
        from genius_search.training.fit import reopen_embedded

        with TerminalProgress() as progress:
            result = evaluate_dense(
                MBeir(self.data),
                reopen_embedded(self.encoder_model, device=self.device, download=self.download),
                self.config(seed=self.options.seed),
                self.options,
                self.out or self.encoder_model / "dense",
                evaluation=self.evaluation or self.encoder_model / "evaluation",
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        print_tables(task_tables(result.rows))
        lines = [
            (one.method, f"{one.pool_size:,}", f"{one.fit_seconds:.2f}", f"{one.index_seconds:.2f}",
             f"{one.queries:,}", f"{one.ms_per_query:.3f}")
            for one in result.timings
        ]  # fmt: skip
        headings = ("method", "candidates", "fit, s", "index, s", "queries", "ms a query")
        print_table(headings, lines, left=headings[:1])


def _features_folder(opened: Path, named: Path, wanted: Path | None) -> Path:
    """Return the folder for the features of the pools, which is never in the hub's cache."""
    from genius_search.errors import UsageError

    if wanted is None and opened != named:
        raise UsageError(
            f"{named} is in the hub's cache, and nothing is written there; say where features go with "
            "--evaluation FOLDER"
        )
    return wanted or named / "evaluation"
