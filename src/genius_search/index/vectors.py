"""Items given as vectors: making an index of them, and adding them to one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int8, Shaped

from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import Encoder, VectorEncoder
from genius_search.errors import BadData, UsageError
from genius_search.index.adding import CHUNK, MAX_ID_LENGTH, Added, Batch, check_item, encode_batch
from genius_search.index.items import Item
from genius_search.index.query import SHORTEST_VECTOR
from genius_search.index.store import OWN_MODEL, IndexManifest
from genius_search.index.writer import Writer
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.records import Modality
from genius_search.training.codebooks import MAX_SAMPLE, fit_codebooks


@dataclass(frozen=True, slots=True)
class VectorItems:
    """Items, each with a vector. All are checked, and vectors may be memory-mapped."""

    vectors: Shaped[np.ndarray, "items dim"]
    ids: Sequence[str]
    modalities: Int8[np.ndarray, " items"]
    texts: Sequence[str | None] | None
    fields: Sequence[Mapping[str, object] | None] | None

    @staticmethod
    def check(
        vectors: object,
        ids: Sequence[str] | None,
        *,
        modalities: str | Modality | Sequence[str | Modality],
        texts: Sequence[str | None] | None,
        fields: Sequence[Mapping[str, object] | None] | None,
    ) -> VectorItems:
        """Check items; without ``ids`` they are numbered from 0.

        Raises
        ------
        BadData
            A vector is zero or has a number that is not finite, or an id occurs twice; the message names the
            row.
        UsageError
            What is given is no matrix of numbers, or there are not as many ids, texts or fields.
        """
        array = np.asanyarray(vectors)
        if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
            raise UsageError(
                f"vectors are {array.dtype} of shape {array.shape}; expected numbers of shape (items, dim), "
                "a row for each item"
            )
        count = len(array)
        given: dict[str, Sequence[object] | None] = {"ids": ids, "texts": texts, "fields": fields}
        if not isinstance(modalities, str):
            given["modalities"] = modalities
        for name, values in given.items():
            if values is not None and len(values) != count:
                raise UsageError(
                    f"there are {count} vectors and {len(values)} {name}; give one for each vector"
                )
        names = [str(number) for number in range(count)] if ids is None else [str(one) for one in ids]
        first: dict[str, int] = {}
        for row, name in enumerate(names):
            if not 1 <= len(name) <= MAX_ID_LENGTH:
                raise BadData(
                    f"the id of row {row} has {len(name)} characters; ids have 1 to {MAX_ID_LENGTH}"
                )
            if first.setdefault(name, row) != row:
                raise BadData(f"rows {first[name]} and {row} have the id {name!r}; ids must be unique")
        for start in range(0, count, CHUNK):
            _check_rows(array[start : start + CHUNK], start)
        kinds = [modalities] * count if isinstance(modalities, str) else modalities
        codes = np.array([Modality(Modality.parse(kind)).code for kind in kinds], dtype=np.int8)
        return VectorItems(array, names, codes, texts, fields)

    def rows(self, start: int, stop: int) -> Float32[np.ndarray, "items dim"]:
        """Return some vectors at unit length."""
        return _to_units(self.vectors[start:stop])

    def item(self, row: int) -> Item:
        """Return an item; its stamp changes with its vector, its text and its fields."""
        text = None if self.texts is None else self.texts[row]
        own = None if self.fields is None else self.fields[row]
        try:
            source = None if not own else json.dumps(dict(own), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadData(f"the fields of row {row} are not JSON: {error}") from None
        modality = list(Modality)[self.modalities[row]]
        vector = np.ascontiguousarray(self.vectors[row]).tobytes()
        stamp = hashlib.sha256(repr((modality, text, source)).encode() + vector).hexdigest()[:16]
        item = Item(self.ids[row], modality, text, None, source, stamp)
        check_item(item)
        return item


def _to_units(vectors: Shaped[np.ndarray, "rows dim"]) -> Float32[np.ndarray, "rows dim"]:
    """Scale vectors to unit length, in double precision, in which squares of large numbers are finite."""
    return np.asarray(normalize(np.asarray(vectors, dtype=np.float64)), dtype=np.float32)


def _check_rows(vectors: Shaped[np.ndarray, "items dim"], start: int) -> None:
    lengths = np.linalg.norm(np.asarray(vectors, dtype=np.float64), axis=1)
    for bad, what in (
        (~np.isfinite(lengths), "a number that is not finite"),
        (lengths <= SHORTEST_VECTOR, "only zeros"),
    ):
        if bad.any():
            rows = start + np.flatnonzero(bad)
            raise BadData(
                f"row {rows[0]} of the vectors has {what}; leave such rows out ({len(rows)} of rows {start} "
                f"to {start + len(vectors) - 1})"
            )


def fit_to_vectors(
    writer: Writer, items: VectorItems, encoder: Encoder | None, levels: int, progress: Progress
) -> Genius:
    """Return a model whose codebooks are fitted to vectors."""
    dim = items.vectors.shape[1]
    opened = encoder or VectorEncoder(str(dim))
    _check_width(items, opened.dim)
    rows = np.sort(np.random.default_rng(0).permutation(len(items.ids))[:MAX_SAMPLE])
    sample = _to_units(items.vectors[rows])
    folder = writer.folder / OWN_MODEL
    quantizer = fit_codebooks(
        torch.from_numpy(sample),
        items.modalities[rows],
        folder / "quantizer",
        items=len(items.ids),
        inputs={"vectors": hashlib.sha256(sample.tobytes()).hexdigest()},
        levels=levels,
        progress=progress,
    )
    return Genius.finish(folder, opened, quantizer, None, ())


def add_vectors(
    writer: Writer,
    model: Genius,
    items: VectorItems,
    *,
    create: IndexManifest | None = None,
    progress: Progress,
) -> Added:
    """Add items to an index, or create the index with them; unchanged items are skipped."""
    _check_width(items, model.encoder.dim)
    result = Added()
    batches = _encode(writer, model, items, create, result, progress)
    if create is not None:
        result.added, result.replaced = writer.create_batches(create, batches)
        return result
    result.added, result.replaced = writer.add_batches(batches)
    return result


def _check_width(items: VectorItems, dim: int) -> None:
    if items.vectors.shape[1] != dim:
        raise UsageError(
            f"the vectors have {items.vectors.shape[1]} numbers, those of this index {dim}; give vectors of "
            "its encoder"
        )


def _encode(
    writer: Writer,
    model: Genius,
    items: VectorItems,
    create: IndexManifest | None,
    result: Added,
    progress: Progress,
) -> Iterator[Batch]:
    manifest = create or writer.snapshot.manifest
    total = len(items.ids)
    progress.begin("index", total)
    for start in range(0, total, CHUNK):
        stop = min(start + CHUNK, total)
        chunk = [items.item(row) for row in range(start, stop)]
        known = {} if create is not None else writer.snapshot.stamps([item.id for item in chunk])
        kept = [place for place, item in enumerate(chunk) if known.get(item.id) != item.stamp]
        result.unchanged += len(chunk) - len(kept)
        if kept:
            vectors = torch.from_numpy(items.rows(start, stop)[kept])
            modality = items.modalities[start:stop][kept]
            pictures = torch.from_numpy(modality == Modality.IMAGE.code)
            features = FeatureBatch(
                torch.where(pictures[:, None], vectors, 0),
                torch.where(pictures[:, None], 0, vectors),
                pictures,
                ~pictures,
            )
            arrays = encode_batch(
                model,
                features,
                modality,
                embeddings=manifest.embeddings,
                bits=manifest.embedding_bits,
            )
            yield [chunk[place] for place in kept], arrays
        progress.advance(stop, {})
