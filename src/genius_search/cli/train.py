"""``genius fit``, ``calibrate``, ``evaluate`` and ``data check``: what data sets are used for."""

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
    WaitOption,
    Words,
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

SHOWN: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
"""Measures of the table of an evaluation."""


@contextmanager
def report_progress() -> Iterator[TerminalProgress]:
    """Join the processes that ``torchrun`` started, if it did; only the first one prints."""
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
    """Train a model on a data set in M-BEIR's layout, or on an index that was created with an encoder.

    A data set needs --encoder and --out: encoder, quantizer and generator are trained in one go. With
    --index, the fusion is trained on pairs of queries and items, and its model replaces that of the
    index if it finds more of the pairs held out. If interrupted, run it again to continue. With other
    settings, only the stages that depend on them are trained again.
    """

    data: Annotated[Path | None, tyro.conf.Positional, optional("[DATA]")] = None
    """Folder of the data set. With --index, also a .jsonl file of queries, {"text": ..., "id": ITEM}; by
    default what the index has learned (`genius index learn`)."""

    encoder: Words = None
    """As of `genius index create`; also small (trains one), small:FOLDER, uniir:FOLDER, precomputed:PATH;
    adapters:IMAGE,TEXT trains small networks over two of them."""

    out: OptionalFolder = None
    """Folder of the model."""

    index: OptionalFolder = None
    """Folder of an index, to train on instead of writing a model."""

    force: bool = False
    """With --index, replace the model even if the new one does not clearly find more."""

    preset: Annotated[Literal["tiny", "small", "paper"] | None, optional("{tiny,small,paper}")] = (
        None
    )
    """Settings to start from: tiny for tests, small for laptops (the default), paper."""

    config: OptionalFile = None
    """TOML file of settings that differ from the preset's; it may name its preset too."""

    print_config: bool = False
    """Print all settings as TOML, for --config, and do nothing."""

    def run(self) -> None:
        settings = read_toml(self.config, preset_name=self.preset)
        if self.print_config:
            sys.stdout.write(to_toml(settings))
        elif self.data is not None and not self.data.exists():
            raise BadData(f"{self.data}: there is no such file or folder")
        elif self.index is not None:
            if self.out is not None or self.encoder is not None:
                raise UsageError(
                    "--index trains on an index, which has an encoder: leave out --encoder and --out"
                )
            self._fit_index(self.data, self.index, settings)
        elif self.data is None or self.out is None or self.encoder is None:
            raise UsageError("give --encoder and --out with a data set, or an index with --index")
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
            progress.say(f"model {model.fingerprint[:12]} is in {out}")
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
            f"{plural(fitted.pairs, 'pair')}, {fitted.left_out:,} left out because the index lacks their "
            f"items; the table is of {fitted.measured:,} that were not trained on."
        )
        if fitted.kept:
            print(f"{folder} has the new model.")
        else:
            print(
                "The new model does not find more by over a standard error, so the index is as it was; "
                "--force replaces its model anyway."
            )


@command
class Calibrate(WaitOption, OpenIndexOptions, JsonOption):
    """Calibrate an index with queries of known answers, so that hits have the probability of being right.

    The queries are those for which the index has learned what was chosen, or those of a file or a data set
    whose answers are items of the index, by their ids. First the weight of densities (density_weight) is
    chosen that finds the most answers, and stored as the index's default.
    A search can then say that it has no good match. Half of the queries are used to fit, the other half to
    measure. Calibrate again when the index has grown much.
    """

    data: OptionalFolder = None
    """A data set in M-BEIR's layout, or a .jsonl file of queries as of `genius fit --index`; by default the
    choices that the index has learned."""

    split: str = "val"
    """Split of the data set."""

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Share of good matches that should be right; sets the threshold of a good match."""

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
                "share of them that are right": fitted.right,
                "a good match has at least": fitted.threshold or "nothing; try a lower --precision",
                "queries with a good match": fitted.good,
                "good matches that are right": fitted.good_and_right,
                "queries without an answer that have none": fitted.refused,
            }
        )


@command
class Evaluate(DeviceOptions, JsonOption):
    """Evaluate an index or a model with the queries of a data set, beside exact search.

    R@k is M-BEIR's: the share of queries with any right answer among the first k. The items of the index must
    be candidates of the data set, with their ids; of a model, the union of the data set's pools is indexed
    first.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    index: OptionalFolder = None
    """Folder of the index."""

    model: OptionalFolder = None
    """Folder of a model, instead of an index."""

    out: OptionalFolder = None
    """With --model: folder of the index that is made; default: one in evaluation/ in the
    model's folder."""

    split: str = "test"
    """Split of the data set."""

    def run(self) -> None:
        from genius_search.data.mbeir import MBeir
        from genius_search.evaluate import evaluate_model
        from genius_search.index.index import Index
        from genius_search.model import Genius

        if (self.index is None) == (self.model is None):
            raise UsageError("give either --index or --model")
        with TerminalProgress() as progress:
            data = MBeir(self.data)
            if self.index is not None:
                index = Index.open(self.index, device=self.device, download=self.download)
                found = index.evaluate(data, split=self.split, progress=progress)
            elif self.model is not None:
                model = Genius.open(self.model, device=self.device, download=self.download)
                folder = self.out or self.model / "evaluation" / f"{data.name}-{self.split}.index"
                found = evaluate_model(model, data, folder, split=self.split, progress=progress)
            if found.left_out:
                progress.say(
                    f"{found.left_out:,} queries are left out: their answers are not in the index"
                )
        if self.json:
            print_json({**found._asdict(), "rows": [one._asdict() for one in found.rows]})
            return
        lines = []
        for one in found.rows:
            numbers = (f"{one.measures[name]:.3f}" for name in SHOWN)
            lines.append((one.row, one.method, f"{one.queries:,}", *numbers, f"{one.touched:,.0f}"))
        columns = ("row", "method", "queries", *SHOWN, "scored")
        print_table(columns, lines, left=columns[:2])


@command
class Check(JsonOption):
    """Check a data set in M-BEIR's layout before hours are spent on it. Exit status 6 on errors."""

    data: DataArgument
    """Folder of the data set."""

    skip_images: bool = False
    """Do not look at images."""

    def run(self) -> int:
        from genius_search.data.mbeir import check

        report = check(self.data, images=not self.skip_images)
        if self.json:
            print_json({"ok": report.ok, **dataclasses.asdict(report)})
        else:
            rows = [(file, f"{count:,}") for file, count in report.records.items()]
            print_table(("file", "records"), rows, left=("file",))
            for one in report.findings:
                print_text(f"{one.severity}: {one.kind}: {one.count}: {'; '.join(one.examples)}")
            print("no errors" if report.ok else "there are errors")
        return 0 if report.ok else 6
