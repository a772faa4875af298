"""A step of training the ``small`` encoder: equation 2 as for CLIP, or with a slow copy as for BLIP."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from genius.config import EncoderConfig
from genius.data.features import Features
from genius.data.pairs import Pairs
from genius.encoders.small_network import EmbeddingNetwork
from genius.models import parallel
from genius.models.losses import contrastive_loss
from genius.models.momentum import MomentumPair, Views
from genius.stages.embed_records import TrainingFeatures
from genius.stages.loop import Moment, StepResult, random_for

__all__ = ["Step", "step_of"]


class Step(Protocol):
    """One step, on prepared records."""

    @property
    def module(self) -> nn.Module:
        """What is optimised, and kept in checkpoints."""
        ...

    def __call__(self, moment: Moment) -> StepResult:
        """The loss of a batch."""
        ...


def step_of(
    network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
) -> Step:
    """The step that fits the kind of encoder."""
    if config.network.has_momentum:
        return _MomentumStep(network, pairs, prepared, config)
    return _ContrastiveStep(network, pairs, prepared, config)


class _Drawn(NamedTuple):
    """A batch: rows of features, and which candidates answer other queries of it."""

    queries: np.ndarray
    candidates: np.ndarray
    false_negatives: Tensor


class _OnPairs:
    """What both steps do: draw a batch and embed it."""

    def __init__(self, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig) -> None:
        self.pairs = pairs
        self.prepared = prepared
        self.config = config

    def draw(self, moment: Moment, device: torch.device) -> _Drawn:
        training = self.config.training
        batch = self.pairs.draw(moment.step, training.batch_size, seed=training.seed)
        return _Drawn(batch.query_rows, batch.candidate_rows, batch.false_negatives.to(device))

    def views(self, network: EmbeddingNetwork, batch: _Drawn) -> Views:
        """Unit vectors of a batch, of all ranks."""
        return Views(
            parallel.gather(_embedded(network, self.prepared.queries, batch.queries)),
            parallel.gather(_embedded(network, self.prepared.candidates, batch.candidates)),
        )


class _ContrastiveStep(_OnPairs):
    """Equation 2."""

    def __init__(
        self, network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
    ) -> None:
        super().__init__(pairs, prepared, config)
        self.module = network

    def __call__(self, moment: Moment) -> StepResult:
        batch = self.draw(moment, self.module.device)
        asked, wanted = self.views(self.module, batch)
        loss = contrastive_loss(
            asked, wanted, batch.false_negatives, temperature=self.config.temperature, direction="both"
        )
        return StepResult(loss, {})


class _MomentumStep(_OnPairs):
    """BLIP's."""

    def __init__(
        self, network: EmbeddingNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
    ) -> None:
        super().__init__(pairs, prepared, config)
        self.module = MomentumPair(
            network,
            dim=network.dim,
            queue=config.momentum.queue,
            decay=config.momentum.decay,
            generator=random_for(config.training.seed, 0),
        ).to(network.device)
        self._steps_per_epoch = len(pairs) / config.training.batch_size

    def __call__(self, moment: Moment) -> StepResult:
        device = self.module.network.device
        batch = self.draw(moment, device)
        self.module.follow()
        with torch.no_grad():
            slow = self.views(self.module.slow, batch)
        numbers = torch.from_numpy(batch.candidates).to(device)
        loss = self.module.loss(
            self.views(self.module.network, batch),
            slow,
            numbers,
            batch.false_negatives,
            temperature=self.config.temperature,
            softness=self.config.momentum.softness * min(1.0, moment.step / self._steps_per_epoch),
        )
        self.module.remember(slow, numbers)
        return StepResult(loss, {})


def _embedded(network: EmbeddingNetwork, features: Features, rows: np.ndarray) -> Float[Tensor, "items dim"]:
    own = parallel.own_rows(torch.from_numpy(rows)).numpy()
    return F.normalize(network.embedding(features.gather(own)), dim=-1)
