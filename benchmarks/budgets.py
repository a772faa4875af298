"""How many candidates a search by codes needs, found by distances or by the generator; plain and filtered.

Usage: python benchmarks/budgets.py INDEX DATA [SPLIT] [QUERIES]

INDEX holds the candidates of DATA (M-BEIR's layout) in one segment, with fused embeddings. QUERIES bounds the queries of
each row. "Share" is relative to ranking every item by codes, "worst" that of the worst kind of query and answer. "Items"
takes items of the index as queries. Then: how many queries have a right answer among few candidates, beside the best of all
items by codes and by embeddings. Prints Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from genius_search.config import SearchConfig
from genius_search.data.mbeir import MBeir
from genius_search.index.index import Index
from genius_search.index.query import evidence_of
from genius_search.lab.bench.measure import describe_machine, time_queries, use_one_thread
from genius_search.progress import Silent
from genius_search.search.fast import Wanted
from genius_search.search.find import find
from genius_search.search.table import Allowed, Restriction
from genius_search.tune import ValidationConfig, ValidationQueries, validation_queries

SHARES = (1 / 80, 1 / 40, 1 / 20, 1 / 10, 1 / 5)
FILTERS = (0.5, 0.1, 0.01, 0.001)
FEW = (50, 150, 600)
SEEDS = 3
ITEMS = 300
TIMED = 200
K = 10
EVERYTHING = 10**9
Found = list[list[int]]
"""Rows of the items that each query found, best first."""


class Searched:
    """An index, and queries with their answers."""

    def __init__(self, index: Index, queries: ValidationQueries) -> None:
        self.model, self.snapshot = index.model, index.snapshot
        [self.segment] = self.snapshot.segments
        self.count = self.snapshot.num_alive
        self.queries = queries.fused.numpy()
        self.right = [{row for _, row in right} for right in queries.right]
        self.kinds = np.array(
            [f"{one.modality}→{wanted}" for one, wanted in zip(queries.queries, queries.wanted, strict=True)]
        )
        self.items = np.asarray(self.segment.vectors(np.arange(self.count)))
        self._evidence = evidence_of(self.model, self.snapshot)

    def search(
        self, vectors: np.ndarray, config: SearchConfig, *, k: int = K, allowed: Restriction | None = None
    ) -> Found:
        """Search with each vector by itself."""
        wanted = [Wanted(config.beam, k, restriction=allowed)]
        found = []
        for number in range(len(vectors)):
            own = vectors[number : number + 1]
            (one,) = find(
                lambda: self.model.decoder_for(config),
                self.model.fast_for(config),
                self.snapshot.search_segments,
                own,
                wanted,
                config,
                evidence=self._evidence,
                embeddings=list(own),
            )
            found.append(one.ranking.items.tolist())
        return found

    def exact(self, mask: np.ndarray | None = None, k: int = K) -> Found:
        """Compare with every embedding."""
        found = []
        for query in self.queries:
            scores = self.items @ query
            if mask is not None:
                scores[~mask] = -np.inf
            best = np.argsort(-scores)[:k]
            found.append(best[np.isfinite(scores[best])].tolist())
        return found

    def is_found(self, found: Found, k: int, right: list[set[int]] | None = None) -> np.ndarray:
        """Return whether each query has a right answer among the first k."""
        return np.array([bool(r & set(own[:k])) for r, own in zip(right or self.right, found, strict=True)])


def agreement(found: Found, truth: Found, k: int = 5) -> float:
    """Share of the first k of the truth that is found among the first k."""
    pairs = zip(found, truth, strict=True)
    return float(np.mean([len({*own[:k]} & {*best[:k]}) / max(1, len(best[:k])) for own, best in pairs]))


def times(
    searched: Searched, configs: dict[str, SearchConfig], allowed: Restriction | None
) -> dict[str, float]:
    """CPU-microseconds of a query alone."""

    def timed(config: SearchConfig) -> Callable[[int], object]:
        return lambda number: searched.search(searched.queries[number : number + 1], config, allowed=allowed)

    measured = time_queries(
        {name: timed(config) for name, config in configs.items()}, min(TIMED, len(searched.queries))
    )
    return {name: 1000 * latency.cpu_ms for name, latency in measured.items()}


def report_budgets(searched: Searched) -> None:
    """Print a line for each router and number of candidates."""
    count = searched.count
    usual = replace(searched.model.usual_search(count), rerank="codes")
    everything = replace(usual, router="geometry", candidates=EVERYTHING)
    configs = {
        f"{router}, {candidates:,} ({candidates / count:.1%})": replace(
            usual, router=router, candidates=candidates
        )
        for router in ("geometry", "generator")
        if router == "geometry" or searched.model.has_generator
        for candidates in sorted({150, 1000, *(round(count * share) for share in SHARES)})
    }
    taken = np.random.default_rng(0).choice(count, ITEMS, replace=False)

    def neighbours(config: SearchConfig) -> Found:
        found = searched.search(searched.items[taken], config, k=K + 1)
        return [[row for row in own if row != item] for own, item in zip(found, taken, strict=True)]

    all_near, by_codes = neighbours(everything), searched.search(searched.queries, everything)
    ceiling = searched.is_found(by_codes, 5)
    micros = times(searched, {"all by codes": everything, **configs}, None)
    print("\n| | R@1 | R@5 | share | worst | agree@5 | items | CPU-µs |\n|---|---|---|---|---|---|---|---|")
    for name, found in (("exact", searched.exact()), ("all by codes", by_codes)):
        hits = (searched.is_found(found, k).mean() for k in (1, 5))
        time = f"{micros[name]:.0f}" if name in micros else ""
        print(f"| {name} | {' | '.join(f'{hit:.3f}' for hit in hits)} | | | | | {time} |")
    for name, config in configs.items():
        found = searched.search(searched.queries, config)
        hits = searched.is_found(found, 5)
        worst = min(
            hits[own].mean() / ceiling[own].mean()
            for own in (searched.kinds == kind for kind in set(searched.kinds))
            if ceiling[own].any()
        )
        numbers = (
            searched.is_found(found, 1).mean(),
            hits.mean(),
            hits.mean() / ceiling.mean(),
            worst,
            agreement(found, by_codes),
            agreement(neighbours(config), all_near),
        )
        print(f"| {name} | {' | '.join(f'{number:.3f}' for number in numbers)} | {micros[name]:.0f} |")


def report_candidates(searched: Searched) -> None:
    """Print the share of queries with a right answer among few candidates, or among the best of all items."""
    usual = replace(searched.model.usual_search(searched.count), rerank="codes", router="geometry")
    print("\n| candidates | geometry | generator | the best by codes | the best by embeddings |")
    print("|---|---|---|---|---|")
    for count in FEW:
        ways = {
            "geometry": replace(usual, candidates=count),
            "generator": replace(usual, candidates=count, router="generator"),
            "codes": replace(usual, candidates=EVERYTHING),
        }
        if not searched.model.has_generator:
            del ways["generator"]
        found = {name: searched.search(searched.queries, config, k=count) for name, config in ways.items()}
        found["embeddings"] = searched.exact(k=count)
        shares = [
            f"{searched.is_found(found[name], count).mean():.3f}" if name in found else ""
            for name in ("geometry", "generator", "codes", "embeddings")
        ]
        print(f"| {count} | {' | '.join(shares)} |", flush=True)


def report_filters(searched: Searched) -> None:
    """Print a line for each share of allowed items and each evidence, drawn several times."""
    usual = replace(searched.model.usual_search(searched.count), router="geometry")
    print(
        "\n| allowed | ranked by | of the truth's first 5 | R@5 | of ranking all | CPU-µs |\n|---|---|---|---|---|---|"
    )
    for share in FILTERS:
        for by in ("codes", "embeddings"):
            config = replace(usual, rerank=by)
            everything = replace(config, candidates=EVERYTHING, shortlist=0)
            agreed, hits, best_hits = [], [], []
            for seed in range(SEEDS):
                mask = np.random.default_rng(seed).random(searched.count) < share
                allowed = (Allowed.of(searched.segment.table, mask),)
                found = searched.search(searched.queries, config, allowed=allowed)
                truth = searched.search(searched.queries, everything, allowed=allowed)
                agreed.append(agreement(found, truth))
                right = [{row for row in own if mask[row]} for own in searched.right]
                has = np.array([bool(own) for own in right])
                hits += searched.is_found(found, 5, right)[has].tolist()
                best_hits += searched.is_found(truth, 5, right)[has].tolist()
            micros = times(searched, {by: config}, allowed)[by]
            ratio = np.mean(hits) / np.mean(best_hits) if any(best_hits) else np.nan
            print(
                f"| {share:.1%} | {by} | {np.mean(agreed):.3f} | {np.mean(hits):.3f} of {len(hits):,} queries "
                f"| {ratio:.3f} | {micros:.0f} |"
            )


def main() -> None:
    """Measure and print."""
    use_one_thread()
    index, data = Index.open(sys.argv[1]), MBeir(Path(sys.argv[2]))
    split = sys.argv[3] if len(sys.argv) > 3 else "test"
    most = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    chosen = ValidationConfig(split=split, queries=most)
    queries = validation_queries(index, data, chosen, rerank="codes", progress=Silent())
    searched = Searched(index, queries)
    print(f"{describe_machine()}; {searched.count:,} items, {len(searched.queries):,} queries")
    report_budgets(searched)
    report_candidates(searched)
    report_filters(searched)


if __name__ == "__main__":
    main()
