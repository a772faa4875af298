"""Stage 0 over two frozen encoders: small networks align their features (paper, equation 2)."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.data.features import Batch, FeatureBatch, Pairs, Shard, to_float16
from genius_search.encoders.adapters import (
    CONFIG_FILE,
    PARTS,
    WEIGHTS_FILE,
    AdapterEncoder,
    FrozenPair,
)
from genius_search.encoders.base import Encoder
from genius_search.nn import parallel
from genius_search.nn.losses import contrastive_loss
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress
from genius_search.recipe import AdapterConfig
from genius_search.training.encoder import embed_prepared, encoder_stage
from genius_search.training.loop import Stage, Step, StepResult, num_steps, share_of_rank, train
from genius_search.training.records import TrainingRecords, embed_training

VALIDATION_QUERIES: Final = 4096
"""Maximum number of validation queries."""
NUM_CHECKS: Final = 20
"""Number of checks with validation queries during a training."""
MAX_CHECKS_WITHOUT_GAIN: Final = 5
"""Early stopping: number of checks without improvement."""
DROPOUT: Final = 0.3
"""Dropout of hidden layers and of the features of images."""
TEXT_DROPOUT: Final = 0.1
"""Dropout of the features of texts."""
IMAGE_NOISE: Final = 1.0
"""Noise that training adds to the features of images, in units of their standard deviations."""
ADAPTER_TEMPERATURE: Final = 0.06
"""Divides the cosines in the contrastive loss."""
STATISTICS_SAMPLE: Final = 16_384
"""Number of features from which means and deviations are computed."""


class TrainedAdapter(nn.Module):
    """An :class:`~genius_search.encoders.adapters.Adapter` in training, with dropout and noise.

    Each member m is a network with a hidden layer and a linear path, of which x is the standardised
    feature:

        y_m = normalize(W₂ gelu(W₁ x + b) + W₀ x)
    """

    is_rooted: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, width: int, config: AdapterConfig, *, part: str) -> None:
        super().__init__()
        is_image = part == "image"
        self.noise = IMAGE_NOISE if is_image else 0.0
        self.input_dropout = DROPOUT if is_image else TEXT_DROPOUT
        self.register_buffer("is_rooted", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        members, hidden = config.members, config.hidden
        self.hidden = nn.Parameter(torch.empty(members, hidden, width))
        self.hidden_bias = nn.Parameter(torch.zeros(members, hidden))
        self.output = nn.Parameter(torch.empty(members, config.dim, hidden))
        self.linear = nn.Parameter(torch.empty(members, config.dim, width))
        # Uniform in ±1/√inputs, as PyTorch initialises a linear layer.
        for weight in (self.hidden, self.output, self.linear):
            nn.init.uniform_(weight, -1, 1)
            weight.data /= math.sqrt(weight.shape[2])

    def standardise(self, features: Float[Tensor, "items width"]) -> None:
        """Measure a sample of features: means and deviations, with which all are standardised."""
        self.is_rooted.fill_(features.min() >= 0)
        features = self.root(features)
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(1 / (features.std(dim=0, unbiased=False) + 1e-3 * features.std() + 1e-12))

    def root(self, features: Float[Tensor, "items width"]) -> Float[Tensor, "items width"]:
        """Return the square roots of features, if the sample was never negative."""
        return features.clamp(min=0).sqrt() if self.is_rooted else features

    def forward(self, features: Float[Tensor, "items width"]) -> Float[Tensor, "items members dim"]:
        """Return a unit vector of each member for every item."""
        inputs = (self.root(features) - self.mean) * self.scale
        if self.training and self.noise:
            inputs = inputs + self.noise * torch.randn_like(inputs)
        inputs = F.dropout(inputs, self.input_dropout, self.training)
        hidden = F.gelu(
            inputs @ self.hidden.transpose(1, 2) + self.hidden_bias[:, None], approximate="tanh"
        )
        outputs = F.dropout(hidden, DROPOUT, self.training) @ self.output.transpose(1, 2)
        return F.normalize(outputs + inputs @ self.linear.transpose(1, 2), dim=-1).transpose(0, 1)


class AdapterNetwork(nn.Module):
    """An adapter for images and an adapter for texts."""

    def __init__(self, pair: FrozenPair, config: AdapterConfig) -> None:
        super().__init__()
        for part, encoder in pair.encoders.items():
            self.add_module(part, TrainedAdapter(encoder.dim, config, part=part))

    def forward(self, items: FeatureBatch) -> Float[Tensor, "items members dim"]:
        """Return each member's unit vectors of items, the normalised sums of image and text."""
        weight = self.get_parameter("image.output")
        total = torch.zeros(len(items.image), *weight.shape[:2], device=weight.device)
        for part in PARTS:
            rows = np.flatnonzero(getattr(items, f"has_{part}"))
            adapter = getattr(self, part)
            # Features of a modality that no item has are of width 0. The adapter runs nevertheless,
            # so that its gradients are 0 and not missing: ranks average the same gradients.
            features = getattr(items, part)[rows].reshape(len(rows), len(adapter.mean))
            vectors = adapter(torch.from_numpy(features).to(weight.device))
            total = total.index_add(0, torch.from_numpy(rows).to(weight.device), vectors)
        return F.normalize(total, dim=-1)


class AdapterStep(nn.Module):
    """A step: equation 2 for each member, and at intervals a check with validation queries.

    The best weights so far are part of the module and of its checkpoint, so that a killed training
    resumes with them.
    """

    best_score: Tensor
    checks_since: Tensor

    def __init__(
        self,
        network: AdapterNetwork,
        pairs: Pairs,
        validation: Pairs | None,
        config: AdapterConfig,
    ) -> None:
        super().__init__()
        self.network = network
        self.pairs = pairs
        self.validation = validation
        self.config = config
        self.total = num_steps(len(pairs), config.training)
        self.best = copy.deepcopy(network).requires_grad_(requires_grad=False)
        self.register_buffer("best_score", torch.zeros(()))
        self.register_buffer("checks_since", torch.zeros(()))

    def forward(self, step: Step) -> StepResult:
        """Return the loss of a batch, and whether validation has stopped improving."""
        training = self.config.training
        if step.number and step.number % max(1, self.total // NUM_CHECKS) == 0:
            self.check()
        batch = self.pairs.draw(step.number, training.batch_size, seed=training.seed)
        queries, candidates = self.embed(self.pairs, batch)
        excluded = self.excluded(self.pairs, batch)
        losses = [
            contrastive_loss(*member, excluded, temperature=ADAPTER_TEMPERATURE, direction="both")
            for member in zip(queries.unbind(1), candidates.unbind(1), strict=True)
        ]
        measures = {"validation": self.best_score} if self.validation else {}
        stop = float(self.checks_since) >= MAX_CHECKS_WITHOUT_GAIN
        return StepResult(torch.stack(losses).sum(), measures, stop)

    def embed(self, pairs: Pairs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the vectors of the queries and the candidates of a batch."""
        queries, candidates = (
            parallel.gather(self.network(features.gather(parallel.rows_of_rank(rows))))
            for features, rows in (
                (pairs.queries, batch.query_rows),
                (pairs.candidates, batch.candidate_rows),
            )
        )
        return queries, candidates

    def excluded(self, pairs: Pairs, batch: Batch) -> Tensor:
        """Return which candidates do not count as wrong: other answers, and other modalities.

        A search states the modality of its results, which a frozen encoder does not read in the
        query. Without this exclusion, a picture's caption in another pair would count as wrong for
        the picture.
        """
        modality = pairs.candidates.modality[batch.candidate_rows]
        excluded = batch.false_negatives | (modality[:, None] != modality[None])
        return torch.from_numpy(excluded).to(self.best_score.device)

    @torch.no_grad()
    def check(self) -> None:
        """Rank the answers of the validation queries, and keep the weights with the best score.

        The score is the mean reciprocal rank of each query's answer among the answers of the same
        modality to all validation queries. Without validation queries, the latest weights are kept.
        """
        if self.validation is None:
            self.best.load_state_dict(self.network.state_dict())
            return
        self.network.eval()
        # The largest number of queries that divides evenly among the ranks.
        size = len(self.validation) // parallel.num_ranks() * parallel.num_ranks()
        batch = self.validation.draw(0, size, seed=0)
        queries, candidates = self.embed(self.validation, batch)
        self.network.train()
        scores = queries.flatten(1) @ candidates.flatten(1).T
        scores.masked_fill_(self.excluded(self.validation, batch), float("-inf"))
        ranks = (scores > scores.diagonal()[:, None]).sum(dim=1) + 1
        score = (1 / ranks).mean()
        self.checks_since += 1
        if score > self.best_score:
            self.best_score.copy_(score)
            self.checks_since.zero_()
            self.best.load_state_dict(self.network.state_dict())


def train_adapters(
    records: TrainingRecords,
    folder: Path,
    config: AdapterConfig,
    pair: FrozenPair,
    *,
    progress: Progress,
    device: str = "cpu",
) -> tuple[Encoder, Pairs]:
    """Train networks over two frozen encoders; return them with the pairs that they embedded.

    If the folder holds finished encoders or features, they are opened. The frozen encoders read
    each record once; training runs on their features. With queries of the split ``val``, the
    weights that rank their answers best are kept.

    Parameters
    ----------
    folder
        folder of the model; receives ``encoder/`` and ``features/``, and until training ends
        ``prepared/`` with the features of the frozen encoders.
    """
    home = folder / "encoder"
    features = folder / "features"
    prepared_folder = folder / "prepared"
    stage = encoder_stage(records, home, config, encoders=pair.fingerprint)
    if stage.is_finished and not prepared_folder.exists():
        encoder = AdapterEncoder(home, pair)
        return encoder, embed_training(
            records, encoder, features, progress=progress, share=share_of_rank()
        )
    prepared = embed_training(
        records, pair, prepared_folder, progress=progress, share=share_of_rank()
    )
    if not stage.is_finished:
        validation = _validation_pairs(records, pair, prepared_folder / "val", progress)
        step = _train_best(stage, pair, prepared, validation, config, progress, device)

        if stage.writer is not None:
            write_weights(stage.writer.path / WEIGHTS_FILE, step.best.state_dict())
            specs = {part: encoder.spec for part, encoder in pair.encoders.items()}
            (stage.writer.path / CONFIG_FILE).write_text(json.dumps(specs, indent=2) + "\n")
            stage.writer.finish()
        stage.wait()
    encoder = AdapterEncoder(home, pair)
    return encoder, embed_prepared(encoder, prepared, features, partial(embed_shard, encoder))


def _validation_pairs(
    records: TrainingRecords, pair: FrozenPair, folder: Path, progress: Progress
) -> Pairs | None:
    """Embed queries of the split ``val`` and their answers; return None if there are none."""
    held_out = TrainingRecords(records.data, validation=VALIDATION_QUERIES)
    if not held_out.lines:
        return None
    return embed_training(held_out, pair, folder, progress=progress, share=share_of_rank())


def _train_best(
    stage: Stage,
    pair: FrozenPair,
    pairs: Pairs,
    validation: Pairs | None,
    config: AdapterConfig,
    progress: Progress,
    device: str,
) -> AdapterStep:
    """Train new adapters; return the last step, which has the best weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        network = AdapterNetwork(pair, config)
    standardise(network, pairs)
    step = AdapterStep(network, pairs, validation, config).to(device)
    train(
        step,
        step,
        total=step.total,
        config=config.training,
        folder=stage.path,
        progress=progress,
        name="train encoder",
    )
    step.check()
    if validation:
        progress.say(
            f"the best weights rank the answers of {len(validation):,} validation queries with a "
            f"mean reciprocal rank of {float(step.best_score):.3f}"
        )
    else:
        progress.say("the data set has no queries of the split val; the last weights are kept")
    return step


def standardise(network: AdapterNetwork, pairs: Pairs) -> None:
    """Give each adapter the means and deviations of the features that it reads."""
    for part in PARTS:
        samples = []
        for source in (pairs.queries, pairs.candidates):
            rows = np.random.default_rng(0).permutation(len(source))[:STATISTICS_SAMPLE]
            batch = source.gather(np.sort(rows))
            samples.append(torch.from_numpy(getattr(batch, part)[getattr(batch, f"has_{part}")]))
        features = torch.cat([sample for sample in samples if len(sample)])
        if len(features):
            getattr(network, part).standardise(features)


def embed_shard(encoder: AdapterEncoder, shard: Shard) -> Shard:
    """Replace the frozen encoders' features in a shard by those of the adapters."""
    image, text = (np.asarray(part, dtype=np.float32) for part in (shard.image, shard.text))
    return shard._replace(
        image=to_float16(encoder.image(image)), text=to_float16(encoder.text(text))
    )
