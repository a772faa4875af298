"""Named settings of everything `genius fit` does: ``tiny`` to ``paper``, and ``reference``."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from genius.config import (
    EncoderConfig,
    FitConfig,
    FusionConfig,
    GeneratorConfig,
    QuantizerConfig,
    TrainingConfig,
)
from genius.encoders.small_config import SmallEncoderConfig
from genius.errors import UsageError

PresetName = Literal["tiny", "small", "base", "paper", "reference"]


def preset(name: str) -> FitConfig:
    """Settings of a preset: ``tiny`` (tests), ``small`` (laptops), ``base``, ``paper``, ``reference``.

    ``paper`` follows the paper's text, ``reference`` the authors' released code where the two differ.
    """
    match name:
        case "tiny":
            return _TINY
        case "small":
            return _SMALL
        case "base":
            return _BASE
        case "paper":
            return FitConfig()
        case "reference":
            return _REFERENCE
        case _:
            raise UsageError(f"preset {name!r} is not one of {', '.join(get_args(PresetName))}")


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
        training=TrainingConfig(batch_size=512, learning_rate=2e-3, epochs=6.0, warmup_steps=50),
    ),
)

_BASE = FitConfig(
    encoder=EncoderConfig(
        network=SmallEncoderConfig(dim=256, text_width=512, image_width=1024),
        training=TrainingConfig(
            epochs=20.0,
            batch_size=1024,
            learning_rate=3e-3,
            warmup_steps=100,
            weight_decay=0.05,
            beta2=0.98,
        ),
    ),
    quantizer=replace(
        _SMALL.quantizer,
        kmeans_samples=32768,
        fusion=replace(_SMALL.quantizer.fusion, hidden=1024),
        training=TrainingConfig(batch_size=1024, learning_rate=5e-4, epochs=20.0),
    ),
    generator=replace(
        _SMALL.generator,
        layers=3,
        width=256,
        feedforward=1024,
        head_width=64,
        prefixes=16,
        training=TrainingConfig(batch_size=1024, learning_rate=1e-3, epochs=30.0, warmup_steps=200),
    ),
)

_REFERENCE = FitConfig(
    quantizer=QuantizerConfig(
        gradient="per-level",
        contrastive="both",
        kmeans_iterations=1000,
        training=TrainingConfig(
            epochs=21.0, batch_size=8000, epsilon=1e-6, weight_decay=0.2, final_share=0.1, precision="bf16"
        ),
    ),
    generator=GeneratorConfig(
        augmentation="reference",
        training=TrainingConfig(
            epochs=31.0,
            batch_size=1024,
            beta2=0.98,
            epsilon=1e-6,
            weight_decay=1e-4,
            warmup_steps=500,
            precision="bf16",
        ),
    ),
)
