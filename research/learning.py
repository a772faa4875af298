"""``python -m research.learning``: what a log of choices adds to a search, beside simple rivals.

Some queries with known answers become a log: for each, one right item was chosen. The others are asked.
Recall is told apart by how often their answers are in the log, which can only know what it has seen.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import pandas as pd
import torch
import tyro
from jaxtyping import Float32, Int64
from torch.nn import functional as F

from genius_search.cli.options import DataArgument, JsonOption, OptionalFile, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table
from genius_search.config import PAPER_SEARCH
from genius_search.data.features import Pairs
from genius_search.errors import BadData
from genius_search.index.encode import EncodedQuery
from genius_search.index.index import Index, current_state
from genius_search.index.learned import MAX_RAISED_CHOICES, shares_from_cosines
from genius_search.index.query import SnapshotSearcher
from genius_search.index.score import raise_by_shares
from genius_search.index.source import stored_features, vector_features
from genius_search.index.store import LEARNED
from genius_search.index.writer import alive_items
from genius_search.model import Genius
from genius_search.nn.codebooks import StoredQuantizer, normalize
from genius_search.progress import Silent
from genius_search.recipe import preset
from genius_search.records import Modality, Query, did_of, qid_of
from genius_search.training.generator import train_generator
from research.bench.given import Given, read_given
from research.bench.measure import use_one_thread
from research.command import run
from research.figures import new_figure

GROUPS: Final = {
    "all": (0, None),
    "never": (0, 1),
    "once": (1, 2),
    "2 to 9": (2, 10),
    "10 and more": (10, None),
}
"""Queries by the number of logged choices of their right answers."""
POPULARITY: Final = 0.25
"""Spreads that an item gains for each e-fold of its choices: the best of .1, .25, .5, 1 on icons."""
TEMPERATURE: Final = 0.05
"""Of the contrastive loss of the adapter."""
STEPS: Final = 300
TIMED: Final = 500
"""Searches that are timed."""
BATCH: Final = 256

DEPTH: Final = 100
"""Hits of an index that are ranked; its other items come after them, as if none was right."""
GENERATOR: Final = 0.05
"""Spreads that an item gains for each unit of the generator's log-probability: the best of .05, .1, .2, .4 on
icons."""
GENERATED: Final = 100
"""IDs that the generator writes for a query."""
EPOCHS: Final = 10.0
"""Of the generator, on the log; with 40 it finds less."""

DRAWN: Final = {
    "exact search": "k--",
    "nearest logged queries": "C2s:",
    "adapter trained on the log": "C1^-",
    "index that learned the log": "C0o-",
}
"""Lines of the figure and their styles."""

Queries = Float32[np.ndarray, "queries dim"]
Scores = Float32[np.ndarray, "queries items"]


class Log(NamedTuple):
    """Queries that were asked before, and the row of the item that was chosen for each."""

    queries: Queries
    chosen: Int64[np.ndarray, " queries"]


def draw_log(
    given: Given, share: float, wrong: float, seed: int
) -> tuple[Log, Int64[np.ndarray, " asked"]]:
    """Draw a log from at most half of the queries; return it, and the numbers of the queries that are asked.

    The other half is always the same for a seed, whatever the share.

    Parameters
    ----------
    share
        of all queries that are logged, at most a half.
    wrong
        share of the choices that are any item.
    """
    random, right = np.random.default_rng(seed), given.right or []
    usable = [number for number, own in enumerate(right) if own]
    order = random.permutation(usable)
    logged = order[: min(round(share * len(order)), len(order) // 2)]
    chosen = np.array([random.choice(sorted(right[number])) for number in logged], dtype=np.int64)
    is_wrong = random.random(len(chosen)) < wrong
    chosen[is_wrong] = random.integers(0, len(given.items), int(is_wrong.sum()))
    return Log(given.queries[logged], chosen), order[len(order) // 2 :]


def nearest_logged(
    queries: Queries, log: Log, num_items: int
) -> Float32[np.ndarray, "queries items"]:
    """Return the shares of items: by the most similar query for which they were chosen."""
    shares = np.zeros((num_items, len(queries)), dtype=np.float32)
    np.maximum.at(shares, log.chosen, shares_from_cosines(queries @ log.queries.T).T)
    shares = np.ascontiguousarray(shares.T)
    least = np.sort(shares, axis=1)[:, -MAX_RAISED_CHOICES]
    return np.where(shares < least[:, None], 0, shares)


def train_adapter(
    log: Log, items: Float32[np.ndarray, "items dim"], seed: int
) -> Callable[[Queries], Queries]:
    """Train a linear map of queries by the contrastive loss on the log (paper, equation 2)."""
    torch.manual_seed(seed)
    dim = items.shape[1]
    adapter = torch.nn.Linear(dim, dim, bias=False)
    torch.nn.init.zeros_(adapter.weight)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3, weight_decay=0.1)
    queries, targets = torch.from_numpy(log.queries), torch.from_numpy(items[log.chosen])
    for _ in range(STEPS):
        rows = torch.randint(len(queries), (min(BATCH, len(queries)),))
        asked = F.normalize(queries[rows] + adapter(queries[rows]), dim=1)
        loss = F.cross_entropy(asked @ targets[rows].T / TEMPERATURE, torch.arange(len(rows)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def adapt(given: Queries) -> Queries:
        with torch.no_grad():
            vectors = torch.from_numpy(given)
            adapted: np.ndarray = F.normalize(vectors + adapter(vectors), dim=1).numpy()
            return adapted

    return adapt


def search_index(
    index: Index, queries: Queries, right: Sequence[set[int]]
) -> Int64[np.ndarray, " queries"]:
    """Return how many hits of an index, whose ids are rows, are before the first right one of each query."""
    above = np.full(len(queries), DEPTH)
    # With an instruction, all modalities are ranked together, as by exact search.
    for number, hits in enumerate(index.search_vectors(queries, k=DEPTH, instruction="as given")):
        for place, hit in enumerate(hits):
            if int(hit.id) in right[number]:
                above[number] = place
                break
    return above


def train_on_log(log: Log, index: Index, folder: Path, seed: int) -> Genius:
    """Train the generator of the preset ``small`` to write the IDs of the items that were chosen."""
    model, snapshot = current_state(index)
    rows = [
        int(item.id) for segment in reversed(snapshot.segments) for item in alive_items(segment)
    ]
    place = np.argsort(rows)
    texts = np.full(len(log.chosen), Modality.TEXT.code, dtype=np.int8)
    queries = vector_features(log.queries, np.arange(len(log.queries)), texts)
    items = stored_features(snapshot, model)
    queries.fingerprint = items.fingerprint
    queries.target_modality = queries.modality
    lines = [
        Query(qid_of(number), Modality.TEXT, positives=(did_of(int(place[row])),))
        for number, row in enumerate(log.chosen)
    ]
    recipe = preset("small").generator
    training = replace(recipe.training, epochs=EPOCHS, batch_size=min(256, len(lines)), seed=seed)
    stored = StoredQuantizer(model.folder / "quantizer")
    generator = train_generator(
        Pairs(lines, queries, items),
        stored,
        folder / "generator",
        replace(recipe, training=training),
        progress=Silent(),
    )
    return Genius.finish(folder, model.encoder, stored, generator, ())


def generate(model: Genius, index: Index, queries: Queries) -> Scores:
    """Return log-probabilities of the IDs that the generator writes; −inf for items of others."""
    config = replace(PAPER_SEARCH, beam=GENERATED)
    searcher = SnapshotSearcher(model, current_state(index).snapshot, config)
    scores = np.full((len(queries), len(index)), -np.inf, dtype=np.float32)
    for start in range(0, len(queries), BATCH):
        asked = [
            [EncodedQuery.of_vector(query, GENERATED)] for query in queries[start : start + BATCH]
        ]
        for number, result in enumerate(searcher.search_encoded(asked), start=start):
            for hit in result.hits:
                scores[number, int(hit.id)] = hit.score
    return scores


def ranks(scores: Scores, right: Sequence[set[int]]) -> Int64[np.ndarray, " queries"]:
    """Return how many items are ranked above the best right answer of each query."""
    best = np.array([scores[number, list(own)].max() for number, own in enumerate(right)])
    above: np.ndarray = (scores > best[:, None]).sum(axis=1)
    return np.where(np.isfinite(best), above, scores.shape[1])


def measure_cost(given: Given, index: Index, count: int) -> dict[str, int]:
    """Return what choices cost: CPU-µs of a search without them, with new and known ones; bytes of one.

    Their queries have a cosine of about .8 with the items that are chosen.
    """
    use_one_thread()
    random = np.random.default_rng(0)
    rows = random.integers(0, len(given.items), count)
    noise = normalize(random.standard_normal((count, given.items.shape[1]), dtype=np.float32))
    queries = normalize(given.items[rows] + 0.75 * noise)

    def time_searches() -> int:
        began = time.process_time()
        for query in queries[:TIMED]:
            index.search(vector=query)
        return round((time.process_time() - began) / TIMED * 1e6)

    index.forget()
    time_searches()
    cost = {"without": time_searches()}
    began = time.process_time()
    index.learn_many(
        {"vector": query, "chosen": str(row)}
        for query, row in zip(queries, rows.tolist(), strict=True)
    )
    cost["learning all, seconds"] = round(time.process_time() - began)
    index.search(vector=queries[-1])  # opens the log
    cost |= {"with new choices": time_searches(), "with known choices": time_searches()}
    size = sum(
        file.stat().st_size for file in (index.folder / LEARNED).rglob("*") if file.is_file()
    )
    return {**cost, "bytes of a choice": round(size / count)}


@command
class Learning(JsonOption):
    """Measure what a log of chosen items adds to exact search, beside simple rivals.

    Half of the queries that have a right answer are asked; of the others, a share is the log.
    """

    data: DataArgument
    """A data set in M-BEIR's layout with features, or one .npy file with a vector for each item."""

    query_vectors: OptionalFile = None
    """With DATA a .npy file: another one, of queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item."""

    work: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("learning")
    """Folder of what is embedded on the way."""

    shares: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Shares of the queries that are logged."""

    wrong: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Shares of the choices that are wrong."""

    generator: bool = False
    """Also train a generator on each log, which takes a minute for 2,000 choices."""

    queries: int = 4000
    """Queries that are read."""

    seeds: tuple[int, ...] = (0, 1, 2)

    figure: OptionalFile = None
    """Draw R@5 against the share of queries that is logged, without wrong choices, into this file."""

    beside: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[FILE ...]")] = ()
    """With --figure: results of other data, as --json prints them, to be drawn beside."""

    choices: int = 0
    """Instead measure what so many choices cost, of queries near random items."""

    def run(self) -> None:
        """Measure and print."""
        with TerminalProgress() as progress:
            given = read_given(
                self.data,
                self.work,
                most_queries=self.queries,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
        if given.right is None:
            raise BadData("the right answers are not known; give --query-vectors and --answers")
        index = self._create_index(given)
        if self.choices:
            print_json(measure_cost(given, index, self.choices))
            return
        rows = [
            row
            for share in self.shares
            for wrong in self.wrong
            for row in self._measure(given, index, share, wrong)
        ]
        if self.figure is not None:
            others = [json.loads(file.read_text(encoding="utf-8")) for file in self.beside]
            draw([{"data": self.data.stem, "rows": rows}, *others], self.figure)
        if self.json:
            print_json({"data": self.data.stem, "rows": rows})
            return
        print_table(
            ["log", "wrong", "ranked by", *GROUPS],
            [[str(value) for value in row.values()] for row in rows],
        )

    def _create_index(self, given: Given) -> Index:
        """Create an index of the items, with the defaults; their ids are their rows."""
        shutil.rmtree(self.work / "index", ignore_errors=True)
        return Index.from_vectors(
            self.work / "index",
            given.items,
            ids=[str(row) for row in range(len(given.items))],
            modalities=[[*Modality][code] for code in given.modality.tolist()],
        )

    def _measure(
        self, given: Given, index: Index, share: float, wrong: float
    ) -> list[dict[str, str]]:
        """Return R@1 / R@5 of each row, mean over the seeds, by group."""
        found: dict[str, list[pd.DataFrame]] = {}
        for seed in self.seeds:
            log, asked = draw_log(given, share, wrong, seed)
            if not len(log.chosen):
                return []
            right = [(given.right or [])[number] for number in asked]
            counts = np.bincount(log.chosen, minlength=len(given.items))
            times = np.array([int(counts[list(own)].sum()) for own in right])
            asking = given.queries[asked]
            measured = self._rank(given, asking, right, log, counts, seed)
            measured += self._search(index, asking, right, log)
            if self.generator:
                measured += self._generate(given, index, asking, right, log, seed)
            for name, above in measured:
                ranked = pd.DataFrame({"seed": seed, "above": above, "times": times})
                found.setdefault(name, []).append(ranked)
        return [
            {"log": f"{share:.0%}", "wrong": f"{wrong:.0%}", "ranked by": name}
            | {
                group: describe(pd.concat(measured), low, high)
                for group, (low, high) in GROUPS.items()
            }
            for name, measured in found.items()
        ]

    def _rank(
        self,
        given: Given,
        queries: Queries,
        right: Sequence[set[int]],
        log: Log,
        counts: Int64[np.ndarray, " items"],
        seed: int,
    ) -> list[tuple[str, Int64[np.ndarray, " queries"]]]:
        plain = queries @ given.items.T
        unit = plain.std(axis=1, keepdims=True)
        near = nearest_logged(queries, log, len(given.items))
        adapted = train_adapter(log, given.items, seed)(queries) @ given.items.T
        popular = POPULARITY * np.log1p(counts).astype(np.float32)
        return [
            ("exact search", ranks(plain, right)),
            ("popularity", ranks(plain + unit * popular, right)),
            ("adapter trained on the log", ranks(adapted, right)),
            (
                "nearest logged queries",
                ranks(raise_by_shares(plain, near, plain.std(axis=1)), right),
            ),
            (
                "adapter and nearest",
                ranks(raise_by_shares(adapted, near, adapted.std(axis=1)), right),
            ),
        ]

    def _search(
        self, index: Index, queries: Queries, right: Sequence[set[int]], log: Log
    ) -> list[tuple[str, Int64[np.ndarray, " queries"]]]:
        index.forget()
        plain = search_index(index, queries, right)
        index.learn_many(
            {"vector": query, "chosen": str(row)}
            for query, row in zip(log.queries, log.chosen.tolist(), strict=True)
        )
        return [
            ("index", plain),
            ("index that learned the log", search_index(index, queries, right)),
        ]

    def _generate(
        self,
        given: Given,
        index: Index,
        queries: Queries,
        right: Sequence[set[int]],
        log: Log,
        seed: int,
    ) -> list[tuple[str, Int64[np.ndarray, " queries"]]]:
        shutil.rmtree(self.work / "generator", ignore_errors=True)
        generated = generate(train_on_log(log, index, self.work, seed), index, queries)
        plain = queries @ given.items.T
        unit = plain.std(axis=1, keepdims=True)
        is_found = np.isfinite(generated)
        least = np.where(is_found, generated, np.inf).min(axis=1, keepdims=True)
        gain = GENERATOR * unit * np.where(is_found, generated - least, 0)
        near = raise_by_shares(
            plain, nearest_logged(queries, log, len(given.items)), plain.std(axis=1)
        )
        return [
            ("generator", ranks(generated, right)),
            (
                "generator routes, exact vectors rank",
                ranks(np.where(is_found, plain, -np.inf), right),
            ),
            ("exact search and generator", ranks(plain + gain, right)),
            ("nearest logged queries and generator", ranks(near + gain, right)),
        ]


def describe(ranked: pd.DataFrame, low: int, high: int | None) -> str:
    """Return R@1 / R@5 of the queries whose answers were logged ``low`` times or more, below ``high``.

    It is the mean over seeds, not a number where a seed has no such query.
    """
    own = ranked[(ranked["times"] >= low) & (ranked["times"] < (high or np.inf))]
    seeds = ranked["seed"].unique()
    first, five = (
        own["above"].lt(k).groupby(own["seed"]).mean().reindex(seeds).mean(skipna=False)
        for k in (1, 5)
    )
    return f"{first:.3f} / {five:.3f}"


def draw(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw R@5 of all queries by the share that is logged, in one panel for each data set."""
    figure = new_figure(width=1 + 2.6 * len(results), height=3.2)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        rows = pd.DataFrame(result["rows"])
        rows = rows[rows["wrong"] == "0%"].assign(
            share=lambda table: table["log"].str.rstrip("%").astype(float),
            recall=lambda table: table["all"].str.split(" / ").str[1].astype(float),
        )
        for name, style in DRAWN.items():
            own = rows[rows["ranked by"] == name]
            axes.plot(own["share"], own["recall"], style, label=name)
        axes.set(title=result["data"], xlabel="queries logged, %", xscale="log")
        axes.set_xticks(sorted(rows["share"].unique()), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.minorticks_off()
    panels[0].set_ylabel("R@5 of all queries that are asked")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


main = partial(run, Learning, "learning")


if __name__ == "__main__":
    sys.exit(main())
