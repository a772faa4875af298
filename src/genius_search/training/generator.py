"""Stage 2: the decoder that writes IDs (paper, section 4.3)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import Manifest, open_artifact
from genius_search.config import to_json
from genius_search.data.features import Pairs
from genius_search.nn import parallel
from genius_search.nn.codebooks import StoredQuantizer, as_floats
from genius_search.nn.generator import Generator, write_generator
from genius_search.nn.losses import prefix_loss
from genius_search.nn.packed import GENERATOR_KIND
from genius_search.progress import Progress
from genius_search.recipe import GeneratorConfig
from genius_search.training.codebooks import encode_features, fuse_features
from genius_search.training.loop import Stage, Step, StepResult, num_steps, train
from genius_search.writing import ArtifactWriter

CONTRASTED_QUERIES: Final = 64
"""Queries of a batch, at most, whose IDs are contrasted with others'."""


def train_generator(
    pairs: Pairs,
    quantizer: StoredQuantizer,
    folder: Path,
    config: GeneratorConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> Manifest:
    """Train the decoder on frozen embeddings and IDs, or open the folder if this was done already."""
    config = config if config.guide == "geometry" else replace(config, contrasted=0)
    inputs = {**pairs.fingerprints, "quantizer": quantizer.manifest.fingerprint}
    stage = Stage(folder, kind=GENERATOR_KIND, config=to_json(config), inputs=inputs)
    if stage.is_finished:
        return open_artifact(folder, kind=GENERATOR_KIND)
    training = config.training
    torch.manual_seed(training.seed)
    codebooks = quantizer.codebooks
    generator = Generator(codebooks.dim, codebooks.sizes, config).to(device)
    generator.start_codes(
        [torch.from_numpy(table) for table in codebooks.tables()],
        generator=torch.Generator().manual_seed(training.seed),
    )
    progress.say("fusing the training features")
    fused = stage.path / "fused"
    if parallel.rank() == 0:
        fused.mkdir(exist_ok=True)
        np.save(fused / "queries.npy", fuse_features(codebooks, pairs.queries))
        encoded = encode_features(codebooks, pairs.candidates)
        np.save(fused / "candidates.npy", encoded.embeddings.astype(np.float16))
        np.save(fused / "codes.npy", encoded.codes)
        del encoded
    parallel.wait_for_ranks()
    # Mapped: all processes of a machine share the memory.
    queries, candidates, codes = (
        np.load(fused / f"{name}.npy", mmap_mode="r") for name in ("queries", "candidates", "codes")
    )
    spread = codebooks.spread
    first_vectors = codebooks.tables()[spread.level]

    def scale(given: Tensor, own: np.ndarray) -> Tensor:
        """Scale queries as a search for their targets' modality does (:mod:`genius_search.nn.spread`)."""
        wanted = [frozenset([code]) for code in own[:, 0].tolist()]
        scales = spread.scales(as_floats(given) @ first_vectors.T, wanted)
        return given * torch.from_numpy(scales)[:, None]

    def take_step(step: Step) -> StepResult:
        batch = pairs.draw(step.number, training.batch_size, seed=training.seed)
        given = torch.from_numpy(queries[batch.query_rows]).float()
        all_codes = codes[batch.candidate_rows]
        if config.contrasted:
            losses = contrast(
                generator,
                given.to(device),
                scale(given, all_codes).to(device),
                torch.from_numpy(all_codes).to(device),
                torch.from_numpy(batch.false_negatives).to(device),
                config.contrasted,
            )
            names = [f"prefix_{length}" for length in range(1, 1 + len(losses))]
        else:
            targets = torch.from_numpy(candidates[batch.candidate_rows]).float()
            mixed = augment(given, targets, config, step.generator)
            rows = (mixed, torch.from_numpy(all_codes), scale(mixed, all_codes))
            losses = generator.loss(*(parallel.rows_of_rank(part).to(device) for part in rows))
            names = [f"level_{level}" for level in range(len(losses))]
        return StepResult(losses.mean(), dict(zip(names, losses.detach(), strict=True)))

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
        write_generator(writer, generator, dim=codebooks.dim)

    stage.write(write)
    return open_artifact(folder, kind=GENERATOR_KIND)


def contrast(
    generator: Generator,
    queries: Float[Tensor, "batch dim"],
    scaled: Float[Tensor, "batch dim"],
    codes: Int[Tensor, "batch levels"],
    false_negatives: Bool[Tensor, "batch batch"],
    count: int,
) -> Float[Tensor, " levels"]:
    """Return the loss of each prefix length (:func:`prefix_loss`) for some queries of a batch.

    Each is contrasted with the IDs of the batch whose code vectors are nearest to it, ``scaled`` as a search
    scales it.
    """
    every = torch.arange(len(codes), device=codes.device)
    own = parallel.rows_of_rank(every)[:CONTRASTED_QUERIES]
    is_answer = false_negatives[own] | (own[:, None] == every)
    vectors = generator.require_guide().vectors_of(codes)
    nearness = scaled[own] @ vectors.T - vectors.square().sum(dim=1) / 2
    others = nearness.masked_fill(is_answer, float("-inf")).topk(min(count, len(codes) - 1)).indices
    rows = torch.cat([own[:, None], others], dim=1)
    given, compared = (part[own].repeat_interleave(rows.shape[1], 0) for part in (queries, scaled))
    scores = generator.score_ids(given, codes[rows.ravel()], compared)
    excluded = is_answer.gather(1, rows)
    excluded[:, 0] = False
    return prefix_loss(scores.unflatten(0, rows.shape), codes[rows], excluded)


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
