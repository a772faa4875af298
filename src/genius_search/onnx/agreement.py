"""How well exported decoders agree with PyTorch's, and what each costs: measured in one run, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchConfig
from genius_search.data.features import Features
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.search.beam import search
from genius_search.search.decoder import Decoding
from genius_search.search.table import IdTable, Part

__all__ = ["Agreement", "Contender", "Trial", "agreement", "drawn_trial", "trial_of"]

BATCH: Final = 8
"""Queries searched together."""
DRAWN_IDS: Final = 20_000
_ENCODED: Final = 4096


class Trial(NamedTuple):
    """What is asked of whom."""

    queries: Float[Tensor, "queries dim"]
    table: IdTable


class Contender(NamedTuple):
    """A decoder under its name."""

    name: str
    decoder: Decoding


class Agreement(NamedTuple):
    """What one decoder found, beside what the first one found."""

    name: str
    top1: float
    """Share of the queries with the same best ID."""
    overlap_10: float
    """Mean share of the first one's 10 best IDs among its own 10 best."""
    overlap_50: float
    """Likewise of 50; of the beam, where that is narrower."""
    cpu_ms: float
    """Processor time of a query, of all cores together."""


def agreement(contenders: Sequence[Contender], trial: Trial, config: SearchConfig) -> list[Agreement]:
    """Let all decoders answer the same queries, batch by batch in turns; the first sets the standard.

    Raises
    ------
    UsageError
        there are no queries.
    """
    if not len(trial.queries):
        raise UsageError("there are no queries to compare decoders by")
    parts = [Part(trial.table)]
    batches = trial.queries.split(BATCH)
    found: list[list[np.ndarray]] = [[] for _ in contenders]
    seconds = [0.0] * len(contenders)
    for contender in contenders:  # so that nobody pays for what is done once
        search(contender.decoder, parts, batches[0], config)
    for batch in batches:
        for place, contender in enumerate(contenders):
            began = time.process_time()
            beams = search(contender.decoder, parts, batch, config)
            seconds[place] += time.process_time() - began
            rows = np.full((len(batch), config.beam), -1, dtype=np.int64)
            rows[:, : beams.low.shape[1]] = np.where(beams.filled(), beams.low[:, :, 0], -1)
            found[place].append(rows)
    answers = [np.concatenate(parts_found) for parts_found in found]
    return [
        Agreement(
            name=contender.name,
            top1=_overlap(answers[0], answers[place], 1),
            overlap_10=_overlap(answers[0], answers[place], 10),
            overlap_50=_overlap(answers[0], answers[place], 50),
            cpu_ms=1000 * seconds[place] / len(trial.queries),
        )
        for place, contender in enumerate(contenders)
    ]


def trial_of(model: Genius, queries: Features, candidates: Features, *, num_queries: int) -> Trial:
    """So many of the queries, evenly, against the IDs of all candidates."""
    chosen = np.unique(np.linspace(0, len(queries) - 1, num_queries).round().astype(np.int64))
    codes, typicality = [], []
    for rows, batch in candidates.batches(_ENCODED):
        encoded = model.encode(batch, candidates.modality[rows].astype(np.int64))
        codes.append(encoded.codes.numpy())
        typicality.append(encoded.code_cosine.numpy())
    table = IdTable.build(np.concatenate(codes), np.concatenate(typicality).astype(np.float32))
    return Trial(model.embed(queries.gather(chosen)), table)


def drawn_trial(sizes: Sequence[int], dim: int, *, num_queries: int, seed: int = 0) -> Trial:
    """Drawn unit vectors against drawn IDs: tells what a search costs, not how well real ones agree."""
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, DRAWN_IDS) for size in sizes], axis=1)
    vectors = torch.from_numpy(random.standard_normal((num_queries, dim)).astype(np.float32))
    return Trial(F.normalize(vectors), IdTable.build(codes, np.zeros(DRAWN_IDS, dtype=np.float32)))


def _overlap(
    standard: Int64[np.ndarray, "queries beams"], own: Int64[np.ndarray, "queries beams"], k: int
) -> float:
    shares = [
        np.isin(wanted[wanted >= 0], given[given >= 0]).mean()
        for wanted, given in zip(standard[:, :k], own[:, :k], strict=True)
    ]
    return float(np.mean(shares))
