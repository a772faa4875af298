"""``genius fit``: from records, or from an index, to a model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import (
    DeviceOptions,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    WaitOption,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_table
from genius_search.config import FitConfig, PresetName, read_toml, to_toml
from genius_search.errors import BadData, GeniusError, UsageError, plural


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
    --index, fusion and generator are trained on pairs of queries and items, and replace the model of the
    index if they find more of the pairs held out. If interrupted, run it again to continue. With other
    settings, only the stages that depend on them are trained again.
    """

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

    preset: Annotated[PresetName | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Settings to start from: tiny for tests, small for laptops (the default), paper."""

    config: OptionalFile = None
    """TOML file of settings that differ from the preset's; it may name its preset too."""

    print_config: bool = False
    """Print all settings as TOML, for --config, and do nothing."""

    seed: OptionalInt = None
    """Seed of all stages."""

    def run(self) -> None:
        """Train all stages."""
        settings = self._settings()
        if self.print_config:
            sys.stdout.write(to_toml(settings))
            return
        if self.data is not None and not self.data.exists():
            raise BadData(f"{self.data}: there is no such file or folder")
        if self.index is not None:
            if self.out is not None or self.encoder is not None:
                raise UsageError(
                    "--index trains on an index, which has an encoder: leave out --encoder and --out"
                )
            self._fit_index(self.index, settings)
            return
        if self.data is None or self.out is None or self.encoder is None:
            raise UsageError("give a data set with --encoder and --out, or an index with --index")
        from genius_search.data.mbeir import MBeir
        from genius_search.training.fit import fit

        with report_progress() as progress:
            model = fit(
                MBeir(self.data),
                self.encoder,
                self.out,
                settings,
                progress=progress,
                device=self.device,
                download=self.download,
            )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")
            progress.say_next("genius", "evaluate", self.data, "--model", self.out)

    def _settings(self) -> FitConfig:
        """Return the settings of preset, file and seed."""
        text = ""
        if self.config is not None:
            try:
                text = self.config.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{self.config} cannot be read: {error}") from None
        settings = read_toml(text, name=str(self.config), preset_name=self.preset)
        if self.seed is None:
            return settings
        stages = {
            name: dataclasses.replace(stage, training=dataclasses.replace(stage.training, seed=self.seed))
            for name in ("encoder", "quantizer", "generator")
            for stage in [getattr(settings, name)]
        }
        return dataclasses.replace(settings, **stages)

    def _fit_index(self, folder: Path, settings: FitConfig) -> None:
        from genius_search.index.index import Index

        with TerminalProgress() as progress:
            index = Index.open(folder, download=self.download)
            fitted = index.fit(
                self.data,
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
