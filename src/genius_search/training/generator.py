"""Stage 2, ``genius train generator``: the decoder that writes IDs (paper, section 4.3)."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import GeneratorConfig, checked, to_json
from genius_search.data.pairs import Pairs
from genius_search.nn import parallel
from genius_search.nn.folded import KIND
from genius_search.nn.generator import (
    TrainedGenerator,
    load_generator,
    make_generator,
    write_generator,
)
from genius_search.nn.ids import TrainedIds, apply_scheme, residual_ids
from genius_search.nn.quantizer import TrainedQuantizer, encode, fuse
from genius_search.progress import Progress
from genius_search.training.loop import Stage, Step, StepResult, num_steps, train
from genius_search.writing import ArtifactWriter


def train_generator(
    pairs: Pairs,
    quantizer: TrainedQuantizer,
    folder: Path,
    config: GeneratorConfig,
    *,
    ids: TrainedIds | None = None,
    progress: Progress,
    device: str = "cpu",
) -> TrainedGenerator:
    """Train the decoder on frozen embeddings and IDs, or open the folder if this was done already.

    Parameters
    ----------
    ids
        the scheme that gives candidates their IDs; by default the quantizer. Without code vectors of its
        own, there is no guide and the code embeddings begin at random.
    """
    scheme = (ids or residual_ids(quantizer.quantizer)).scheme
    tables = scheme.tables()
    if tables is None:
        config = dataclasses.replace(config, guide="none")
    config = checked(config)
    inputs = {**pairs.fingerprints, "quantizer": quantizer.manifest.fingerprint}
    if ids is not None and ids.manifest is not None:
        inputs["ids"] = ids.manifest.fingerprint
    stage = Stage(folder, kind=KIND, config=to_json(config), inputs=inputs)
    if stage.is_finished:
        return load_generator(folder, device=device)
    training = config.training
    torch.manual_seed(training.seed)
    dim = quantizer.quantizer.dim
    generator = make_generator(dim, scheme.sizes, config, shares_codes=scheme.shares_codes).to(device)
    if tables is not None:
        generator.start_codes(tables, generator=torch.Generator().manual_seed(training.seed))
    progress.say("fusing the training features")
    fused = stage.path / "fused"
    if parallel.rank() == 0:
        fused.mkdir(exist_ok=True)
        np.save(fused / "queries.npy", fuse(quantizer.quantizer, pairs.queries).numpy())
        encoded = apply_scheme(scheme, encode(quantizer.quantizer, pairs.candidates), pairs.candidates.ids)
        np.save(fused / "candidates.npy", encoded.embeddings.half().numpy())
        np.save(fused / "codes.npy", encoded.codes.numpy())
        del encoded
    parallel.wait()
    # Mapped: all processes of a machine share the memory.
    queries, candidates, codes = (
        np.load(fused / f"{name}.npy", mmap_mode="r") for name in ("queries", "candidates", "codes")
    )

    def take_step(step: Step) -> StepResult:
        batch = pairs.draw(step.number, training.batch_size, seed=training.seed)
        mixed = augment(
            torch.from_numpy(queries[batch.query_rows]).float(),
            torch.from_numpy(candidates[batch.candidate_rows]).float(),
            config,
            step.generator,
        )
        own_codes = torch.from_numpy(codes[parallel.own_rows(batch.candidate_rows)])
        losses = generator.loss(parallel.own_rows(mixed).to(device), own_codes.to(device))
        by_level = {f"level_{level}": value for level, value in enumerate(losses.detach())}
        return StepResult(losses.mean(), by_level)

    train(
        generator,
        take_step,
        total=num_steps(len(pairs), training),
        config=training,
        folder=stage.path,
        progress=progress,
        name="train generator",
    )

    def write(writer: ArtifactWriter) -> None:
        shutil.rmtree(fused)
        write_generator(writer, generator, dim=dim)

    stage.write(write)
    return load_generator(folder, device=device)


def augment(
    queries: Float[Tensor, "batch dim"],
    candidates: Float[Tensor, "batch dim"],
    config: GeneratorConfig,
    random: torch.Generator,
) -> Float[Tensor, "batch dim"]:
    """Move each query embedding part of the way to its target (equation 11).

    ``paper`` draws one share per sample from Beta(2, 2) and mixes linearly; ``reference`` draws one per
    dimension, mixes with square roots and normalises. ``plain_share`` of the samples stay as they are
    (deviation 14).
    """
    match config.augmentation:
        case "none":
            return queries
        case "paper":
            share = _beta_2_2((len(queries), 1), random)
            mixed = share * queries + (1 - share) * candidates
        case "reference":
            share = _beta_2_2(tuple(queries.shape), random)
            mixed = F.normalize(share.sqrt() * queries + (1 - share).sqrt() * candidates, dim=-1)
    plain = torch.rand(len(queries), 1, generator=random) < config.plain_share
    return torch.where(plain, queries, mixed)


def _beta_2_2(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draw from Beta(2, 2): the median of three uniform numbers."""
    return torch.rand((3, *shape), generator=random).median(dim=0).values
