"""Learning of an index that was created with an encoder: its model is replaced in place, and all IDs with it.

:func:`refit_index` fits the codebooks anew to the items, :func:`fit_index` trains on queries with answers.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from genius_search.artifact import fingerprint_of
from genius_search.config import CodebookConfig, SearchSettings, validate_settings
from genius_search.data.features import Features, Pairs
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.open import load_encoder
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.build import MAX_BATCH_ITEMS, encode_items, with_recall
from genius_search.index.calibrate import (
    NUM_FIRST_HITS,
    PAIRS_FORMAT,
    Pair,
    choose_density_weight,
    density_weights_around,
    read_pairs,
    significant_gain,
)
from genius_search.index.encode import EncodedQuery
from genius_search.index.items import Item
from genius_search.index.pool import stamp_of
from genius_search.index.query import SnapshotSearcher, default_settings
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import draw_embeddings, feature_rows, stored_features
from genius_search.index.store import OWN_MODEL, WORK, IndexManifest
from genius_search.index.writer import (
    Writer,
    alive_entries,
    items_to_encode,
    remove_leftovers,
    remove_work,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize, sum_features
from genius_search.progress import Progress
from genius_search.recipe import FitConfig
from genius_search.records import Modality, Query, did_of, instructed, qid_of
from genius_search.search.rank import QueryVectors
from genius_search.training.codebooks import FITTED_ITEMS, fit_codebooks, query_metric
from genius_search.training.features import FeatureRow, embed
from genius_search.writing import new_folder, sync, sync_tree

MIN_REFIT_GROWTH: Final = 1.5
"""A refit is suggested when an index has this many times the items that its codebooks were fitted to."""
MIN_TRAINING_BITS: Final = 4
"""Fewest bits of stored embeddings that are trained on instead of features."""
MIN_TRAINING_PAIRS: Final = 100
"""Fewer pairs are not enough to train on most and measure on the others."""
HELD_OUT_SHARE: Final = 0.1
"""Share of the pairs that are measured on."""
MIN_HELD_OUT_PAIRS: Final = 20
MAX_HELD_OUT_PAIRS: Final = 1000


class Recall(NamedTuple):
    """Share of queries with a right answer first, and among the first five."""

    at_1: float
    at_5: float

    @staticmethod
    def of(is_right: Bool[np.ndarray, "queries hits"]) -> Recall:
        """Return the recall of queries, from which of their first five hits are right."""
        return Recall(float(is_right[:, 0].mean()), float(is_right.any(axis=1).mean()))


class Fitted(NamedTuple):
    """The result of training on an index."""

    kept: bool
    """Whether the index now has the new model."""
    pairs: int
    left_out: int
    """Pairs whose items are not in the index."""
    measured: int
    """Pairs that were not trained on, and are measured."""
    before: Recall
    after: Recall


def fit_index(
    writer: Writer,
    model: Genius,
    pairs: Path | None,
    config: FitConfig,
    *,
    force: bool = False,
    device: str = "cpu",
    progress: Progress,
) -> Fitted:
    """Train on pairs and replace the model of an index, and all IDs, in one step.

    Fusion is trained, and codebooks are fitted to the items as it fuses them. No generator is trained: it
    finds no more (``docs/lab/log.md``). A tenth of the pairs is held out. Nothing changes, unless
    ``force``, if the new model does not find more of their answers among its first five hits than the old
    one, by more than a standard error. Run again after an interruption, finished stages are not repeated.

    Parameters
    ----------
    pairs
        a ``.jsonl`` file of queries, or a data set in M-BEIR's layout; None for what the index has learned.

    Raises
    ------
    UsageError
        the index was created with a trained model, its embeddings and pairs do not allow it, or the settings
        train nothing.
    BadData
        there are no pairs, or too few.
    """
    config = validate_settings(config)
    if config.quantizer.fusion.kind == "sum":
        raise UsageError(
            "these settings sum features, which is nothing to train; leave quantizer.fusion.kind out, or fit "
            "the codebooks anew with `genius index refit`"
        )
    snapshot = writer.snapshot
    manifest = snapshot.manifest
    if not manifest.has_own_model:
        raise UsageError(
            f"{writer.folder} was created with a trained model; `genius fit DATA --out MODEL` trains one "
            "anew, and `genius index create` makes an index with it"
        )
    if isinstance(model.encoder, PrecomputedEncoder) and (pairs is None or pairs.is_file()):
        raise UsageError(
            "the features of this index are looked up by id, and these queries have none; give a data set in "
            "M-BEIR's layout"
        )
    modalities: dict[str, Modality] = {}
    numbers: dict[str, int] = {}
    for number, entry in enumerate(alive_entries(snapshot.segments)):
        if isinstance(entry, Item):
            modalities[entry.id], numbers[entry.id] = entry.modality, number
    known, left_out = _read_known_pairs(writer.folder, pairs, numbers)
    work = writer.folder / WORK / "fit"
    queries = embed(
        _query_rows(model, known, modalities),
        model.encoder,
        work / "queries",
        inputs={
            "pairs": fingerprint_of(
                [[stamp_of(query), query.id, items] for query, items, _ in known]
            )
        },
        expected=len(known),
        progress=progress,
    )
    features = _item_features(writer, model, queries, work, progress)
    measured = _hold_out(known, config.quantizer.training.seed)
    lines = [
        Query(
            qid_of(number),
            query.modality,
            positives=tuple(did_of(numbers[name]) for name in answers),
        )
        for number, (query, answers, _) in enumerate(known)
        if number not in measured
    ]
    trained = _train(
        Pairs(lines, queries, features), features, model, work, config, device, progress
    )
    rows = np.flatnonzero(np.isin(queries.ids, list(measured)))
    find = partial(_find_right, queries, rows, known)
    before = find(model, snapshot, default_settings(model, snapshot))
    written = _write_replacement(writer, trained, features, progress)
    settings = default_settings(trained, written)
    after = find(trained, written, settings)
    kept = (
        force or significant_gain(np.asarray(after.any(axis=1)), np.asarray(before.any(axis=1))) > 0
    )
    if kept:
        _commit_replacement(writer, trained, written.manifest)
        is_found = {}
        for weight in density_weights_around(settings.density_weight):
            found = find(trained, written, dataclasses.replace(settings, density_weight=weight))
            is_found[weight] = np.asarray(found.any(axis=1))
        writer.update_manifest(
            density_weight=choose_density_weight(is_found, settings.density_weight)
        )
        remove_work(writer.folder)
    else:
        remove_leftovers(writer.folder, manifest)
    return Fitted(kept, len(known), left_out, len(rows), Recall.of(before), Recall.of(after))


def has_outgrown(model: Genius, snapshot: Snapshot) -> bool:
    """Return whether an index has grown by more than a half since its codebooks were fitted to it."""
    fitted = model.quantizer_manifest.inputs.get(FITTED_ITEMS)
    return fitted is not None and snapshot.num_rows > MIN_REFIT_GROWTH * int(fitted)


def refit_index(
    writer: Writer,
    model: Genius,
    *,
    levels: int | None = None,
    query_vectors: Shaped[np.ndarray, ...] | None = None,
    progress: Progress,
) -> None:
    """Fit the codebooks to the items of an index, and give all items new IDs in one step.

    Nothing is encoded. A calibration, which belongs to the old IDs, is removed.

    Raises
    ------
    UsageError
        the index was not created with an encoder alone, stores no fused embeddings, or has no items.
    """
    levels = (
        model.codebooks.config.levels
        if levels is None
        else validate_settings(CodebookConfig(levels=levels)).levels
    )
    snapshot = writer.snapshot
    manifest = snapshot.manifest
    if not manifest.has_own_model or manifest.embeddings != "fused":
        raise UsageError(
            f"{writer.folder} was created with a trained model, or stores no fused embeddings; only an index "
            "that was created with an encoder, and stores them, can be refitted"
        )
    if not snapshot.num_alive:
        raise UsageError(f"{writer.folder} has no items to fit codebooks to")
    metric = model.codebooks.metric
    if query_vectors is not None:
        metric = query_metric(query_vectors, model.dim)
    features = stored_features(snapshot, model)
    folder = writer.folder / WORK / "refit"
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted refit
    quantizer = fit_codebooks(
        *draw_embeddings(features),
        folder / "quantizer",
        items=len(features),
        inputs={"quantizer": model.quantizer_manifest.fingerprint},
        fused_by=model.codebooks,
        metric=metric,
        levels=levels,
        progress=progress,
    )
    fitted = Genius.finish(
        folder, _carry_encoder(model, folder), quantizer, None, model.instructions
    )
    fitted.fuse = sum_features  # from here on: what is stored is fused already
    written = _write_replacement(writer, fitted, features, progress)
    _commit_replacement(writer, fitted, written.manifest.replace(least=manifest.least))
    remove_work(writer.folder)


def _write_replacement(
    writer: Writer, model: Genius, features: Features, progress: Progress
) -> Snapshot:
    """Write all items with the IDs of a new model; return that state, to be committed."""
    before = writer.snapshot.manifest
    manifest = before.replace(
        model=f"{OWN_MODEL}-{before.generation + 1}",
        model_fingerprint=model.fingerprint,
        calibration=None,
        density_weight=None,
        least={},
        measured=None,
    )
    entries = alive_entries(writer.snapshot.segments)
    written = writer.rewrite(manifest, encode_items(model, entries, features, manifest, progress))
    return with_recall(model, written)


def _commit_replacement(writer: Writer, model: Genius, manifest: IndexManifest) -> None:
    """Move a new model from the folder of unfinished work into the index, and commit its items."""
    before, place = writer.snapshot.manifest.model, writer.folder / manifest.model
    shutil.rmtree(place, ignore_errors=True)  # of an interrupted run
    sync_tree(model.folder)
    model.folder.rename(place)
    sync(place.parent)
    writer.commit(manifest)
    shutil.rmtree(writer.folder / before, ignore_errors=True)


def _carry_encoder(model: Genius, folder: Path) -> Encoder:
    """Return the encoder for a new model in a folder; one inside the old model's folder is copied to it."""
    kind, _, place = model.encoder.spec.partition(":")
    inside = Path(place)
    if not inside.exists() or not inside.resolve().is_relative_to(model.folder.resolve()):
        return model.encoder
    target = folder / inside.resolve().relative_to(model.folder.resolve())
    shutil.rmtree(target, ignore_errors=True)  # of an interrupted run
    with new_folder(target) as partial:
        shutil.copytree(inside, partial, dirs_exist_ok=True)
    return load_encoder(f"{kind}:{target}", device=model.device)


def _read_known_pairs(
    folder: Path, source: Path | None, known: Container[str]
) -> tuple[list[Pair], int]:
    """Return the pairs of known items, and the number of others; refuse too few."""
    given = [pair for pair in read_pairs(folder, source) if pair.vector is None]
    pairs = [
        pair._replace(items=tuple(name for name in pair.items if name in known)) for pair in given
    ]
    pairs = [pair for pair in pairs if pair.items]
    left_out = len(given) - len(pairs)
    if len(pairs) < MIN_TRAINING_PAIRS:
        missing = f" ({left_out:,} {'query names' if left_out == 1 else 'queries name'} no item of the index)"
        raise BadData(
            f"{source or 'what was learned for texts'} gives {plural(len(pairs), 'pair')} for {folder}"
            f"{missing if left_out else ''}; "
            f"at least {MIN_TRAINING_PAIRS} are needed: {PAIRS_FORMAT}"
        )
    return pairs, left_out


def _query_rows(
    model: Genius, pairs: Sequence[Pair], modalities: Mapping[str, Modality]
) -> Iterator[FeatureRow]:
    """Yield each query once for each modality of its answers, as a search reads it."""
    for number, (query, items, _) in enumerate(pairs):
        for modality in sorted({modalities[name] for name in items}, key=lambda one: one.code):
            yield FeatureRow(
                id=number,
                key=ItemKey("query", query.id or str(number)),  # features are kept by key
                modality=query.modality,
                image=None if query.image is None else Path(query.image),
                text=instructed(model.instruction_for(query.modality, modality), query.text),
                wanted=modality,
            )


def _item_features(
    writer: Writer, model: Genius, queries: Features, work: Path, progress: Progress
) -> Features:
    """Return the features of all items: their embeddings if these are features, else encoded again.

    A sum of two features, the result of a trained fusion, and features that are no unit vectors cannot be had
    from embeddings.
    """
    snapshot = writer.snapshot
    lengths = np.linalg.norm(
        queries.gather(np.arange(min(len(queries), MAX_BATCH_ITEMS))).total(), axis=1
    )
    if (
        snapshot.manifest.embeddings != "none"
        and snapshot.manifest.embedding_bits >= MIN_TRAINING_BITS
        and model.codebooks.config.fusion.kind == "sum"
        and Modality.IMAGE_TEXT not in snapshot.count_by_modality()
        and bool((np.abs(lengths - 1) < 0.01).all())
    ):
        return stored_features(snapshot, model)
    return embed(
        feature_rows(items_to_encode(alive_entries(snapshot.segments)), writer.folder),
        model.encoder,
        work / "items",
        inputs={
            "items": fingerprint_of(
                [entry.model_dump(mode="json") for entry in snapshot.manifest.segments]
            )
        },
        expected=snapshot.num_alive,
        progress=progress,
    )


def _hold_out(pairs: Sequence[Pair], seed: int) -> set[int]:
    """Return the numbers of the pairs to measure: all of some items."""
    by_item: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        by_item.setdefault(pair.items[0], []).append(number)
    count = min(MAX_HELD_OUT_PAIRS, max(MIN_HELD_OUT_PAIRS, round(HELD_OUT_SHARE * len(pairs))))
    groups = list(by_item.values())
    random.Random(seed).shuffle(groups)
    return set(islice(chain.from_iterable(groups), count))


def _train(
    pairs: Pairs,
    items: Features,
    model: Genius,
    work: Path,
    config: FitConfig,
    device: str,
    progress: Progress,
) -> Genius:
    from genius_search.training.quantizer import train_quantizer  # noqa: PLC0415  refitting needs no PyTorch

    folder = work / "model"
    fusion = train_quantizer(
        pairs, work / "fusion", config.quantizer, progress=progress, device=device
    )
    quantizer = fit_codebooks(
        *draw_embeddings(items, fusion.codebooks.fuse),
        folder / "quantizer",
        items=len(items),
        inputs={"items": items.manifest.fingerprint, "fusion": fusion.manifest.fingerprint},
        fused_by=fusion.codebooks,
        levels=model.codebooks.config.levels,
        progress=progress,
    )
    return Genius.finish(folder, _carry_encoder(model, folder), quantizer, None, model.instructions)


def _find_right(
    queries: Features,
    rows: Int64[np.ndarray, " queries"],
    pairs: Sequence[Pair],
    model: Genius,
    snapshot: Snapshot,
    config: SearchSettings,
) -> Bool[np.ndarray, "queries hits"]:
    """Return for each query that was held out which of its first :data:`NUM_FIRST_HITS` hits are right."""
    features = queries.gather(rows)
    is_raw = snapshot.manifest.embeddings == "raw" and config.rerank == "embeddings"
    fused = model.embed_features(features)
    evidence = normalize(features.total()) if is_raw else fused
    encoded = [
        EncodedQuery(
            QueryVectors(fused[number], evidence[number], evidence[number]),
            NUM_FIRST_HITS,
            request_number=number,
            level0=model.level0_codes([*Modality][code]) if model.level0_is_exact else frozenset(),
        )
        for number, code in enumerate(queries.target_modality[rows].tolist())
    ]
    is_right = np.zeros((len(encoded), NUM_FIRST_HITS), dtype=bool)
    results = SnapshotSearcher(model, snapshot, config).search_encoded(encoded)
    for number, (pair, result) in enumerate(zip(queries.ids[rows].tolist(), results, strict=True)):
        right = [hit.id in pairs[pair].items for hit in result.hits]
        is_right[number, : len(right)] = right
    return is_right
