"""The one training loop: seeded, clipped, scheduled, resumable to the same losses, equal on any ranks.

A stage defines a step; the loop owns the optimizer, the schedule, the checkpoint and the log. Every
random choice of a step comes from a generator seeded by (seed, step), so a resumed run draws what an
uninterrupted one would have drawn.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from genius_search.errors import TrainingFailed, UsageError
from genius_search.nn import parallel
from genius_search.progress import Progress
from genius_search.recipe import TrainingConfig
from genius_search.writing import CHECKPOINT, ArtifactWriter, sync, write_atomically

METRICS: Final = "metrics.jsonl"
BETA1: Final = 0.9
CLIP_NORM: Final = 1.0
"""Longest gradient of a step."""


class Step(NamedTuple):
    """A step of a training and the random numbers it may use."""

    number: int
    """From 0."""
    generator: torch.Generator
    """On the CPU, seeded alike on all ranks and on every resumption."""


class StepResult(NamedTuple):
    """The loss to descend and the measures to log."""

    loss: Tensor
    measures: Mapping[str, Tensor | float]
    stop: bool = False
    """Whether this step is the last one."""


class Stage:
    """The folder of a stage: the first rank writes it, the others wait for it."""

    def __init__(
        self, folder: Path, *, kind: str, config: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> None:
        is_first = parallel.rank() == 0
        self._writer = (
            ArtifactWriter(folder, kind=kind, config=config, inputs=inputs) if is_first else None
        )
        done = self._writer is not None and self._writer.finished() is not None
        self.is_finished = parallel.broadcast(done)
        """Whether the folder is complete and was made by this very plan."""
        self.path = parallel.broadcast(self._writer.path if self._writer else folder)
        """Folder of what is not finished yet."""

    def write(self, write: Callable[[ArtifactWriter], object]) -> None:
        """Let the first rank write the results and finish the folder."""
        if self._writer is not None:
            write(self._writer)
        parallel.wait_for_ranks()


def random_for(seed: int, step: int) -> torch.Generator:
    """Return the generator of one step's random numbers."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)


def learning_rate_at(step: int, total: int, config: TrainingConfig) -> float:
    """Return the rate at a step: linear warm-up, then a cosine to ``final_share`` of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * share


def num_steps(num_queries: int, config: TrainingConfig) -> int:
    """Return the steps of a training run: epochs of full batches, cut by ``max_steps``."""
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
    """Run ``take_step`` until ``total`` steps are done; ``folder`` receives the checkpoint and the log.

    On several ranks, each takes its share of every batch. Losses and gradients are means over ranks.

    Raises
    ------
    UsageError
        a batch cannot be divided evenly among the ranks.
    TrainingFailed
        the loss is no longer finite.
    """
    if config.batch_size % parallel.num_ranks():
        raise UsageError(
            f"{name}: a batch of {config.batch_size} cannot be divided evenly among {parallel.num_ranks()} "
            "processes; change the number of processes, or training.batch-size"
        )
    optimizer = _optimizer(module, config)
    begun = _resume(module, optimizer, folder)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = parameters[0].device
    parallel.copy_from_first_rank(module)
    is_first = parallel.rank() == 0
    progress.begin(name, total)
    saved = time.monotonic()
    module.train()
    with _open_log(folder, begun) if is_first else nullcontext() as log:
        for index in range(begun, total):
            torch.manual_seed((config.seed * 7_919 + index) % 2**63)  # dropout
            rate = learning_rate_at(index, total, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
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
            if log is not None:
                log.write(json.dumps({"step": index, "learning_rate": rate, **measures}) + "\n")
                progress.advance(index + 1, measures)
                if time.monotonic() - saved >= config.checkpoint_seconds and index + 1 < total:
                    log.flush()
                    sync(folder / METRICS)  # the checkpoint counts on the lines before it
                    _save(module, optimizer, folder, index + 1)
                    saved = time.monotonic()
            if result.stop:
                break
    module.eval()


def _optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    # Deviation 15: one recipe for all stages; the paper names AdamW, rate and cosine only.
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(BETA1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def _save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, done: int) -> None:
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
    with write_atomically(folder / CHECKPOINT) as temporary:
        torch.save(state, temporary)


def _resume(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["done"])


def _open_log(folder: Path, begun: int) -> TextIO:
    """Open the log for more lines, without those of steps that will be done again."""
    path = folder / METRICS
    lines = (
        path.read_text(errors="replace").splitlines(keepends=True)
        if begun and path.exists()
        else []
    )
    path.write_text("".join(lines[:begun]))
    return path.open("a")
