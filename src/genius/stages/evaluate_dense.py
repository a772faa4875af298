"""``genius baseline dense``: an encoder's embeddings in faiss's indexes, measured as our runs are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32
from torch.nn import functional as F

from genius.artifact import write_json
from genius.baselines.choices import DenseName, dense_kind
from genius.baselines.dense import NOTHING, Fitted, fit
from genius.config import Count, Natural, checked
from genius.data.features import Features
from genius.data.mbeir import MBeir
from genius.evaluation.tables import ResultRow, to_json
from genius.stages.evaluate import RESULTS, EvaluationConfig, chosen_rows, evaluate_rows, query_features
from genius.stages.fit import Embedded
from genius.stages.methods import DEPTH, Found, PoolItems, RowQueries, hits_of
from genius.stages.pools import EmbeddedPools
from genius.stages.progress import Progress

__all__ = ["DenseConfig", "DenseResult", "evaluate_dense"]

READ_AT_ONCE: Final = 65_536


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Which indexes."""

    kinds: tuple[DenseName, ...] = ("exact",)
    """Of index."""

    code_bytes: Count = 14
    """Of an item, where codes are kept: as many as an ID of the preset small with its marks."""

    effort: Count = 16
    """Nodes that hnsw keeps in view, lists that the others look through."""

    seed: Natural = 0
    """Of the sample that centroids and codes are learned from."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Their names in tables and runs."""
        return tuple(map(_method, self.kinds))


class Timing(NamedTuple):
    """What one pool took, in processor time."""

    method: str
    pool_size: int
    fit_seconds: float
    """0 where a kind was fitted for a pool of this size before."""
    index_seconds: float
    queries: int
    ms_per_query: float


class DenseResult(NamedTuple):
    """Rows of the table, and what they took."""

    rows: list[ResultRow]
    timings: list[Timing]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As ``genius evaluate`` has it, with ``timings`` in place of ``health``."""
        timings = [timing._asdict() for timing in self.timings]
        return {**self.about, **to_json(self.rows), "timings": timings}


class DenseRival:
    """Fits kinds of index on an encoder's training candidates, and indexes pools with them."""

    def __init__(self, training: Features, config: DenseConfig) -> None:
        self._training = training
        self._config = config
        self._fitted: dict[object, Fitted] = {}
        self.timings: list[Timing] = []

    def fit(self, name: DenseName, num_items: int) -> Fitted:
        """A kind for pools of so many items: how many lists there are follows from that."""
        config = self._config
        kind = dense_kind(
            name,
            num_items=num_items,
            num_training=len(self._training),
            dim=self._training.dim,
            code_bytes=config.code_bytes,
            effort=config.effort,
        )
        if kind not in self._fitted:
            self._fitted[kind] = fit(_unit_sums(self._training), kind, seed=config.seed)
        return self._fitted[kind]

    def answer(self, rows: Sequence[RowQueries], pool: PoolItems) -> Iterator[list[Found]]:
        """Index a pool in every way and ask each the queries of each row."""
        # One kind after the other, so that one index at a time is in memory.
        answers = [list(self._answer(kind, rows, pool)) for kind in self._config.kinds]
        return map(list, zip(*answers, strict=True))

    def _answer(self, kind: DenseName, rows: Sequence[RowQueries], pool: PoolItems) -> Iterator[Found]:
        began = time.process_time()
        fitted = self.fit(kind, len(pool))
        ready = time.process_time()
        index = fitted.index(pool.raw(slice(None)).numpy())
        built = time.process_time()
        size = index.bytes_per_item()
        method = _method(kind)
        for queries in rows:
            asked = time.process_time()
            counted = index.search_counting(queries.raw.numpy(), DEPTH)
            took = time.process_time() - asked
            found = counted.found
            hits = [
                hits_of(pool, items[items != NOTHING], scores[items != NOTHING])
                for items, scores in zip(found.items, found.scores, strict=True)
            ]
            count = len(queries.qids)
            self.timings.append(
                Timing(method, len(pool), ready - began, built - ready, count, 1000 * took / count)
            )
            yield Found(method, hits, size, counted.compared / count)


def evaluate_dense(
    data: MBeir,
    embedded: Embedded,
    config: EvaluationConfig,
    dense: DenseConfig,
    folder: Path,
    *,
    evaluation: Path,
    progress: Progress,
) -> DenseResult:
    """Measure indexes of an encoder's embeddings; ``folder`` receives runs and results.

    Image and text features are summed and normalised, as UniIR does. Of ``config`` only rows, pools, split,
    instructions, seed and the number of queries count.

    Parameters
    ----------
    embedded
        the encoder, and features of the training candidates, from which centroids and codes are learned.
    evaluation
        where features of pools and queries are, or go.

    Raises
    ------
    UsageError
        an index cannot be made so: too few training candidates, too few bytes.
    MissingExtra
        faiss is not installed.
    BadData
        as ``genius evaluate``.
    """
    dense = checked(dense)
    config = dataclasses.replace(checked(config), methods=dense.methods)
    rows = chosen_rows(data, config)
    encoder = embedded.encoder
    pools = EmbeddedPools(
        data, encoder, rows, evaluation, split=config.split, pools=config.pools, progress=progress
    )
    asked = []
    for row in rows:
        ways = query_features(data, encoder, row, config, evaluation, progress)
        sums = [(way.qids, F.normalize(way.features.total(), dim=-1)) for way in ways]
        asked.append((row, [RowQueries(qids, total, total) for qids, total in sums]))
    rival = DenseRival(embedded.features.candidates, dense)
    folder.mkdir(parents=True, exist_ok=True)
    results = evaluate_rows(asked, pools, rival.answer, config, folder, progress)
    about = {
        "encoder": {"spec": encoder.spec, "fingerprint": encoder.fingerprint},
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
        "dense": dataclasses.asdict(dense),
    }
    result = DenseResult(results, rival.timings, about)
    write_json(folder / RESULTS, result.to_json())
    return result


def _method(kind: DenseName) -> str:
    return f"dense-{kind}"


def _unit_sums(features: Features) -> Float32[np.ndarray, "items dim"]:
    parts = [F.normalize(batch.total(), dim=-1).numpy() for _, batch in features.batches(READ_AT_ONCE)]
    return np.concatenate(parts)
