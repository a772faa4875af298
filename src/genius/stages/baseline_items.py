"""What rivals' IDs are made of, read from a data set with a model's encoder and fusion: embeddings, texts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64

from genius.artifact import open_artifact
from genius.baselines.id_kinds import Items, KnownTexts
from genius.data import features as features_on_disk
from genius.data.features import Features
from genius.data.mbeir import MBeir, read_pool, read_queries
from genius.data.records import candidate_number, query_number
from genius.errors import ArtifactError
from genius.model import Genius
from genius.stages.embed_records import (
    TrainingFeatures,
    embed_pool,
    embed_training,
    fingerprint_of_files,
    instruction_files,
)
from genius.stages.pools import ALL
from genius.stages.progress import Progress
from genius.stages.train_quantizer import encode, fuse


class Sources(NamedTuple):
    """Where items come from."""

    data: MBeir
    model: Genius
    evaluation: Path
    """Folder of the model's evaluation: it has, or will have, the features of the pools."""


def pool_items(sources: Sources, split: str, *, with_codes: bool, progress: Progress) -> Items:
    """Every candidate of a split's pools, in the order of the evaluation."""
    data = sources.data
    files = list(dict.fromkeys([*data.global_pool(split), *data.local_pools_of(split)]))
    place = sources.evaluation / ALL / "features"
    features = embed_pool(data, files, sources.model.encoder, place, progress=progress)
    return _items(sources, features, files, with_codes=with_codes)


def training_features(sources: Sources, folder: Path, *, progress: Progress) -> TrainingFeatures:
    """Features of the training records: those the model was trained on, if it has them still."""
    data, model = sources.data, sources.model
    own = model.folder / "features"
    asked = [*data.training_queries(), *instruction_files(data)]
    if _is_of(own / "candidates", data.training_pools(), model) and _is_of(own / "queries", asked, model):
        return TrainingFeatures(Features.open(own / "queries"), Features.open(own / "candidates"))
    return embed_training(data, model.encoder, folder, progress=progress)


def training_items(sources: Sources, candidates: Features, *, with_codes: bool) -> Items:
    """Every candidate of the training pool, in the order of its features."""
    return _items(sources, candidates, sources.data.training_pools(), with_codes=with_codes)


def known_texts(sources: Sources, queries: Features) -> KnownTexts:
    """The texts of the training queries, each under its first instruction."""
    texts = {
        query_number(query.qid): query.text
        for path in sources.data.training_queries()
        for query in read_queries(path)
        if query.text
    }
    _, first = np.unique(queries.ids, return_index=True)
    rows = np.array([row for row in first.tolist() if int(queries.ids[row]) in texts], dtype=np.int64)
    embeddings = fuse(sources.model.quantizer, queries)[torch.from_numpy(rows)].float()
    return KnownTexts([texts[int(queries.ids[row])] or "" for row in rows], embeddings)


def together(first: Items, second: Items) -> Items:
    """The items of both, each once."""
    seen = set(first.numbers.tolist())
    new = np.array(
        [row for row, number in enumerate(second.numbers.tolist()) if number not in seen], dtype=np.int64
    )
    codes = (
        None
        if first.codes is None or second.codes is None
        else np.concatenate([first.codes, second.codes[new]])
    )
    return Items(
        np.concatenate([first.numbers, second.numbers[new]]),
        torch.cat([first.embeddings, second.embeddings[torch.from_numpy(new)]]),
        [*first.texts, *(second.texts[row] for row in new.tolist())],
        codes,
    )


def rows_of(
    numbers: Int64[np.ndarray, " wanted"], among: Int64[np.ndarray, " known"]
) -> Int64[np.ndarray, " wanted"]:
    """Where each wanted number is among those known; −1 for one that is not."""
    if not len(among):
        return np.full(len(numbers), -1)
    order = np.argsort(among, kind="stable")
    found = order[np.searchsorted(among, numbers, sorter=order).clip(max=len(among) - 1)]
    return np.where(among[found] == numbers, found, -1)


def _items(sources: Sources, features: Features, files: list[Path], *, with_codes: bool) -> Items:
    texts = {candidate_number(candidate.did): candidate.text for candidate in read_pool(files)}
    quantizer = sources.model.quantizer
    return Items(
        features.ids,
        fuse(quantizer, features).float(),
        [texts[number] for number in features.ids.tolist()],
        encode(quantizer, features).codes.short().numpy() if with_codes else None,
    )


def _is_of(folder: Path, files: list[Path], model: Genius) -> bool:
    """Whether a finished folder of features was made from these files by the model's encoder."""
    try:
        manifest = open_artifact(folder, kind=features_on_disk.KIND)
    except ArtifactError:
        return False
    made_from = {"records": fingerprint_of_files(files), "encoder": model.encoder.fingerprint}
    return all(manifest.inputs.get(name) == value for name, value in made_from.items())
