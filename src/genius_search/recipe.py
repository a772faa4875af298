"""Settings of networks and of their training, with the presets of ``genius fit``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le, Lt

from genius_search.config import (
    CodebookConfig,
    Count,
    DecoderConfig,
    FusionConfig,
    Natural,
    NonNegative,
    Positive,
    Share,
    Size,
    SmallEncoderConfig,
    settings,
)
from genius_search.errors import UsageError


@settings
class TrainingConfig:
    """Training of a stage: AdamW, warm-up, cosine schedule, gradient clipping."""

    epochs: Positive = 20.0
    """Number of passes over the training queries; each draws new positives and instructions."""

    max_steps: Natural = 0
    """Stop after this many steps; 0 means no limit."""

    batch_size: Count = 256
    """Number of pairs in a batch, all ranks together."""

    learning_rate: Positive = 1e-4
    """Peak learning rate."""

    final_share: Share = 0.0
    """Final learning rate of the cosine schedule, as a share of the peak."""

    warmup_steps: Natural = 0
    """Number of steps of linear warm-up."""

    weight_decay: NonNegative = 0.01
    """Weight decay of matrices; biases and gains of norms have none."""

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """AdamW's beta2."""

    epsilon: Positive = 1e-8
    """AdamW's epsilon."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the matrix products of the network in bfloat16; weights stay fp32."""

    seed: Natural = 0
    """Seed of initial weights, batches, instructions, positives and augmentation. Equal seeds give
    equal weights on the same type of machine with one thread (OMP_NUM_THREADS=1); several threads
    or a GPU may add numbers in another order."""

    checkpoint_seconds: NonNegative = 30.0
    """Minimum number of seconds between checkpoints."""


@settings
class QuantizerConfig(CodebookConfig):
    """Quantization of embeddings into IDs (paper, section 4.2.2), and its training (stage 1)."""

    shared_codebook: bool = False
    """Share a codebook between all semantic levels (supplement, table 6: it destroys recall)."""

    decay: Share = 0.9
    """Decay d of the codebooks' moving averages: average ← d · average + (1 − d) · batch."""

    dead_below: NonNegative = 2.0
    """Move a semantic code to a random residual of the batch when its average count falls below
    this."""

    kmeans_iterations: Natural = 100
    """Maximum number of k-means iterations."""

    kmeans_samples: Natural = 0
    """Number of embeddings for k-means; 0 means one batch (the paper)."""

    codebook_start: Natural = 0
    """Number of contrastive steps before k-means initialises the codebooks."""

    gradient: Literal["once", "per-level"] = "once"
    """Straight-through gradient: once for the sum of the levels, or once per level, as in the
    authors' library, which multiplies the gradient by the number of levels."""

    # Deviation 8: the paper has one direction; the smaller presets train both, as the released code
    # does.
    contrastive: Literal["both", "query"] = "query"
    """Contrast queries with candidates only (paper), or in both directions (released code)."""

    contrastive_weight: NonNegative = 1.0
    """Weight of L_cl. With 0 the codebooks collapse, and training goes on nevertheless; with any
    other weight a collapse stops it."""

    quantization_weight: NonNegative = 100.0
    """Weight of L_rq, a mean over elements and levels."""

    alignment_weight: NonNegative = 100.0
    """Weight of L_mse, a mean over elements of unit vectors."""

    temperature: Positive = 0.01
    """Divides the cosines in L_cl."""

    training: TrainingConfig = TrainingConfig(epochs=20.0)
    """Training settings."""


@settings
class GeneratorConfig(DecoderConfig):
    """Decoder that generates IDs (paper, section 4.3), and its training (stage 2).

    The default sizes are those of T5-small.
    """

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.1
    """Dropout rate in training."""

    # Deviation 13: tiny, small and base train over the level's codes only.
    softmax: Literal["vocabulary", "level"] = "vocabulary"
    """Normalise over the whole vocabulary (released code), or over the codes of the current
    level."""

    augmentation: Literal["paper", "reference", "none"] = "paper"
    """Interpolate query and target embeddings: with one ratio per sample (equation 11), with one
    ratio per dimension and square roots (released code), or not at all."""

    plain_share: Share = 0.0
    """Share of samples that are not augmented."""

    # Deviation 32: the paper's decoder learns each code by itself.
    contrasted: Natural = 0
    """With a guide: train to score the prefixes of the target's ID above those of this many other
    IDs, the nearest in the batch, instead of predicting each code. Queries are not augmented then.
    0 trains as the paper does."""

    training: TrainingConfig = TrainingConfig(epochs=30.0)
    """Training settings."""


@settings
class EncoderConfig:
    """The encoder trained from scratch (paper, equation 2); pretrained ones need no training."""

    network: SmallEncoderConfig = SmallEncoderConfig()
    """Sizes."""

    temperature: Positive = 0.05
    """Divides the cosines in the contrastive loss."""

    # Deviation 31: the paper's encoder learns from pairs alone.
    word_weight: NonNegative = 0.0
    """Weight of three more losses: an image predicts the words of the texts that describe it, a few
    of those words find the image, and a few words of a text find the text. So the encoder learns
    short queries from whole captions."""

    training: TrainingConfig = TrainingConfig(
        epochs=6.0,
        batch_size=1024,
        learning_rate=6e-3,
        warmup_steps=50,
        weight_decay=0.05,
        beta2=0.98,
    )
    """Training settings."""


@settings
class AdapterConfig:
    """Small networks over two frozen encoders (`adapters:IMAGE,TEXT`; paper, equation 2)."""

    dim: Size = 128
    """Width of a member's vectors; features join the vectors of all members."""

    hidden: Size = 1024
    """Width of a member's hidden layer."""

    members: Annotated[int, Ge(1), Le(64)] = 3
    """Number of networks, which are trained side by side from different random weights, and whose
    vectors are joined."""

    training: TrainingConfig = TrainingConfig(
        epochs=8.0, batch_size=1024, learning_rate=2e-3, warmup_steps=50, weight_decay=0.1
    )
    """Training settings."""


@settings
class FitConfig:
    """Settings of ``genius fit``: a preset provides them, and a TOML file overrides them."""

    encoder: EncoderConfig = EncoderConfig()
    """Stage 0; only for the encoder `small`."""

    adapters: AdapterConfig = AdapterConfig()
    """Stage 0; only for `adapters:IMAGE,TEXT`."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """Stage 1."""

    generator: GeneratorConfig = GeneratorConfig()
    """Stage 2."""


_TINY = FitConfig(
    encoder=EncoderConfig(
        network=SmallEncoderConfig(
            dim=48, vocabulary=1024, pair_buckets=1024, text_width=64, image_width=96
        ),
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


# Deviation 7: small follows a slower average and revives fewer codes than the released code.
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


PRESETS: Final = {"tiny": _TINY, "small": _SMALL, "paper": FitConfig()}
"""Settings for tests (tiny), for laptops (small), and of the paper's text (paper)."""


def preset(name: str) -> FitConfig:
    """Return a preset: ``tiny`` (tests), ``small`` (laptops) or ``paper``."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
