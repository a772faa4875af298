"""Named settings of everything `genius fit` does: ``tiny`` to ``paper``, and ``reference``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from genius_search.errors import UsageError

EncoderKind = Literal["clip-sf", "clip-ff", "blip-sf", "blip-ff"]
"""CLIP or BLIP, fused by summing features (score) or by layers over both (feature)."""


__all__ = ["SmallEncoderConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallEncoderConfig:
    """How large the encoder that is trained from scratch is (paper, Eq. 2, with a light network)."""

    kind: EncoderKind = "clip-sf"
    """Which of UniIR's four it is in small. -sf gives image and text features, to be summed; -ff one vector
    from layers over the tokens of both, which is a baseline. blip- is trained with a slow copy of itself."""

    count_padding: bool = False
    """Of -ff: let padding, a missing picture and a missing text count, as the authors' code does (of blip-ff
    padding counts in neither)."""

    dim: int = 128
    """Width of the features."""

    vocabulary: int = 8192
    """Most words and word pieces learnt from the training texts; at least 257."""

    max_tokens: int = 64
    """Longer texts are cut here."""

    pair_buckets: int = 8192
    """Rows of the table that tells apart pairs of neighbouring words, and so their order."""

    text_width: int = 256
    """Width of a word's vector and of the layers that read texts."""

    image_width: int = 512
    """Width of the layers that read pictures."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise UsageError(f"{field.name} is {value}; it must be at least 1")
        if self.vocabulary < 257:
            raise UsageError(
                f"vocabulary is {self.vocabulary}; it must be at least 257: all bytes and padding"
            )

        if self.count_padding and not self.is_joint:
            raise UsageError(f"count_padding is for clip-ff and blip-ff; {self.kind} has nothing to count")

    @property
    def is_joint(self) -> bool:
        """Whether image and text become one vector (feature fusion)."""
        return self.kind in ("clip-ff", "blip-ff")

    @property
    def has_momentum(self) -> bool:
        """Whether it is trained as BLIP is."""
        return self.kind in ("blip-sf", "blip-ff")

    def to_json(self) -> dict[str, Any]:
        """As it is saved. What only other kinds know is left out, so that an encoder stays the one it was."""
        told = asdict(self)
        if self.kind == "clip-sf":
            del told["kind"]
        if not self.count_padding:
            del told["count_padding"]
        return told


Settings = TypeVar("Settings")

Level0 = Literal["learned", "assigned", "classifier", "none"]


def _added(default: str) -> Any:
    """Declare a setting that version 0.1 lacked; its default is not stored, so that old folders match."""
    return dataclasses.field(default=default, metadata={"stored": False})


Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative = Annotated[float, Ge(0), Lt(float("inf"))]
Share = Annotated[float, Ge(0), Le(1)]
Momentum = Annotated[float, Ge(0), Lt(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How one stage is trained: AdamW, warm-up, cosine, clipping."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epochs: Positive = 20.0
    """Passes over the training queries; each draws a positive and an instruction afresh."""

    max_steps: Natural = 0
    """Stop after this many steps even if epochs are left; 0 means no limit."""

    batch_size: Count = 256
    """Pairs in a batch, over all ranks together."""

    learning_rate: Positive = 1e-4
    """Peak learning rate."""

    final_share: Share = 0.0
    """The cosine ends at this share of the peak."""

    warmup_steps: Natural = 0
    """Steps of linear warm-up."""

    weight_decay: NonNegative = 0.01
    """Decay of weight matrices; biases, norms and gains have none."""

    beta1: Momentum = 0.9
    """AdamW's first momentum."""

    beta2: Momentum = 0.999
    """AdamW's second momentum."""

    epsilon: Positive = 1e-8
    """AdamW's epsilon."""

    clip_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0 means never."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the matrix products of the network in bfloat16; weights stay fp32."""

    seed: Natural = 0
    """Decides initial weights, batches, instructions, positives and augmentation."""

    checkpoint_seconds: NonNegative = 30.0
    """At most this much work is lost by a kill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumConfig:
    """How BLIP is trained: with a slow copy of the network (M-BEIR, section 3.5)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # The authors' 0.995 and 57,960 pairs are for runs of many thousands of steps.
    decay: Momentum = 0.95
    """Share of itself that the copy keeps at a step."""

    queue: Count = 4096
    """Pairs of earlier batches that are compared with."""

    softness: Share = 0.4
    """Share of the targets that is the copy's own similarities; it grows from 0 in the first epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The encoder trained from scratch (paper, equation 2); pretrained ones need no training."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    network: SmallEncoderConfig = SmallEncoderConfig()
    """Its kind and sizes."""

    momentum: MomentumConfig = MomentumConfig()
    """Of the kinds blip-sf and blip-ff."""

    temperature: Positive = 0.05
    """Divides the cosines in the contrastive loss."""

    training: TrainingConfig = TrainingConfig(
        epochs=6.0, batch_size=1024, learning_rate=6e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98
    )
    """How it is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """How image and text features become one embedding (paper, section 4.2.1)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    hidden: Count = 2560
    """Width of the layer on each modality; the joint layers are twice as wide."""

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.0
    """While training, before each layer of the MLP but not on the features that are added to it."""

    # Deviation 28: the paper's network starts at random, so an embedding begins far from the features' sum.
    start: Literal["random", "sum"] = "random"
    """Begin with the MLP at random, or with its output at zero: then an embedding begins as λ·text +
    (1−λ)·image, which exact search already knows to be good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizerConfig:
    """How an embedding becomes an ID (paper, section 4.2.2), and how that is learned (stage 1)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: str = _added("residual")
    """residual, or the name of an entry point of the group genius_search.quantizers."""

    levels: Annotated[int, Ge(1), Le(64)] = 8
    """Semantic levels, coarse to fine; the modality level comes on top."""

    codebook_size: Annotated[int, Ge(2), Le(32767)] = 4096
    """Codes at each semantic level."""

    level0: Level0 = "learned"
    """The modality code: learned by k-means (the paper), assigned from the candidate's known modality,
    predicted by a classifier (supplement, table 3), or none at all."""

    shared_codebook: bool = False
    """One codebook for all semantic levels (supplement, table 6: it destroys recall)."""

    decay: Share = 0.9
    """Of the moving average that codebooks follow."""

    laplace: Positive = 1e-5
    """Smoothing of the counts in that average."""

    dead_below: NonNegative = 2.0
    """A semantic code whose average count falls below this moves to a random current residual."""

    kmeans_iterations: Natural = 100
    """At most; k-means stops when nothing moves."""

    kmeans_samples: Natural = 0
    """Embeddings that k-means starts from; 0 means one batch (the paper)."""

    codebook_start: Natural = 0
    """Steps of contrastive learning alone before the codebooks are started by k-means."""

    # Deviation 30: the paper takes the nearest code vector at each level and never looks back.
    encoding_beam: Annotated[int, Ge(1), Le(1024)] = 1
    """Partial IDs that are kept at each level while an item gets its ID; 1 is the paper's greedy choice. A
    code that is second best at one level may leave less for the next. Training stays greedy."""

    gradient: Literal["once", "per-level"] = "once"
    """Straight-through: one identity for the sum of the levels, or one per level (what the authors'
    library did, which multiplies the gradient by the number of levels)."""

    # Deviation 8: the paper writes one direction; the smaller presets train both, as the released code does.
    contrastive: Literal["both", "query"] = "query"
    """Cross-entropy from queries to candidates only (paper), or back as well (released code)."""

    contrastive_weight: NonNegative = 1.0
    """Of L_cl."""

    quantization_weight: NonNegative = 100.0
    """Of L_rq, a mean over elements and levels."""

    alignment_weight: NonNegative = 100.0
    """Of L_mse, a mean over elements of unit vectors."""

    temperature: Positive = 0.01
    """Divides the cosines in L_cl."""

    collapse: Literal["refuse", "allow"] = "refuse"
    """Stop when all candidates get the same code, or go on and let the evaluation show it (ablations)."""

    fusion: FusionConfig = FusionConfig()
    """The network before the codebooks."""

    training: TrainingConfig = TrainingConfig(epochs=20.0)
    """How it is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The decoder that writes IDs (paper, section 4.3; T5-small's sizes are the defaults) and stage 2."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: str = _added("t5")
    """t5, or the name of an entry point of the group genius_search.generators."""

    layers: Count = 6
    """Decoder blocks."""

    width: Count = 512
    """Width of the residual stream (d_model)."""

    feedforward: Count = 2048
    """Width inside the feed-forward layers (d_ff)."""

    heads: Count = 8
    """Attention heads."""

    head_width: Count = 64
    """Width of one head (d_kv)."""

    prefixes: Count = 30
    """Vectors made from the query that the decoder attends to."""

    dropout: Annotated[float, Ge(0), Le(0.9)] = 0.1
    """While training."""

    head: Literal["tied", "per-level"] = "tied"
    """Output weights: the code embeddings themselves, or a matrix of their own for each level."""

    # Deviation 13: tiny, small and base train over the level's codes only.
    softmax: Literal["vocabulary", "level"] = "vocabulary"
    """Train over the whole vocabulary (released code), or over the codes of the level being written."""

    # Deviation 29: the paper's decoder has to learn from pairs what the distances already tell.
    guide: Literal["none", "geometry"] = "none"
    """Begin each level's logits with how near the codes' vectors are to what is left of the query's
    embedding, and let the decoder learn the correction. It trains over the level's codes."""

    augmentation: Literal["paper", "reference", "none"] = "paper"
    """Mix query and target embedding: one share per sample (equation 11), one share per dimension with
    square roots (released code), or not at all."""

    plain_share: Share = 0.0
    """Share of the samples left unmixed when augmentation is on."""

    training: TrainingConfig = TrainingConfig(epochs=30.0)
    """How it is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Everything that ``genius fit`` decides; a preset fills it, flags change it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    ids: str = _added("residual")
    """IDs of items: residual (the quantizer's codes), or the name of an entry point of the group
    genius_search.id_schemes."""

    encoder: EncoderConfig = EncoderConfig()
    """Only used by the encoder `small`."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """Stage 1."""

    generator: GeneratorConfig = GeneratorConfig()
    """Stage 2."""


def _also(name: str, old: str) -> Any:
    """Let settings that are read from a file use the name that a field had until version 0.1."""
    return Field(validation_alias=AliasChoices(name, old))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How a query is answered."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    beam: Annotated[Count, Le(10**9)] = 50
    """IDs kept at each level (the paper's B)."""

    # Deviation 19: the stored embeddings may be the fused ones; the paper's are raw sums.
    rerank: Literal["none", "codes", "embeddings"] = "none"
    """Order the found items by the generator's probability, by their codes' vectors, or by stored
    embeddings (the paper's GENIUS^R)."""

    # Deviation 17: the released code normalises over the whole vocabulary.
    scores: Literal["level", "vocabulary", "children"] = "level"
    """Normalise each decoding step over the level's codes, over the whole vocabulary (released code), or
    over the codes that exist there."""

    # Deviation 23: the paper decodes every level.
    candidates: Annotated[Natural, Le(10**9), _also("candidates", "leaves")] = 0
    """With a re-ranking: stop decoding as soon as at most so many IDs lie under the beams (but at least as
    many as the beam is wide), and order them all."""

    shortlist: Annotated[Natural, Le(10**9)] = 0
    """With stored embeddings: compare only so many of the found items, the best by their codes; 0 means
    all."""

    # Deviation 26: the paper orders by one kind of evidence at a time.
    generator_weight: Annotated[NonNegative, _also("generator_weight", "mix")] = 0.0
    """Where items are ordered by their codes' vectors (a shortlist too): so many times the log-probability
    of the prefix under which an item was found is added to its score."""

    # Deviation 27: the paper has no such correction.
    density_weight: Annotated[NonNegative, _also("density_weight", "hubness")] = 0.3
    """Where items are ordered by their codes' vectors or by stored fused embeddings: so many times the
    density around an item is taken from its score, for items in crowded places are near to any query. 0
    takes nothing; raw embeddings are compared as they are."""


USUAL_SEARCH: Final = SearchConfig(rerank="codes", candidates=1000)
"""How an index is searched unless it was tuned or one says otherwise: the generator says where to look, the
IDs there are ordered by their codes. :class:`SearchConfig` itself is the paper's."""


def checked(config: Settings) -> Settings:
    """The same settings, every field within its limits.

    Raises
    ------
    UsageError
        a field is out of range; the message names it.
    """
    adapter: TypeAdapter[Settings] = TypeAdapter(type(config))
    try:
        return adapter.validate_python(dataclasses.asdict(config))  # type: ignore[call-overload]
    except ValidationError as error:
        raise UsageError(_first_problem(error)) from None


def from_json(kind: type[Settings], value: Mapping[str, Any]) -> Settings:
    """Strictly read settings that :func:`to_json` wrote: unknown or impossible fields are refused."""
    try:
        return TypeAdapter(kind).validate_python(dict(value))
    except ValidationError as error:
        raise UsageError(f"{kind.__name__}: {_first_problem(error)}") from None


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as a JSON-able dictionary."""
    return {
        field.name: to_json(value) if dataclasses.is_dataclass(value) else copy.deepcopy(value)
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
        if field.metadata.get("stored", True) or value != field.default
    }


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"setting {where} = {problem.get('input')!r}: {problem['msg'].lower()}"


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
