"""Other searches of vectors: faiss, hnswlib and rabitqlib, where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import faiss
import numpy as np
from jaxtyping import Bool, Float32

from genius_search.errors import UsageError
from genius_search.nn.spread import NUM_EXTRA_COLUMNS
from genius_search.training.codebooks import LEVELS
from research.baselines.faiss_index import (
    TRAINING_ITEMS,
    num_bits,
    num_lists,
    num_parts,
    train_index,
)
from research.bench.given import Found, K, Search

Vectors = Float32[np.ndarray, "items dim"]

LINKS: Final = 32
"""Links of a node in all graphs."""
BUILD_EFFORT: Final = 40
"""Nodes in view while a graph is built; faiss's default."""
QUERY_BITS: Final = 8
"""Of a query's numbers in faiss's RaBitQ; with all 32 it takes forty times as long and finds no more."""
NUMBER_BYTES: Final = 8
"""Of an item's number, which faiss keeps beside its code."""
CENTROIDS: Final = 16
"""Of rabitqlib's graph, as its examples have."""
CODE_BYTES: Final = LEVELS + NUM_EXTRA_COLUMNS + 1
"""Bytes of our IDs: codes and the modality's, half norm and density. faiss's codes get as many."""
EXACT: Final = "exact search (faiss Flat)"
GRAPH_EFFORTS: Final = (16, 32, 64)
PACKAGES: Final = {"faiss": "faiss-cpu", "hnswlib": "hnswlib", "rabitqlib": "rabitqlib"}
"""The module and the package of each rival."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A built index. Its rows are numbered in the order in which they were added."""

    name: str
    find: Callable[[Vectors, int, Any], Found]
    """Searches with an effort, and a filter of :attr:`limit` or None."""
    efforts: tuple[int, ...] = ()
    """Lists to look through, or nodes in view; none where there is nothing to set."""
    has_lists: bool = False
    limit: Callable[[Bool[np.ndarray, " items"]], Any] | None = None
    """Makes a filter, in the form that is quickest to search with; None if this has no filters."""
    item_bytes: float
    """Bytes that grow with the pool, for each item: what it writes without centroids, its number included."""

    def search(self, effort: int, limit: Any = None) -> Search:
        """Return the search with an effort, of all items or of those of a filter."""
        return lambda queries: self.find(queries, effort, limit)

    def title(self, effort: int) -> str:
        """Return the name of a search with an effort."""
        setting = f", {effort} lists" if self.has_lists else f", ef {effort}"
        return self.name + (setting if self.efforts else "")


def faiss_rival(factory: str, vectors: Vectors, *, seed: int = 0) -> Rival:
    """Build an index of faiss."""
    library: Any = faiss
    has_residual_codes = ",RQ" in factory
    index = train_index(factory, vectors, seed=seed)
    if hasattr(index, "qb"):
        index.qb = QUERY_BITS
    is_graph, has_lists = "HNSW" in factory, "IVF" in factory
    if is_graph:
        index.hnsw.efConstruction = BUILD_EFFORT
    index.add(vectors)

    def find(queries: Vectors, effort: int, limit: Any) -> Found:
        parameters = None
        if is_graph:
            parameters = library.SearchParametersHNSW(efSearch=effort, sel=limit)
        elif has_residual_codes:
            index.nprobe = effort  # it takes no parameters
        elif has_lists:
            parameters = library.SearchParametersIVF(nprobe=effort, sel=limit)
        elif limit is not None:
            parameters = library.SearchParameters(sel=limit)
        found: Found = index.search(queries, K, params=parameters)[1]
        return found

    stored: Any = faiss.downcast_index(index.storage) if is_graph else index
    links = faiss.vector_to_array(index.hnsw.neighbors).size if is_graph else 0
    graph_bytes = (
        4 * links / len(vectors) + 12 * is_graph
    )  # and of each node where its links begin, its level

    def limit(allowed: Bool[np.ndarray, " items"]) -> Any:
        return library.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))

    return Rival(
        name=EXACT if factory == "Flat" else f"faiss {factory}",
        find=find,
        efforts=GRAPH_EFFORTS if is_graph else list_efforts(index.nlist) if has_lists else (),
        has_lists=has_lists,
        limit=None if has_residual_codes else limit,
        item_bytes=float(stored.code_size + NUMBER_BYTES * has_lists + graph_bytes),
    )


def hnswlib_rival(vectors: Vectors) -> Rival:
    """Build a graph of hnswlib; filters are functions that it calls for each item that it visits."""
    graph = importlib.import_module("hnswlib").Index("ip", vectors.shape[1])
    graph.init_index(len(vectors), M=LINKS, ef_construction=BUILD_EFFORT)
    graph.set_num_threads(1)
    graph.add_items(vectors)

    def find(queries: Vectors, effort: int, limit: Any) -> Found:
        graph.set_ef(effort)
        try:
            found: Found = graph.knn_query(queries, K, filter=limit)[0].astype(np.int64)
        except RuntimeError:  # it does not return fewer
            return np.full((len(queries), K), -1)
        return found

    return Rival(
        name="hnswlib",
        find=find,
        efforts=GRAPH_EFFORTS,
        limit=lambda allowed: set(np.flatnonzero(allowed).tolist()).__contains__,
        item_bytes=graph.index_file_size() / len(vectors),
    )


def rabitq_rival(kind: str, bits: int, vectors: Vectors, *, seed: int = 0) -> Rival:
    """Build a graph (HNSW) or lists (IVF) of rabitqlib, which has no filters."""
    library = importlib.import_module("rabitqlib")
    (count, dim), has_lists = vectors.shape, kind == "IVF"
    lists = num_lists(count) if has_lists else min(CENTROIDS, count)
    name = f"rabitqlib {kind}, {bits} bit{'s' * (bits > 1)}"
    try:
        if has_lists:
            index = library.IvfIndex(dim, count, lists, bits)
        else:
            index = library.HnswIndex(dim, count, LINKS, BUILD_EFFORT, bits)
    except ValueError as error:
        raise UsageError(f"{name} with vectors of {dim} numbers: {error}") from None
    points = max(1, TRAINING_ITEMS // lists)
    means = faiss.Kmeans(
        dim, lists, niter=10, seed=seed, min_points_per_centroid=1, max_points_per_centroid=points
    )
    means.train(vectors)
    nearest = means.index.search(vectors, 1)[1][:, 0].astype(np.uint32)
    index.build(vectors, means.centroids, nearest, num_threads=1, fast_quantization=True)

    def find(queries: Vectors, effort: int, _: Any) -> Found:
        found: np.ndarray = index.search(queries, K, effort)[0]
        return found.astype(np.int32).astype(np.int64)  # the largest number stands for none

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "index"
        index.save(str(file))
        num_bytes = file.stat().st_size - 4 * lists * dim  # without centroids
    return Rival(
        name=name,
        find=find,
        efforts=list_efforts(lists) if has_lists else GRAPH_EFFORTS,
        has_lists=has_lists,
        item_bytes=num_bytes / count,
    )


def list_efforts(lists: int) -> tuple[int, ...]:
    """Return the numbers of lists that are looked through."""
    return tuple(sorted({min(effort, lists) for effort in (16, 64)}))


def is_installed(module: str) -> bool:
    """Return whether a rival can be imported."""
    return importlib.util.find_spec(module) is not None


def describe_packages(unbuilt: Iterable[str] = ()) -> str:
    """Return the versions of the rivals' packages, and which are left out, also of those that are there."""
    there = [
        f"{package} {importlib.metadata.version(package)}"
        for module, package in PACKAGES.items()
        if is_installed(module)
    ]
    absent = [package for module, package in PACKAGES.items() if not is_installed(module)]
    left_out = f"; left out, because they are not installed: {', '.join(absent)}" if absent else ""
    reasons = "".join(f"; left out: {reason}" for reason in unbuilt)
    return f"Rivals: {', '.join(there)}{left_out}{reasons}."


def builders(vectors: Vectors, *, graphs: bool, seed: int) -> list[Callable[[], Rival]]:
    """Return what builds exact search, the rivals with lists of codes and, if wanted, the graphs."""
    count, dim = vectors.shape
    lists, parts = num_lists(count), num_parts(dim, CODE_BYTES)
    residual_codes = f"RQ{2 * (CODE_BYTES - 1)}x4fs_32_Nrq2x4"
    codes = [f"PQ{parts}x{num_bits(count)}np", residual_codes, "RaBitQ", "RaBitQ4"]
    names = ["Flat", *(f"IVF{lists},{code}" for code in codes)]
    names += [f"HNSW{LINKS}", f"HNSW{LINKS}_SQ8"] if graphs else []
    found: list[Callable[[], Rival]] = [partial(faiss_rival, name, vectors, seed=seed) for name in names]
    if is_installed("rabitqlib"):
        kinds = [("IVF", 1), ("IVF", 4), *([("HNSW", 4), ("HNSW", 7)] if graphs else [])]
        found += [partial(rabitq_rival, kind, bits, vectors, seed=seed) for kind, bits in kinds]
    if graphs and is_installed("hnswlib"):
        found.append(partial(hnswlib_rival, vectors))
    return found
