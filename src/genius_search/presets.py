"""Settings of `genius fit`, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from pydantic import ConfigDict

from genius_search.config import (
    FusionConfig,
    GeneratorConfig,
    NonNegative,
    Positive,
    QuantizerConfig,
    SmallEncoderConfig,
    TrainingConfig,
    added_in_0_2,
)
from genius_search.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The encoder trained from scratch (paper, equation 2); pretrained ones need no training."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    network: SmallEncoderConfig = SmallEncoderConfig()
    """Sizes."""

    temperature: Positive = 0.05
    """Divides the cosines in the contrastive loss."""

    # Deviation 31: the paper's encoder learns from pairs alone.
    word_weight: NonNegative = added_in_0_2(0.0)
    """Weight of two more losses: an image predicts the words of the texts that it is paired with, and a few
    of its words find it. So single words and short queries are learned from whole captions."""

    training: TrainingConfig = TrainingConfig(
        epochs=6.0, batch_size=1024, learning_rate=6e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98
    )
    """Training settings."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of ``genius fit``; a preset provides them, flags override them."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    ids: str = added_in_0_2("residual")
    """IDs of items: residual (the quantizer's codes), or the name of an entry point of the group
    genius_search.id_schemes."""

    encoder: EncoderConfig = EncoderConfig()
    """Stage 0; only for the encoder `small`."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """Stage 1."""

    generator: GeneratorConfig = GeneratorConfig()
    """Stage 2."""


PresetName = Literal["tiny", "small", "paper"]


def preset(name: str) -> FitConfig:
    """Return a preset: ``tiny`` (tests), ``small`` (laptops), ``base``, ``paper`` or ``reference``.

    ``paper`` follows the paper's text, ``reference`` the authors' released code where they differ.
    """
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


_TINY = FitConfig(
    encoder=EncoderConfig(
        network=SmallEncoderConfig(dim=48, vocabulary=1024, pair_buckets=1024, text_width=64, image_width=96),
        training=TrainingConfig(batch_size=128, learning_rate=6e-3, epochs=3.0, weight_decay=0.05),
    ),
    quantizer=QuantizerConfig(
        levels=3,
        codebook_size=32,
        level0="assigned",
        contrastive="both",
        fusion=FusionConfig(hidden=64),
        training=TrainingConfig(batch_size=128, learning_rate=1e-3, epochs=2.0),
    ),
    generator=GeneratorConfig(
        layers=1,
        width=64,
        feedforward=128,
        heads=2,
        head_width=32,
        prefixes=4,
        dropout=0.0,
        softmax="level",
        plain_share=0.5,
        training=TrainingConfig(batch_size=128, learning_rate=2e-3, epochs=3.0),
    ),
)


# Deviation 7: small and base follow a slower average and revive fewer codes than the released code.
_SMALL = FitConfig(
    encoder=EncoderConfig(
        word_weight=1.0,
        training=replace(EncoderConfig.training, epochs=12.0),
    ),
    quantizer=QuantizerConfig(
        levels=12,
        codebook_size=256,
        level0="assigned",
        contrastive="both",
        temperature=0.05,
        decay=0.98,
        dead_below=0.25,
        kmeans_samples=8192,
        codebook_start=100,
        encoding_beam=8,
        fusion=FusionConfig(hidden=384, dropout=0.4, start="sum"),
        training=TrainingConfig(batch_size=512, learning_rate=1e-3, epochs=6.0),
    ),
    generator=GeneratorConfig(
        layers=1,
        width=128,
        feedforward=256,
        heads=4,
        head_width=32,
        prefixes=4,
        dropout=0.1,
        softmax="level",
        guide="geometry",
        plain_share=0.5,
        contrasted=7,
        training=TrainingConfig(batch_size=512, learning_rate=2e-3, epochs=6.0, warmup_steps=50),
    ),
)


PRESETS: Final = {
    "tiny": _TINY,
    "small": _SMALL,
    "paper": FitConfig(),
}
