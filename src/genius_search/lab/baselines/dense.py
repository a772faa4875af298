"""``genius baseline dense``: an encoder's embeddings in faiss's indexes, measured as a model's IDs are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from torch.nn import functional as F

from genius_search.config import checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.lab.baselines.faiss_index import (
    NORM_BYTES,
    FaissIndex,
    num_bits,
    num_lists,
    num_parts,
    train_index,
)
from genius_search.lab.evaluate import RESULTS, evaluate_pools
from genius_search.lab.methods import DEPTH, MethodHits, PoolCandidates, RowQueries
from genius_search.lab.results import ResultRow, to_json
from genius_search.lab.settings import DenseConfig, DenseKind, EvaluationConfig, choose
from genius_search.progress import Progress
from genius_search.training.features import Embedded
from genius_search.writing import write_json

BATCH: Final = 65_536


def factory_string(kind: DenseKind, *, num_items: int, num_training: int, dim: int, code_bytes: int) -> str:
    """Return faiss's description of an index for a pool.

    Parameters
    ----------
    num_training
        number of vectors to learn from: no more lists, and no more codes, can be learned.
    code_bytes
        bytes of an item, where codes are kept: residual codes take exactly so many, with a norm; product
        codes the next number that divides a vector. Exact search and HNSW keep vectors in 16 bits.
    """
    lists, bits = min(num_lists(num_items), num_training), num_bits(min(num_items, num_training))
    match kind:
        case "exact":
            return "SQfp16"
        case "hnsw":
            return "HNSW32_SQfp16"
        case "ivf-pq":
            return f"IVF{lists},PQ{num_parts(dim, code_bytes)}x{bits}np"
        case "ivf-rq":
            if code_bytes <= NORM_BYTES:
                raise UsageError(
                    f"{code_bytes} bytes hold no residual code, since {NORM_BYTES} is the norm's; give at "
                    f"least {NORM_BYTES + 1}"
                )
            return f"IVF{lists},RQ{code_bytes - NORM_BYTES}x{bits}_Nqint8"


class Timing(NamedTuple):
    """Processor time that one pool took."""

    method: str
    pool_size: int
    fit_seconds: float
    """0 if the index was trained for an earlier pool."""
    index_seconds: float
    queries: int
    ms_per_query: float


class DenseResult(NamedTuple):
    """Rows of the results table, and timings."""

    rows: list[ResultRow]
    timings: list[Timing]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``genius evaluate`` does, with ``timings`` in place of ``health``."""
        timings = [timing._asdict() for timing in self.timings]
        return {**self.about, **to_json(self.rows), "timings": timings}


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
    instructions, seed and the number of queries count. Raises UsageError for too few bytes for a code.

    Parameters
    ----------
    embedded
        the encoder, and features of the training candidates, from which centroids and codes are learned.
    evaluation
        folder of the features of pools and queries, which are made unless they exist.
    """
    dense = checked(dense)
    kinds: tuple[DenseKind, ...] = choose("--kinds", dense.kinds, get_args(DenseKind))
    config = dataclasses.replace(checked(config), methods=tuple(f"dense-{kind}" for kind in kinds))
    encoder, training = embedded.encoder, embedded.features.candidates
    trained: dict[str, Any] = {}
    timings: list[Timing] = []

    def search_pool(
        kind: DenseKind, queries: Sequence[RowQueries], pool: PoolCandidates
    ) -> Iterator[MethodHits]:
        factory = factory_string(
            kind,
            num_items=len(pool),
            num_training=len(training),
            dim=training.dim,
            code_bytes=dense.code_bytes,
        )
        start = time.process_time()
        if factory not in trained:
            vectors = [F.normalize(batch.total(), dim=-1).numpy() for _, batch in training.batches(BATCH)]
            trained[factory] = train_index(factory, np.concatenate(vectors), seed=dense.seed)
        fitted = time.process_time()
        index = FaissIndex(factory, pool.raw(slice(None)).numpy(), trained=trained[factory])
        indexed = time.process_time()
        for of_row in queries:
            start_search = time.process_time()
            found = index.search(of_row.raw.numpy(), DEPTH, effort=dense.effort)
            seconds, count = time.process_time() - start_search, len(of_row.qids)
            method, size = f"dense-{kind}", len(pool)
            times = (fitted - start, indexed - fitted, count, 1000 * seconds / count)
            timings.append(Timing(method, size, *times))
            hits = [pool.hits(items, scores) for items, scores in zip(found.items, found.scores, strict=True)]
            yield MethodHits(method, hits, index.item_bytes, found.compared / count)

    def answer(queries: Sequence[RowQueries], pool: PoolCandidates) -> Iterator[list[MethodHits]]:
        # One kind after the other, so that one index at a time is in memory.
        found = [list(search_pool(kind, queries, pool)) for kind in kinds]
        return map(list, zip(*found, strict=True))

    results, _ = evaluate_pools(
        data, encoder, config, answer, folder, evaluation=evaluation, progress=progress
    )
    about = {
        "encoder": {"spec": encoder.spec, "fingerprint": encoder.fingerprint},
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
        "dense": {**dataclasses.asdict(dense), "kinds": list(kinds)},
    }
    result = DenseResult(results, timings, about)
    write_json(folder / RESULTS, result.to_json())
    return result
