"""Train IRGen's tokenizer on embeddings of training pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from genius.baselines.retrieval_tokenizer import RetrievalTokenizer
from genius.config import TrainingConfig
from genius.data.pairs import Pairs
from genius.stages.loop import Moment, StepResult, num_steps, random_for, train
from genius.stages.progress import Progress

START: Final = 8192
"""Items that k-means begins from."""


def train_tokenizer(
    pairs: Pairs,
    queries: Float[Tensor, "queries dim"],
    candidates: Float[Tensor, "candidates dim"],
    folder: Path,
    training: TrainingConfig,
    *,
    progress: Progress,
) -> RetrievalTokenizer:
    """Train it; ``folder`` receives the checkpoint and the log.

    Parameters
    ----------
    queries, candidates
        embeddings, as rows of the features that the pairs point to.
    """
    torch.manual_seed(training.seed)
    tokenizer = RetrievalTokenizer(candidates.shape[1])
    random = random_for(training.seed, -1)
    sample = torch.randperm(len(candidates), generator=random)[:START]
    tokenizer.start(candidates[sample].float(), generator=random)

    def step(moment: Moment) -> StepResult:
        batch = pairs.draw(moment.step, training.batch_size, seed=training.seed)
        loss, found = tokenizer.loss(
            queries[torch.from_numpy(batch.query_rows)].float(),
            candidates[torch.from_numpy(batch.candidate_rows)].float(),
            batch.false_negatives,
        )
        tokenizer.follow(found, generator=moment.generator)
        return StepResult(loss, {"commitment": found.commitment.detach()})

    folder.mkdir(parents=True, exist_ok=True)
    train(
        tokenizer,
        step,
        total=num_steps(len(pairs), training),
        config=dataclasses.replace(training, precision="fp32"),
        folder=folder,
        progress=progress,
        name="train tokenizer",
    )
    return tokenizer
