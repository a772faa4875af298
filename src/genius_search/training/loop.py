"""The training loop of all stages: seeded, clipped, scheduled, and resumable with the same losses.

A stage defines a step; the loop owns the optimizer, the schedule, the checkpoint and the log. Every
random choice of a step comes from a generator seeded by (seed, step), so a resumed run draws the
same numbers as an uninterrupted one, on any number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from genius_search.encoders.store import Share
from genius_search.errors import TrainingFailed, UsageError
from genius_search.nn import parallel
from genius_search.progress import Progress
from genius_search.recipe import TrainingConfig
from genius_search.writing import CHECKPOINT, ArtifactWriter, sync, write_atomically

METRICS: Final = "metrics.jsonl"
"""The log, with a line of measures for each step."""
BETA1: Final = 0.9
"""AdamW's beta1."""
CLIP_NORM: Final = 1.0
"""Longer gradients are scaled down to this norm."""


class Step(NamedTuple):
    """A step of a training and the random numbers it may use."""

    number: int
    """Number of the step, from 0."""
    generator: torch.Generator
    """Source of random numbers on the CPU, seeded alike on all ranks and after every resumption."""


class StepResult(NamedTuple):
    """The loss to descend and the measures to log."""

    loss: Tensor
    measures: Mapping[str, Tensor | float]
    stop: bool = False
    """Whether this step is the last one."""


def share_of_rank() -> Share:
    """Return this rank's share of the records that all ranks embed together."""
    return Share(parallel.rank(), parallel.num_ranks(), parallel.broadcast, parallel.wait_for_ranks)


class Stage:
    """The folder of a stage: the first rank writes it, the others wait for it.

    ::

        if stage.writer is not None:
            ...  # write the results to stage.writer.path
            stage.writer.finish()
        stage.wait()
    """

    def __init__(
        self, folder: Path, *, kind: str, config: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> None:
        is_first = parallel.rank() == 0
        self.writer = (
            ArtifactWriter(folder, kind=kind, config=config, inputs=inputs) if is_first else None
        )
        """The writer of the folder on the first rank; None on the others."""
        is_finished = self.writer is not None and self.writer.finished() is not None
        self.is_finished = parallel.broadcast(is_finished)
        """Whether the folder is complete and was written with the same settings and inputs."""
        self.path = parallel.broadcast(self.writer.path if self.writer else folder)
        """Folder for unfinished work, which becomes the folder of the stage."""

    def wait(self) -> None:
        """Wait until the first rank has finished the folder."""
        parallel.wait_for_ranks()


def random_for(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step's random numbers."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)


def learning_rate_at(step: int, total: int, config: TrainingConfig) -> float:
    """Return the rate at a step: linear warm-up, then a cosine to ``final_share`` of the peak.

    After the warm-up, at the fraction p of the remaining steps, the share of the peak is
    f + (1 − f) · (1 + cos πp) / 2 with f = ``final_share``.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


def num_steps(num_queries: int, config: TrainingConfig) -> int:
    """Return the number of steps: ``epochs`` passes in full batches, but at most ``max_steps``."""
    steps = max(1, math.ceil(config.epochs * num_queries / config.batch_size))
    return min(steps, config.max_steps) if config.max_steps else steps


def train(
    module: nn.Module,
    take_step: Callable[[Step], StepResult],
    *,
    total: int,
    config: TrainingConfig,
    folder: Path,
    progress: Progress,
    name: str,
) -> None:
    """Run ``take_step`` until ``total`` steps are done, or resume where an earlier run was stopped.

    On several ranks, each takes its part of every batch. Losses and gradients are means over ranks.

    Parameters
    ----------
    module
        holds the weights, which are in its checkpoint, too.
    folder
        receives the checkpoint and the log.

    Raises
    ------
    UsageError
        A batch cannot be divided evenly among the ranks.
    TrainingFailed
        The loss is no longer finite.
    """
    if config.batch_size % parallel.num_ranks():
        raise UsageError(
            f"{name}: a batch of {config.batch_size} cannot be divided evenly among "
            f"{parallel.num_ranks()} processes; change the number of processes, or "
            "training.batch-size"
        )
    optimizer = _optimizer(module, config)
    first_step = _resume(module, optimizer, folder)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parallel.copy_from_first_rank(module)
    progress.begin(name, total)
    saved_at = time.monotonic()
    module.train()
    with _open_log(folder, first_step) if parallel.rank() == 0 else nullcontext() as log:
        for index in range(first_step, total):
            rate = learning_rate_at(index, total, config)
            result, measures = _descend(take_step, index, rate, optimizer, parameters, config, name)
            if log is not None:
                log.write(json.dumps({"step": index, "learning_rate": rate, **measures}) + "\n")
                progress.advance(index + 1, measures)
                is_due = time.monotonic() - saved_at >= config.checkpoint_seconds
                if is_due and index + 1 < total:
                    # A resumed run keeps the log's lines up to the checkpoint, so they are on the
                    # disk before it.
                    log.flush()
                    sync(folder / METRICS)
                    _save(module, optimizer, folder, index + 1)
                    saved_at = time.monotonic()
            if result.stop:
                break
    module.eval()


def _descend(
    take_step: Callable[[Step], StepResult],
    index: int,
    rate: float,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    config: TrainingConfig,
    name: str,
) -> tuple[StepResult, dict[str, float]]:
    """Compute the loss of a step and descend its gradient; return the result and its measures."""
    torch.manual_seed((config.seed * 7_919 + index) % 2**63)  # dropout
    for group in optimizer.param_groups:
        group["lr"] = rate
    is_bf16 = config.precision == "bf16"
    with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=is_bf16):
        result = take_step(Step(index, random_for(config.seed, index)))
    measures = parallel.average_measures({"loss": result.loss, **result.measures})
    if not math.isfinite(measures["loss"]):
        raise TrainingFailed(
            f"{name}: the loss is {measures['loss']} at step {index}. Lower the learning rate "
            f"({config.learning_rate}) or look for features that are not finite"
        )
    optimizer.zero_grad(set_to_none=True)
    result.loss.backward()
    parallel.average_gradients(parameters)
    nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    optimizer.step()
    return result, measures


def _optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW for the trained parameters, with weight decay of matrices alone."""
    # Deviation 15: one recipe for all stages; the paper names AdamW, rate and cosine only.
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(BETA1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def _save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, done: int) -> None:
    """Write a checkpoint after ``done`` steps."""
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
    with write_atomically(folder / CHECKPOINT) as temporary:
        torch.save(state, temporary)


def _resume(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the checkpoint, if there is one; return the number of steps that are done."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["done"])


def _open_log(folder: Path, first_step: int) -> TextIO:
    """Open the log for appending, cut to the lines of the steps before ``first_step``."""
    path = folder / METRICS
    lines: list[str] = []
    if first_step and path.exists():
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    path.write_text("".join(lines[:first_step]))
    return path.open("a")
