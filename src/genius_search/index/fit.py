"""Fit or train the model of an index again, and replace the model with all IDs in one commit.

:func:`refit_index` fits codebooks to the items; :func:`fit_index` trains on queries with answers.
Either writes all items with the new IDs. Only an index that was created with an encoder has such a
model.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from genius_search.config import CodebookConfig, SearchSettings, validate_settings
from genius_search.data.features import Features, Pairs
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.encoders.open import load_encoder
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.encoders.rows import FeatureRow
from genius_search.encoders.store import embed_unfinished
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.build import (
    MAX_BATCH_ITEMS,
    Fuse,
    batches_with_ids,
    check_recall,
    num_fine_codes_of,
    with_recall,
)
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
from genius_search.index.query import SnapshotSearcher
from genius_search.index.settings import default_settings
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import (
    draw_embeddings,
    item_encoder,
    refuse_left_out,
    stored_features,
)
from genius_search.index.store import OWN_MODEL, WORK, IndexManifest
from genius_search.index.writer import (
    Writer,
    alive_entries,
    remove_leftovers,
    remove_work,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize, sum_features
from genius_search.progress import Progress
from genius_search.recipe import FitConfig
from genius_search.records import Modality, Query, did_of, instructed, qid_of
from genius_search.training.codebooks import FITTED_ITEMS, fit_codebooks, query_metric
from genius_search.writing import new_folder, sync, sync_tree

MIN_REFIT_GROWTH: Final = 1.5
"""Growth of an index, since its codebooks were fitted, from which on a refit is suggested."""
MIN_TRAINING_BITS: Final = 4
"""Minimum bits per number of stored embeddings that can take the place of features in training."""
MIN_TRAINING_PAIRS: Final = 100
"""Minimum number of pairs, of which most are trained on and the others measured."""
HELD_OUT_SHARE: Final = 0.1
"""Share of the pairs that are not trained on, but measured."""
MIN_HELD_OUT_PAIRS: Final = 20
MAX_HELD_OUT_PAIRS: Final = 1000
MAX_LENGTH_ERROR: Final = 0.01
"""Features whose lengths differ from 1 by less are unit vectors."""


class Recall(NamedTuple):
    """Share of queries with a right answer first, and among the first five."""

    at_1: float
    at_5: float

    @staticmethod
    def of(is_right: Bool[np.ndarray, "queries hits"]) -> Recall:
        """Return the recall, given a mask of the right answers among the first five hits."""
        return Recall(float(is_right[:, 0].mean()), float(is_right.any(axis=1).mean()))


class Fitted(NamedTuple):
    """The result of training on an index."""

    kept: bool
    """Whether the index now has the new model."""
    pairs: int
    left_out: int
    """Number of pairs whose items are not in the index."""
    measured: int
    """Number of pairs that were not trained on, but measured."""
    before: Recall
    after: Recall


class _AliveItems(NamedTuple):
    """Modality and number of each alive item, by its id; passages are numbered, too."""

    modalities: dict[str, Modality]
    numbers: dict[str, int]

    @staticmethod
    def of(snapshot: Snapshot) -> _AliveItems:
        """Number the entries of an index in the order of :func:`alive_entries`."""
        alive = _AliveItems({}, {})
        reads_images = snapshot.manifest.reads_images
        for number, entry in enumerate(alive_entries(snapshot.segments)):
            if isinstance(entry, Item):
                alive.modalities[entry.id] = entry.modality if reads_images else Modality.TEXT
                alive.numbers[entry.id] = number
        return alive


class _HeldOut(NamedTuple):
    """Pairs that are measured, and the features of their queries."""

    queries: Features
    rows: Int64[np.ndarray, " queries"]
    """Rows of the queries' features; ``queries.ids`` are numbers of pairs."""
    pairs: Sequence[Pair]
    """All pairs by number."""

    def search(
        self, model: Genius, snapshot: Snapshot, settings: SearchSettings
    ) -> Bool[np.ndarray, "queries hits"]:
        """Return which of the first :data:`NUM_FIRST_HITS` hits of each query are right."""
        features = self.queries.gather(self.rows)
        is_raw = snapshot.manifest.embeddings == "raw" and settings.rerank == "embeddings"
        fused = model.embed_features(features)
        evidence = normalize(features.total()) if is_raw else fused
        encoded = []
        for number, code in enumerate(self.queries.target_modality[self.rows].tolist()):
            modality = [*Modality][code]
            level0 = model.level0_codes(modality) if model.level0_is_exact else frozenset()
            encoded.append(
                [
                    EncodedQuery(
                        fused[number],
                        evidence[number],
                        NUM_FIRST_HITS,
                        level0=level0,
                        feature=evidence[number],
                    )
                ]
            )
        is_right = np.zeros((len(encoded), NUM_FIRST_HITS), dtype=bool)
        results = SnapshotSearcher(model, snapshot, settings).search_encoded(encoded)
        pair_numbers = self.queries.ids[self.rows].tolist()
        for number, (pair, result) in enumerate(zip(pair_numbers, results, strict=True)):
            right = [hit.id in self.pairs[pair].items for hit in result.hits]
            is_right[number, : len(right)] = right
        return is_right


def fit_index(
    writer: Writer,
    model: Genius,
    source: Path | None,
    config: FitConfig,
    *,
    force: bool = False,
    device: str = "cpu",
    progress: Progress,
) -> Fitted:
    """Train on pairs, and replace the model and all IDs of an index in one step.

    The fusion is trained, and codebooks are fitted to the items as it fuses them. No generator is
    trained, because it finds no more (``docs/lab/log.md``). A tenth of the pairs is held out: the
    index changes only if the new model finds more of their answers among its first five hits than
    the old one, by more than a standard error. After an interruption, finished stages are not
    repeated.

    Parameters
    ----------
    source
        A ``.jsonl`` file of queries, or a data set in M-BEIR's layout; None for the choices that
        the index has learned.
    force
        Replace the model even if it is no better.

    Raises
    ------
    UsageError
        The index was created with a trained model, its embeddings and pairs do not allow training,
        or the settings train nothing.
    BadData
        There are no pairs, or too few.
    """
    config = validate_settings(config)
    snapshot = writer.snapshot
    _check_trainable(writer, model, source, config)
    alive = _AliveItems.of(snapshot)
    pairs, num_left_out = _read_pairs_of_items(writer.folder, source, alive.numbers)
    work = writer.folder / WORK / "fit"
    queries = _embed_queries(model, pairs, alive.modalities, work, progress)
    features = _item_features(writer, model, queries, progress)
    held_out_pairs = _hold_out(pairs, config.quantizer.training.seed)
    training_queries = _training_queries(pairs, held_out_pairs, alive.numbers)
    training_pairs = Pairs(training_queries, queries, features)
    trained = _train(training_pairs, features, model, work, config, device, progress)
    rows = np.flatnonzero(np.isin(queries.ids, list(held_out_pairs)))
    held_out = _HeldOut(queries, rows, pairs)
    right_before = held_out.search(model, snapshot, default_settings(model, snapshot))
    written = _write_replacement(writer, trained, features, progress)
    right_after = held_out.search(trained, written, default_settings(trained, written))
    is_replaced = force or significant_gain(_any_right(right_after), _any_right(right_before)) > 0
    if is_replaced:
        commit_replacement(writer, trained, written.manifest)
        writer.update_manifest(density_weight=_measure_density_weight(held_out, trained, written))
        remove_work(writer.folder)
    else:
        remove_leftovers(writer.folder, snapshot.manifest)
    recalls = Recall.of(right_before), Recall.of(right_after)
    return Fitted(is_replaced, len(pairs), num_left_out, len(rows), *recalls)


def _check_trainable(writer: Writer, model: Genius, source: Path | None, config: FitConfig) -> None:
    """Raise :class:`UsageError` for settings, an index or pairs that cannot be trained on."""
    if config.quantizer.fusion.kind == "sum":
        raise UsageError(
            "these settings sum features, so there is nothing to train; leave out "
            "quantizer.fusion.kind, or fit the codebooks again with `genius index refit`"
        )
    if not writer.snapshot.manifest.has_own_model:
        raise UsageError(
            f"{writer.folder} was created with a trained model; `genius fit DATA --out MODEL` "
            "trains a new model, and `genius index create` makes an index with it"
        )
    has_no_ids = source is None or source.is_file()
    if isinstance(model.encoder, PrecomputedEncoder) and has_no_ids:
        raise UsageError(
            "the features of this index are looked up by id, and these queries have none; give a "
            "data set in M-BEIR's layout"
        )


def _read_pairs_of_items(
    folder: Path, source: Path | None, item_ids: Container[str]
) -> tuple[list[Pair], int]:
    """Return the pairs with items of the index, and the number of other pairs.

    Raises
    ------
    BadData
        There are fewer than :data:`MIN_TRAINING_PAIRS`.
    """
    read = [pair for pair in read_pairs(folder, source) if pair.vector is None]
    pairs = []
    for pair in read:
        present = tuple(item_id for item_id in pair.items if item_id in item_ids)
        if present:
            pairs.append(pair._replace(items=present))
    num_left_out = len(read) - len(pairs)
    if len(pairs) < MIN_TRAINING_PAIRS:
        missing = ""
        if num_left_out:
            verb = "query names" if num_left_out == 1 else "queries name"
            missing = f" ({num_left_out:,} {verb} no item of the index)"
        raise BadData(
            f"{source or 'the log of choices for texts'} has {plural(len(pairs), 'pair')} for "
            f"{folder}{missing}; at least {MIN_TRAINING_PAIRS} are needed: {PAIRS_FORMAT}"
        )
    return pairs, num_left_out


def _embed_queries(
    model: Genius,
    pairs: Sequence[Pair],
    modalities: Mapping[str, Modality],
    work: Path,
    progress: Progress,
) -> Features:
    """Encode the queries; the ids of the features are the numbers of the pairs."""
    return embed_unfinished(
        _query_rows(model, pairs, modalities),
        model.encoder,
        work,
        name="queries",
        expected=len(pairs),
        progress=progress,
    )


def _query_rows(
    model: Genius, pairs: Sequence[Pair], modalities: Mapping[str, Modality]
) -> Iterator[FeatureRow]:
    """Yield each query once for each modality of its answers, as a search reads it."""
    for number, (query, item_ids, _) in enumerate(pairs):
        targets = {modalities[item_id] for item_id in item_ids}
        for target in sorted(targets, key=lambda modality: modality.code):
            yield FeatureRow(
                id=number,
                key=ItemKey("query", query.id or str(number)),  # features are stored by key
                modality=query.modality,
                image=None if query.image is None else Path(query.image),
                text=instructed(model.instruction_for(query.modality, target), query.text),
                wanted=target,
            )


def _item_features(
    writer: Writer, model: Genius, queries: Features, progress: Progress
) -> Features:
    """Return the features of all items, if possible without encoding them again."""
    snapshot = writer.snapshot
    reason = _why_encode(snapshot, model, queries)
    if reason is None:
        return stored_features(snapshot, model)
    progress.say(f"encoding the items again, since {reason}")
    with item_encoder(writer.folder, model.encoder) as work:
        features = work.features_of(
            alive_entries(snapshot.segments), snapshot.num_alive, progress, has_contents=False
        )
        work.save()
    refuse_left_out(features.left_out, model.encoder)
    return features


def _why_encode(snapshot: Snapshot, model: Genius, queries: Features) -> str | None:
    """Return why stored embeddings cannot take the place of features; None if they can.

    The stored embedding of an item is its feature if the item has only one, which is a unit vector.
    """
    manifest = snapshot.manifest
    if manifest.embeddings == "none":
        return "the index stores no embeddings"
    if manifest.embedding_bits < MIN_TRAINING_BITS:
        return f"stored embeddings have {manifest.embedding_bits} bits per number"
    if model.codebooks.config.fusion.kind != "sum":
        return "stored embeddings were fused by training"
    if manifest.reads_images and _has_pairs(snapshot):
        return "embeddings of pictures with texts are sums of features"
    sample = queries.gather(np.arange(min(len(queries), MAX_BATCH_ITEMS)))
    lengths = np.linalg.norm(sample.total(), axis=1)
    if (np.abs(lengths - 1) >= MAX_LENGTH_ERROR).any():
        return "the encoder's features are no unit vectors"
    return None


def _has_pairs(snapshot: Snapshot) -> bool:
    """Return whether an index has pairs of picture and text."""
    return Modality.IMAGE_TEXT in snapshot.count_by_modality()


def _hold_out(pairs: Sequence[Pair], seed: int) -> set[int]:
    """Return the numbers of random pairs to measure.

    Pairs with the same first item are held out together, so that no measured item was trained on.
    """
    numbers_by_item: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers_by_item.setdefault(pair.items[0], []).append(number)
    share = round(HELD_OUT_SHARE * len(pairs))
    count = min(MAX_HELD_OUT_PAIRS, max(MIN_HELD_OUT_PAIRS, share))
    groups = list(numbers_by_item.values())
    random.Random(seed).shuffle(groups)
    return set(islice(chain.from_iterable(groups), count))


def _training_queries(
    pairs: Sequence[Pair], held_out_pairs: Collection[int], item_numbers: Mapping[str, int]
) -> list[Query]:
    """Return the queries to train on, with their answers as candidates of the features."""
    queries = []
    for number, pair in enumerate(pairs):
        if number not in held_out_pairs:
            positives = tuple(did_of(item_numbers[item_id]) for item_id in pair.items)
            queries.append(Query(qid_of(number), pair.query.modality, positives=positives))
    return queries


def _train(
    pairs: Pairs,
    items: Features,
    model: Genius,
    work: Path,
    config: FitConfig,
    device: str,
    progress: Progress,
) -> Genius:
    """Train a fusion, fit codebooks to the fused items, and return the new model."""
    from genius_search.training.quantizer import (  # noqa: PLC0415  refitting needs no PyTorch
        train_quantizer,
    )

    folder = work / "model"
    fusion = train_quantizer(
        pairs, work / "fusion", config.quantizer, progress=progress, device=device
    )
    quantizer = fit_codebooks(
        *draw_embeddings(items, fusion.codebooks.fuse),
        folder / "quantizer",
        items=len(items),
        inputs={"items": items.fingerprint, "fusion": fusion.manifest.fingerprint},
        fused_by=fusion.codebooks,
        levels=fitted_levels(model),
        progress=progress,
    )
    return Genius.finish(folder, _carry_encoder(model, folder), quantizer, None, model.instructions)


def _any_right(is_right: Bool[np.ndarray, "queries hits"]) -> Bool[np.ndarray, " queries"]:
    """Return which queries have a right answer among their first hits."""
    return np.asarray(is_right.any(axis=1))


def _measure_density_weight(held_out: _HeldOut, model: Genius, snapshot: Snapshot) -> float | None:
    """Return the weight of densities with which the held-out queries find most answers."""
    settings = default_settings(model, snapshot)
    is_right_by_weight = {}
    for weight in density_weights_around(settings.density_weight):
        weighted = dataclasses.replace(settings, density_weight=weight)
        is_right_by_weight[weight] = _any_right(held_out.search(model, snapshot, weighted))
    return choose_density_weight(is_right_by_weight, settings.density_weight)


def fitted_levels(model: Genius) -> int | None:
    """Return the number of levels to fit codebooks with again; None stands for fine codes."""
    return None if model.codebooks.fine is not None else model.codebooks.config.levels


def has_outgrown(model: Genius, snapshot: Snapshot) -> bool:
    """Return whether an index has grown by more than half since its codebooks were fitted."""
    num_fitted = model.quantizer_manifest.inputs.get(FITTED_ITEMS)
    return num_fitted is not None and snapshot.num_rows > MIN_REFIT_GROWTH * int(num_fitted)


def refit_index(
    writer: Writer,
    model: Genius,
    *,
    levels: int | None = None,
    recall: float | None = None,
    query_vectors: Shaped[np.ndarray, ...] | None = None,
    progress: Progress,
) -> None:
    """Fit the codebooks to the items of an index, and give all items new IDs in one step.

    Nothing is encoded. The calibration is removed, since it belongs to the old IDs.

    Raises
    ------
    UsageError
        The index was created with a trained model, stores no fused embeddings, or has no items.
    """
    check_recall(recall)
    if levels is None:
        levels = fitted_levels(model)
    else:
        levels = validate_settings(CodebookConfig(levels=levels)).levels
    snapshot = writer.snapshot
    manifest = snapshot.manifest
    check_refit(writer)
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
    encoder = _carry_encoder(model, folder)
    refitted = Genius.finish(folder, encoder, quantizer, None, model.instructions)
    # The stored embeddings are fused already, so the fusion of the model is not applied again.
    written = _write_replacement(
        writer, refitted, features, progress, fuse=sum_features, recall=recall
    )
    commit_replacement(writer, refitted, written.manifest.replace(least=manifest.least))
    remove_work(writer.folder)


def check_refit(writer: Writer) -> None:
    """Raise :class:`UsageError` unless codebooks can be fitted to the items of an index again."""
    manifest = writer.snapshot.manifest
    if not manifest.has_own_model or manifest.embeddings != "fused":
        raise UsageError(
            f"{writer.folder} was created with a trained model, or stores no fused embeddings; "
            "only an index that was created with an encoder, and stores them, can be refitted"
        )
    if not writer.snapshot.num_alive:
        raise UsageError(f"{writer.folder} has no items to fit codebooks to")


def _write_replacement(
    writer: Writer,
    model: Genius,
    features: Features,
    progress: Progress,
    *,
    fuse: Fuse | None = None,
    recall: float | None = None,
) -> Snapshot:
    """Write all items with the IDs of a new model; return that state, to be committed."""
    manifest = replaced_manifest(writer.snapshot.manifest, model, recall)
    entries = alive_entries(writer.snapshot.segments)
    batches = batches_with_ids(model, entries, features, manifest, progress, fuse=fuse)
    return with_recall(model, writer.rewrite(manifest, batches))


def replaced_manifest(before: IndexManifest, model: Genius, recall: float | None) -> IndexManifest:
    """Return the manifest of an index with a new model, without what was measured with the old."""
    return before.replace(
        model=f"{OWN_MODEL}-{before.generation + 1}",
        model_fingerprint=model.fingerprint,
        reads_images=reads_images(model.encoder),
        fine_codes=num_fine_codes_of(model),
        recall=before.recall if recall is None else recall,
        calibration=None,
        density_weight=None,
        least={},
        measured=None,
    )


def commit_replacement(writer: Writer, model: Genius, manifest: IndexManifest) -> None:
    """Move a new model from the folder of unfinished work into the index, and commit its items."""
    old_model_folder = writer.folder / writer.snapshot.manifest.model
    new_model_folder = writer.folder / manifest.model
    shutil.rmtree(new_model_folder, ignore_errors=True)  # of an interrupted run
    sync_tree(model.folder)
    model.folder.rename(new_model_folder)
    sync(new_model_folder.parent)
    writer.commit(manifest)
    shutil.rmtree(old_model_folder, ignore_errors=True)


def _carry_encoder(model: Genius, folder: Path) -> Encoder:
    """Return the encoder for a new model.

    An encoder inside the folder of the old model, which will be removed, is copied to the new one.
    """
    name, _, location = model.encoder.spec.partition(":")
    old_path, old_folder = Path(location), model.folder.resolve()
    if not old_path.exists() or not old_path.resolve().is_relative_to(old_folder):
        return model.encoder
    new_path = folder / old_path.resolve().relative_to(old_folder)
    shutil.rmtree(new_path, ignore_errors=True)  # of an interrupted run
    with new_folder(new_path) as unfinished:
        shutil.copytree(old_path, unfinished, dirs_exist_ok=True)
    return load_encoder(f"{name}:{new_path}", device=model.device)
