"""``python -m research.baselines.dense``: an encoder's embeddings in faiss's indexes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import tyro

from genius_search.cli.options import DataArgument, JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress
from genius_search.config import Count, Natural, checked
from genius_search.data.mbeir import MBeir
from genius_search.encoders.base import Encoder, absolute_spec
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.nn.spread import normalize
from genius_search.progress import Progress
from genius_search.training.features import embed_pool
from research.baselines.faiss_index import (
    NORM_BYTES,
    FaissIndex,
    num_bits,
    num_lists,
    num_parts,
    train_index,
)
from research.command import run
from research.evaluate import EvaluationResult, evaluate_pools
from research.methods import DEPTH, MethodHits, PoolCandidates, RowQueries
from research.published.fusions import open_encoder
from research.settings import EvaluationConfig

BATCH: Final = 65_536
DenseKind = Literal["exact", "hnsw", "ivf-pq", "ivf-rq"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Settings of faiss's indexes."""

    kinds: tuple[DenseKind, ...] = ("exact",)
    """Kinds of index: exact (compare with every item), hnsw (a graph of neighbours), ivf-pq (product codes in
    lists), ivf-rq (residual codes in lists)."""

    code_bytes: Count = 14
    """Bytes of an item, where codes are kept: by default as many as an ID of the preset small with norm and
    density; ivf-pq takes the next number that divides a vector."""

    effort: Count = 16
    """Nodes that hnsw keeps in view, lists that the other two look through."""

    seed: Natural = 0
    """Seed for the choice of instructions, and for the sample that codes are learned from."""


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


def evaluate_dense(
    data: MBeir,
    encoder: Encoder,
    config: EvaluationConfig,
    dense: DenseConfig,
    folder: Path,
    *,
    evaluation: Path,
    progress: Progress,
) -> EvaluationResult:
    """Measure indexes of an encoder's embeddings; ``folder`` receives runs and results.

    Image and text features are summed and normalised, as UniIR does. Of ``config`` only rows, pools, split,
    instructions, seed and the number of queries count. Raises UsageError for too few bytes for a code.

    Parameters
    ----------
    evaluation
        folder of the features of pools and queries, and of the training candidates, from which centroids and
        codes are learned; they are made unless they exist.
    """
    dense = checked(dense)
    kinds = dense.kinds
    config = checked(config)
    place = evaluation / "training" / "candidates"
    training = embed_pool(data, data.training_pools(), encoder, place, progress=progress)
    trained: dict[str, Any] = {}

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
        if factory not in trained:
            vectors = [normalize(batch.total()) for _, batch in training.batches(BATCH)]
            trained[factory] = train_index(factory, np.concatenate(vectors), seed=dense.seed)
        index = FaissIndex(trained[factory], pool.raw(slice(None)).numpy())
        for of_row in queries:
            found = index.search(of_row.raw.numpy(), DEPTH, effort=dense.effort)
            hits = [pool.hits(items, scores) for items, scores in zip(found.items, found.scores, strict=True)]
            yield MethodHits(f"dense-{kind}", hits, index.item_bytes, found.compared / len(of_row.qids))

    def answer(queries: Sequence[RowQueries], pool: PoolCandidates) -> Iterator[list[MethodHits]]:
        # One kind after the other, so that one index at a time is in memory.
        found = [list(search_pool(kind, queries, pool)) for kind in kinds]
        return map(list, zip(*found, strict=True))

    results = evaluate_pools(data, encoder, config, answer, folder, evaluation=evaluation, progress=progress)
    about = {
        "encoder": {"spec": encoder.spec, "fingerprint": encoder.fingerprint},
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
        "dense": {**dataclasses.asdict(dense), "kinds": list(kinds)},
    }
    return EvaluationResult(results, about).write(folder)


@command
class Dense(JsonOption):
    """Measure embedding search as `research.evaluate` measures a model: same queries, pools, files.

    Centroids and codes are learned from the training candidates, as IDs are.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    out: Path
    """Folder for runs and results.json."""

    model: OptionalFolder = None
    """Folder whose encoder is measured: the --out of `genius fit`."""

    encoder: str = ""
    """Instead of a model: an encoder, such as clip:NAME, or fusion:FOLDER for UniIR's fusions."""

    dense: Annotated[DenseConfig, tyro.conf.arg(name="")] = DenseConfig()

    options: EvaluationConfig = EvaluationConfig()
    """Rows, pools and queries."""

    evaluation: OptionalFolder = None
    """Folder for the features of pools and queries; default: evaluation/ in --model or --out."""

    def run(self) -> None:
        """Index, search, measure, print the table."""
        if (self.model is None) is not bool(self.encoder):
            raise UsageError("give either --model or --encoder")
        data = MBeir(self.data)
        with TerminalProgress() as progress:
            if self.model is not None:
                encoder = Genius.open(self.model).encoder
            else:
                encoder = open_encoder(absolute_spec(self.encoder))
            result = evaluate_dense(
                data,
                encoder,
                self.options,
                self.dense,
                self.out,
                evaluation=self.evaluation or (self.model or self.out) / "evaluation",
                progress=progress,
            )
        result.print(as_json=self.json)


main = partial(run, Dense, "baselines.dense")


if __name__ == "__main__":
    sys.exit(main())
