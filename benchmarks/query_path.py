"""One query on one core: the general search, NumPy and the compiled library, beside faiss; plain and filtered.

Usage: python benchmarks/query_path.py FLICKR8K INDEX [QUERIES]

FLICKR8K has M-BEIR's layout and ``features/text_features.npy``; INDEX is an index of its candidates, with embeddings, in
one segment. All methods search the same fused embeddings and take turns of 20 queries in one process: trust the ratios.
hnswlib and usearch are measured too if they are installed, without filters, which they ask Python about for every item.
Prints Markdown.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import torch

from genius_search.config import usual_search
from genius_search.data.features import FeatureBatch
from genius_search.index.index import Index
from genius_search.index.query import evidence_of
from genius_search.lab.bench.measure import describe_machine, time_queries, time_rounds, use_one_thread
from genius_search.model import Genius
from genius_search.search.compiled import CompiledSearch
from genius_search.search.fast import NumpySearch, Wanted
from genius_search.search.find import find, quick_search
from genius_search.search.table import Allowed, SearchSegment

SHARES = (0.5, 0.1, 0.01, 0.001)
"""Of the items that filters allow."""
K = 10
BATCH = 64
Search = Callable[[torch.Tensor], list[np.ndarray]]
"""From queries to item rows of each, best first."""


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row_of(name: str) -> int:
    return int(name.split(":")[1]) - 1


class Data:
    """Embeddings of queries and items, and the right answers."""

    def __init__(self, folder: Path, model: Genius, limit: int) -> None:
        features = np.load(folder / "features/text_features.npy").astype(np.float32)
        pool = lines(next((folder / "cand_pool/global").glob("*test*.jsonl")))
        queries = lines(next((folder / "query/test").glob("*.jsonl")))[:limit]
        items = [row_of(str(line["did"])) for line in pool]
        self.place = {row: place for place, row in enumerate(items)}
        self.right = [{self.place[row_of(did)] for did in query["pos_cand_list"]} for query in queries]
        self.queries = model.embed(text_batch(features[[row_of(str(query["qid"])) for query in queries]]))
        self.items = model.embed(text_batch(features[items])).numpy()

    def recall(self, found: list[np.ndarray], k: int) -> float:
        """Share of queries with a right answer among the first k."""
        return float(
            np.mean([bool(right & set(own[:k])) for right, own in zip(self.right, found, strict=True)])
        )


def text_batch(features: np.ndarray) -> FeatureBatch:
    present = torch.ones(len(features), dtype=torch.bool)
    vectors = torch.from_numpy(features)
    return FeatureBatch(torch.zeros_like(vectors), vectors, ~present, present)


def our_methods(index: Index, allowed: np.ndarray | None) -> dict[str, Search]:
    """Return each router in each implementation; by codes, and by the stored embeddings."""
    model, snapshot = index.model, index.snapshot
    [segment] = snapshot.search_segments
    if allowed is not None:
        segment = SearchSegment(segment.table, Allowed.of(segment.table, allowed))
    evidence = evidence_of(model, snapshot)
    routers = {"geometry": (model.router, quick_search(model.ranker))}
    if model.has_generator:
        routers["generator"] = (model.decoder, model.fast)
    usual = usual_search(snapshot.num_alive)
    configs = [usual, replace(usual, candidates=10**9)]
    if allowed is None:
        configs.insert(1, replace(usual, beam=50, candidates=1000, shortlist=0))
    methods: dict[str, Search] = {}
    for name, (decoder, compiled) in routers.items():
        assert isinstance(compiled, CompiledSearch), "compile the search first"
        ways = {"compiled": compiled}
        if allowed is None:
            ways |= {"general": None, "NumPy": NumpySearch(model.ranker, compiled.generator)}
        for config in (replace(config, rerank=by) for by in ("codes", "embeddings") for config in configs):
            for way, fast in (
                ways.items() if config.candidates == usual.candidates else [("compiled", compiled)]
            ):

                def search(
                    queries: torch.Tensor, decoder=decoder, fast=fast, config=config
                ) -> list[np.ndarray]:
                    wanted = [Wanted(config.beam, K)] * len(queries)
                    found = find(
                        lambda: decoder,
                        fast,
                        [segment],
                        queries.numpy(),
                        wanted,
                        config,
                        evidence=evidence,
                        embeddings=list(queries.numpy()),
                    )
                    return [one.ranking.items for one in found]

                by = "codes" if config.rerank == "codes" else f"{snapshot.manifest.embedding_type} embeddings"
                setting = f"beam {config.beam}, {config.candidates:,} candidates"
                methods[f"{name}, {way}, {setting if config.candidates < 10**9 else 'all'}, by {by}"] = search
    return methods


def faiss_methods(data: Data, allowed: np.ndarray | None) -> dict[str, Search]:
    """Return the usual indexes with the efforts that are tried."""
    vectors = np.ascontiguousarray(data.items, dtype=np.float32)
    selector = None if allowed is None else faiss.IDSelectorBatch(np.flatnonzero(allowed))
    efforts = (K, 16, 32) if allowed is None else (32, 64, 128, 256)
    methods: dict[str, Search] = {}

    def search(queries: torch.Tensor, index, parameters) -> list[np.ndarray]:
        return list(index.search(queries.numpy(), K, params=parameters)[1])

    for name in ("Flat", "HNSW32", "HNSW32_SQ8", "IVF1011,PQ16x8np"):
        metric = faiss.METRIC_L2 if "PQ" in name else faiss.METRIC_INNER_PRODUCT
        index = faiss.index_factory(vectors.shape[1], name, metric)
        if "IVF" in name:
            index.cp.min_points_per_centroid = 1
        index.train(vectors)
        index.add(vectors)
        given = {"": faiss.SearchParameters(sel=selector)}
        if "HNSW" in name:
            given = {
                f", efSearch {ef}": faiss.SearchParametersHNSW(sel=selector, efSearch=ef) for ef in efforts
            }
        elif "IVF" in name:
            given = {f", {n} lists": faiss.SearchParametersIVF(sel=selector, nprobe=n) for n in (16, 64)}
        for setting, parameters in given.items():
            methods[f"faiss {name}{setting}"] = partial(search, index=index, parameters=parameters)
    return methods


def graph_methods(data: Data) -> dict[str, Search]:
    """Return the graphs of hnswlib and usearch, with as many links as faiss's, if these are installed."""
    vectors = np.ascontiguousarray(data.items, dtype=np.float32)
    methods: dict[str, Search] = {}
    if importlib.util.find_spec("hnswlib"):
        import hnswlib  # noqa: PLC0415  optional

        hnsw = hnswlib.Index("ip", vectors.shape[1])
        hnsw.init_index(len(vectors), M=32, ef_construction=40)
        hnsw.set_num_threads(1)
        hnsw.add_items(vectors)

        def search_hnswlib(queries: torch.Tensor, effort: int) -> list[np.ndarray]:
            hnsw.set_ef(effort)
            return list(hnsw.knn_query(queries.numpy(), K)[0])

        for effort in (16, 32):
            methods[f"hnswlib, ef {effort}"] = partial(search_hnswlib, effort=effort)
    if importlib.util.find_spec("usearch"):
        from usearch.index import Index as Graph  # noqa: PLC0415  optional

        def search_keys(queries: torch.Tensor, graph: Graph, effort: int) -> list[np.ndarray]:
            graph.expansion_search = effort
            keys = graph.search(queries.numpy(), K, threads=1).keys
            return [keys] if keys.ndim == 1 else list(keys)

        for kind in ("f32", "i8"):
            graph = Graph(ndim=vectors.shape[1], metric="cos", dtype=kind, connectivity=32)
            graph.add(np.arange(len(vectors)), vectors, threads=1)
            for effort in (16, 32):
                methods[f"usearch {kind}, expansion {effort}"] = partial(
                    search_keys, graph=graph, effort=effort
                )
    return methods


def report(data: Data, methods: dict[str, Search], allowed: np.ndarray | None) -> None:
    """Measure and print one table."""
    queries = data.queries
    alone = {
        name: (lambda number, call=call: call(queries[number : number + 1])) for name, call in methods.items()
    }
    times = time_queries(alone, min(200, len(queries)))
    together = time_rounds(
        {name: partial(call, queries[:BATCH]) for name, call in methods.items()}, rounds=5, per=BATCH
    )
    rival = times["faiss HNSW32, efSearch 32"].cpu_ms
    exact = [set(own[:5]) for own in methods["faiss Flat"](queries)]
    title = "all items" if allowed is None else f"{allowed.sum():,} allowed items ({allowed.mean():.1%})"
    print(
        f"\n### {title}\n\n| method | R@1 | R@5 | of exact's top 5 | alone, CPU-µs | × HNSW32 (32) | of 64, CPU-µs |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, call in methods.items():
        found = call(queries)
        shared = np.mean(
            [len(best & set(own[:5])) / len(best) for best, own in zip(exact, found, strict=True)]
        )
        alone_ms = times[name].cpu_ms
        print(
            f"| {name} | {data.recall(found, 1):.3f} | {data.recall(found, 5):.3f} | {shared:.3f} | {1000 * alone_ms:,.0f} | {alone_ms / rival:.2f} "
            f"| {1000 * together[name]:,.0f} |"
        )


def report_parts(data: Data, index: Index) -> None:
    """Print how much of a query's time by codes the library takes, and how much the Python around it."""
    model, snapshot = index.model, index.snapshot
    fast = quick_search(model.ranker)
    queries = data.queries.numpy()
    config = usual_search(snapshot.num_alive)
    evidence, wanted = evidence_of(model, snapshot), [Wanted(config.beam, K)]

    def search(number: int) -> None:
        own = queries[number : number + 1]
        find(
            lambda: model.router,
            fast,
            snapshot.search_segments,
            own,
            wanted,
            config,
            evidence=evidence,
            embeddings=list(own),
        )

    whole = time_queries({"find": search}, 200)["find"].cpu_ms
    library = fast._library  # noqa: SLF001
    fast._library = SimpleNamespace(search=lambda *_: 1)  # noqa: SLF001  what the last search left is read again
    rest = time_queries({"find": search}, 200)["find"].cpu_ms
    fast._library = library  # noqa: SLF001
    print(f"\nGeometry by codes: {1000 * whole:.0f} CPU-µs, of which Python {1000 * rest:.0f}.")


def main() -> None:
    """Measure and print."""
    use_one_thread()
    index = Index.open(sys.argv[2])
    data = Data(Path(sys.argv[1]), index.model, int(sys.argv[3]) if len(sys.argv) > 3 else 1000)
    print(f"{describe_machine()}; {len(data.items):,} items, {len(data.queries):,} queries")
    report(data, our_methods(index, None) | faiss_methods(data, None) | graph_methods(data), None)
    report_parts(data, index)
    for share in SHARES:
        allowed = np.random.default_rng(0).random(len(data.items)) < share
        report(data, our_methods(index, allowed) | faiss_methods(data, allowed), allowed)


if __name__ == "__main__":
    main()
