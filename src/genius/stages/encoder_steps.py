"""A step of training the ``small`` encoder: equation 2 as for CLIP, or with a slow copy as for BLIP."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from genius.config import EncoderConfig
from genius.data.features import Features
from genius.data.pairs import Batch, Pairs
from genius.encoders.small_network import EmbeddingNetwork
from genius.models import parallel
from genius.models.losses import contrastive_loss
from genius.models.momentum import MomentumPair, Views
from genius.stages.embed_records import TrainingFeatures
from genius.stages.loop import Moment, StepResult, random_for

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
