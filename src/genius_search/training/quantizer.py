"""Stage 1: training of fusion and codebooks (paper, section 4.2, equation 8).

The loss is L_cl + 100 L_rq + 100 L_mse, with the weights of the paper: contrast of queries with
candidates, error of the quantization, and alignment of quantized queries with quantized candidates.

Quantizers that collapse unnoticed are the most common complaint about generative retrieval. So the
health of IDs is measured during training, and reported at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import to_json
from genius_search.data.features import Features, Pairs
from genius_search.errors import TrainingFailed
from genius_search.nn import parallel
from genius_search.nn.codebooks import QUANTIZER_KIND, Codebooks, StoredQuantizer
from genius_search.nn.coder import EncodedItems
from genius_search.nn.losses import alignment_loss, contrastive_loss
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Progress
from genius_search.recipe import QuantizerConfig
from genius_search.records import NUM_MODALITIES
from genius_search.training.codebooks import encode_features, measure_items, write_quantizer
from genius_search.training.loop import Stage, Step, StepResult, num_steps, train

HEALTH_SAMPLE: Final = 4_096
"""Number of candidates whose IDs are examined during training; at the end all are."""
HEALTH_CHECKS: Final = 5
"""Number of times that the health of IDs is measured during training."""
LOW_PURITY: Final = 0.95
"""A lower purity of level 0 is a problem."""
HIGH_COLLISIONS: Final = 0.05
"""A higher share of candidates with a common ID is a problem."""
LOW_USE: Final = 0.25
"""A lower share of used codes at a level is a problem."""
LOW_RECONSTRUCTION: Final = 0.5
"""A lower mean cosine between embeddings and the vectors of their IDs is a problem."""


class Health(NamedTuple):
    """Health of the IDs of a set of candidates."""

    collision_rate: float
    """Share of the candidates that have the same ID as another candidate."""
    purity: float | None
    """Share of the candidates with the most frequent modality of their level-0 code; None without
    level 0."""
    reconstruction: float
    """Mean cosine between an embedding and the vector of its ID."""
    used: tuple[int, ...]
    """Number of codes of each level with at least one candidate."""
    problems: tuple[str, ...]
    """A sentence for each problem; empty if the IDs are healthy."""


def train_quantizer(
    pairs: Pairs,
    folder: Path,
    config: QuantizerConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> StoredQuantizer:
    """Train fusion and codebooks, or open the folder if it is finished.

    Raises
    ------
    TrainingFailed
        The codebooks collapsed.
    """
    stage = Stage(folder, kind=QUANTIZER_KIND, config=to_json(config), inputs=pairs.fingerprints)
    if stage.is_finished:
        return StoredQuantizer(folder)
    torch.manual_seed(config.training.seed)
    quantizer = Quantizer(pairs.candidates.dim, config).to(device)
    total = num_steps(len(pairs), config.training)
    train(
        quantizer,
        QuantizerStep(quantizer, pairs, total),
        total=total,
        config=config.training,
        folder=stage.path,
        progress=progress,
        name="train quantizer",
    )

    if stage.writer is not None:
        codebooks, health = measure_candidates(quantizer, pairs.candidates)
        progress.say(f"IDs: {'; '.join(health.problems) or 'healthy'}")
        write_quantizer(stage.writer, codebooks)
    stage.wait()
    return StoredQuantizer(folder)


def measure_candidates(quantizer: Quantizer, candidates: Features) -> tuple[Codebooks, Health]:
    """Measure all candidates; return codebooks with their statistics, and the health of their IDs.

    The statistics include the modality that each level-0 code stands for.
    """
    codebooks = quantizer.to_codebooks()
    encoded = encode_features(codebooks, candidates)
    statistics = measure_items(codebooks, encoded)
    if quantizer.config.level0 == "learned":
        level0 = encoded.codes[:, 0]
        statistics["level0_modality"] = majority_modalities(level0, candidates.modality)
    health = measure_health(codebooks, encoded, candidates.modality)
    return quantizer.to_codebooks(statistics), health


def majority_modalities(
    level0: Integer[np.ndarray, " items"], modalities: Integer[np.ndarray, " items"]
) -> Integer[np.ndarray, " 3"]:
    """Return the most frequent modality of each level-0 code; −1 for a code that no item has."""
    counts = np.zeros((NUM_MODALITIES, NUM_MODALITIES), dtype=np.int64)
    np.add.at(counts, (level0, modalities), 1)
    return np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), -1)


def measure_health(
    codebooks: Codebooks, encoded: EncodedItems, modalities: Integer[np.ndarray, " items"]
) -> Health:
    """Measure the health of the IDs of items with the given modalities."""
    codes = encoded.codes
    problems: list[str] = []
    purity = None
    if codebooks.has_modality_level:
        majority = majority_modalities(codes[:, 0], modalities)
        purity = float((majority[codes[:, 0]] == modalities).mean())
        if purity < LOW_PURITY:
            problems.append(
                f"level 0 matches the modality of only {purity:.1%} of the candidates: train "
                'longer, or set quantizer.level0 to "assigned"'
            )
    counts = np.unique(codes, axis=0, return_counts=True)[1]
    collision_rate = float(counts[counts > 1].sum() / len(codes))
    if collision_rate > HIGH_COLLISIONS:
        problems.append(
            f"{collision_rate:.1%} of the candidates share their ID: use more levels or larger "
            "codebooks"
        )
    cosine = float(encoded.code_cosine.mean())
    if cosine < LOW_RECONSTRUCTION:
        problems.append(
            f"IDs are poor approximations of embeddings (mean cosine {cosine:.2f}): train longer"
        )
    used = tuple(len(np.unique(level_codes)) for level_codes in codes.T)
    for level, (num_used, size) in enumerate(zip(used, codebooks.sizes, strict=True)):
        is_semantic = level >= codebooks.has_modality_level
        if is_semantic and num_used < LOW_USE * min(size, len(codes)):
            problems.append(
                f"level {level} uses {num_used} of {size} codes: smaller codebooks suffice, or "
                "they collapsed"
            )
    return Health(collision_rate, purity, cosine, used, tuple(problems))


class QuantizerStep:
    """A step of stage 1 (equation 8)."""

    def __init__(self, quantizer: Quantizer, pairs: Pairs, total: int) -> None:
        self.quantizer = quantizer
        self.pairs = pairs
        self.config = quantizer.config
        self.device = next(quantizer.parameters()).device
        self.start = min(self.config.codebook_start, total // 2)
        """The step at which codebooks are initialised; before it, the loss is contrastive only."""
        self.check_every = max(1, (total - self.start) // HEALTH_CHECKS)
        random = np.random.default_rng(self.config.training.seed)
        size = min(HEALTH_SAMPLE, len(pairs.candidates))
        self.sample = np.sort(random.choice(len(pairs.candidates), size, replace=False))

    def __call__(self, step: Step) -> StepResult:
        """Return the loss of a batch, and update the codebooks with it."""
        config = self.config
        quantizer = self.quantizer
        if step.number == self.start:
            self._start_codebooks(step.number)
        batch = self.pairs.draw(step.number, config.training.batch_size, seed=config.training.seed)
        candidate_rows = parallel.rows_of_rank(batch.candidate_rows)
        queries = self._fuse(self.pairs.queries, parallel.rows_of_rank(batch.query_rows))
        candidates = self._fuse(self.pairs.candidates, candidate_rows)
        contrastive = contrastive_loss(
            parallel.gather(queries),
            parallel.gather(candidates),
            torch.from_numpy(batch.false_negatives).to(self.device),
            temperature=config.temperature,
            direction=config.contrastive,
        )
        modality = self._modality(candidate_rows).repeat(2)
        both = torch.cat([queries, candidates])
        loss = config.contrastive_weight * contrastive
        measures: dict[str, Tensor | float] = {"contrastive": contrastive.detach()}
        if config.level0 == "classifier":
            loss = loss + F.cross_entropy(quantizer.classify(both), modality)
        if step.number < self.start:
            return StepResult(loss, measures)
        quantized = quantizer.quantize(both, modality)
        alignment = alignment_loss(*quantized.vectors.chunk(2))
        loss = (
            loss + config.quantization_weight * quantized.loss + config.alignment_weight * alignment
        )
        measures |= {
            "quantization": quantized.loss.detach(),
            "alignment": alignment.detach(),
            "revived": float(quantizer.update_averages(quantized, generator=step.generator)),
        }
        if (step.number - self.start + 1) % self.check_every == 0 and parallel.rank() == 0:
            measures |= self._check(step.number)
        return StepResult(loss, measures)

    def _fuse(self, features: Features, rows: np.ndarray) -> Tensor:
        """Return the fused embeddings of rows of features."""
        batch = features.gather(rows)
        image = torch.from_numpy(batch.image).to(self.device)
        text = torch.from_numpy(batch.text).to(self.device)
        fused: Tensor = self.quantizer.fusion(image, text)
        return fused

    def _modality(self, rows: np.ndarray) -> Tensor:
        """Return the modalities of candidates."""
        modalities = self.pairs.candidates.modality[rows].astype(np.int64)
        return torch.from_numpy(modalities).to(self.device)

    @torch.no_grad()
    def _start_codebooks(self, step: int) -> None:
        """Run k-means on the first batch, or on ``kmeans_samples`` embeddings of several batches.

        Deviation 6: the paper starts from the very first batch; ``codebook_start`` lets it wait.
        """
        config = self.config
        seed = config.training.seed
        size = config.training.batch_size
        embeddings: list[Tensor] = []
        modalities: list[Tensor] = []
        for number in range(max(1, config.kmeans_samples // (2 * size))):
            batch = self.pairs.draw(step + number, size, seed=seed)
            embeddings += [
                self._fuse(self.pairs.queries, batch.query_rows),
                self._fuse(self.pairs.candidates, batch.candidate_rows),
            ]
            modalities += [self._modality(batch.candidate_rows)] * 2
        self.quantizer.initialise_codebooks(
            torch.cat(embeddings),
            torch.cat(modalities),
            batch_size=size,
            random=np.random.default_rng([seed, step]),
        )
        parallel.copy_from_first_rank(self.quantizer)

    def _check(self, step: int) -> dict[str, float]:
        """Measure the health of a sample's IDs, and stop if the codebooks collapsed."""
        candidates = self.pairs.candidates
        codebooks = self.quantizer.to_codebooks()
        encoded = encode_features(codebooks, candidates, self.sample)
        health = measure_health(codebooks, encoded, candidates.modality[self.sample])
        if (
            health.used[int(self.quantizer.has_modality_level)] == 1
            and len(self.sample) > 1
            and self.config.contrastive_weight
        ):
            raise TrainingFailed(
                f"the codebooks collapsed by step {step}: every candidate has the same code at the "
                "first semantic level. Lower quantizer.alignment_weight and "
                "quantizer.quantization_weight, or raise quantizer.contrastive_weight"
            )
        measures = {
            "collision_rate": health.collision_rate,
            "reconstruction": health.reconstruction,
            **{f"used_{level}": float(used) for level, used in enumerate(health.used)},
        }
        return measures if health.purity is None else {**measures, "purity": health.purity}
