"""Commands that use data sets: ``genius fit``, ``calibrate``, ``evaluate`` and ``data check``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import tyro

from genius_search.cli.options import (
    DataArgument,
    DeviceOptions,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalFolder,
    OptionalName,
    WaitOption,
    command,
    optional,
    read_toml,
    to_toml,
)
from genius_search.cli.terminal import (
    TerminalProgress,
    print_facts,
    print_json,
    print_table,
    print_text,
)
from genius_search.errors import BadData, GeniusError, UsageError, plural

if TYPE_CHECKING:
    from genius_search.recipe import FitConfig

TABLE_MEASURES: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
"""The measures in the table of an evaluation."""


@contextmanager
def report_progress() -> Iterator[TerminalProgress]:
    """Yield a progress for training.

    If ``torchrun`` has started several processes, only the first one prints.
    """
    from genius_search.nn import parallel

    with parallel.join_ranks():
        try:
            with TerminalProgress(quiet=parallel.rank() > 0) as progress:
                yield progress
        except GeniusError as error:
            if parallel.rank():
                raise SystemExit(error.exit_code) from None
            raise


@command
class Fit(DeviceOptions, WaitOption):
    """Train a model on a data set in M-BEIR's layout, or on an index created with an encoder.

    For a data set, give --encoder and --out: the encoder, the quantizer and the generator are
    trained one after the other. With --index, the fusion is trained on pairs of queries and items;
    the new model replaces the model of the index if it finds more held-out pairs. After an
    interruption, run the same command again to continue. If settings have changed, only the stages
    that depend on them are trained again.
    """

    data: Annotated[Path | None, tyro.conf.Positional, optional("[DATA]")] = None
    """Folder of the data set. With --index, also a .jsonl file of queries, {"text": ..., "id":
    ITEM}. Default with --index: the choices that the index has learned (`genius index learn`)."""

    encoder: OptionalName = None
    """Encoder, as for `genius index create`, or one of: small (trains one), small:FOLDER,
    uniir:FOLDER, precomputed:PATH, or adapters:IMAGE,TEXT, which trains small networks on top of
    two encoders."""

    out: OptionalFolder = None
    """Folder of the new model."""

    index: OptionalFolder = None
    """Folder of an index to train, instead of writing a model."""

    force: bool = False
    """With --index: replace the model even if the new one does not find clearly more pairs."""

    preset: Annotated[Literal["tiny", "small", "paper"] | None, optional("{tiny,small,paper}")] = (
        None
    )
    """Settings to start from: tiny (for tests), small (for laptops), or paper. Default: small."""

    config: OptionalFile = None
    """TOML file of settings that differ from the preset. It may also name the preset."""

    print_config: bool = False
    """Print all settings as TOML, for --config, and exit."""

    def run(self) -> None:
        settings = read_toml(self.config, preset_name=self.preset)
        if self.print_config:
            sys.stdout.write(to_toml(settings))
        elif self.data is not None and not self.data.exists():
            raise BadData(f"{self.data} does not exist; give the folder of a data set")
        elif self.index is not None:
            if self.out is not None or self.encoder is not None:
                raise UsageError(
                    "--index trains the model of an index, which has an encoder; leave out "
                    "--encoder and --out"
                )
            self._fit_index(self.data, self.index, settings)
        elif self.data is None or self.out is None or self.encoder is None:
            raise UsageError("give a data set with --encoder and --out, or an index with --index")
        else:
            self._fit_data(self.data, self.encoder, self.out, settings)

    def _fit_data(self, data: Path, encoder: str, out: Path, settings: FitConfig) -> None:
        from genius_search.data.mbeir import MBeir
        from genius_search.training.fit import fit

        with report_progress() as progress:
            model = fit(
                MBeir(data),
                encoder,
                out,
                settings,
                progress=progress,
                device=self.device,
                download=self.download,
            )
            progress.say(f"model {model.fingerprint[:12]} was written to {out}")
            progress.say_next("genius", "evaluate", data, "--model", out)

    def _fit_index(self, pairs: Path | None, folder: Path, settings: FitConfig) -> None:
        from genius_search.index.index import Index

        with TerminalProgress() as progress:
            index = Index.open(folder, download=self.download)
            fitted = index.train(
                pairs,
                config=settings,
                force=self.force,
                device=self.device,
                progress=progress,
                wait_seconds=self.wait,
            )
        rows = [
            (name, f"{recall.at_1:.3f}", f"{recall.at_5:.3f}")
            for name, recall in (("before", fitted.before), ("after", fitted.after))
        ]
        print_table(("model", "R@1", "R@5"), rows, left=("model",))
        print(
            f"{plural(fitted.pairs, 'pair')}, of which {fitted.left_out:,} were left out because "
            f"the index lacks their items. The table shows the {fitted.measured:,} held-out pairs."
        )
        if fitted.kept:
            print(f"{folder} now uses the new model.")
        else:
            print(
                "The new model is not better by more than a standard error, so the index keeps its "
                "model; use --force to replace it anyway."
            )


@command
class Calibrate(WaitOption, OpenIndexOptions, JsonOption):
    """Calibrate an index with queries whose answers are known, so that hits have a probability.

    Searches can then also report that there is no good match. The queries come from a data set, a
    file, or the choices that the index has learned; their answers are ids of items. The weight of
    densities (density_weight) that finds the most answers becomes the default of the index. Half of
    the queries are used to fit, the other half to measure. Calibrate again after the index has
    grown considerably.
    """

    data: OptionalFolder = None
    """Data set in M-BEIR's layout, or a .jsonl file of queries, as for `genius fit --index`.
    Default: the choices that the index has learned."""

    split: str = "val"
    """Split of the data set."""

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Share of good matches that should be right. It determines the threshold of a good match."""

    def run(self) -> None:
        with TerminalProgress() as progress:
            index = self.open_index()
            fitted = index.calibrate(
                self.data,
                split=self.split,
                precision=self.precision,
                progress=progress,
                wait_seconds=self.wait,
            )
        if self.json:
            print_json(dataclasses.asdict(fitted))
            return
        print_facts(
            {
                "queries": fitted.queries,
                "weight of densities": fitted.search.density_weight,
                "mean probability of first hits": fitted.promised,
                "share of first hits that are right": fitted.right,
                "threshold of a good match": fitted.threshold or "none; try a lower --precision",
                "queries with a good match": fitted.good,
                "good matches that are right": fitted.good_and_right,
                "queries without an answer or a good match": fitted.refused,
            }
        )


@command
class Evaluate(DeviceOptions, JsonOption):
    """Evaluate an index or a model with the queries of a data set, compared with exact search.

    The items of the index must be candidates of the data set, with the same ids. For a model, the
    union of the data set's pools is indexed first. R@k is defined as in M-BEIR: the share of
    queries with any right answer among the first k hits.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    index: OptionalFolder = None
    """Folder of the index."""

    model: OptionalFolder = None
    """Folder of a model, instead of an index."""

    out: OptionalFolder = None
    """With --model: folder of the new index. Default: a folder in MODEL/evaluation."""

    split: str = "test"
    """Split of the data set."""

    max_queries: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Search for at most this many queries of each row, evenly spaced. Default: all queries."""

    def run(self) -> None:
        from genius_search.data.mbeir import MBeir
        from genius_search.evaluate import evaluate_model
        from genius_search.index.index import Index
        from genius_search.model import Genius

        if (self.index is None) == (self.model is None):
            raise UsageError("give exactly one of --index and --model")
        if self.max_queries < 0:
            raise UsageError(f"--max-queries is {self.max_queries}; give 0 for all, or a number")
        with TerminalProgress() as progress:
            data = MBeir(self.data)
            if self.index is not None:
                index = Index.open(self.index, device=self.device, download=self.download)
                evaluation = index.evaluate(
                    data, split=self.split, max_queries=self.max_queries, progress=progress
                )
            elif self.model is not None:
                model = Genius.open(self.model, device=self.device, download=self.download)
                folder = self.out or self.model / "evaluation" / f"{data.name}-{self.split}.index"
                evaluation = evaluate_model(
                    model,
                    data,
                    folder,
                    split=self.split,
                    max_queries=self.max_queries,
                    progress=progress,
                )
            if evaluation.left_out:
                progress.say(
                    f"{evaluation.left_out:,} queries were left out, since the index lacks their "
                    "answers"
                )
        if self.json:
            rows = [row._asdict() for row in evaluation.rows]
            print_json({**evaluation._asdict(), "rows": rows})
            return
        lines = []
        for row in evaluation.rows:
            values = (f"{row.measures[name]:.3f}" for name in TABLE_MEASURES)
            lines.append(
                (row.row, row.method, f"{row.queries:,}", *values, f"{row.num_ranked:,.0f}")
            )
        columns = ("row", "method", "queries", *TABLE_MEASURES, "scored")
        print_table(columns, lines, left=columns[:2])


@command
class Check(JsonOption):
    """Check a data set in M-BEIR's layout for errors before training on it.

    The exit status is 6 if there are errors.
    """

    data: DataArgument
    """Folder of the data set."""

    skip_images: bool = False
    """Do not read the images."""

    def run(self) -> int:
        from genius_search.data.mbeir import check

        report = check(self.data, images=not self.skip_images)
        if self.json:
            print_json({"ok": report.ok, **dataclasses.asdict(report)})
        else:
            rows = [(file, f"{count:,}") for file, count in report.records.items()]
            print_table(("file", "records"), rows, left=("file",))
            for finding in report.findings:
                examples = "; ".join(finding.examples)
                print_text(f"{finding.severity}: {finding.kind}: {finding.count}: {examples}")
            print("no errors" if report.ok else "errors found")
        return 0 if report.ok else 6
