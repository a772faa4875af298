"""``genius train quantizer``: stage 1, fusion and codebooks (paper, section 4.2, equation 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import ArtifactWriter
from genius_search.config import QuantizerConfig, checked, to_json
from genius_search.data.features import Batch, Features, Pairs
from genius_search.errors import TrainingFailed
from genius_search.nn import parallel
from genius_search.nn.health import Health, majority_modality
from genius_search.nn.losses import alignment_loss, contrastive_loss
from genius_search.nn.quantizer import (
    KIND,
    Quantizer,
    TrainedQuantizer,
    encode,
    load_quantizer,
    measure_health,
    write_quantizer,
)
from genius_search.progress import Progress
from genius_search.training.loop import Moment, StepResult, num_steps, random_for, train

HEALTH_SAMPLE: Final = 4_096
"""Candidates whose IDs are looked at while training goes on; all are when it has ended."""
HEALTH_CHECKS: Final = 5


def train_quantizer(
    pairs: Pairs,
    queries: Features,
    candidates: Features,
    folder: Path,
    config: QuantizerConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> TrainedQuantizer:
    """Train fusion and codebooks, or open the folder when this very training is already done.

    Raises
    ------
    TrainingFailed
        the codebooks collapsed.
    """
    config = checked(config)
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config=to_json(config),
        inputs={
            "queries": queries.manifest.fingerprint,
            "candidates": candidates.manifest.fingerprint,
        },
    )
    if writer.finished() is not None:
        return load_quantizer(folder, device=device)
    torch.manual_seed(config.training.seed)
    quantizer = Quantizer(candidates.dim, config).to(device)
    total = num_steps(len(pairs), config.training)
    start = min(config.codebook_start, total // 2)
    trainer = _Trainer(quantizer, pairs, queries, candidates, config, total, start, progress)
    train(
        quantizer,
        trainer.step,
        total=total,
        config=config.training,
        folder=writer.path,
        progress=progress,
        name="train quantizer",
    )
    health = settle(quantizer, candidates)
    progress.say(f"IDs: {health.verdict}")
    return write_quantizer(writer, quantizer, health)


def settle(quantizer: Quantizer, candidates: Features) -> Health:
    """After training: find out what each level-0 code stands for, and examine all IDs."""
    if quantizer.config.level0 == "learned":
        codes = encode(quantizer, candidates).codes[:, 0].numpy()
        majority = majority_modality(codes, candidates.modality.astype(np.int64))
        quantizer.level0_modality.copy_(torch.from_numpy(majority))
    return measure_health(quantizer, candidates)


class _Trainer:
    """One step of stage 1."""

    def __init__(
        self,
        quantizer: Quantizer,
        pairs: Pairs,
        queries: Features,
        candidates: Features,
        config: QuantizerConfig,
        total: int,
        start: int,
        progress: Progress,
    ) -> None:
        self.quantizer = quantizer
        self.pairs = pairs
        self.queries = queries
        self.candidates = candidates
        self.config = config
        self.device = next(quantizer.parameters()).device
        self.start = start
        self.progress = progress
        self.check_every = max(1, (total - start) // HEALTH_CHECKS)
        random = np.random.default_rng(config.training.seed)
        size = min(HEALTH_SAMPLE, len(candidates))
        self.sample = np.sort(random.choice(len(candidates), size, replace=False))

    def step(self, moment: Moment) -> StepResult:
        config = self.config
        if moment.step == self.start:
            self._start_codebooks(moment)
        batch = self.pairs.draw(moment.step, config.training.batch_size, seed=config.training.seed)
        query_rows, candidate_rows = self._own(batch.query_rows), self._own(batch.candidate_rows)
        asked = self._fused(self.queries, query_rows)
        wanted = self._fused(self.candidates, candidate_rows)
        contrastive = contrastive_loss(
            parallel.gather(asked),
            parallel.gather(wanted),
            batch.false_negatives.to(self.device),
            temperature=config.temperature,
            direction=config.contrastive,
        )
        modality = self._modality(candidate_rows)
        both = torch.cat([asked, wanted])
        loss = config.contrastive_weight * contrastive
        measures: dict[str, Tensor | float] = {"contrastive": contrastive.detach()}
        if self.config.level0 == "classifier":
            loss = loss + F.cross_entropy(self.quantizer.classify(both), modality.repeat(2))
        if moment.step < self.start:
            return StepResult(loss, measures)
        quantized = self.quantizer.quantize(both, modality.repeat(2))
        alignment = alignment_loss(*quantized.vectors.chunk(2))
        loss = loss + config.quantization_weight * quantized.loss + config.alignment_weight * alignment
        revived = self.quantizer.follow(quantized, generator=moment.generator)
        measures |= {
            "quantization": quantized.loss.detach(),
            "alignment": alignment.detach(),
            "revived": float(revived),
        }
        if (moment.step - self.start + 1) % self.check_every == 0 and parallel.rank() == 0:
            measures |= self._check(moment.step)
        return StepResult(loss, measures)

    def _own(self, rows: np.ndarray) -> np.ndarray:
        return parallel.own_rows(torch.from_numpy(rows)).numpy()

    def _fused(self, features: Features, rows: np.ndarray) -> Tensor:
        batch = features.gather(rows)
        fused: Tensor = self.quantizer.fusion(batch.image.to(self.device), batch.text.to(self.device))
        return fused

    def _modality(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.candidates.modality[rows].astype(np.int64)).to(self.device)

    @torch.no_grad()
    def _start_codebooks(self, moment: Moment) -> None:
        """K-means on the first batch, or on as many batches as ``kmeans_samples`` asks for.

        Deviation 6: the paper starts from the very first batch; ``codebook_start`` lets it wait.
        """
        config = self.config
        size = config.training.batch_size
        embeddings: list[Tensor] = []
        modalities: list[Tensor] = []
        for number in range(max(1, config.kmeans_samples // (2 * size))):
            batch: Batch = self.pairs.draw(moment.step + number, size, seed=config.training.seed)
            modality = self._modality(batch.candidate_rows)
            embeddings += [
                self._fused(self.queries, batch.query_rows),
                self._fused(self.candidates, batch.candidate_rows),
            ]
            modalities += [modality, modality]
        self.quantizer.start_codebooks(
            torch.cat(embeddings),
            torch.cat(modalities),
            batch_size=size,
            generator=random_for(config.training.seed, -1 - moment.step),
        )

    def _check(self, step: int) -> dict[str, float]:
        health = measure_health(self.quantizer, self.candidates, self.sample)
        semantic = health.levels[1:] if self.quantizer.has_modality_level else health.levels
        collapsed = semantic[0].used == 1 and len(self.sample) > 1
        if collapsed and self.config.collapse == "refuse":
            raise TrainingFailed(
                f"the codebooks collapsed by step {step}: every candidate has the same code at the first "
                "semantic level. Lower --quantizer.alignment-weight and --quantizer.quantization-weight, or "
                "raise --quantizer.contrastive-weight; --quantizer.collapse allow goes on all the same"
            )
        if health.problems:
            self.progress.say(f"step {step}: {health.verdict}")
        measures = {
            "collision_rate": health.collision_rate,
            "reconstruction": health.reconstruction,
            **{f"used_{level.level}": float(level.used) for level in health.levels},
        }
        return measures if health.purity is None else {**measures, "purity": health.purity}
