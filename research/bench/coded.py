"""Our side of a comparison: the codes of a pool and their searches, beginning behind the encoder."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64

from genius_search.config import SearchConfig, usual_search
from genius_search.index.store import ItemArrays
from genius_search.model import Genius
from genius_search.nn.fusion import SumFusion
from genius_search.nn.quantizer import Quantizer
from genius_search.nn.spread import Spread
from genius_search.progress import Progress
from genius_search.search.decoder import Decoder, GeometricDecoder
from genius_search.search.kernel import CompiledSearch, find, quick_search
from genius_search.search.rank import CodeRanker, Evidence, Vectors, Wanted
from genius_search.search.table import Allowed, IdTable, SearchSegment
from genius_search.search.vectors import (
    EmbeddingBits,
    Quantized,
    StoredVectors,
    quantize,
    stored_width,
    value_type,
)
from genius_search.training.codebooks import LEVELS, MAX_SAMPLE, fit_codebooks
from research.bench.given import BLOCK, Given, K, Search, as_tensors

CHUNK: Final = 16_384
ALL: Final = 10**9
"""Candidates that no pool has."""
BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4, 8)
"""Bits of the stored embeddings that are compared."""
MOST_BITS: Final = max(BITS)


class Codes(NamedTuple):
    """Code vectors, and the items of a pool written in them."""

    quantizer: Quantizer
    arrays: ItemArrays


def fit(given: Given, folder: Path, *, levels: int = LEVELS, progress: Progress) -> Quantizer:
    """Return codebooks fitted to a pool without training, as `genius index create` does."""
    count = len(given.items)
    rows = np.sort(np.random.default_rng(0).permutation(count)[:MAX_SAMPLE])
    sample, modality = given.items[rows], given.modality[rows]
    quantizer: Quantizer = fit_codebooks(
        torch.from_numpy(sample),
        modality,
        folder,
        items=count,
        inputs={"vectors": hashlib.sha256(sample.tobytes()).hexdigest()},
        levels=levels,
        progress=progress,
    ).quantizer
    return quantizer


def of_model(model: Genius) -> Quantizer:
    """Return a trained model's codebooks, for embeddings that are fused already."""
    quantizer: Quantizer = copy.deepcopy(model.quantizer)
    quantizer.fusion = SumFusion()
    return quantizer


def encode(quantizer: Quantizer, given: Given) -> Codes:
    """Return the IDs of items, with their embeddings and densities."""
    batches = list(_encoded(quantizer, given))
    joined = (
        np.concatenate([getattr(one, name) for one in batches])
        for name in ("codes", "code_cosine", "embeddings", "densities")
    )
    codes, code_cosine, embeddings, densities = joined
    return Codes(quantizer, ItemArrays(codes, code_cosine, embeddings, densities))


def _encoded(quantizer: Quantizer, given: Given) -> Iterator[ItemArrays]:
    items, modality = as_tensors(given)
    for own, kinds in zip(items.split(CHUNK), modality.split(CHUNK), strict=True):
        found = quantizer.encode_items(torch.zeros_like(own), own, kinds)
        yield ItemArrays(
            found.columns.numpy(),
            found.code_cosine.numpy().astype(np.float16),
            embeddings=own.numpy().astype(np.float16),
            densities=quantizer.norm_and_density.item_density(found.embeddings, found.codes).numpy(),
        )


class OurMethod(NamedTuple):
    """A search, and the bytes that an item takes for it."""

    title: str
    search: Search
    item_bytes: float


def name_evidence(bits: EmbeddingBits | None) -> str:
    """Return what items are ranked by."""
    if bits is None:
        return "codes"
    return f"codes and {bits} bit{'s' * (bits > 1)}"


class Ours:
    """The searches of a pool, or of the segments of an index."""

    def __init__(self, tables: Sequence[torch.Tensor], spread: Spread | None = None) -> None:
        self.ranker = CodeRanker(tables, spread)
        self.quick = quick_search(self.ranker)
        self.router = GeometricDecoder(list(tables), self.ranker.spread)
        self.segments: Sequence[SearchSegment] = ()
        self.stored: Mapping[EmbeddingBits, Sequence[Vectors]] = {}
        self.densities: Sequence[np.ndarray] | None = None

    @staticmethod
    def of(codes: Codes, vectors: Float32[np.ndarray, "items dim"] | None = None) -> Ours:
        """Return the searches of a pool in memory, by codes and, if there are any, by stored vectors."""
        table = IdTable.build(codes.arrays.codes, codes.arrays.code_cosine)
        densities = None if codes.arrays.densities is None else [codes.arrays.densities]
        own = Ours(codes.quantizer.tables(), codes.quantizer.spread)
        stored = {bits: [own.store(vectors, table, bits)] for bits in BITS if vectors is not None}
        return own.on([SearchSegment(table)], stored, densities)

    def store(
        self, vectors: Float32[np.ndarray, "items dim"], table: IdTable, bits: EmbeddingBits
    ) -> StoredVectors:
        """Return embeddings with so many bits a number, as an index stores them."""
        items, dim = vectors.shape
        values = np.empty((items, stored_width(dim, bits)), dtype=value_type(bits))
        scales = np.empty(items, dtype=np.float16)
        rows = table.rows()
        for start in range(0, items, BLOCK):
            block = slice(start, start + BLOCK)
            own = vectors[block]
            own = own - self.ranker.vectors(table.ids[rows[block]])
            values[block], scales[block] = quantize(own, bits)
        return StoredVectors(Quantized(values, scales), bits, ranker=self.ranker, table=table)

    def on(
        self,
        segments: Sequence[SearchSegment],
        stored: Mapping[EmbeddingBits, Sequence[Vectors]] | None = None,
        densities: Sequence[np.ndarray] | None = None,
    ) -> Ours:
        """Return the searches of segments with these code vectors; ``stored`` are embeddings by bits."""
        own = copy.copy(self)
        own.segments, own.stored, own.densities = segments, stored or {}, densities
        return own

    def allowing(self, allowed: Bool[np.ndarray, " items"]) -> Ours:
        """Return the searches of some of the items of a pool."""
        ((table, _),) = self.segments
        segments = [SearchSegment(table, Allowed.of(table, allowed))]
        return self.on(segments, self.stored, self.densities)

    @property
    def num_items(self) -> int:
        """Number of items, deleted ones included."""
        return sum(one.table.num_items for one in self.segments)

    @property
    def item_bytes(self) -> float:
        """Bytes of an item's ID with half norm and density, where prefixes begin, and the lists of items."""
        tables = [one.table for one in self.segments]
        return (
            sum(one.nbytes + one.bucket_starts.nbytes + one.items.nbytes for one in tables) / self.num_items
        )

    def bytes_with(self, bits: EmbeddingBits | None) -> float:
        """Return the bytes of an item with an embedding of so many bits, its scale and its density."""
        if bits is None:
            return self.item_bytes
        dim = int(self.ranker.tables()[0].shape[1])
        return self.item_bytes + stored_width(dim, bits) + 3

    def method(
        self,
        config: SearchConfig,
        fast: CompiledSearch | None,
        decoder: Decoder | None = None,
        bits: EmbeddingBits | None = None,
    ) -> Search:
        """Return a search by codes, or by embeddings of so many bits; in PyTorch without ``fast``."""
        vectors = None if bits is None else self.stored[bits]
        evidence = Evidence(self.ranker, vectors, densities=self.densities)

        def search(queries: Float32[np.ndarray, "queries dim"]) -> Int64[np.ndarray, "queries k"]:
            results = find(
                lambda: decoder or self.router,
                fast,
                self.segments,
                queries,
                [Wanted(config.beam, K)] * len(queries),
                config,
                evidence=evidence,
                embeddings=list(queries),
            )
            rows = np.full((len(queries), K), -1)
            for own, (ranking, _) in zip(rows, results, strict=True):
                own[: len(ranking.items)] = ranking.items
            return rows

        return search

    def methods(self) -> Iterator[OurMethod]:
        """Yield the default search by codes and by embeddings, and the search of all items."""
        usual = usual_search(self.num_items)
        for bits in (None, *self.stored):
            config = dataclasses.replace(usual, rerank="codes" if bits is None else "embeddings")
            title = f"ours, {name_evidence(bits)}"
            yield OurMethod(title, self.method(config, self.quick, bits=bits), self.bytes_with(bits))
            if bits in (None, MOST_BITS):
                everything = dataclasses.replace(config, candidates=ALL)
                search = self.method(everything, self.quick, bits=bits)
                yield OurMethod(f"{title}, all items ranked", search, self.bytes_with(bits))

    def other_ways(self, model: Genius | None) -> dict[str, Search]:
        """Return the search by codes in PyTorch, and with a model's generator if it has one."""
        usual = usual_search(self.num_items)
        found = {"ours, codes, in PyTorch": self.method(usual, None)}
        if model is not None and model.has_generator:
            generating = self.method(usual, model.fast, model.decoder)
            found["ours, codes, found by the generator"] = generating
        return found
