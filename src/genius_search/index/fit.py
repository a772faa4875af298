"""Training on an index that was created with an encoder alone; its model is replaced in place."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32

from genius_search.artifact import fingerprint_of
from genius_search.config import FitConfig, SearchConfig, checked
from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_json_lines, read_queries
from genius_search.data.pairs import Pairs
from genius_search.encoders.base import Encoder, ImageInput, ItemKey, TextInput
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.adding import CHUNK, encode_features, feature_rows
from genius_search.index.hubness import FIRST, WEIGHTS, Hubness
from genius_search.index.query import EncodedQuery, default_settings, search_encoded
from genius_search.index.refit import carry_encoder
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import OWN_MODEL, WORK
from genius_search.index.writer import Writer, alive_items, remove_leftovers, remove_work
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.nn.fusion import SumFusion
from genius_search.nn.quantizer import Quantizer, TrainedQuantizer
from genius_search.progress import Progress
from genius_search.records import Modality, Query, did_of, instructed, qid_of
from genius_search.search.rank import CodeRanker
from genius_search.training.codebooks import draw_sample, fit_codebooks
from genius_search.training.features import FeatureRow, embed
from genius_search.training.generator import train_generator
from genius_search.training.quantizer import train_quantizer
from genius_search.writing import put_in_place, sync_tree

MIN_BITS: Final = 4
"""Fewest bits of stored embeddings that are trained on instead of features."""
FEWEST: Final = 100
"""Fewer pairs are not enough to train on most and measure on the others."""
HELD_OUT: Final = 0.1
"""Share of the pairs that are measured on."""
FEWEST_HELD_OUT: Final = 20
MOST_HELD_OUT: Final = 1000
CAPTIONS: Final = "captions"
"""Field with several captions of a picture; the first of them is its text."""
WHAT_PAIRS_ARE: Final = (
    "pairs are pictures with captions, a .jsonl file of queries with lines such as "
    '{"text": "a red kite", "id": "kites/7.jpg"}, or a data set in M-BEIR\'s layout whose candidates have '
    "the items' ids"
)


class Pair(NamedTuple):
    """A query and the items that answer it."""

    text: str | None
    image: Path | None
    items: tuple[str, ...]
    key: ItemKey = ItemKey("query", "")

    @property
    def modality(self) -> Modality:
        """Modality of the query."""
        return Modality.of(has_image=self.image is not None, has_text=bool(self.text))


class Recall(NamedTuple):
    """Share of queries with a right answer first, and among the first five."""

    at_1: float
    at_5: float


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

    Fusion is trained first; then codebooks are fitted to the items as it fuses them, and the generator is
    trained on their codes. A tenth of the pairs is held out. If the new model finds no more of their answers
    than the old one, nothing changes, unless ``force``. Run again after an interruption, finished stages are
    not repeated.

    Parameters
    ----------
    pairs
        a ``.jsonl`` file of queries, a data set in M-BEIR's layout, or None for the captions of the index.

    Raises
    ------
    UsageError
        the index was created with a trained model, or its embeddings and pairs do not allow it.
    BadData
        there are no pairs, or too few.
    """
    config = checked(config)
    snapshot = writer.snapshot
    if not snapshot.manifest.has_own_model:
        raise UsageError(
            f"{writer.folder} was created with a trained model; `genius fit DATA --out MODEL` trains one "
            "anew, and `genius index create` makes an index with it"
        )
    if isinstance(model.encoder, PrecomputedEncoder) and (pairs is None or pairs.is_file()):
        raise UsageError(
            "the features of this index are looked up by id, and these queries have none; give a data set in "
            "M-BEIR's layout"
        )
    numbers, modalities = _number_items(snapshot)
    given = _read_captions(snapshot, config.generator.training.seed) if pairs is None else _read_pairs(pairs)
    known = [pair._replace(items=tuple(name for name in pair.items if name in numbers)) for pair in given]
    known = [pair for pair in known if pair.items]
    if len(known) < FEWEST:
        where = "the captions of the index" if pairs is None else str(pairs)
        count = len(given) - len(known)
        missing = f" ({count:,} {'query names' if count == 1 else 'queries name'} no item of the index)"
        raise BadData(
            f"{where} gives {plural(len(known), 'pair')} for {writer.folder}"
            f"{missing if count else ''}; at least {FEWEST} are needed: {WHAT_PAIRS_ARE}"
        )
    work = writer.folder / WORK / "fit"
    wanted = [[numbers[name] for name in pair.items] for pair in known]
    queries = embed(
        _query_rows(model, known, wanted, modalities),
        model.encoder,
        work / "queries",
        inputs={"pairs": fingerprint_of([_describe(pair) for pair in known])},
        expected=len(known),
        progress=progress,
    )
    candidates = _embed_items(writer, model, queries, work, len(numbers), progress)
    measured = _hold_out(wanted, config.generator.training.seed)
    lines = [
        Query(qid_of(number), pair.modality, positives=tuple(map(did_of, rows)))
        for number, (pair, rows) in enumerate(zip(known, wanted, strict=True))
        if number not in measured
    ]
    trained = _train(Pairs(lines, queries, candidates), candidates, model, work, config, device, progress)
    held_out = [number for number, row in enumerate(queries.ids.tolist()) if row in measured]
    right = [set(known[queries.ids[row]].items) for row in held_out]
    before = _measure(model, snapshot, queries, held_out, right)
    manifest = snapshot.manifest.replace(
        model=f"{OWN_MODEL}-{snapshot.manifest.generation + 1}",
        model_fingerprint=trained.fingerprint,
        calibration=None,
        hubness=None,
    )
    items = chain.from_iterable(map(alive_items, snapshot.segments))
    written = writer.write_replacement(
        manifest, encode_features(trained, items, candidates, manifest, progress)
    )
    after = _measure(trained, written, queries, held_out, right)
    kept = force or (after.at_5, after.at_1) > (before.at_5, before.at_1)
    if kept:
        place = writer.folder / manifest.model
        shutil.rmtree(place, ignore_errors=True)  # of an interrupted run
        sync_tree(trained.folder)
        put_in_place(trained.folder, place)
        writer.replace(written)
        shutil.rmtree(writer.folder / snapshot.manifest.model, ignore_errors=True)
        config_now = default_settings(trained, writer.snapshot)
        is_found = {
            weight: np.array(
                [
                    any(one)
                    for one in _find(
                        trained,
                        writer.snapshot,
                        queries,
                        held_out,
                        right,
                        dataclasses.replace(config_now, density_weight=weight),
                    )
                ]
            )
            for weight in WEIGHTS
        }
        writer.keep_hubness(Hubness.choose(is_found, "pairs that were held out"))
        remove_work(writer.folder)
    else:
        remove_leftovers(writer.folder, snapshot.manifest.segments)
    return Fitted(kept, len(known), len(given) - len(known), len(held_out), before, after)


def _number_items(snapshot: Snapshot) -> tuple[dict[str, int], list[Modality]]:
    """Return the number of each item by its id, and the items' modalities."""
    items = list(chain.from_iterable(map(alive_items, snapshot.segments)))
    return {item.id: number for number, item in enumerate(items)}, [item.modality for item in items]


def _read_captions(snapshot: Snapshot, seed: int) -> list[Pair]:
    """Return the captions of pictures as queries: all but the item's own text.

    Where there is no other, some of the words of a picture's text are the query, in their order.
    """
    drawn = random.Random(seed)
    found = []
    for item in chain.from_iterable(map(alive_items, snapshot.segments)):
        if item.image is None:
            continue
        listed = item.fields.get(CAPTIONS)
        texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
        others = [text for text in texts if text.strip() and text.strip() != item.text]
        words = (item.text or "").split()
        if not others and len(words) > 2:
            places = sorted(drawn.sample(range(len(words)), len(words) // 2))
            others = [" ".join(words[place] for place in places)]
        found += [Pair(text, None, (item.id,)) for text in others]
    return found


def _read_pairs(source: Path) -> list[Pair]:
    if source.is_file():
        return [pair for _, pair in read_json_lines(source, lambda row: _parse_pair(row, source))]
    data = MBeir(source)
    return [
        Pair(
            query.text,
            None if query.image is None else data.image_path(query.image),
            query.positives,
            ItemKey("query", query.qid),
        )
        for path in data.training_queries()
        for query in read_queries(path)
    ]


def _parse_pair(row: dict[str, Any], source: Path) -> Pair:
    """Read a line of a query log: ``text``, ``image`` or both, and ``id``, one or a list."""
    text, image, answers = row.get("text"), row.get("image"), row.get("id")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
        raise BadData("needs an id, the right item's, or a list of several")
    if not all(part is None or (isinstance(part, str) and part.strip()) for part in (text, image)) or (
        text is None and image is None
    ):
        raise BadData("needs a text, an image (a file's name), or both")
    return Pair(text, None if image is None else source.parent / image, tuple(answers))


def _describe(pair: Pair) -> list[object]:
    stamp = None
    if pair.image is not None and pair.image.exists():
        status = pair.image.stat()
        stamp = [str(pair.image), status.st_size, status.st_mtime_ns]
    return [pair.text, stamp, pair.items, pair.key.id]


def _query_rows(
    model: Genius, pairs: Sequence[Pair], wanted: Sequence[list[int]], modalities: Sequence[Modality]
) -> Iterator[FeatureRow]:
    """Yield each query once for each modality of its answers, as a search reads it."""
    for number, (pair, rows) in enumerate(zip(pairs, wanted, strict=True)):
        for modality in sorted({modalities[row] for row in rows}, key=lambda one: one.code):
            yield FeatureRow(
                id=number,
                key=pair.key if pair.key.id else ItemKey("query", str(number)),  # features are kept by key
                modality=pair.modality,
                image=pair.image,
                text=instructed(model.instruction_for(pair.modality, modality), pair.text),
                variant=0,
                wanted=modality,
            )


class _Stored:
    """An encoder that gives the stored embeddings of items as their features."""

    kind = "stored"
    needs_pixels = False

    def __init__(self, snapshot: Snapshot, encoder: Encoder, ranker: CodeRanker) -> None:
        self._ranker = ranker
        self.spec = encoder.spec
        self.fingerprint = encoder.fingerprint
        self.dim = encoder.dim
        self._segments = snapshot.segments
        self._rows = [segment.alive_rows() for segment in snapshot.segments]
        self._starts = np.cumsum([0, *map(len, self._rows)])

    def image_features(self, images: Sequence[ImageInput]) -> Float32[np.ndarray, "items dim"]:
        """Return the embeddings of items by number."""
        return self._vectors(images)

    def text_features(self, texts: Sequence[TextInput]) -> Float32[np.ndarray, "items dim"]:
        """Return the embeddings of items by number."""
        return self._vectors(texts)

    def _vectors(self, given: Sequence[ImageInput | TextInput]) -> Float32[np.ndarray, "items dim"]:
        numbers = np.array([int(one.key.id) for one in given])
        found = np.empty((len(numbers), self.dim), dtype=np.float32)
        segments = np.searchsorted(self._starts, numbers, side="right") - 1
        for place, segment in enumerate(self._segments):
            own = segments == place
            found[own] = segment.vectors(self._ranker)(self._rows[place][numbers[own] - self._starts[place]])
        return found


def _embed_items(
    writer: Writer, model: Genius, queries: Features, work: Path, items: int, progress: Progress
) -> Features:
    """Return the features of all items: from their embeddings if these are features, else encoded again.

    A sum of two features, the result of a trained fusion, and features that are no unit vectors cannot be had
    from embeddings.
    """
    snapshot = writer.snapshot
    lengths = queries.gather(np.arange(min(len(queries), CHUNK))).total().norm(dim=-1)
    is_enough = (
        snapshot.manifest.embeddings != "none"
        and snapshot.manifest.embedding_bits >= MIN_BITS
        and isinstance(model.quantizer.fusion, SumFusion)
        and Modality.IMAGE_TEXT not in snapshot.count_by_modality()
        and bool(((lengths - 1).abs() < 0.01).all())
    )
    rows = feature_rows(chain.from_iterable(map(alive_items, snapshot.segments)), writer.folder)
    encoder = model.encoder
    if is_enough:
        encoder = _Stored(snapshot, model.encoder, model.ranker)
        rows = (row._replace(key=ItemKey("candidate", str(row.id))) for row in rows)
    return embed(
        rows,
        encoder,
        work / "items",
        inputs={
            "items": fingerprint_of([entry.model_dump() for entry in snapshot.manifest.segments]),
            "from": "embeddings" if is_enough else "items",
        },
        expected=items,
        progress=progress,
    )


def _hold_out(wanted: Sequence[list[int]], seed: int) -> set[int]:
    """Return the numbers of the pairs to measure: all of some items."""
    by_item: dict[int, list[int]] = {}
    for number, rows in enumerate(wanted):
        by_item.setdefault(rows[0], []).append(number)
    count = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, round(HELD_OUT * len(wanted))))
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
    folder = work / "model"
    fusion: TrainedQuantizer | None = None
    if config.quantizer.fusion.kind != "sum":
        fusion = train_quantizer(pairs, work / "fusion", config.quantizer, progress=progress, device=device)
    rows = draw_sample(items)
    some = items.gather(rows)
    fused_by: Quantizer | None = None if fusion is None else fusion.quantizer.cpu()
    with torch.no_grad():
        embeddings = (SumFusion() if fused_by is None else fused_by.fusion)(some.image, some.text)
    quantizer = fit_codebooks(
        embeddings,
        items.modality[rows],
        folder / "quantizer",
        items=len(items),
        inputs={
            "items": items.manifest.fingerprint,
            "fusion": "sum" if fusion is None else fusion.manifest.fingerprint,
        },
        fused_by=fused_by,
        levels=model.quantizer.config.levels,
        progress=progress,
    )
    generator = train_generator(
        pairs, quantizer, folder / "generator", config.generator, progress=progress, device=device
    )
    return Genius.finish(folder, carry_encoder(model, folder), quantizer, generator, model.instructions)


def _measure(
    model: Genius, snapshot: Snapshot, queries: Features, rows: Sequence[int], right: Sequence[set[str]]
) -> Recall:
    """Return the recall of queries with the settings that searches have by default."""
    found = _find(model, snapshot, queries, rows, right, default_settings(model, snapshot))
    return Recall(sum(any(one[:1]) for one in found) / len(found), sum(map(any, found)) / len(found))


def _find(
    model: Genius,
    snapshot: Snapshot,
    queries: Features,
    rows: Sequence[int],
    right: Sequence[set[str]],
    config: SearchConfig,
) -> list[list[bool]]:
    """Return for each query which of its first hits are right."""
    is_raw = snapshot.manifest.embeddings == "raw" and config.rerank == "embeddings"
    modalities = list(Modality)
    hits = []
    for start in range(0, len(rows), CHUNK):
        some = np.array(rows[start : start + CHUNK])
        features = queries.gather(some)
        fused = as_floats(model.embed(features))
        evidence = normalize(as_floats(features.total())) if is_raw else fused
        encoded = [
            EncodedQuery(
                number,
                FIRST,
                level0=model.level0_codes(modalities[queries.wanted[row]])
                if model.level0_is_exact
                else frozenset(),
                embedding=fused[number],
                evidence=evidence[number],
            )
            for number, row in enumerate(some)
        ]
        hits += [result.hits for result in search_encoded(model, snapshot, encoded, config)]
    return [[hit.id in answers for hit in own] for own, answers in zip(hits, right, strict=True)]
