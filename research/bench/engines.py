"""Searches of vectors by turbovec, scalable-vs (Intel SVS), zvec and LanceDB, if installed.

Each is built with one thread and read back from its folder, as in :mod:`research.bench.rivals`.
A single query is sent by the shortest call of the package.
"""

from __future__ import annotations

import importlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from genius_search.errors import UsageError
from genius_search.index.build import MANY_ITEMS
from research.bench.data import HitRows, K, Queries
from research.bench.rivals import (
    BUILD_EFFORT,
    LINKS,
    NUMBER_BYTES,
    TRAINING_ITEMS,
    Rival,
    Vectors,
    build_once,
    choose_num_lists,
    is_installed,
)

CALIBRATION_ITEMS: Final = 16_384
"""Random items that turbovec fits its scales to; its guide advises at least 2,048."""
SCALE_BYTES: Final = 4
"""Bytes of an item's scale in turbovec."""
LIST_HEADER_BYTES: Final = 2851
"""Bytes of a list's description in SVS's files."""
VAMANA_PRUNING: Final = 0.95
"""Parameter alpha of a Vamana graph with inner products, as its guide recommends."""
REORDERED_PER_HIT: Final = 4.0
"""Items for each hit that SVS's lists compare again by the second level of their codes."""
PRODUCT_BITS: Final = 4
"""Bits of a product code, which LanceDB looks up in registers."""
INSERT_BATCH: Final = 1000
"""Items that zvec inserts at a time; it accepts no more than 1,024."""
TRIAL_DIM: Final = 64
"""Length of a vector in :func:`try_engine`; zvec's RaBitQ accepts no shorter ones."""
TRIAL_ITEMS: Final = 1024
"""Items of :func:`try_engine`; turbovec's calibration and product codes need some hundreds."""
PAGE_BYTES: Final = 4096
PAGE_BATCH: Final = 4096
"""Pages that are read at a time, to count the pages in use."""
ENGINES: Final = ("turbovec", "svs", "zvec", "lancedb")
"""Modules of the engines."""


def turbovec_engine(bits: int, vectors: Vectors, file: Path) -> Rival:
    """Build an index of turbovec, which compares a query with the codes of all items."""
    library: Any = importlib.import_module("turbovec").TurboQuantIndex
    count, dim = vectors.shape

    def build() -> Any:
        index = library(dim, bits)
        sample = np.random.default_rng(0).permutation(count)[:CALIBRATION_ITEMS]
        index.calibrate(vectors[np.sort(sample)])
        index.add(vectors)
        return index

    index, seconds = build_once(file, build, lambda index, name: index.write(name), library.load)
    index.prepare()

    def find(queries: Queries, _effort: int) -> HitRows:
        rows: HitRows = index.search(np.ascontiguousarray(queries), K)[1]
        return rows

    return Rival(
        name=f"turbovec, {bits} bits",
        find=find,
        effort_unit=None,
        item_bytes=dim * bits / 8 + SCALE_BYTES,  # its file reserves some 300 KB more
        build_seconds=seconds,
    )


def load_vectors(library: Any, vectors: Vectors, bits: tuple[int, int], scratch: Path) -> Any:
    """Return SVS's loader of vectors as locally adaptive codes (LVQ) of one or two levels."""
    file = scratch / "items.fvecs"
    library.write_vecs(vectors, str(file))
    library.convert_vecs_to_svs(str(file), str(scratch / "items.svs"))
    data = library.VectorDataLoader(
        str(scratch / "items.svs"), library.DataType.float32, vectors.shape[1]
    )
    return library.LVQLoader(data, primary=bits[0], residual=bits[1])


def svs_graph(bits: tuple[int, int], links: int, vectors: Vectors, file: Path) -> Rival:
    """Build a Vamana graph of SVS; the second level of its codes ranks the candidate nodes."""
    library: Any = importlib.import_module("svs")
    library.logging.set_level(library.logging.level.error)
    parts = [str(file / part) for part in ("config", "graph", "data")]

    def build() -> Any:
        # The lowest layer of HNSW, which holds nearly all links, has twice as many per node.
        parameters = library.VamanaBuildParameters(
            alpha=VAMANA_PRUNING,
            graph_max_degree=2 * links,
            window_size=max(BUILD_EFFORT, 2 * links),
        )
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            loader = load_vectors(library, vectors, bits, Path(scratch))
            return library.Vamana.build(parameters, loader, library.DistanceType.MIP, num_threads=1)

    def write(index: Any, _name: str) -> None:
        file.mkdir(exist_ok=True)
        index.save(*parts)

    def read(_name: str) -> Any:
        graph = library.GraphLoader(parts[1])
        data = library.LVQLoader(parts[2])
        return library.Vamana(parts[0], graph, data, library.DistanceType.MIP, num_threads=1)

    index, seconds = build_once(file, build, write, read)

    def find(queries: Queries, effort: int) -> HitRows:
        if index.search_window_size != effort:
            index.search_window_size = effort
        return np.asarray(index.search(queries, K)[0]).astype(np.int64)

    return Rival(
        name=f"scalable-vs Vamana, {_name_bits(bits)}",
        find=find,
        effort_unit="nodes",
        item_bytes=(_folder_bytes(file / "graph") + _folder_bytes(file / "data")) / len(vectors),
        build_seconds=seconds,
    )


def svs_lists(bits: tuple[int, int], vectors: Vectors, file: Path) -> Rival:
    """Build lists (IVF) of SVS."""
    library: Any = importlib.import_module("svs")
    library.logging.set_level(library.logging.level.error)
    count, dim = vectors.shape
    lists, distance = choose_num_lists(count), library.DistanceType.MIP

    def build() -> Any:
        parameters = library.IVFBuildParameters(
            num_centroids=lists,
            is_hierarchical=False,
            training_fraction=min(1.0, max(TRAINING_ITEMS, lists) / count),
        )
        clusters = library.Clustering.build(parameters, vectors, distance, num_threads=1)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            loader = load_vectors(library, vectors, bits, Path(scratch))
            return library.IVF.assemble_from_clustering(clusters, loader, distance, num_threads=1)

    def write(index: Any, _name: str) -> None:
        file.mkdir(exist_ok=True)
        index.save(str(file / "config"), str(file / "data"))

    def read(_name: str) -> Any:
        return library.IVF.load(str(file / "config"), str(file / "data"), distance, num_threads=1)

    index, seconds = build_once(file, build, write, read)
    reordered_per_hit = REORDERED_PER_HIT if bits[1] else 1.0

    @cache
    def make_parameters(effort: int) -> Any:
        """Return parameters of a search; an effort above the number of lists reads all of them."""
        return library.IVFSearchParameters(min(effort, lists), k_reorder=reordered_per_hit)

    def find(queries: Queries, effort: int) -> HitRows:
        index.search_parameters = make_parameters(effort)
        return np.asarray(index.search(queries, K)[0]).astype(np.int64)

    # Each list's part of the file begins with a header and the mean of its vectors.
    centroids = _folder_bytes(file / "data" / "centroids") + lists * (LIST_HEADER_BYTES + 4 * dim)
    return Rival(
        name=f"scalable-vs IVF, {_name_bits(bits)}",
        find=find,
        effort_unit="lists",
        item_bytes=(_folder_bytes(file / "data") - centroids) / count,
        build_seconds=seconds,
    )


@cache
def open_zvec() -> Any:
    """Return zvec's module, limited to one thread; it can be set up only once in a process."""
    library: Any = importlib.import_module("zvec")
    library.init(query_threads=1, optimize_threads=1, log_level=library.LogLevel.ERROR)
    return library


def zvec_engine(structure: str, bits: int, links: int, vectors: Vectors, file: Path) -> Rival:
    """Build a graph (HNSW) of zvec with 8 bits a number, or lists (IVF) with RaBitQ codes."""
    library: Any = open_zvec()
    count, dim = vectors.shape
    lists, has_lists = choose_num_lists(count), structure == "IVF"
    metric = library.MetricType.IP
    if has_lists:
        build_parameters = library.IvfRabitqIndexParam(
            metric, nlist=lists, total_bits=bits, sample_count=min(TRAINING_ITEMS, count)
        )
        make_parameters = cache(library.IvfRabitqQueryParam)
    else:
        build_parameters = library.HnswIndexParam(
            metric, m=links, ef_construction=BUILD_EFFORT, quantize_type=library.QuantizeType.INT8
        )
        make_parameters = cache(library.HnswQueryParam)

    def read(name: str) -> Any:
        return library.open(name, library.CollectionOption(read_only=True, enable_mmap=True))

    def build() -> Any:
        shutil.rmtree(file, ignore_errors=True)
        field = library.VectorSchema(
            "v", library.DataType.VECTOR_FP32, dim, index_param=build_parameters
        )
        schema = library.CollectionSchema("items", vectors=[field])
        collection = library.create_and_open(str(file), schema)
        for start in range(0, count, INSERT_BATCH):
            batch = enumerate(vectors[start : start + INSERT_BATCH], start=start)
            collection.insert(
                [library.Doc(str(row), vectors={"v": vector}) for row, vector in batch]
            )
        collection.optimize(library.OptimizeOption(concurrency=1))
        collection.close()
        return read(str(file))

    collection, seconds = build_once(file, build, lambda _index, _name: None, read)

    def find(queries: Queries, effort: int) -> HitRows:
        parameters = make_parameters(min(effort, lists) if has_lists else effort)
        rows = []
        for query in queries:
            request = library.Query("v", vector=query, param=parameters)
            rows.append(collection.query_internal_ids(request, topk=K))
        return np.array(rows, dtype=np.int64)

    # The 32-bit vectors are in another mapped file, which a search of codes does not read.
    code_bytes = sum(_count_used_bytes(part) for part in file.rglob("v.qindex.*"))
    return Rival(
        name=f"zvec {structure}, {bits} bits",
        find=find,
        effort_unit="lists" if has_lists else "nodes",
        item_bytes=(code_bytes - 4 * lists * dim * has_lists) / count,
        build_seconds=seconds,
    )


def lance_engine(codes: str, bits: int, vectors: Vectors, file: Path) -> Rival:
    """Build lists (IVF) of LanceDB with RaBitQ or product codes, and load them into its cache."""
    library, arrow = importlib.import_module("lancedb"), importlib.import_module("pyarrow")
    index_types = importlib.import_module("lancedb.index")
    count, dim = vectors.shape
    lists = choose_num_lists(count)
    options: dict[str, Any] = {"distance_type": "l2", "num_partitions": lists}
    options["sample_rate"] = max(1, min(TRAINING_ITEMS, count) // lists)

    def build() -> Any:
        shutil.rmtree(file, ignore_errors=True)
        flat = arrow.array(np.ascontiguousarray(vectors).reshape(-1))
        column = arrow.FixedSizeListArray.from_arrays(flat, dim)
        rows = arrow.table({"row": arrow.array(np.arange(count)), "v": column})
        table = library.connect(str(file)).create_table("items", rows)
        if codes == "PQ":
            parts = dim * bits // PRODUCT_BITS
            config = index_types.IvfPq(**options, num_sub_vectors=parts, num_bits=PRODUCT_BITS)
        else:
            config = index_types.IvfRq(**options, num_bits=bits)
        table.create_index("v", config=config)
        return table

    def read(name: str) -> Any:
        return library.connect(name).open_table("items")

    table, seconds = build_once(file, build, lambda _index, _name: None, read)
    table.prewarm_index("v_idx")

    def find(queries: Queries, effort: int) -> HitRows:
        rows = np.full((len(queries), K), -1)
        for hit_rows, query in zip(rows, queries, strict=True):
            request = table.search(query, vector_column_name="v").distance_type("l2")
            request = request.nprobes(min(effort, lists)).select(["row", "_distance"]).limit(K)
            numbers = request.to_arrow()["row"].to_numpy()
            hit_rows[: len(numbers)] = numbers
        return rows

    # The file has codes, their factors, and packed row numbers, which take 8 bytes in memory.
    [code_file] = (file / "items.lance" / "_indices").glob("*/auxiliary.idx")
    packed_bytes = math.ceil(math.log2(count)) / 8
    codebooks = 4 * dim * 2**PRODUCT_BITS * (codes == "PQ")
    return Rival(
        name=f"lancedb IVF, {codes}, {bits} bits",
        find=find,
        effort_unit="lists",
        item_bytes=(code_file.stat().st_size - codebooks) / count - packed_bytes + NUMBER_BYTES,
        build_seconds=seconds,
    )


def engine_builders(
    vectors: Vectors, folder: Path
) -> Iterator[tuple[str, list[Callable[[], Rival]]]]:
    """Yield each installed engine's module and the functions that build or read its indexes."""
    links = LINKS if len(vectors) < MANY_ITEMS else LINKS // 2
    builders: dict[str, dict[str, Callable[..., Rival]]] = {
        "turbovec": {f"turbovec-{bits}": partial(turbovec_engine, bits) for bits in (2, 4)},
        "svs": {
            "svs-graph-4": partial(svs_graph, (4, 0), links),
            "svs-graph-4-8": partial(svs_graph, (4, 8), links),
            "svs-lists-4": partial(svs_lists, (4, 0)),
            "svs-lists-4-8": partial(svs_lists, (4, 8)),
        },
        "zvec": {
            "zvec-IVF-2": partial(zvec_engine, "IVF", 2, links),
            "zvec-IVF-4": partial(zvec_engine, "IVF", 4, links),
            "zvec-HNSW-8": partial(zvec_engine, "HNSW", 8, links),
        },
        "lancedb": {
            "lancedb-RQ-4": partial(lance_engine, "RaBitQ", 4),
            "lancedb-PQ-2": partial(lance_engine, "PQ", 2),
        },
    }
    for module in filter(is_installed, ENGINES):
        named = builders[module].items()
        yield module, [partial(_build, name, build, vectors, folder) for name, build in named]


def _build(name: str, build: Callable[..., Rival], vectors: Vectors, folder: Path) -> Rival:
    """Build an engine's index; raise UsageError with its message if it rejects the vectors."""
    try:
        return build(vectors=vectors, file=folder / name)
    except (RuntimeError, ValueError) as error:
        size = f"{len(vectors):,} vectors of {vectors.shape[1]} numbers"
        raise UsageError(f"{name} cannot be built of {size}: {error}") from None


def try_engine(module: str) -> str:
    """Build all indexes of an engine from a few random items; return its message if it fails.

    Call this in a new process: an engine that needs instructions which the processor lacks ends
    its process.
    """
    logging.disable(logging.CRITICAL)
    random = np.random.default_rng(0).standard_normal((TRIAL_ITEMS, TRIAL_DIM))
    items = (random / np.linalg.norm(random, axis=1, keepdims=True)).astype(np.float32)
    with tempfile.TemporaryDirectory() as scratch:
        for build in dict(engine_builders(items, Path(scratch)))[module]:
            try:
                build().search(1)(items[:1])
            except UsageError as error:
                return str(error)
    return ""


def _name_bits(bits: tuple[int, int]) -> str:
    return f"{bits[0]} + {bits[1]} bits" if bits[1] else f"{bits[0]} bits"


def _count_used_bytes(file: Path) -> int:
    """Return the bytes of a mapped file's pages that are not empty; a graph's end is reserved."""
    data = np.memmap(file, dtype=np.uint8, mode="r")
    num_used = 0
    for start in range(0, len(data), PAGE_BATCH * PAGE_BYTES):
        part = data[start : start + PAGE_BATCH * PAGE_BYTES]
        pages = part[: len(part) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
        num_used += int(pages.any(axis=1).sum())
    return PAGE_BYTES * num_used


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
