"""Searches of vectors by faiss, hnswlib, rabitqlib, scann and usearch, if they are installed.

:mod:`research.bench.engines` has four more.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import faiss
import numpy as np
from jaxtyping import Float32

from genius_search.errors import UsageError
from genius_search.index.build import MANY_ITEMS
from research.bench.data import HitRows, K, Search

Vectors = Float32[np.ndarray, "items dim"]

TRAINING_ITEMS: Final = 65_536
"""Items from which centroids and code vectors are learned."""
LINKS: Final = 32
"""Links of a node in all graphs; half as many in a pool of a million."""
BUILD_EFFORT: Final = 100
"""Candidate nodes that are build_once while a node is inserted into a graph."""
QUERY_BITS: Final = 8
"""Bits of a query's numbers in faiss's RaBitQ; all 32 take forty times as long and find no more."""
NUMBER_BYTES: Final = 8
"""Bytes of an item's number, which faiss stores with its code."""
GRAPH_CENTROIDS: Final = 16
"""Centroids of rabitqlib's graph, as in its examples."""
NUM_RERANKED: Final = 200
"""Items that scann compares with 8 bits a number."""
PACKAGES: Final = {
    name: name
    for name in ("hnswlib", "lancedb", "rabitqlib", "scann", "turbovec", "usearch", "zvec")
} | {"faiss": "faiss-cpu", "svs": "scalable-vs"}
"""The module and the package of each rival."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A built index. Its rows are numbered in the order in which they were added."""

    name: str
    find: Callable[[Vectors, int], HitRows]
    """Return the hits of queries with an effort."""
    effort_unit: Literal["lists", "nodes"] | None = "nodes"
    """Unit of the effort: lists that are read, or candidate nodes; None if there is no choice."""
    item_bytes: float
    """Stored bytes of an item with its number; centroids are not counted."""
    build_seconds: float
    """CPU-seconds that building it took."""

    def search(self, effort: int) -> Search:
        """Return a search with a fixed effort."""
        return lambda queries: self.find(queries, effort)


def build_once(
    file: Path,
    build: Callable[[], Any],
    write: Callable[[Any, str], object],
    read: Callable[[str], Any],
) -> tuple[Any, float]:
    """Return an index and the CPU-seconds of building it; it is read if it was built before."""
    seconds_file = file.with_suffix(".seconds")
    if seconds_file.exists():
        return read(str(file)), float(seconds_file.read_text(encoding="utf-8"))
    began = time.process_time()
    index = build()
    seconds = time.process_time() - began
    write(index, str(file))
    seconds_file.write_text(f"{seconds:.1f}", encoding="utf-8")
    return index, seconds


def choose_num_lists(num_items: int) -> int:
    """Return the number of lists: about the root of the number of items, with 32 items or more."""
    return max(1, min(max(1024, 1 << round(math.log2(num_items) / 2)), num_items // 32))


def faiss_rival(factory: str, vectors: Vectors, file: Path) -> Rival:
    """Build an index of faiss."""
    library: Any = faiss
    is_graph, has_lists = "HNSW" in factory, "IVF" in factory

    def build() -> Any:
        # Product codes compare by distance, others by inner product; both order unit vectors alike.
        metric = faiss.METRIC_L2 if "PQ" in factory else faiss.METRIC_INNER_PRODUCT
        index: Any = faiss.index_factory(vectors.shape[1], factory, metric)
        if is_graph:
            index.hnsw.efConstruction = BUILD_EFFORT
        elif has_lists:
            index.cp.min_points_per_centroid = 1  # no warnings about small samples
        if not index.is_trained:
            order = np.random.default_rng(0).permutation(len(vectors))
            index.train(vectors[np.sort(order[:TRAINING_ITEMS])])
        index.add(vectors)
        return index

    index, seconds = build_once(file, build, library.write_index, library.read_index)
    if hasattr(index, "qb"):
        index.qb = QUERY_BITS

    def find(queries: Vectors, effort: int) -> HitRows:
        if is_graph:
            index.hnsw.efSearch = effort
        elif has_lists:
            index.nprobe = min(effort, index.nlist)
        rows: HitRows = index.search(queries, K)[1]
        return rows

    stored: Any = faiss.downcast_index(index.storage) if is_graph else index
    links = faiss.vector_to_array(index.hnsw.neighbors).size if is_graph else 0
    # Each node also has the position of its first link, in 8 bytes, and its level, in 4.
    graph_bytes = 4 * links / len(vectors) + 12 * is_graph
    return Rival(
        name=f"faiss {factory}",
        find=find,
        effort_unit="lists" if has_lists else "nodes",
        item_bytes=float(stored.code_size + NUMBER_BYTES * has_lists + graph_bytes),
        build_seconds=seconds,
    )


def hnswlib_rival(links: int, vectors: Vectors, file: Path) -> Rival:
    """Build a graph of hnswlib."""
    library = importlib.import_module("hnswlib")

    def build() -> Any:
        graph = library.Index("ip", vectors.shape[1])
        graph.init_index(len(vectors), M=links, ef_construction=BUILD_EFFORT)
        graph.set_num_threads(1)
        graph.add_items(vectors)
        return graph

    def read(name: str) -> Any:
        graph = library.Index("ip", vectors.shape[1])
        graph.load_index(name)
        graph.set_num_threads(1)
        return graph

    graph, seconds = build_once(file, build, lambda graph, name: graph.save_index(name), read)

    def find(queries: Vectors, effort: int) -> HitRows:
        graph.set_ef(effort)
        rows: HitRows = graph.knn_query(queries, K)[0].astype(np.int64)
        return rows

    return Rival(
        name="hnswlib",
        find=find,
        item_bytes=graph.index_file_size() / len(vectors),
        build_seconds=seconds,
    )


def usearch_rival(links: int, vectors: Vectors, file: Path) -> Rival:
    """Build a graph of usearch, with 8 bits a number."""
    library = importlib.import_module("usearch.index")
    options = {"ndim": vectors.shape[1], "metric": "ip", "dtype": "i8"}

    def build() -> Any:
        graph = library.Index(**options, connectivity=links, expansion_add=BUILD_EFFORT)
        graph.add(np.arange(len(vectors)), vectors, threads=1)
        return graph

    graph, seconds = build_once(
        file, build, lambda graph, name: graph.save(name), library.Index.restore
    )

    def find(queries: Vectors, effort: int) -> HitRows:
        graph.expansion_search = effort
        rows: np.ndarray = graph.search(queries, K, threads=1).keys
        return rows.reshape(len(queries), -1).astype(np.int64)

    return Rival(
        name="usearch, 8 bits",
        find=find,
        item_bytes=graph.serialized_length / len(vectors),
        build_seconds=seconds,
    )


def scann_rival(vectors: Vectors, file: Path) -> Rival:
    """Build lists of scann, 4 bits for two numbers; 8 bits a number re-rank the best items."""
    library: Any = importlib.import_module("scann.scann_ops.py.scann_ops_pybind")
    lists, dim = choose_num_lists(len(vectors)), vectors.shape[1]

    def build() -> Any:
        builder = library.builder(vectors, K, "dot_product")
        builder = builder.tree(lists, lists, training_sample_size=TRAINING_ITEMS)
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        return builder.set_n_training_threads(1).reorder(NUM_RERANKED, quantize=True).build()

    def write(index: Any, name: str) -> None:
        Path(name).mkdir(exist_ok=True)
        index.serialize(name)

    index, seconds = build_once(file, build, write, library.load_searcher)

    def find(queries: Vectors, effort: int) -> HitRows:
        rows: np.ndarray = index.search_batched(queries, K, leaves_to_search=effort)[0]
        return rows.astype(np.int64)

    return Rival(
        name="scann",
        find=find,
        effort_unit="lists",
        item_bytes=dim / 4 + dim + NUMBER_BYTES / 2,
        build_seconds=seconds,
    )


def rabitq_rival(structure: str, bits: int, links: int, vectors: Vectors, file: Path) -> Rival:
    """Build a graph (HNSW) or lists (IVF) of rabitqlib."""
    library = importlib.import_module("rabitqlib")
    count, dim = vectors.shape
    has_lists = structure == "IVF"
    lists = choose_num_lists(count) if has_lists else min(GRAPH_CENTROIDS, count)
    name = f"rabitqlib {structure}, {bits} bit{'s' * (bits > 1)}"

    def build() -> Any:
        try:
            if has_lists:
                index = library.IvfIndex(dim, count, lists, bits)
            else:
                index = library.HnswIndex(dim, count, links, BUILD_EFFORT, bits)
        except ValueError as error:
            raise UsageError(f"{name} with vectors of {dim} numbers: {error}") from None
        points = max(1, TRAINING_ITEMS // lists)
        means = faiss.Kmeans(
            dim, lists, niter=10, min_points_per_centroid=1, max_points_per_centroid=points
        )
        means.train(vectors)
        nearest = means.index.search(vectors, 1)[1][:, 0].astype(np.uint32)
        index.build(vectors, means.centroids, nearest, num_threads=1, fast_quantization=True)
        return index

    read = (library.IvfIndex if has_lists else library.HnswIndex).load
    index, seconds = build_once(file, build, lambda index, name: index.save(name), read)

    def find(queries: Vectors, effort: int) -> HitRows:
        rows: np.ndarray = index.search(queries, K, effort)[0]
        return rows.astype(np.int32).astype(np.int64)  # the largest unsigned number becomes −1

    return Rival(
        name=name,
        find=find,
        effort_unit="lists" if has_lists else "nodes",
        item_bytes=file.stat().st_size / count - 4 * lists * dim / count,
        build_seconds=seconds,
    )


def is_installed(module: str) -> bool:
    """Return whether a rival can be imported."""
    return importlib.util.find_spec(module) is not None


def describe_packages() -> str:
    """Return the versions of the rivals' packages, and the names of absent ones."""
    absent = [package for module, package in PACKAGES.items() if not is_installed(module)]
    present = [package for package in PACKAGES.values() if package not in absent]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in present)
    return f"Rivals: {versions}; not installed: {', '.join(absent) or 'none'}."


def rival_builders(vectors: Vectors, folder: Path) -> list[tuple[str, Callable[[], Rival]]]:
    """Return the module of each rival, and a function that builds or reads its index."""
    lists, dim = choose_num_lists(len(vectors)), vectors.shape[1]
    links = LINKS if len(vectors) < MANY_ITEMS else LINKS // 2
    names = [f"IVF{lists},{code}" for code in (f"PQ{dim // 2}x4fs", "RaBitQ", "RaBitQ4")]
    names.append(f"HNSW{links}_SQ8")
    builders: dict[str, Callable[..., Rival]] = {
        f"faiss-{name}": partial(faiss_rival, name) for name in names
    }
    if is_installed("rabitqlib"):
        for structure, bits in (("IVF", 1), ("IVF", 2), ("IVF", 4), ("HNSW", 4)):
            name = f"rabitqlib-{structure}-{bits}"
            builders[name] = partial(rabitq_rival, structure, bits, links)
    if is_installed("scann"):
        builders["scann"] = scann_rival
    for name, build in (("hnswlib", hnswlib_rival), ("usearch", usearch_rival)):
        if is_installed(name):
            builders[name] = partial(build, links)
    return [
        (name.partition("-")[0], partial(build, vectors=vectors, file=folder / name))
        for name, build in builders.items()
    ]
