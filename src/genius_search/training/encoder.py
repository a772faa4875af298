"""``genius train encoder``: the ``small`` encoder from scratch, as CLIP or as BLIP is trained."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import ArtifactWriter, fingerprint_of, open_artifact
from genius_search.config import EncoderConfig, checked, to_json
from genius_search.data.features import ABSENT, Batch, FeatureBatch, Features, Pairs, Shard
from genius_search.data.mbeir import MBeir, read_pool, read_queries
from genius_search.embed import (
    TrainingFeatures,
    embed_training,
    fingerprint_of_files,
    instruction_files,
    transform,
)
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.small import (
    AnySmallEncoder,
    EmbeddingNetwork,
    SmallEncoder,
    SmallJointEncoder,
    create_small,
    load_small,
)
from genius_search.nn import parallel
from genius_search.nn.losses import contrastive_loss
from genius_search.progress import Progress
from genius_search.records import Query, format_text
from genius_search.training.loop import Moment, StepResult, num_steps, random_for, train

Network = TypeVar("Network", bound=nn.Module)

NOBODY = -1
"""Stands in the queue for the candidate of a random vector, before there are others."""


class Views(NamedTuple):
    """Unit vectors of the pairs of a batch; row i of one belongs to row i of the other."""

    queries: Float[Tensor, "batch dim"]
    candidates: Float[Tensor, "batch dim"]


class MomentumPair(nn.Module, Generic[Network]):
    """A network, its slow copy and their queue; all of it is in a checkpoint.

    Parameters
    ----------
    dim
        width of its vectors.
    queue
        pairs that are remembered.
    decay
        share of itself that the copy keeps at a step.
    """

    queued_queries: Tensor
    queued_candidates: Tensor
    queued_numbers: Tensor

    def __init__(
        self, network: Network, *, dim: int, queue: int, decay: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.network = network
        self.slow: Network = copy.deepcopy(network).requires_grad_(requires_grad=False)
        self.decay = decay
        for name in ("queued_queries", "queued_candidates"):
            vectors = F.normalize(torch.randn(queue, dim, generator=generator), dim=-1)
            self.register_buffer(name, vectors)
        self.register_buffer("queued_numbers", torch.full((queue,), NOBODY))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the copy towards the network."""
        for slow, fast in zip(self.slow.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.decay)

    @torch.no_grad()
    def remember(self, slow: Views, numbers: Int64[Tensor, " batch"]) -> None:
        """Put a batch in front of the queue; the oldest pairs are forgotten."""
        for name, new in (
            ("queued_queries", slow.queries),
            ("queued_candidates", slow.candidates),
            ("queued_numbers", numbers),
        ):
            queue = getattr(self, name)
            queue.copy_(torch.cat([new, queue])[: len(queue)])

    def loss(
        self,
        fast: Views,
        slow: Views,
        numbers: Int64[Tensor, " batch"],
        false_negatives: Bool[Tensor, "batch batch"],
        *,
        temperature: float,
        softness: float,
    ) -> Float[Tensor, ""]:
        """Cross-entropy in both directions against targets that are partly the copy's own similarities.

        Parameters
        ----------
        numbers
            of the candidates; pairs of the same candidate share the hard target.
        false_negatives
            marks candidates of the batch that answer another query too; they share its hard target.
        softness
            of the targets: the share that is the copy's (BLIP's alpha).
        """
        same = numbers[:, None] == torch.cat([numbers, self.queued_numbers])[None]
        batch = len(numbers)
        forth, back = same.clone(), same.clone()
        forth[:, :batch] |= false_negatives
        back[:, :batch] |= false_negatives.T
        candidates = torch.cat([slow.candidates, self.queued_candidates])
        queries = torch.cat([slow.queries, self.queued_queries])
        with torch.autocast(numbers.device.type, enabled=False):  # a low temperature magnifies rounding
            return (
                _soft(fast.queries, slow.queries, candidates, forth, temperature, softness)
                + _soft(fast.candidates, slow.candidates, queries, back, temperature, softness)
            ) / 2


def _soft(
    fast: Float[Tensor, "batch dim"],
    slow: Float[Tensor, "batch dim"],
    others: Float[Tensor, "others dim"],
    right: Bool[Tensor, "batch others"],
    temperature: float,
    softness: float,
) -> Float[Tensor, ""]:
    hard = F.normalize(right.float(), p=1, dim=1)
    with torch.no_grad():
        guessed = (slow @ others.T / temperature).softmax(dim=1)
    return F.cross_entropy(fast @ others.T / temperature, softness * guessed + (1 - softness) * hard)


__all__ = ["Step", "step_of"]


class Step(ABC):
    """One step, on prepared records."""

    def __init__(self, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig) -> None:
        self.pairs = pairs
        self.prepared = prepared
        self.config = config

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What is optimised, and kept in checkpoints."""

    @abstractmethod
    def __call__(self, moment: Moment) -> StepResult:
        """The loss of a batch."""

    def draw(self, moment: Moment) -> Batch:
        """The batch of a step, of all ranks."""
        training = self.config.training
        return self.pairs.draw(moment.step, training.batch_size, seed=training.seed)

    def views(self, network: EmbeddingNetwork, batch: Batch) -> Views:
        """Unit vectors of a batch, of all ranks."""
        return Views(
            parallel.gather(_embedded(network, self.prepared.queries, batch.query_rows)),
            parallel.gather(_embedded(network, self.prepared.candidates, batch.candidate_rows)),
        )


def step_of(
    network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
) -> Step:
    """The step that fits the kind of encoder."""
    if config.network.has_momentum:
        return _MomentumStep(network, pairs, prepared, config)
    return _ContrastiveStep(network, pairs, prepared, config)


class _ContrastiveStep(Step):
    """Equation 2."""

    def __init__(
        self, network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
    ) -> None:
        super().__init__(pairs, prepared, config)
        self._network = network

    @property
    def module(self) -> nn.Module:
        return self._network

    def __call__(self, moment: Moment) -> StepResult:
        batch = self.draw(moment)
        asked, wanted = self.views(self._network, batch)
        loss = contrastive_loss(
            asked,
            wanted,
            batch.false_negatives.to(asked.device),
            temperature=self.config.temperature,
            direction="both",
        )
        return StepResult(loss, {})


class _MomentumStep(Step):
    """BLIP's."""

    def __init__(
        self, network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
    ) -> None:
        super().__init__(pairs, prepared, config)
        self._pair = MomentumPair(
            network,
            dim=network.dim,
            queue=config.momentum.queue,
            decay=config.momentum.decay,
            generator=random_for(config.training.seed, 0),
        ).to(network.device)
        self._steps_per_epoch = len(pairs) / config.training.batch_size

    @property
    def module(self) -> nn.Module:
        return self._pair

    def __call__(self, moment: Moment) -> StepResult:
        device = self._pair.network.device
        batch = self.draw(moment)
        self._pair.follow()
        with torch.no_grad():
            slow = self.views(self._pair.slow, batch)
        numbers = torch.from_numpy(batch.candidate_rows).to(device)
        loss = self._pair.loss(
            self.views(self._pair.network, batch),
            slow,
            numbers,
            batch.false_negatives.to(device),
            temperature=self.config.temperature,
            softness=self.config.momentum.softness * min(1.0, moment.step / self._steps_per_epoch),
        )
        self._pair.remember(slow, numbers)
        return StepResult(loss, {})


def _embedded(network: EmbeddingNetwork, features: Features, rows: np.ndarray) -> Float[Tensor, "items dim"]:
    own = parallel.own_rows(torch.from_numpy(rows)).numpy()
    return F.normalize(network.embedding(features.gather(own)), dim=-1)


KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048


class TrainedEncoder(NamedTuple):
    """The encoder, and the training features it gives."""

    encoder: AnySmallEncoder
    features: TrainingFeatures


def train_encoder(
    data: MBeir,
    folder: Path,
    config: EncoderConfig,
    *,
    features_folder: Path,
    progress: Progress,
    device: str = "cpu",
) -> TrainedEncoder:
    """Train ``small`` on a data set, or open the folder when this very training is already done.

    Pictures are described and texts tokenised once; training runs on those numbers, and so does the
    embedding of the training records afterwards.
    """
    config = checked(config)
    sources = [*data.training_pools(), *data.training_queries(), *instruction_files(data)]
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config=_plan(config),
        inputs={"records": fingerprint_of_files(sources)},
    )
    torch.manual_seed(config.training.seed)
    done = writer.finished() is not None
    prepared_folder = folder.parent / "prepared"
    if done:
        encoder = load_trained_encoder(folder, device=device)
        if not prepared_folder.exists():  # a finished model keeps only the features
            features = embed_training(data, encoder, features_folder, progress=progress)
            return TrainedEncoder(encoder, features)
    else:
        progress.say("learning the words of the training texts")
        encoder = create_small(config.network, _texts(data), seed=config.training.seed)
    prepared = embed_training(data, _Preparation(encoder), prepared_folder, progress=progress)
    if not done:
        pairs = Pairs(_queries(data), prepared.queries, prepared.candidates)
        step = step_of(encoder.network.to(device), pairs, prepared, config)
        train(
            step.module,
            step,
            total=num_steps(len(pairs), config.training),
            config=config.training,
            folder=writer.path,
            progress=progress,
            name="train encoder",
        )
        encoder.save(writer.path)
        writer.finish()
        encoder = load_trained_encoder(folder, device=device)
    return TrainedEncoder(encoder, _features(encoder, prepared, features_folder))


def load_trained_encoder(folder: Path, *, device: str = "cpu") -> AnySmallEncoder:
    """Open a finished encoder."""
    open_artifact(folder, kind=KIND)
    return load_small(folder, device=device)


def _plan(config: EncoderConfig) -> dict[str, Any]:
    """What the training depends on, without what only other kinds know."""
    told = {**to_json(config), "network": config.network.to_json()}
    if not config.network.has_momentum:
        del told["momentum"]
    return told


class _Preparation:
    """The frozen first half of ``small`` as an encoder of its own: descriptors and token numbers."""

    needs_pixels = True
    spec = "small, not yet trained"

    def __init__(self, encoder: AnySmallEncoder) -> None:
        self._encoder = encoder
        self.dim = 0
        self.fingerprint = fingerprint_of([encoder.config.max_tokens, encoder.tokenizer.to_str()])

    def image_features(self, images: Sequence[ImageInput]) -> Shaped[Tensor, "items pixels"]:
        return self._encoder.prepare_images([item.image for item in images if item.image is not None])

    def text_features(self, texts: Sequence[TextInput]) -> Shaped[Tensor, "items tokens"]:
        return self._encoder.prepare_texts([item.text for item in texts])


@torch.no_grad()
def _features(encoder: AnySmallEncoder, prepared: TrainingFeatures, folder: Path) -> TrainingFeatures:
    """The trained network applied to the prepared training records."""
    return TrainingFeatures(
        *(
            transform(
                source,
                folder / source.manifest.folder.name,
                change=lambda shard: (
                    _together(encoder, shard)
                    if isinstance(encoder, SmallJointEncoder)
                    else _apart(encoder, shard)
                ),
                inputs={"records": source.manifest.inputs["records"]},
                encoder=encoder,
            )
            for source in prepared
        )
    )


def _apart(encoder: SmallEncoder, shard: Shard) -> Shard:
    """Features of a shard's pictures and of its texts."""
    network = encoder.network
    image = [
        network.image(torch.from_numpy(part.astype(np.float32)).to(network.device)).cpu().numpy()
        for part in _parts(shard.image)
    ]
    text = [
        network.text(torch.from_numpy(part.astype(np.int64)).to(network.device)).cpu().numpy()
        for part in _parts(shard.text)
    ]
    nothing = np.zeros((0, encoder.dim), dtype=np.float16)
    return shard._replace(image=np.concatenate([nothing, *image]), text=np.concatenate([nothing, *text]))


def _together(encoder: SmallJointEncoder, shard: Shard) -> Shard:
    """One vector for each distinct picture and text of a shard; they stand where texts do."""
    both = np.stack([shard.image_index, shard.text_index], axis=1)
    distinct, rows = np.unique(both, axis=0, return_inverse=True)
    image, text = (torch.from_numpy(content.astype(np.float32)) for content in (shard.image, shard.text))
    vectors = [
        encoder.network.embedding(FeatureBatch.of(image, text, part[:, 0], part[:, 1])).cpu().numpy()
        for part in _parts(distinct)
    ]
    return shard._replace(
        image_index=np.full_like(shard.image_index, ABSENT),
        text_index=rows.astype(np.int64),
        image=np.zeros((0, encoder.dim), dtype=np.float16),
        text=np.concatenate(vectors),
    )


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + FORWARD_BATCH] for start in range(0, len(array), FORWARD_BATCH))


def _texts(data: MBeir) -> Iterator[str]:
    """All texts that the encoder will read in training; instructions once, not with every query."""
    for candidate in read_pool(data.training_pools()):
        if candidate.text:
            yield format_text(candidate.text)
    for query in _queries(data):
        if query.text:
            yield format_text(query.text)
    for row in data.instructions.rows.values():
        # Twice, since a word seen once is spelled in pieces, and instructions go with every query.
        yield from (format_text(text) for text in (*row, *row))


def _queries(data: MBeir) -> Iterator[Query]:
    for path in data.training_queries():
        yield from read_queries(path)
