"""Settings of `genius fit`, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from pydantic import ConfigDict

from genius_search.config import (
    Count,
    FusionConfig,
    GeneratorConfig,
    Momentum,
    Natural,
    NonNegative,
    Positive,
    QuantizerConfig,
    Share,
    SmallEncoderConfig,
    TrainingConfig,
    added_in_0_2,
)
from genius_search.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MomentumConfig:
    """Training of the blip kinds with a momentum copy of the network (M-BEIR, section 3.5)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # The authors use 0.995 and 57,960 pairs, for runs of many thousands of steps.
    decay: Momentum = 0.95
    """Decay of the moving average that the copy follows."""

    queue: Count = 4096
    """Number of pairs from earlier batches to contrast with."""

    softness: Share = 0.4
    """Weight of the copy's similarities in the targets; it grows from 0 during the first epoch."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The encoder trained from scratch (paper, equation 2); pretrained ones need no training."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    network: SmallEncoderConfig = SmallEncoderConfig()
    """Kind and sizes."""

    momentum: MomentumConfig = MomentumConfig()
    """Only for the kinds blip-sf and blip-ff."""

    temperature: Positive = 0.05
    """Divides the cosines in the contrastive loss."""

    # Deviation 31: the paper's encoder learns from pairs alone.
    word_weight: NonNegative = added_in_0_2(0.0)
    """Weight of two more losses: an image predicts the words of the texts that it is paired with, and a few
    of its words find it. So single words and short queries are learned from whole captions. Only for the kind
    clip-sf."""

    words: str = added_in_0_2("")
    """Static embeddings whose vocabulary and word vectors are used instead of learned ones: text:wordllama or
    text:FOLDER. Words that no training text has are then near to those that mean the same. For -sf only."""

    pictures: str = added_in_0_2("")
    """Pretrained network (CLIP, SigLIP, or of images alone such as DINOv2), by folder or by name on the hub,
    whose features the encoder reads instead of descriptions of pictures. It is not trained, and copied into
    the model. For -sf only."""

    patience: Natural = added_in_0_2(0)
    """Search queries of the split val exactly after every epoch, if there are any. Stop after so many epochs
    that rank their answers no higher, and keep the best state; 0 measures nothing and keeps the last."""

    training: TrainingConfig = TrainingConfig(
        epochs=6.0, batch_size=1024, learning_rate=6e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98
    )
    """Training settings."""

    def __post_init__(self) -> None:
        for name in ("words", "pictures"):
            if getattr(self, name) and self.network.is_joint:
                raise UsageError(f"{name} is for clip-sf and blip-sf, not for {self.network.kind}")


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


PresetName = Literal["tiny", "small", "base", "paper", "reference"]


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
        network=SmallEncoderConfig(outlines=True),
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


_BASE = FitConfig(
    encoder=replace(
        _SMALL.encoder, network=SmallEncoderConfig(dim=256, outlines=True, shortcuts=True, dropout=0.3)
    ),
    quantizer=replace(
        _SMALL.quantizer,
        kmeans_samples=32768,
        fusion=replace(_SMALL.quantizer.fusion, hidden=1024),
        training=TrainingConfig(batch_size=1024, learning_rate=5e-4, epochs=20.0),
    ),
    generator=replace(
        _SMALL.generator,
        contrasted=0,  # not measured
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


PRESETS: Final = {
    "tiny": _TINY,
    "small": _SMALL,
    "base": _BASE,
    "paper": FitConfig(),
    "reference": _REFERENCE,
}
