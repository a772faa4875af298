"""``genius fit``, ``embed`` and ``train``: from records to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from genius_search.cli.options import (
    DataArgument,
    DeviceOptions,
    OptionalFolder,
    WaitOption,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_table
from genius_search.config import GeneratorConfig, QuantizerConfig
from genius_search.errors import BadData, GeniusError, UsageError, plural
from genius_search.presets import EncoderConfig, FitConfig, PresetName

if TYPE_CHECKING:
    from genius_search.training.embed import TrainingRecords


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
class TrainingOptions:
    """A command that reads a data set and writes to the folder of a model."""

    data: DataArgument
    """Folder of the data set."""

    out: Path
    """Folder of the model."""

    device: str = "cpu"
    """Device to train on: cpu or cuda."""

    def _records(self) -> TrainingRecords:
        """Read the training queries, after a check that training can begin."""
        from genius_search.data.mbeir import MBeir
        from genius_search.training.embed import TrainingRecords
        from genius_search.training.fit import check_output

        data = MBeir(self.data)
        check_output(data, self.out, self.device)
        return TrainingRecords(data)

    def _say_next(self, progress: TerminalProgress, folder: Path, stage: str) -> None:
        """Say which stage comes next, and that a finished model stays until the last one."""
        if folder != self.out:
            progress.say(f"{self.out} stays as it is until `genius train generator` completes its successor")
        progress.say_next("genius", "train", stage, self.data, "--out", self.out)


@command
class Fit(DeviceOptions, WaitOption):
    """Train a model on a data set in M-BEIR's layout, or on an index that was created with an encoder.

    A data set needs --encoder and --out: encoder, quantizer and generator are trained in one go. With
    --index, fusion and generator are trained on pairs of queries and items, and replace the model of the
    index if they find more of the pairs held out. If interrupted, run it again to continue. With other
    settings, only the stages that depend on them are trained again.
    """

    settings_of: ClassVar = staticmethod(lambda settings: settings)

    data: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")
    ] = None
    """Folder of the data set. With --index, also a .jsonl file of queries, {"text": ..., "id": ITEM}; by
    default the captions of its pictures."""

    encoder: Annotated[str | None, tyro.conf.arg(metavar="SPEC", help_behavior_hint="")] = None
    """small (trains one), small:FOLDER, clip:NAME-or-folder, uniir:FOLDER, precomputed:PATH, text:FOLDER."""

    out: OptionalFolder = None
    """Folder of the model."""

    index: OptionalFolder = None
    """Folder of an index, to train on instead of writing a model."""

    force: bool = False
    """With --index, replace the model even if the new one finds no more."""

    preset: PresetName = "small"
    """Settings to start from: tiny for tests, small for laptops, base, paper, reference (released code)."""

    settings: Annotated[FitConfig, tyro.conf.arg(name="")] = FitConfig()

    def run(self) -> None:
        """Train all stages."""
        from genius_search.data.mbeir import MBeir
        from genius_search.training.fit import fit

        if self.data is not None and not self.data.exists():
            raise BadData(f"{self.data}: there is no such file or folder")
        if self.index is not None:
            if self.out is not None or self.encoder is not None:
                raise UsageError(
                    "--index trains on an index, which has an encoder: leave out --encoder and --out"
                )
            self._fit_index(self.index)
            return
        if self.data is None or self.out is None or self.encoder is None:
            raise UsageError("give a data set with --encoder and --out, or an index with --index")
        with report_progress() as progress:
            model = fit(
                MBeir(self.data),
                self.encoder,
                self.out,
                self.settings,
                progress=progress,
                device=self.device,
                download=self.download,
            )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")
            progress.say_next("genius", "evaluate", self.data, "--model", self.out)

    def _fit_index(self, folder: Path) -> None:
        from genius_search.index.index import Index

        with TerminalProgress() as progress:
            index = Index.open(folder, download=self.download)
            fitted = index.fit(
                self.data,
                config=self.settings,
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
        left_out = (
            f", {fitted.left_out:,} left out because the index lacks their items" if fitted.left_out else ""
        )
        print(
            f"{plural(fitted.pairs, 'pair')}{left_out}; the table is of {fitted.measured:,} that were not "
            "trained on. "
            + (
                f"{folder} has the new model."
                if fitted.kept
                else "The new model finds no more, so the index is as it was; --force replaces its model "
                "all the same."
            )
        )


@command
class Embed(DeviceOptions, TrainingOptions):
    """Embed the training records of a data set with an existing encoder; the first step of `genius fit`."""

    encoder: str
    """small:FOLDER, clip:NAME-or-folder, uniir:FOLDER, precomputed:PATH or text:FOLDER."""

    out: Path
    """Folder of the model; the features are written to its features/."""

    def run(self) -> None:
        """Embed the records."""
        from genius_search.encoders.base import load_encoder
        from genius_search.training.embed import embed_training
        from genius_search.training.fit import absolute_spec, replace_model

        if self.encoder == "small":
            raise UsageError(
                "`small` has no weights yet: train it with `genius train encoder`, which embeds too"
            )
        encoder = load_encoder(absolute_spec(self.encoder), download=self.download, device=self.device)
        with report_progress() as progress, replace_model(self.out) as folder:
            embed_training(self._records(), encoder, folder / "features", progress=progress)
            self._say_next(progress, folder, "quantizer")


@command
class StageOptions(TrainingOptions):
    """A command that trains a single stage."""

    preset: PresetName = "small"
    """Settings to start from."""


@command
class TrainEncoder(DeviceOptions, StageOptions):
    """Train the encoder `small` from scratch, and embed the training records with it."""

    settings_of: ClassVar = staticmethod(lambda settings: settings.encoder)

    out: Path
    """Folder of the model; the encoder is written to its encoder/."""

    settings: Annotated[EncoderConfig, tyro.conf.arg(name="encoder")] = EncoderConfig()

    def run(self) -> None:
        """Train stage 0."""
        from genius_search.training.encoder import train_encoder
        from genius_search.training.fit import replace_model

        with report_progress() as progress, replace_model(self.out) as folder:
            train_encoder(
                self._records(),
                folder,
                self.settings,
                progress=progress,
                device=self.device,
            )
            self._say_next(progress, folder, "quantizer")


@command
class TrainQuantizer(StageOptions):
    """Train fusion and codebooks (stage 1) on embedded records."""

    settings_of: ClassVar = staticmethod(lambda settings: settings.quantizer)

    out: Path
    """Folder of the model, which already has features/."""

    settings: Annotated[QuantizerConfig, tyro.conf.arg(name="quantizer")] = QuantizerConfig()

    def run(self) -> None:
        """Train stage 1."""
        from genius_search.data.pairs import Pairs
        from genius_search.training.fit import reopen_embedded, replace_model
        from genius_search.training.quantizer import train_quantizer

        with report_progress() as progress, replace_model(self.out) as folder:
            features = reopen_embedded(folder, home=self.out, device=self.device).features
            pairs = Pairs(self._records().lines(), *features)
            train_quantizer(pairs, folder / "quantizer", self.settings, progress=progress, device=self.device)
            self._say_next(progress, folder, "generator")


@command
class TrainGenerator(StageOptions):
    """Train the decoder (stage 2) on embedded records and a finished quantizer; completes the model."""

    settings_of: ClassVar = staticmethod(lambda settings: settings.generator)

    out: Path
    """Folder of the model, which already has features/ and quantizer/."""

    ids: str = "residual"
    """IDs of items: residual, or the name of an entry point of the group genius_search.id_schemes."""

    settings: Annotated[GeneratorConfig, tyro.conf.arg(name="generator")] = GeneratorConfig()

    def run(self) -> None:
        """Train stage 2."""
        from genius_search.data.pairs import Pairs
        from genius_search.nn.quantizer import load_quantizer
        from genius_search.training.fit import fit_generator, reopen_embedded, replace_model

        with report_progress() as progress:
            with replace_model(self.out) as folder:
                encoder, features = reopen_embedded(folder, home=self.out, device=self.device)
                records = self._records()
                model = fit_generator(
                    records,
                    encoder,
                    Pairs(records.lines(), *features),
                    load_quantizer(folder / "quantizer", device=self.device),
                    folder,
                    self.settings,
                    ids=self.ids,
                    progress=progress,
                    device=self.device,
                )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")
