"""How many candidates pools of different sizes need, and what a query takes: geometry and ranking by codes.

Usage: python benchmarks/pools.py FLICKR8K FOLDER [ITEMS ...]

The smallest pool is Flickr8k's 32,368 captions. Larger ones are invented: beside the captions, each item is the feature
of a caption plus the difference between the features of two captions of another photograph, normalised. (A query's
nearest invented items are as near as its nearest captions.) Codebooks are fitted to 65,536 items of each pool; FOLDER
keeps the pools. Above a million, the IDs alone are invented: the first three codes of an item of the million, followed by
the rest of another's that shares the first two. Prints Markdown.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import torch
from cluster import invent
from query_path import lines, row_of

from genius_search.config import SearchConfig, usual_search
from genius_search.lab.bench.measure import describe_machine, time_queries, use_one_thread
from genius_search.progress import Silent
from genius_search.search.compiled import CompiledSearch, open_library
from genius_search.search.fast import Wanted
from genius_search.search.rank import CodeRanker
from genius_search.search.table import IdTable, SearchSegment
from genius_search.training.codebooks import MAX_SAMPLE, draw_ids, fit_codebooks

K = 10
ALL = "all by codes"
CAPTIONS = 5
CHUNK = 8192
DENSITY_SAMPLE = 1024
MOST_VECTORS = 1_000_000


class Flickr8k:
    """Features of the captions, and the rows of candidates and test queries among them."""

    def __init__(self, folder: Path) -> None:
        self.features = np.load(folder / "features/text_features.npy").astype(np.float32)
        pool = lines(next((folder / "cand_pool/global").glob("*test*.jsonl")))
        queries = lines(next((folder / "query/test").glob("*.jsonl")))
        self.pool = np.array([row_of(str(line["did"])) for line in pool])
        place = {row: place for place, row in enumerate(self.pool.tolist())}
        self.right = [{place[row_of(did)] for did in query["pos_cand_list"]} for query in queries]
        self.queries = self.features[[row_of(str(query["qid"])) for query in queries]]

    def recall(self, found: np.ndarray) -> float:
        """Share of queries with a right answer among the first five."""
        return float(
            np.mean([bool(right & set(own[:5])) for right, own in zip(self.right, found, strict=True)])
        )

    def items(self, count: int) -> np.ndarray:
        """The candidates, and invented items up to this number."""
        random = np.random.default_rng(0)
        invented = count - len(self.pool)
        base = self.pool[random.integers(0, len(self.pool), invented)]
        photo = random.integers(0, len(self.features) // CAPTIONS, invented) * CAPTIONS
        one = random.integers(0, CAPTIONS, invented)
        other = (one + random.integers(1, CAPTIONS, invented)) % CAPTIONS
        vectors = self.features[base] + self.features[photo + one] - self.features[photo + other]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.concatenate([self.features[self.pool], vectors])


def encode(vectors: np.ndarray, folder: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the IDs of items, with norms and densities, and the code vectors; from the folder if they are there."""
    count = len(vectors)
    ids_file, tables_file = folder / f"ids{count}.npy", folder / f"tables{count}.npz"
    if not tables_file.exists():
        sample = torch.from_numpy(vectors[np.sort(np.random.default_rng(0).permutation(count)[:MAX_SAMPLE])])
        texts = np.ones(len(sample), dtype=np.int8)
        quantizer = fit_codebooks(
            sample, texts, folder / f"quant{count}", items=count, inputs={}, progress=Silent()
        ).quantizer
        quantizer.config = dataclasses.replace(
            quantizer.config, encoding_beam=2
        )  # a million items in minutes

        def own_ids(own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
            encoded = quantizer.encode_items(
                torch.zeros_like(own), own, torch.ones(len(own), dtype=torch.long)
            )
            return encoded.codes, np.concatenate(
                [encoded.codes.numpy(), encoded.norm_and_density.numpy()], axis=1
            )

        codes, _ = own_ids(sample[:DENSITY_SAMPLE])
        quantizer.set_pool_sample(draw_ids(codes, texts[:DENSITY_SAMPLE], seed=0))
        chunks = [own_ids(own)[1] for own in torch.from_numpy(vectors).split(CHUNK)]
        np.save(ids_file, np.concatenate(chunks).astype(np.uint8))
        np.savez(tables_file, *[table.numpy() for table in quantizer.tables()])
    saved = np.load(tables_file)
    return np.load(ids_file), [saved[name] for name in saved.files]


Method = Callable[[np.ndarray], list[np.ndarray]]
"""Finds the best items of each query."""


def search_codes(
    ids: np.ndarray, tables: list[np.ndarray], configs: Iterable[SearchConfig]
) -> dict[str, Method]:
    """Return searches by codes, the last of which ranks all items."""
    segments = [SearchSegment(IdTable.build(ids, np.zeros(len(ids))))]
    library = open_library()
    if library is None:
        sys.exit("compile the search first: python -m genius_search.search.native.build")
    fast = CompiledSearch(CodeRanker([torch.from_numpy(table) for table in tables]), library)

    def search(own: np.ndarray, config: SearchConfig) -> list[np.ndarray]:
        found = fast.search(segments, own, [Wanted(config.beam, K)] * len(own), config)
        return [one.ranking.items for one in found]

    usual = usual_search(len(ids))
    named = {}
    for config in configs:
        name = f"beam {config.beam}, {config.candidates:,} candidates"
        named[f"**{name}**" if config == usual else name] = config
    named[ALL] = dataclasses.replace(usual, candidates=10**9)
    return {name: partial(search, config=config) for name, config in named.items()}


def search_vectors(vectors: np.ndarray) -> dict[str, Method]:
    """Return searches by faiss, the last of which is exact."""
    found: dict[str, Method] = {}
    count = len(vectors)
    index = faiss.index_factory(vectors.shape[1], f"IVF{1 << round(np.log2(count**0.5))},PQ16x8np")
    index.cp.min_points_per_centroid = 1
    index.train(vectors[np.random.default_rng(0).permutation(count)[:MAX_SAMPLE]])
    index.add(vectors)
    for lists in (16, 64):
        parameters = faiss.SearchParametersIVF(nprobe=lists)
        found[f"faiss IVF{index.nlist},PQ16x8, {lists} lists"] = lambda own, parameters=parameters: list(
            index.search(own, K, params=parameters)[1]
        )
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    found["exact"] = lambda own: list(flat.search(own, K)[1])
    return found


def report(data: Flickr8k, count: int, folder: Path) -> None:
    """Measure and print one pool's table."""
    usual, queries = usual_search(count), data.queries
    has_captions = count <= MOST_VECTORS
    if has_captions:
        vectors = data.items(count)
        ids, tables = encode(vectors, folder)
        candidates = (1000, count // 50, count // 20, count // 10, count // 5)
        beams = (usual.beam, 50)
    else:
        ids, tables = encode(data.items(MOST_VECTORS), folder)
        random, table = np.random.default_rng(0), IdTable.build(ids, np.zeros(len(ids)))
        sizes = [min(MOST_VECTORS, count - done) for done in range(0, count, MOST_VECTORS)]
        ids = np.concatenate([invent(table, size, random).astype(np.uint8) for size in sizes])
        candidates = (10_000, 30_000, 70_000, 100_000, 300_000, 1_000_000)
        beams = (usual.beam,)
    configs = [
        dataclasses.replace(usual, beam=beam, candidates=number) for beam in beams for number in candidates
    ]
    methods = search_codes(ids, tables, configs)
    if has_captions:
        methods |= search_vectors(vectors)
    times = time_queries(
        {
            name: (lambda number, call=call: call(queries[number : number + 1]))
            for name, call in methods.items()
        },
        100,
    )
    best = [set(own) for own in methods[ALL](queries)]
    print(f"\n### {count:,} items, {count - has_captions * len(data.pool):,} of them invented\n")
    print("| | of the ten best by codes | R@5 | CPU-µs alone |\n|---|---|---|---|")
    for name, call in methods.items():
        found = call(queries)
        shared = np.mean([len(own & set(other)) / K for own, other in zip(best, found, strict=True)])
        of_codes = f"{shared:.3f}" if "candidates" in name else ""
        recall = f"{data.recall(found):.3f}" if has_captions else ""
        print(f"| {name} | {of_codes} | {recall} | {1000 * times[name].cpu_ms:,.0f} |", flush=True)


def main() -> None:
    """Measure and print."""
    use_one_thread()
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    data = Flickr8k(Path(sys.argv[1]))
    began = time.monotonic()
    print(describe_machine())
    for count in [int(size) for size in sys.argv[3:]] or [len(data.pool), 300_000, 1_000_000]:
        report(data, max(count, len(data.pool)), folder)
    print(f"\nin {time.monotonic() - began:,.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
