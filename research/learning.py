"""``python -m research.learning``: how a log of choices improves search, compared with baselines.

Some queries with right answers become a log: for each, one right item is chosen. The others are
searched. Recall is reported by how often a query's answers were logged, as a log can only help with
items that it contains.
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
from research.bench.data import BenchData, read_data
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
"""Groups of queries, by how often their right answers were chosen: minimum, and bound above."""
POPULARITY_WEIGHT: Final = 0.25
"""Weight of log(1 + choices) of an item, in standard deviations of a query's scores.

The best of 0.1, 0.25, 0.5 and 1 on icons.
"""
ADAPTER_TEMPERATURE: Final = 0.05
ADAPTER_STEPS: Final = 300
NUM_TIMED: Final = 500
"""Number of searches that are timed."""
BATCH: Final = 256
DEPTH: Final = 100
"""Hits of an index that are ranked; a right answer after them counts as not found."""
GENERATOR_WEIGHT: Final = 0.05
"""Weight of the generator's log-probability, in standard deviations of a query's scores.

The best of 0.05, 0.1, 0.2 and 0.4 on icons.
"""
GENERATED_IDS: Final = 100
"""IDs that the generator writes for a query."""
GENERATOR_EPOCHS: Final = 10.0
"""Epochs of the generator on the log; with 40 it finds fewer answers."""
CURVE_STYLES: Final = {
    "exact search": "k--",
    "nearest logged queries": "C2s:",
    "adapter trained on the log": "C1^-",
    "index that learned the log": "C0o-",
}
"""Methods in the figure and the styles of their curves."""

Queries = Float32[np.ndarray, "queries dim"]
Scores = Float32[np.ndarray, "queries items"]
Ranks = Int64[np.ndarray, " queries"]
"""Number of items above the best right answer of each query."""


class Log(NamedTuple):
    """Logged queries, and the row of the item that was chosen for each."""

    queries: Queries
    chosen: Int64[np.ndarray, " queries"]


class Trial(NamedTuple):
    """A log and the queries that are searched, with the rows of their right answers."""

    log: Log
    queries: Queries
    answers: Sequence[set[int]]
    seed: int


def draw_trial(data: BenchData, share: float, wrong: float, seed: int) -> Trial:
    """Draw a log from one half of the queries with answers; the other half is searched.

    The half that is searched depends on the seed alone.

    Parameters
    ----------
    share
        share of all queries that are logged, at most a half.
    wrong
        share of the choices that are random items.
    """
    random, answers = np.random.default_rng(seed), data.answers or []
    order = random.permutation([number for number, rows in enumerate(answers) if rows])
    logged = order[: min(round(share * len(order)), len(order) // 2)]
    chosen = np.array([random.choice(sorted(answers[number])) for number in logged], dtype=np.int64)
    is_wrong = random.random(len(chosen)) < wrong
    chosen[is_wrong] = random.integers(0, len(data.items), int(is_wrong.sum()))
    searched = order[len(order) // 2 :]
    return Trial(
        Log(data.queries[logged], chosen),
        data.queries[searched],
        [answers[number] for number in searched],
        seed,
    )


def shares_of_items(
    queries: Queries, log: Log, num_items: int
) -> Float32[np.ndarray, "queries items"]:
    """Return each item's share: that of the most similar query for which it was chosen."""
    shares = np.zeros((num_items, len(queries)), dtype=np.float32)
    np.maximum.at(shares, log.chosen, shares_from_cosines(queries @ log.queries.T).T)
    shares = np.ascontiguousarray(shares.T)
    min_shares = np.sort(shares, axis=1)[:, -MAX_RAISED_CHOICES]
    return np.where(shares < min_shares[:, None], 0, shares)


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
    for _ in range(ADAPTER_STEPS):
        rows = torch.randint(len(queries), (min(BATCH, len(queries)),))
        adapted = F.normalize(queries[rows] + adapter(queries[rows]), dim=1)
        logits = adapted @ targets[rows].T / ADAPTER_TEMPERATURE
        loss = F.cross_entropy(logits, torch.arange(len(rows)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def adapt(queries: Queries) -> Queries:
        with torch.no_grad():
            vectors = torch.from_numpy(queries)
            adapted: np.ndarray = F.normalize(vectors + adapter(vectors), dim=1).numpy()
            return adapted

    return adapt


def train_on_log(log: Log, index: Index, folder: Path, seed: int) -> Genius:
    """Train the generator of the preset ``small`` to write the IDs of the chosen items."""
    model, snapshot = current_state(index)
    rows = [
        int(item.id) for segment in reversed(snapshot.segments) for item in alive_items(segment)
    ]
    positions = np.argsort(rows)
    modality = np.full(len(log.chosen), Modality.TEXT.code, dtype=np.int8)
    queries = vector_features(log.queries, np.arange(len(log.queries)), modality)
    items = stored_features(snapshot, model)
    queries.fingerprint = items.fingerprint
    queries.target_modality = queries.modality
    records = [
        Query(qid_of(number), Modality.TEXT, positives=(did_of(int(positions[row])),))
        for number, row in enumerate(log.chosen)
    ]
    settings = preset("small").generator
    training = replace(
        settings.training,
        epochs=GENERATOR_EPOCHS,
        batch_size=min(256, len(records)),
        seed=seed,
    )
    quantizer = StoredQuantizer(model.folder / "quantizer")
    generator = train_generator(
        Pairs(records, queries, items),
        quantizer,
        folder / "generator",
        replace(settings, training=training),
        progress=Silent(),
    )
    return Genius.finish(folder, model.encoder, quantizer, generator, ())


def score_by_generator(model: Genius, index: Index, queries: Queries) -> Scores:
    """Return the log-probabilities of the IDs that the generator writes; −inf for other items."""
    config = replace(PAPER_SEARCH, beam=GENERATED_IDS)
    searcher = SnapshotSearcher(model, current_state(index).snapshot, config)
    scores = np.full((len(queries), len(index)), -np.inf, dtype=np.float32)
    for start in range(0, len(queries), BATCH):
        batch = queries[start : start + BATCH]
        encoded = [[EncodedQuery.of_vector(query, GENERATED_IDS)] for query in batch]
        for number, result in enumerate(searcher.search_encoded(encoded), start=start):
            for hit in result.hits:
                scores[number, int(hit.id)] = hit.score
    return scores


def rank_answers(scores: Scores, answers: Sequence[set[int]]) -> Ranks:
    """Return the number of items with a higher score than the best right answer of each query."""
    best = np.array([scores[number, list(rows)].max() for number, rows in enumerate(answers)])
    above: np.ndarray = (scores > best[:, None]).sum(axis=1)
    return np.where(np.isfinite(best), above, scores.shape[1])


def rank_answers_of_index(index: Index, queries: Queries, answers: Sequence[set[int]]) -> Ranks:
    """Return the number of hits of an index before the first right one; ids are rows of items."""
    ranks = np.full(len(queries), DEPTH)
    # With an instruction, all modalities are ranked together, as by exact search.
    for number, hits in enumerate(index.search_vectors(queries, k=DEPTH, instruction="as given")):
        for position, hit in enumerate(hits):
            if int(hit.id) in answers[number]:
                ranks[number] = position
                break
    return ranks


def measure_cost(data: BenchData, index: Index, count: int) -> dict[str, int]:
    """Return the costs of ``count`` choices, whose queries have a cosine of about 0.8 with items.

    CPU-microseconds of a search without choices, and with choices that have and have not been read
    before; and the bytes of a choice.
    """
    use_one_thread()
    random = np.random.default_rng(0)
    rows = random.integers(0, len(data.items), count)
    noise = normalize(random.standard_normal((count, data.items.shape[1]), dtype=np.float32))
    queries = normalize(data.items[rows] + 0.75 * noise)

    def time_searches() -> int:
        began = time.process_time()
        for query in queries[:NUM_TIMED]:
            index.search(vector=query)
        return round((time.process_time() - began) / NUM_TIMED * 1e6)

    index.forget()
    time_searches()
    cost = {"without": time_searches()}
    began = time.process_time()
    learn_log(index, Log(queries, rows))
    cost["learning all, seconds"] = round(time.process_time() - began)
    index.search(vector=queries[-1])  # opens the log
    cost |= {"with new choices": time_searches(), "with known choices": time_searches()}
    files = [file for file in (index.folder / LEARNED).rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return {**cost, "bytes of a choice": round(size / count)}


def learn_log(index: Index, log: Log) -> None:
    """Record the choices of a log in an index whose ids are rows of items."""
    index.learn_many(
        {"vector": query, "chosen": str(row)}
        for query, row in zip(log.queries, log.chosen.tolist(), strict=True)
    )


@command
class Learning(JsonOption):
    """Measure how a log of chosen items improves exact search, compared with baselines.

    Half of the queries that have a right answer are searched; a share of the others is the log.
    """

    data: DataArgument
    """A data set in M-BEIR's layout with features, or one .npy file with a vector for each item."""

    query_vectors: OptionalFile = None
    """If DATA is a .npy file: another one, of queries."""

    answers: OptionalFile = None
    """With --query-vectors: a .npy file with the row of each query's right item."""

    work: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("learning")
    """Folder of features, the index and the generator."""

    shares: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Shares of the queries that are logged."""

    wrong: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Shares of the choices that are wrong."""

    generator: bool = False
    """Also train a generator on each log, which takes a minute for 2,000 choices."""

    queries: int = 4000
    """Maximum number of queries."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the logs; results are means over them."""

    figure: OptionalFile = None
    """Draw R@5 against the share of logged queries, without wrong choices, into this file."""

    beside: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[FILE ...]")] = ()
    """With --figure: results of other data, as printed with --json, for more panels."""

    choices: int = 0
    """Instead, measure the costs of this number of choices, whose queries are near random items."""

    def run(self) -> None:
        """Measure and print."""
        with TerminalProgress() as progress:
            data = read_data(
                self.data,
                self.work,
                max_queries=self.queries,
                query_vectors=self.query_vectors,
                answers=self.answers,
                progress=progress,
            )
        if data.answers is None:
            raise BadData("the right answers are not known; give --query-vectors and --answers")
        index = self._create_index(data)
        if self.choices:
            print_json(measure_cost(data, index, self.choices))
            return
        rows: list[dict[str, str]] = []
        for share in self.shares:
            for wrong in self.wrong:
                rows += self._measure(data, index, share, wrong)
        result = {"data": self.data.stem, "rows": rows}
        if self.figure is not None:
            results = [json.loads(file.read_text(encoding="utf-8")) for file in self.beside]
            draw_recall([result, *results], self.figure)
        if self.json:
            print_json(result)
            return
        lines = [list(row.values()) for row in rows]
        print_table(["log", "wrong", "ranked by", *GROUPS], lines)

    def _create_index(self, data: BenchData) -> Index:
        """Create an index of the items with default settings; their ids are their rows."""
        shutil.rmtree(self.work / "index", ignore_errors=True)
        return Index.from_vectors(
            self.work / "index",
            data.items,
            ids=[str(row) for row in range(len(data.items))],
            modalities=[[*Modality][code] for code in data.modality.tolist()],
        )

    def _measure(
        self, data: BenchData, index: Index, share: float, wrong: float
    ) -> list[dict[str, str]]:
        """Return R@1 / R@5 of each method by group of queries, as means over the seeds."""
        frames: dict[str, list[pd.DataFrame]] = {}
        for seed in self.seeds:
            trial = draw_trial(data, share, wrong, seed)
            if not len(trial.log.chosen):
                return []
            counts = np.bincount(trial.log.chosen, minlength=len(data.items))
            times_logged = [int(counts[list(rows)].sum()) for rows in trial.answers]
            ranks = rank_by_vectors(data.items, trial) | rank_by_index(index, trial)
            if self.generator:
                ranks |= self._rank_by_generator(data.items, index, trial)
            for method, above in ranks.items():
                frame = pd.DataFrame({"seed": seed, "above": above, "times": times_logged})
                frames.setdefault(method, []).append(frame)
        rows = []
        for method, seed_frames in frames.items():
            queries = pd.concat(seed_frames)
            row = {"log": f"{share:.0%}", "wrong": f"{wrong:.0%}", "ranked by": method}
            for group, (low, high) in GROUPS.items():
                row[group] = describe_recall(queries, low, high)
            rows.append(row)
        return rows

    def _rank_by_generator(
        self, items: Float32[np.ndarray, "items dim"], index: Index, trial: Trial
    ) -> dict[str, Ranks]:
        """Return the ranks of answers with a generator that is trained on the log."""
        log, queries, answers, seed = trial
        shutil.rmtree(self.work / "generator", ignore_errors=True)
        model = train_on_log(log, index, self.work, seed)
        generated = score_by_generator(model, index, queries)
        cosines = queries @ items.T
        spread = cosines.std(axis=1)
        is_generated = np.isfinite(generated)
        lowest = np.where(is_generated, generated, np.inf).min(axis=1, keepdims=True)
        log_ratios = np.where(is_generated, generated - lowest, 0)
        gain = GENERATOR_WEIGHT * spread[:, None] * log_ratios
        nearest = raise_by_shares(cosines, shares_of_items(queries, log, len(items)), spread)
        routed = np.where(is_generated, cosines, -np.inf)
        return {
            "generator": rank_answers(generated, answers),
            "generator routes, exact vectors rank": rank_answers(routed, answers),
            "exact search and generator": rank_answers(cosines + gain, answers),
            "nearest logged queries and generator": rank_answers(nearest + gain, answers),
        }


def rank_by_vectors(items: Float32[np.ndarray, "items dim"], trial: Trial) -> dict[str, Ranks]:
    """Return the ranks of answers by exact search, by itself and with four uses of the log."""
    log, queries, answers, seed = trial
    cosines = queries @ items.T
    spread = cosines.std(axis=1)
    shares = shares_of_items(queries, log, len(items))
    adapted = train_adapter(log, items, seed)(queries) @ items.T
    counts = np.bincount(log.chosen, minlength=len(items))
    popularity = POPULARITY_WEIGHT * np.log1p(counts).astype(np.float32)
    adapted_and_nearest = raise_by_shares(adapted, shares, adapted.std(axis=1))
    return {
        "exact search": rank_answers(cosines, answers),
        "popularity": rank_answers(cosines + spread[:, None] * popularity, answers),
        "adapter trained on the log": rank_answers(adapted, answers),
        "nearest logged queries": rank_answers(raise_by_shares(cosines, shares, spread), answers),
        "adapter and nearest": rank_answers(adapted_and_nearest, answers),
    }


def rank_by_index(index: Index, trial: Trial) -> dict[str, Ranks]:
    """Return the ranks of answers by an index before and after it learns the log."""
    index.forget()
    before = rank_answers_of_index(index, trial.queries, trial.answers)
    learn_log(index, trial.log)
    after = rank_answers_of_index(index, trial.queries, trial.answers)
    return {"index": before, "index that learned the log": after}


def describe_recall(queries: pd.DataFrame, low: int, high: int | None) -> str:
    """Return R@1 / R@5 of queries whose answers were chosen ``low`` to below ``high`` times.

    It is the mean over seeds, and nan if a seed has no such query.
    """
    group = queries[(queries["times"] >= low) & (queries["times"] < (high or np.inf))]
    seeds = queries["seed"].unique()
    recalls = []
    for k in (1, 5):
        by_seed = group["above"].lt(k).groupby(group["seed"]).mean()
        recalls.append(f"{by_seed.reindex(seeds).mean(skipna=False):.3f}")
    return " / ".join(recalls)


def draw_recall(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw R@5 of all queries by the share that is logged, in one panel for each data set."""
    figure = new_figure(width=1 + 2.6 * len(results), height=3.2)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        rows = pd.DataFrame(result["rows"])
        rows = rows[rows["wrong"] == "0%"].assign(
            share=lambda table: table["log"].str.rstrip("%").astype(float),
            recall=lambda table: table["all"].str.split(" / ").str[1].astype(float),
        )
        for method, style in CURVE_STYLES.items():
            points = rows[rows["ranked by"] == method]
            axes.plot(points["share"], points["recall"], style, label=method)
        axes.set(title=result["data"], xlabel="queries logged, %", xscale="log")
        axes.set_xticks(sorted(rows["share"].unique()), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.minorticks_off()
    panels[0].set_ylabel("R@5 of all queries that are searched")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


main = partial(run, Learning, "learning")


if __name__ == "__main__":
    sys.exit(main())
