"""``genius fit``, ``embed`` and ``train``: from records to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from genius_search.cli.terminal import TerminalProgress
from genius_search.config import EncoderConfig, FitConfig, GeneratorConfig, PresetName, QuantizerConfig

Data = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]


def _look_for(encoder: str, *, download: bool) -> None:
    """A pretrained encoder that is not here is said at once, before PyTorch is imported for seconds."""
    from genius_search.encoders.pretrained import find_checkpoint

    kind, _, name = encoder.partition(":")
    if kind == "clip" and name:
        find_checkpoint(name, download=download)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Train a model on a data set in M-BEIR's layout: encoder, quantizer, generator, in one go.

    Run again after an interruption it goes on where it stopped; run again with other settings it redoes
    only what depends on them. Every setting of the preset has a flag of its own, listed below.
    """

    settings_of: ClassVar = staticmethod(lambda whole: whole)

    data: Data
    """Folder of the data set."""

    encoder: str
    """small (trains one), small:FOLDER, clip:NAME-or-folder, uniir:FOLDER, precomputed:PATH, text:FOLDER."""

    out: Path
    """Folder of the model."""

    preset: PresetName = "small"
    """Settings to begin from: tiny for tests, small for laptops, base, paper, reference (released code)."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    settings: Annotated[FitConfig, tyro.conf.arg(name="")] = FitConfig()

    def run(self) -> None:
        """Train everything."""
        _look_for(self.encoder, download=self.download)
        from genius_search.data.mbeir import MBeir
        from genius_search.training.fit import fit

        with TerminalProgress() as progress:
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
            progress.say(f"next: genius evaluate {self.data} --model {self.out}")


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Embed the training records of a data set with an existing encoder; the first step of `genius fit`."""

    data: Data
    """Folder of the data set."""

    encoder: str
    """small:FOLDER, clip:NAME-or-folder, uniir:FOLDER, precomputed:PATH or text:FOLDER."""

    out: Path
    """Folder of the model; the features go to its features/."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> None:
        """Embed."""
        _look_for(self.encoder, download=self.download)
        from genius_search.data.mbeir import MBeir
        from genius_search.errors import UsageError
        from genius_search.training.embed import TrainingRecords
        from genius_search.training.fit import embed_with

        if self.encoder == "small":
            raise UsageError(
                "`small` has no weights yet: train it with `genius train encoder`, which embeds too"
            )
        with TerminalProgress() as progress:
            embed_with(
                TrainingRecords(MBeir(self.data)),
                self.encoder,
                self.out,
                EncoderConfig(),
                progress=progress,
                device=self.device,
                download=self.download,
            )


@dataclass(frozen=True, kw_only=True)
class OneStage:
    """What the commands that train a single stage have in common."""

    data: Data
    """Folder of the data set."""

    out: Path
    """Folder of the model."""

    preset: PresetName = "small"
    """Settings to begin from."""

    device: str = "cpu"
    """Or cuda."""


@dataclass(frozen=True, kw_only=True)
class TrainEncoder(OneStage):
    """Train the encoder `small` from scratch, and embed the training records with it."""

    settings_of: ClassVar = staticmethod(lambda whole: whole.encoder)

    out: Path
    """Folder of the model; the encoder goes to its encoder/."""

    settings: Annotated[EncoderConfig, tyro.conf.arg(name="encoder")] = EncoderConfig()

    def run(self) -> None:
        """Train stage 0."""
        from genius_search.data.mbeir import MBeir
        from genius_search.training.embed import TrainingRecords
        from genius_search.training.fit import embed_with

        with TerminalProgress() as progress:
            embed_with(
                TrainingRecords(MBeir(self.data)),
                "small",
                self.out,
                self.settings,
                progress=progress,
                device=self.device,
            )
            progress.say(f"next: genius train quantizer {self.data} --out {self.out}")


@dataclass(frozen=True, kw_only=True)
class TrainQuantizer(OneStage):
    """Train fusion and codebooks (stage 1) on embedded records."""

    settings_of: ClassVar = staticmethod(lambda whole: whole.quantizer)

    out: Path
    """Folder of the model, which has features/ already."""

    settings: Annotated[QuantizerConfig, tyro.conf.arg(name="quantizer")] = QuantizerConfig()

    def run(self) -> None:
        """Train stage 1."""
        from genius_search.data.mbeir import MBeir
        from genius_search.training.embed import TrainingRecords
        from genius_search.training.fit import fit_quantizer, reopen_embedded

        with TerminalProgress() as progress:
            features = reopen_embedded(self.out, device=self.device).features
            records = TrainingRecords(MBeir(self.data))
            fit_quantizer(records, features, self.out, self.settings, progress=progress, device=self.device)
            progress.say(f"next: genius train generator {self.data} --out {self.out}")


@dataclass(frozen=True, kw_only=True)
class TrainGenerator(OneStage):
    """Train the decoder (stage 2) on embedded records and a finished quantizer; completes the model."""

    settings_of: ClassVar = staticmethod(lambda whole: whole.generator)

    out: Path
    """Folder of the model, which has features/ and quantizer/ already."""

    ids: str = "residual"
    """IDs of items: residual, or the name of an entry point of the group genius_search.id_schemes."""

    settings: Annotated[GeneratorConfig, tyro.conf.arg(name="generator")] = GeneratorConfig()

    def run(self) -> None:
        """Train stage 2."""
        from genius_search.data.mbeir import MBeir
        from genius_search.training.embed import TrainingRecords
        from genius_search.training.fit import fit_generator, reopen_embedded

        with TerminalProgress() as progress:
            model = fit_generator(
                TrainingRecords(MBeir(self.data)),
                reopen_embedded(self.out, device=self.device),
                self.out,
                self.settings,
                ids=self.ids,
                progress=progress,
                device=self.device,
            )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")
