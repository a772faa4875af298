"""Evaluate a model with a data set in M-BEIR's layout: index its pool, and evaluate the index."""

from __future__ import annotations

from pathlib import Path

from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData
from genius_search.index.evaluate import Evaluation
from genius_search.index.index import Index
from genius_search.index.store import CURRENT
from genius_search.model import Genius
from genius_search.progress import Progress


def evaluate_model(
    model: Genius,
    data: MBeir,
    folder: Path,
    *,
    split: str = "test",
    max_queries: int = 0,
    progress: Progress,
) -> Evaluation:
    """Evaluate a model with an index of the union of a split's pools.

    The index is created in ``folder``, with fused embeddings for exact search, unless the folder
    already contains an index of the same model. Other parameters are those of
    :func:`genius_search.index.evaluate.evaluate_index`.

    Raises
    ------
    BadData
        The union of the pools consists of several files.
    ArtifactMismatch
        The folder contains an index of another model.
    """
    pools = data.global_pool(split)
    if len(pools) != 1:
        raise BadData(
            f"{data.root}: the pool of split {split} consists of {len(pools)} files; create an "
            "index with `genius index create` and `genius index add`, and evaluate it with --index"
        )
    if (folder / CURRENT).exists():
        index = Index.open(folder, model=model)
    else:
        index = Index.create(folder, pools[0], model=model, embeddings="fused", progress=progress)
    return index.evaluate(data, split=split, max_queries=max_queries, progress=progress)
