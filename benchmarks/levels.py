"""How close ranking by codes comes to exact search, by the bytes of an ID, beside faiss at equal bytes.

Usage: python benchmarks/levels.py FLICKR8K [--levels 12,32,64]

FLICKR8K has M-BEIR's layout and ``features/text_features.npy``. Codebooks are fitted to the pool without training,
as `genius index create --levels` does, and all IDs are ranked as in such an index, but without densities.
Agreement is the share of exact search's first five hits that are among the first five. Prints Markdown; takes
half an hour of CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import faiss
import numpy as np
import torch

from genius_search.nn.arrays import normalize
from genius_search.progress import Silent
from genius_search.training.codebooks import fit_codebooks

K = 5
OPQ_SAMPLE = 9984
"""Items that OPQ's rotation is trained on, as few as faiss accepts; its codebooks are trained on all."""
SCALAR = (
    *(f"RR384,SQtqmse{bits}" for bits in (1, 2, 3)),
    "SQ4",
    "SQ6",
    "SQ8",
    *(f"IVF64,RaBitQ{bits}" for bits in range(1, 6)),
)
"""Indexes of faiss with one to eight bits for each number, some of them after a random rotation."""


class Data:
    """Vectors of the pool and of queries, and the right answers."""

    def __init__(self, folder: Path) -> None:
        features = normalize(np.load(folder / "features/text_features.npy").astype(np.float32))
        pool = [
            row_of(line["did"]) for line in read(next((folder / "cand_pool/global").glob("*test*.jsonl")))
        ]
        queries = read(next((folder / "query/test").glob("*.jsonl")))
        place = {row: number for number, row in enumerate(pool)}
        self.items = features[pool]
        self.queries = features[[row_of(query["qid"]) for query in queries]]
        self.right = [{place[row_of(did)] for did in query["pos_cand_list"]} for query in queries]
        self.exact = best(self.queries @ self.items.T)

    def print_row(self, name: str, size: float, found: np.ndarray, seconds: float) -> None:
        first = np.mean([own[0] in right for own, right in zip(found, self.right, strict=True)])
        five = np.mean(
            [bool(right & set(own)) for own, right in zip(found.tolist(), self.right, strict=True)]
        )
        shared = [
            len({*own} & {*exact}) / K for own, exact in zip(found.tolist(), self.exact.tolist(), strict=True)
        ]
        print(
            f"| {name} | {size:g} | {first:.3f} | {five:.3f} | {np.mean(shared):.3f} | {seconds:.0f} |",
            flush=True,
        )


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row_of(name: str) -> int:
    return int(name.split(":")[1]) - 1


def best(scores: np.ndarray) -> np.ndarray:
    """Return the columns of the largest scores, best first."""
    columns = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, columns, 1), axis=1)
    return np.take_along_axis(columns, order, 1)


def rank_by_codes(data: Data, levels: int) -> np.ndarray:
    """Fit codebooks, encode the pool, and rank all IDs."""
    items = torch.from_numpy(data.items)
    modalities = np.ones(len(items), dtype=np.int8)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        quantizer = fit_codebooks(
            items,
            modalities,
            Path(folder) / "q",
            items=len(items),
            inputs={},
            levels=levels,
            progress=Silent(),
        ).quantizer
        encoded = quantizer.encode_items(
            torch.zeros_like(items), items, torch.from_numpy(modalities.astype(np.int64))
        )
        vectors = quantizer.decode(encoded.codes).numpy()
    costs = quantizer.config.norm_weight * np.square(vectors).sum(axis=1) / 2
    return best(data.queries @ vectors.T - costs)


def print_faiss(data: Data, name: str) -> None:
    """Build an index of faiss and print its row; all its lists are read."""
    began = time.process_time()
    index = faiss.index_factory(data.items.shape[1], name, faiss.METRIC_INNER_PRODUCT)
    codes = index
    if isinstance(index, faiss.IndexPreTransform):
        codes, first = faiss.downcast_index(index.index), faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(first, faiss.OPQMatrix):
            first.max_train_points = OPQ_SAMPLE
    if isinstance(codes, faiss.IndexIVF):
        codes.nprobe = codes.nlist
    index.train(data.items)
    index.add(data.items)
    found = index.search(data.queries, K)[1]
    data.print_row(f"faiss {name}", codes.code_size, found, time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--levels", default="12,32,64")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    data = Data(given.data)
    print("| method | bytes | R@1 | R@5 | agreement | CPU-s to build |\n|---|---|---|---|---|---|")
    data.print_row("exact search", 4 * data.items.shape[1], data.exact, 0)
    for levels in map(int, given.levels.split(",")):
        began = time.process_time()
        found = rank_by_codes(data, levels)
        data.print_row(f"ours, {levels} levels", levels, found, time.process_time() - began)
        if data.items.shape[1] % levels == 0:
            print_faiss(data, f"PQ{levels}x8")
            print_faiss(data, f"OPQ{levels},PQ{levels}x8")
    for name in SCALAR:
        print_faiss(data, name)


if __name__ == "__main__":
    main()
