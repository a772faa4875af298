"""Stage 2: training of the decoder that generates IDs (paper, section 4.3)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import Manifest, open_artifact
from genius_search.config import to_json
from genius_search.data.features import Pairs
from genius_search.nn import parallel
from genius_search.nn.codebooks import Codebooks, StoredQuantizer, as_floats
from genius_search.nn.generator import Generator, write_generator
from genius_search.nn.losses import prefix_loss
from genius_search.nn.packed import GENERATOR_KIND
from genius_search.progress import Progress
from genius_search.recipe import GeneratorConfig
from genius_search.training.codebooks import encode_features, fuse_features
from genius_search.training.loop import Stage, Step, StepResult, num_steps, train

CONTRASTED_QUERIES: Final = 64
"""Maximum number of queries of a batch whose target IDs are contrasted with other IDs."""


def train_generator(
    pairs: Pairs,
    quantizer: StoredQuantizer,
    folder: Path,
    config: GeneratorConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> Manifest:
    """Train the decoder on frozen embeddings and IDs, or open the folder if it is finished."""
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
    fused_folder = stage.path / "fused"
    _fuse_pairs(codebooks, pairs, fused_folder)
    train(
        generator,
        GeneratorStep(generator, codebooks, pairs, fused_folder, config, device),
        total=num_steps(len(pairs), training),
        config=training,
        folder=stage.path,
        progress=progress,
        name="train generator",
    )

    if stage.writer is not None:
        shutil.rmtree(fused_folder)
        write_generator(stage.writer, generator, dim=codebooks.dim)
    stage.wait()
    return open_artifact(folder, kind=GENERATOR_KIND)


def _fuse_pairs(codebooks: Codebooks, pairs: Pairs, folder: Path) -> None:
    """Write the embeddings and IDs of all pairs into files, once, on the first rank."""
    if parallel.rank() == 0:
        folder.mkdir(exist_ok=True)
        np.save(folder / "queries.npy", fuse_features(codebooks, pairs.queries))
        encoded = encode_features(codebooks, pairs.candidates)
        np.save(folder / "candidates.npy", encoded.embeddings.astype(np.float16))
        np.save(folder / "codes.npy", encoded.codes)
    parallel.wait_for_ranks()


class GeneratorStep:
    """A step of stage 2: equation 10 or, with ``contrasted``, the loss of prefixes.

    Parameters
    ----------
    folder
        The embeddings and IDs of the pairs, in place of features.
    """

    def __init__(
        self,
        generator: Generator,
        codebooks: Codebooks,
        pairs: Pairs,
        folder: Path,
        config: GeneratorConfig,
        device: str,
    ) -> None:
        self.generator = generator
        self.pairs = pairs
        self.config = config
        self.device = device
        self._spread = codebooks.spread
        # With the code vectors of the first semantic level, products are scaled.
        self._first_vectors = codebooks.tables()[codebooks.spread.level]
        # The files are mapped, so that all processes of a machine share their memory.
        self._queries = np.load(folder / "queries.npy", mmap_mode="r")
        self._candidates = np.load(folder / "candidates.npy", mmap_mode="r")
        self._codes = np.load(folder / "codes.npy", mmap_mode="r")

    def __call__(self, step: Step) -> StepResult:
        """Return the loss of a batch: the mean over levels, or over lengths of prefixes."""
        training = self.config.training
        batch = self.pairs.draw(step.number, training.batch_size, seed=training.seed)
        queries = torch.from_numpy(self._queries[batch.query_rows]).float()
        codes = self._codes[batch.candidate_rows]
        if self.config.contrasted:
            losses = contrast(
                self.generator,
                queries.to(self.device),
                self._scale(queries, codes).to(self.device),
                torch.from_numpy(codes).to(self.device),
                torch.from_numpy(batch.false_negatives).to(self.device),
                self.config.contrasted,
            )
            names = [f"prefix_{length}" for length in range(1, 1 + len(losses))]
        else:
            targets = torch.from_numpy(self._candidates[batch.candidate_rows]).float()
            mixed = augment(queries, targets, self.config, step.generator)
            inputs = (mixed, torch.from_numpy(codes), self._scale(mixed, codes))
            losses = self.generator.loss(
                *(parallel.rows_of_rank(rows).to(self.device) for rows in inputs)
            )
            names = [f"level_{level}" for level in range(len(losses))]
        return StepResult(losses.mean(), dict(zip(names, losses.detach(), strict=True)))

    def _scale(
        self, queries: Float[Tensor, "batch dim"], codes: Int64[np.ndarray, "batch levels"]
    ) -> Float[Tensor, "batch dim"]:
        """Scale queries like a search for the modality of their targets, which have these IDs."""
        level0 = [frozenset([code]) for code in codes[:, 0].tolist()]
        scales = self._spread.scales(as_floats(queries) @ self._first_vectors.T, level0)
        return queries * torch.from_numpy(scales)[:, None]


def contrast(
    generator: Generator,
    queries: Float[Tensor, "batch dim"],
    scaled: Float[Tensor, "batch dim"],
    codes: Int[Tensor, "batch levels"],
    false_negatives: Bool[Tensor, "batch batch"],
    count: int,
) -> Float[Tensor, " levels"]:
    """Return the loss of each prefix length for the first queries of a rank's part of a batch.

    Each query's target is contrasted with the IDs of the batch whose vectors v are nearest to the
    scaled query q, those with the largest q·v − |v|²/2
    (:func:`~genius_search.nn.losses.prefix_loss`).

    Parameters
    ----------
    scaled
        the queries, scaled as a search scales them.
    codes
        IDs of the batch; query i's target is ID i.
    false_negatives
        true at [i, j] if ID j answers query i, too.
    count
        number of other IDs for each query.
    """
    batch = torch.arange(len(codes), device=codes.device)
    chosen = parallel.rows_of_rank(batch)[:CONTRASTED_QUERIES]
    is_answer = false_negatives[chosen] | (chosen[:, None] == batch)
    vectors = generator.require_guide().vectors_of(codes)
    nearness = scaled[chosen] @ vectors.T - vectors.square().sum(dim=1) / 2
    wrong = nearness.masked_fill(is_answer, float("-inf")).topk(min(count, len(codes) - 1)).indices
    # Row i holds the IDs that query i is scored with: [target, nearest wrong ID, second nearest, …]
    ids = torch.cat([chosen[:, None], wrong], dim=1)
    repeated, repeated_scaled = (
        rows[chosen].repeat_interleave(ids.shape[1], 0) for rows in (queries, scaled)
    )
    scores = generator.score_ids(repeated, codes[ids.ravel()], repeated_scaled)
    # If a query has too few wrong IDs in the batch, topk also returns answers.
    excluded = is_answer.gather(1, ids)
    excluded[:, 0] = False
    return prefix_loss(scores.unflatten(0, ids.shape), codes[ids], excluded)


def augment(
    queries: Float[Tensor, "batch dim"],
    candidates: Float[Tensor, "batch dim"],
    config: GeneratorConfig,
    random: torch.Generator,
) -> Float[Tensor, "batch dim"]:
    """Move each query embedding q part of the way to its target c (equation 11).

    With shares s drawn from Beta(2, 2), the result is

    - ``paper``: s q + (1 − s) c, with a share for each sample
    - ``reference``: √s ⊙ q + √(1 − s) ⊙ c, normalised, with a share for each dimension

    ``plain_share`` of the samples are not augmented (deviation 14).
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
    is_plain = torch.rand(len(queries), 1, generator=random) < config.plain_share
    return torch.where(is_plain, queries, mixed)


def _beta_2_2(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draw from Beta(2, 2): the median of three uniform numbers."""
    return torch.rand((3, *shape), generator=random).median(dim=0).values
