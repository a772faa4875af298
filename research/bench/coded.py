"""Our side of a comparison: the codes of a pool and their searches, beginning behind the encoder."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64

from genius_search.config import SearchConfig, usual_search
from genius_search.index.store import ItemArrays
from genius_search.model import Genius
from genius_search.nn.codebooks import Codebooks
from genius_search.progress import Progress
from genius_search.search.decoder import Decoder, GeometricDecoder
from genius_search.search.kernel import CompiledSearch, find, quick_search
from genius_search.search.rank import CodeRanker, Evidence, Wanted
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
from research.bench.given import BLOCK, Given, K, Search

CHUNK: Final = 16_384
ALL: Final = 10**9
"""Candidates that no pool has."""
BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4, 8)
"""Bits of the stored embeddings that are compared."""
MOST_BITS: Final = max(BITS)


class Codes(NamedTuple):
    """Code vectors, and the items of a pool written in them."""

    quantizer: Codebooks
    arrays: ItemArrays


def fit(given: Given, folder: Path, *, levels: int = LEVELS, progress: Progress) -> Codebooks:
    """Return codebooks fitted to a pool without training, as `genius index create` does."""
    count = len(given.items)
    rows = np.sort(np.random.default_rng(0).permutation(count)[:MAX_SAMPLE])
    sample, modality = given.items[rows], given.modality[rows]
    return fit_codebooks(
        sample,
        modality,
        folder,
        items=count,
        inputs={"vectors": hashlib.sha256(sample.tobytes()).hexdigest()},
        levels=levels,
        progress=progress,
    ).codebooks


def encode(quantizer: Codebooks, given: Given) -> Codes:
    """Return the IDs of items, with their embeddings and densities."""
    batches = []
    for start in range(0, len(given.items), CHUNK):
        own = given.items[start : start + CHUNK]
        found = quantizer.encode_items(own, given.modality[start : start + CHUNK])
        densities = quantizer.norm_and_density.item_density(found.embeddings, found.codes)
        batches.append(
            (found.columns, found.code_cosine.astype(np.float16), own.astype(np.float16), densities)
        )
    return Codes(quantizer, ItemArrays(*map(np.concatenate, zip(*batches, strict=True))))


class Ours:
    """The searches of a pool, by codes and, if its vectors are given, by stored embeddings."""

    def __init__(self, codes: Codes, vectors: Float32[np.ndarray, "items dim"] | None = None) -> None:
        self.ranker = CodeRanker(
            codes.quantizer.tables(), codes.quantizer.spread, codes.quantizer.config.norm_weight
        )
        self.quick = quick_search(self.ranker)
        self.router = GeometricDecoder(
            [torch.from_numpy(table) for table in codes.quantizer.tables()],
            self.ranker.spread,
            self.ranker.norm_weight,
        )
        self.table = IdTable.build(codes.arrays.codes, codes.arrays.code_cosine)
        self.segments = [SearchSegment(self.table)]
        self.stored = {bits: self.store(vectors, bits) for bits in BITS if vectors is not None}
        self.densities = None if codes.arrays.densities is None else [codes.arrays.densities]
        table = self.table
        self.item_bytes = (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / table.num_items
        """Bytes of an item's ID with half norm and density, where prefixes begin, and the lists of items."""

    def store(self, vectors: Float32[np.ndarray, "items dim"], bits: EmbeddingBits) -> StoredVectors:
        """Return embeddings with so many bits a number, as an index stores them."""
        items, dim = vectors.shape
        values = np.empty((items, stored_width(dim, bits)), dtype=value_type(bits))
        scales = np.empty(items, dtype=np.float16)
        rows = self.table.rows_of_items
        for start in range(0, items, BLOCK):
            block = slice(start, start + BLOCK)
            own = vectors[block]
            own = own - self.ranker.vectors(self.table.ids[rows[block]])
            values[block], scales[block] = quantize(own, bits)
        return StoredVectors(Quantized(values, scales), bits, ranker=self.ranker, table=self.table)

    def allowing(self, allowed: Bool[np.ndarray, " items"]) -> Ours:
        """Return the searches of some of the items."""
        own = copy.copy(self)
        own.segments = [SearchSegment(self.table, Allowed.of(self.table, allowed))]
        return own

    def method(
        self,
        config: SearchConfig,
        fast: CompiledSearch | None,
        decoder: Decoder | None = None,
        bits: EmbeddingBits | None = None,
    ) -> Search:
        """Return a search by codes, or by embeddings of so many bits; in PyTorch without ``fast``."""
        vectors = None if bits is None else [self.stored[bits]]
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

    def methods(self) -> Iterator[tuple[str, Search, float]]:
        """Yield the default search by codes and by embeddings, and the search of all items.

        Each has a title, and the bytes that an item takes, with its embedding's scale and density.
        """
        usual = usual_search(self.table.num_items)
        for bits in (None, *self.stored):
            config, title, size = replace(usual, rerank="codes"), "ours, codes", self.item_bytes
            if bits is not None:
                config, title = (
                    replace(usual, rerank="embeddings"),
                    f"{title} and {bits} bit{'s' * (bits > 1)}",
                )
                size += stored_width(self.ranker.tables()[0].shape[1], bits) + 3
            yield title, self.method(config, self.quick, bits=bits), size
            if bits in (None, MOST_BITS):
                search = self.method(replace(config, candidates=ALL), self.quick, bits=bits)
                yield f"{title}, all items ranked", search, size

    def other_ways(self, model: Genius | None) -> dict[str, Search]:
        """Return the search by codes in PyTorch, and with a model's generator if it has one."""
        usual = usual_search(self.table.num_items)
        found = {"ours, codes, in PyTorch": self.method(usual, None)}
        if model is not None and model.has_generator:
            generating = self.method(usual, model.fast, model.decoder)
            found["ours, codes, found by the generator"] = generating
        return found
