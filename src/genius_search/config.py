"""Settings of networks, of training with its presets, and of search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from genius_search.errors import UsageError

Level0 = Literal["learned", "assigned", "classifier", "none"]
Settings = TypeVar("Settings")

Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(1), Le(1 << 20)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative = Annotated[float, Ge(0), Lt(float("inf"))]
Share = Annotated[float, Ge(0), Le(1)]
Momentum = Annotated[float, Ge(0), Lt(1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(kind: type[Settings]) -> type[Settings]:
    """Make a class a frozen dataclass; :func:`from_json` refuses fields that it does not have."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(kind)


@settings
class SmallEncoderConfig:
    """Sizes of the encoder trained from scratch (paper, equation 2, with a light network)."""

    dim: Size = 128
    """Width of the features."""

    vocabulary: Annotated[int, Ge(257), Le(1 << 20)] = 8192
    """Maximum number of words and word pieces learned from the training texts; at least 257."""

    max_tokens: Annotated[int, Ge(1), Le(8192)] = 64
    """Longer texts are truncated."""

    pair_buckets: Size = 8192
    """Rows of the hashed embedding table for pairs of adjacent words, which encode word order."""

    text_width: Size = 256
    """Width of a word's vector and of the layers that read texts."""

    image_width: Size = 512
    """Width of the layers that read pictures."""


@settings
class TrainingConfig:
    """Training of one stage: AdamW, warm-up, cosine schedule, gradient clipping."""

    epochs: Positive = 20.0
    """Passes over the training queries; each draws new positives and instructions."""

    max_steps: Natural = 0
    """Stop after this many steps; 0 means no limit."""

    batch_size: Count = 256
    """Pairs per batch, summed over all ranks."""

    learning_rate: Positive = 1e-4
    """Peak learning rate."""

    final_share: Share = 0.0
    """Final learning rate of the cosine schedule, as a share of the peak."""

    warmup_steps: Natural = 0
    """Number of steps of linear warm-up."""

    weight_decay: NonNegative = 0.01
    """Weight decay of matrices; biases, norms and gains have none."""

    beta1: Momentum = 0.9
    """AdamW's beta1."""

    beta2: Momentum = 0.999
    """AdamW's beta2."""

    epsilon: Positive = 1e-8
    """AdamW's epsilon."""

    clip_norm: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the matrix products of the network in bfloat16; weights stay fp32."""

    seed: Natural = 0
    """Seed of initial weights, batches, instructions, positives and augmentation. Equal seeds give equal
    weights on the same kind of machine with the same number of threads; one thread (OMP_NUM_THREADS=1) is
    certain, several threads or a GPU may add in another order."""

    checkpoint_seconds: NonNegative = 30.0
    """Seconds between checkpoints."""


@settings
class FusionConfig:
    """Fusion of image and text features into one embedding (paper, section 4.2.1)."""

    kind: Literal["network", "sum"] = "network"
    """A trained network, or the sum of the normalised features, which needs no training."""

    hidden: Count = 2560
    """Width of the layer on each modality; the joint layers are twice as wide."""

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.0
    """Dropout before each layer of the MLP, but not on the features added to its output."""

    # Deviation 28: the paper's network starts at random, so embeddings start far from the features' sum.
    start: Literal["random", "sum"] = "random"
    """Initialise the MLP at random, or with zero output, so that embeddings start as λ·text + (1−λ)·image,
    which already works well in exact search."""


@settings
class QuantizerConfig:
    """Quantization of embeddings into IDs (paper, section 4.2.2), and its training (stage 1)."""

    levels: Annotated[int, Ge(1), Le(64)] = 8
    """Number of semantic levels, coarse to fine; the modality level is extra."""

    codebook_size: Annotated[int, Ge(2), Le(32767)] = 4096
    """Number of codes at each semantic level."""

    level0: Level0 = "learned"
    """Modality code: learned by k-means (the paper), assigned from the candidate's known modality, predicted
    by a classifier (supplement, table 3), or none."""

    shared_codebook: bool = False
    """Use one codebook for all semantic levels (supplement, table 6: it destroys recall)."""

    decay: Share = 0.9
    """Decay of the moving average that codebooks follow."""

    laplace: Positive = 1e-5
    """Laplace smoothing of the counts in that average."""

    dead_below: NonNegative = 2.0
    """Move a semantic code to a random residual of the batch when its average count falls below this."""

    kmeans_iterations: Natural = 100
    """Maximum number of k-means iterations."""

    kmeans_samples: Natural = 0
    """Number of embeddings for k-means; 0 means one batch (the paper)."""

    codebook_start: Natural = 0
    """Number of contrastive steps before k-means initialises the codebooks."""

    # Deviation 30: the paper greedily takes the nearest code vector at each level.
    encoding_beam: Annotated[int, Ge(1), Le(1024)] = 1
    """Beam width when choosing the codes of an item; 1 is the paper's greedy choice. A second-best code at
    one level can leave a smaller residual for the next. Training is always greedy."""

    norm_weight: Share = 1.0
    """Weight of half the squared norm of an ID's vector, which is subtracted from scores by codes: 1 ranks by
    distance, 0 by inner product. It is stored with the IDs."""

    gradient: Literal["once", "per-level"] = "once"
    """Straight-through gradient: once for the sum of the levels, or once per level (as in the authors'
    library, which multiplies the gradient by the number of levels)."""

    # Deviation 8: the paper has one direction; the smaller presets train both, as the released code does.
    contrastive: Literal["both", "query"] = "query"
    """Contrast queries with candidates only (paper), or in both directions (released code)."""

    contrastive_weight: NonNegative = 1.0
    """Weight of L_cl."""

    quantization_weight: NonNegative = 100.0
    """Weight of L_rq, a mean over elements and levels."""

    alignment_weight: NonNegative = 100.0
    """Weight of L_mse, a mean over elements of unit vectors."""

    temperature: Positive = 0.01
    """Divides the cosines in L_cl."""

    collapse: Literal["refuse", "allow"] = "refuse"
    """Stop if all candidates get the same code, or continue (for ablations)."""

    fusion: FusionConfig = FusionConfig()
    """The fusion network."""

    training: TrainingConfig = TrainingConfig(epochs=20.0)
    """Training settings."""


@settings
class GeneratorConfig:
    """Decoder that generates IDs (paper, section 4.3; defaults as in T5-small), and training (stage 2)."""

    layers: Annotated[int, Ge(1), Le(256)] = 6
    """Number of decoder blocks."""

    width: Count = 512
    """Width of the residual stream (d_model)."""

    feedforward: Count = 2048
    """Width inside the feed-forward layers (d_ff)."""

    heads: Count = 8
    """Number of attention heads."""

    head_width: Count = 64
    """Width of one head (d_kv)."""

    prefixes: Count = 30
    """Number of prefix vectors computed from the query."""

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.1
    """Dropout rate in training."""

    head: Literal["tied", "per-level"] = "tied"
    """Output weights: tied to the code embeddings, or a separate matrix for each level."""

    # Deviation 13: tiny, small and base train over the level's codes only.
    softmax: Literal["vocabulary", "level"] = "vocabulary"
    """Normalise over the whole vocabulary (released code), or over the codes of the current level."""

    # Deviation 29: the paper's decoder has no access to distances and must learn them from pairs.
    guide: Literal["none", "geometry"] = "none"
    """With geometry, each level's logits start from the distances between the residual of the query's
    embedding and the code vectors, and the decoder learns a correction. Implies normalising per level."""

    augmentation: Literal["paper", "reference", "none"] = "paper"
    """Interpolate query and target embeddings: with one ratio per sample (equation 11), with one ratio per
    dimension and square roots (released code), or not at all."""

    plain_share: Share = 0.0
    """Share of samples left without augmentation."""

    # Deviation 32: the paper's decoder learns each code by itself.
    contrasted: Natural = 0
    """With a guide: train to score the prefixes of a query's ID above those of so many others, the nearest
    of the batch, instead of to predict each code. Queries are not augmented then. 0 trains as the paper."""

    training: TrainingConfig = TrainingConfig(epochs=30.0)
    """Training settings."""


@settings
class SearchConfig:
    """Search settings."""

    beam: Annotated[Count, Le(10**9)] = 50
    """Beam width: IDs kept at each level (the paper's B)."""

    # Deviation 19: the stored embeddings may be the fused ones; the paper's are raw sums.
    rerank: Literal["none", "codes", "embeddings"] = "none"
    """Rank items by the generator's probability (none), by the vectors of their codes, or by stored
    embeddings (the paper's GENIUS^R)."""

    # Deviation 17: the released code normalises over the whole vocabulary.
    scores: Literal["level", "vocabulary"] = "level"
    """Normalise each decoding step over the level's codes, or over the whole vocabulary (released code)."""

    # Deviation 23: the paper decodes every level.
    candidates: Annotated[Natural, Le(10**9)] = 0
    """With re-ranking: stop decoding once at most this many IDs (or the beam width, if larger) lie under the
    beams, and rank them all. Where at most twice as many are allowed, all are ranked and none is decoded."""

    router: Literal["generator", "geometry"] = "generator"
    """With re-ranking: find candidates by the generator, or by the distances between the query and the code
    vectors. IDs without code vectors, the order of generated IDs and ``generator_weight`` need the generator.
    """

    shortlist: Annotated[Natural, Le(10**9)] = 0
    """With stored embeddings: compare only this many items, the best by codes; 0 means all."""

    # Deviation 26: the paper orders by one kind of evidence at a time.
    generator_weight: NonNegative = 0.0
    """Weight of the log-probability of an item's beam in scores by codes."""

    # Deviation 27: the paper has no such correction.
    density_weight: NonNegative = 0.11
    """Weight of the density around an item, which is subtracted from scores by codes and by fused
    embeddings, because items in dense regions are near every query. It is in units of the spread: with 0.1,
    one standard deviation of density costs a tenth of the standard deviation of an item's products with
    others. Has no effect on raw embeddings."""


USUAL_SEARCH: Final = SearchConfig(beam=10, rerank="codes", router="geometry", candidates=1000, shortlist=100)
"""What default settings start from: follow the nearest codes until at most 1000 candidates are left, then
rank them by codes. The defaults of :class:`SearchConfig` are the paper's."""
SMALL_POOL: Final = 8_000
"""Up to so many items all are candidates: that takes at most a quarter longer than leaving some out."""
ITEMS_PER_CANDIDATE: Final = 10
MANY_CANDIDATES: Final = 70_000
CANDIDATES_PER_ROOT: Final = 30
WIDE_BEAM: Final = 30
"""Beam of a large index."""
LARGE: Final = 25
"""An index is large if it has more items for each candidate. With 256 codes at a level, the best ten first
semantic codes then hold more than may be ranked."""
RANK_ALL: Final = 2
"""A query that allows at most this many times the candidates ranks all of them: to leave some out takes
longer."""


@lru_cache
def usual_search(items: int) -> SearchConfig:
    """Return the default settings of an index of so many items.

    All items of a small pool are candidates. Otherwise a tenth of the items are, at most 70,000 or 30
    times the square root of their number. With 256 codes at a level, a tenth are the items under the best
    25 first semantic codes. They lie side by side, so ranking them takes no longer than decoding another
    code to leave most of them out. They hold 96 to 99 % of the first five by codes for captions, drawn
    pictures and icons, and at least 95 % of the first ten up to fifty million items (``python -m
    research.bench``). Large indexes decode further codes, for which a wide beam costs little.
    """
    if items <= SMALL_POOL:
        return dataclasses.replace(USUAL_SEARCH, candidates=max(items, USUAL_SEARCH.candidates))
    most = max(MANY_CANDIDATES, round(CANDIDATES_PER_ROOT * math.sqrt(items)))
    candidates = min(max(items // ITEMS_PER_CANDIDATE, USUAL_SEARCH.candidates), most)
    beam = WIDE_BEAM if items > LARGE * candidates else USUAL_SEARCH.beam
    return dataclasses.replace(USUAL_SEARCH, beam=beam, candidates=candidates)


@settings
class EncoderConfig:
    """The encoder trained from scratch (paper, equation 2); pretrained ones need no training."""

    network: SmallEncoderConfig = SmallEncoderConfig()
    """Sizes."""

    temperature: Positive = 0.05
    """Divides the cosines in the contrastive loss."""

    # Deviation 31: the paper's encoder learns from pairs alone.
    word_weight: NonNegative = 0.0
    """Weight of two more losses: an image predicts the words of the texts that it is paired with, and a few
    of its words find it. So single words and short queries are learned from whole captions."""

    training: TrainingConfig = TrainingConfig(
        epochs=6.0, batch_size=1024, learning_rate=6e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98
    )
    """Training settings."""


@settings
class FitConfig:
    """Settings of ``genius fit``; a preset provides them, a TOML file overrides them."""

    encoder: EncoderConfig = EncoderConfig()
    """Stage 0; only for the encoder `small`."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """Stage 1."""

    generator: GeneratorConfig = GeneratorConfig()
    """Stage 2."""


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
"""Settings for tests, for laptops, and those of the paper's text."""


def preset(name: str) -> FitConfig:
    """Return a preset: ``tiny`` (tests), ``small`` (laptops) or ``paper``."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


def checked(config: Settings) -> Settings:
    """Return settings whose fields are all within their limits; :class:`UsageError` names one that is not."""
    return from_json(type(config), to_json(config))


def from_json(kind: type[Settings], value: Mapping[str, Any]) -> Settings:
    """Read settings written by :func:`to_json`; :class:`UsageError` names an unknown or invalid field."""
    try:
        return TypeAdapter(kind).validate_python(dict(value))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"{kind.__name__}: setting {where} = {problem.get('input')!r}: {problem['msg'].lower()}"
        ) from None


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as a JSON-able dictionary."""
    return dataclasses.asdict(config)
