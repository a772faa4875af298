"""One rank of a stage-1 training, run as a process: ``rank.py PLAN FOLDER RANK RANKS``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from genius_search.config import from_json
from genius_search.data.features import Features, Pairs
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Silent
from genius_search.recipe import QuantizerConfig
from genius_search.records import Modality, Query
from genius_search.training.loop import Step, StepResult, train
from genius_search.training.quantizer import QuantizerStep


def main(plan_file: Path, folder: Path, rank: int, ranks: int) -> None:
    """Train every configuration of the plan and leave the weights and how many codes were revived."""
    torch.set_num_threads(1)
    own = folder / f"rank-{rank}"
    own.mkdir(parents=True)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder.resolve()}/meeting", rank=rank, world_size=ranks
        )
    plan = torch.load(plan_file, weights_only=True)
    queries, candidates = Features.open(Path(plan["queries"])), Features.open(Path(plan["candidates"]))
    lines = [Query(qid, Modality.TEXT, "?", positives=tuple(positives)) for qid, positives in plan["lines"]]
    pairs = Pairs(lines, queries, candidates)
    for number, settings in enumerate(plan["configs"]):
        config = from_json(QuantizerConfig, settings)
        torch.manual_seed(config.training.seed)
        quantizer = Quantizer(candidates.dim, config)
        total = config.training.max_steps
        trainer = QuantizerStep(quantizer, pairs, total)
        revived = 0.0

        def take_step(step: Step, trainer: QuantizerStep = trainer) -> StepResult:
            nonlocal revived
            result = trainer(step)
            revived += float(result.measures["revived"])
            return result

        log = own / str(number)
        log.mkdir()
        train(
            quantizer,
            take_step,
            total=total,
            config=config.training,
            folder=log,
            progress=Silent(),
            name="rank",
        )
        weights = {**quantizer.state_dict(), "revived": torch.tensor(revived)}
        torch.save(weights, own / f"weights-{number}.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
