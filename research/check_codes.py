"""``python -m research.check_codes``: how well IDs separate items, and where queries lose answers.

All measures are of codes alone. With queries, a beam search counts at each level the queries that
still have a right answer under their beams, and predicts the recall of a search that ranks items
only by their IDs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float, Int64, Integer
from torch import Tensor

from genius_search.artifact import open_artifact
from genius_search.cli.options import (
    DeviceOptions,
    JsonOption,
    OptionalFolder,
    command,
    optional,
)
from genius_search.cli.terminal import TerminalProgress, print_json, print_table, print_text
from genius_search.config import PAPER_SEARCH, SearchSettings, validate_settings
from genius_search.data.features import FEATURES_KIND, ROW, Features, rows_of_ids
from genius_search.data.mbeir import MBeir, read_judgements
from genius_search.errors import UsageError, plural
from genius_search.index.evaluate import KS
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats
from genius_search.progress import Progress
from genius_search.records import NUM_MODALITIES, candidate_number
from genius_search.search.beam import Decoder, Prefixes, find_beams
from genius_search.search.rank import CodeRanker
from genius_search.search.table import SearchSegment
from genius_search.training.codebooks import encode_features
from research.command import run
from research.evaluate import EvaluationPools, chosen_rows, embed_row_queries
from research.id_files import read_id_file
from research.methods import SEARCH_BATCH, PoolCandidates
from research.runs import filter_to_pool
from research.settings import EvaluationConfig

MAX_COLLIDING: Final = 0.01
"""Share of items with another item's ID above which collisions are named as a problem."""
MIN_USED: Final = 0.5
"""Share of a codebook below which its size is named as a problem."""
MAX_MOST_FREQUENT: Final = 0.1
"""Share of the items with the same code above which the level is named as a problem."""
MAX_LOSS: Final = 0.03
"""Share of the queries that a level may lose before it is named as a problem."""


class LevelCheck(NamedTuple):
    """The codes of one level, and the prefixes that end with them."""

    level: int
    codes: int
    """Number of codes in the codebook."""
    used: float
    """Share of the codes that an item has."""
    most_frequent: float
    """Share of the items with the most frequent code."""
    entropy: float
    """Entropy of the codes in bits: at most log2 of the number of codes."""
    perplexity: float
    """2 to the power of the entropy: number of equally frequent codes with this entropy."""
    prefixes: int
    """Number of distinct prefixes up to this level."""
    colliding: float
    """Share of the items that share the prefix with another item."""
    survival: float | None = None
    """Share of the queries with a right answer under the beams of this level, if there are any."""


class CodeCheck(NamedTuple):
    """The result of a check."""

    items: int
    levels: list[LevelCheck]
    queries: int = 0
    beam: int = 0
    predicted: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    """Order of the IDs -> measure -> recall of a search that ranks items by their IDs alone."""

    def to_json(self) -> dict[str, Any]:
        """Return the result for scripts."""
        predicted = {order: dict(recall) for order, recall in self.predicted.items()}
        levels = [level._asdict() for level in self.levels]
        return {**self._asdict(), "levels": levels, "predicted": predicted}


def check_levels(
    codes: Integer[np.ndarray, "items levels"], sizes: Sequence[int]
) -> list[LevelCheck]:
    """Measure the codes of items, level by level.

    Parameters
    ----------
    sizes
        number of codes in the codebook of each level.
    """
    num_items = len(codes)
    ordered = codes[np.lexsort(codes.T[::-1])]
    # Row r begins a new prefix if it differs from row r − 1 at this level or an earlier one.
    begins = np.ones(num_items, dtype=bool)
    begins[1:] = False
    checks = []
    for level, size in enumerate(sizes):
        begins[1:] |= ordered[1:, level] != ordered[:-1, level]
        items_of_prefixes = np.diff(np.flatnonzero(begins), append=num_items)
        counts = np.bincount(codes[:, level], minlength=size)
        shares = counts[counts > 0] / num_items
        entropy = float(-(shares * np.log2(shares)).sum()) + 0.0  # −0 becomes 0
        checks.append(
            LevelCheck(
                level=level,
                codes=size,
                used=float((counts > 0).mean()),
                most_frequent=float(shares.max()),
                entropy=entropy,
                perplexity=2**entropy,
                prefixes=len(items_of_prefixes),
                colliding=float(items_of_prefixes[items_of_prefixes > 1].sum() / num_items),
            )
        )
    return checks


def expected_hit(
    items: Int64[np.ndarray, " ids"], answers: Int64[np.ndarray, " ids"], k: int
) -> float:
    """Return the probability that a right answer is among the first ``k`` items of ranked IDs.

    Items with the same ID are in random order. All items of the first IDs are hits, and j of the m
    items of the next ID. If t of the m items are right answers, none is a hit with the probability
    C(m − t, j) / C(m, j).

    >>> expected_hit(np.array([1, 4, 3]), np.array([0, 1, 1]), 3)
    0.5

    Parameters
    ----------
    items, answers
        number of items and of right answers with each ID, best ID first.
    """
    before = items.cumsum() - items
    hits = np.clip(k - before, 0, items)
    if (answers[hits == items] > 0).any():
        return 1.0
    missed = 1.0
    for size, right, drawn in zip(items.tolist(), answers.tolist(), hits.tolist(), strict=True):
        missed *= math.comb(size - right, drawn) / math.comb(size, drawn)
    return 1.0 - missed


class TargetSurvival:
    """Follows the right answers of a batch of queries through a beam search.

    Parameters
    ----------
    pool
        the candidates that are searched.
    targets
        positions of each query's right answers in the pool.
    levels
        number of levels.
    """

    def __init__(
        self, pool: PoolCandidates, targets: Sequence[Int64[np.ndarray, " _"]], levels: int
    ) -> None:
        table = pool.table
        self._num_rows = len(table) + 1
        rows = [table.rows_of_items[positions] for positions in targets]
        # The key of a right answer orders by query, then by the table row of its ID.
        self._keys = np.sort(
            np.concatenate([query * self._num_rows + row for query, row in enumerate(rows)])
        )
        self._bucket_sizes = np.diff(table.bucket_starts)
        self._num_queries = len(targets)
        self.survived = np.zeros((self._num_queries, levels), dtype=bool)
        """Whether a query has a right answer under its beams after each level."""
        self.ids: list[Int64[np.ndarray, " ids"]] = []
        """Table rows of the IDs that each query found, in the order of the decoder."""

    def observe(self, level: int, prefixes: Prefixes) -> None:
        """Record which queries have a right answer under the beams of a level."""
        has_answer = self.count_answers(prefixes.query, prefixes.low[:, 0], prefixes.high[:, 0]) > 0
        self.survived[prefixes.query[has_answer], level] = True
        if level == self.survived.shape[1] - 1:
            bounds = prefixes.query.searchsorted(np.arange(1, self._num_queries))
            self.ids = np.split(prefixes.low[:, 0], bounds)

    def count_answers(
        self,
        query: Int64[np.ndarray, " ranges"],
        low: Int64[np.ndarray, " ranges"],
        high: Int64[np.ndarray, " ranges"],
    ) -> Int64[np.ndarray, " ranges"]:
        """Count the right answers of queries in ranges of table rows."""
        first = query * self._num_rows
        counts: np.ndarray = self._keys.searchsorted(first + high)
        counts -= self._keys.searchsorted(first + low)
        return counts

    def expected_hits(self, query: int, ids: Int64[np.ndarray, " ids"]) -> list[float]:
        """Return the probability of a right answer among the first hits, for each of :data:`KS`."""
        answers = self.count_answers(np.full(len(ids), query), ids, ids + 1)
        items = self._bucket_sizes[ids].astype(np.int64)
        return [expected_hit(items, answers, k) for k in KS]


def follow_queries(
    decoder: Decoder,
    ranker: CodeRanker,
    pool: PoolCandidates,
    queries: Float[Tensor, "queries dim"],
    targets: Sequence[Int64[np.ndarray, " _"]],
    config: SearchSettings,
) -> Iterator[tuple[np.ndarray, dict[str, list[list[float]]]]]:
    """Yield which queries of a batch survive each level, and the expected hits by order of IDs."""
    levels = len(decoder.sizes)
    for start in range(0, len(targets), SEARCH_BATCH):
        batch = queries[start : start + SEARCH_BATCH]
        survival = TargetSurvival(pool, targets[start : start + SEARCH_BATCH], levels)
        find_beams(decoder, [SearchSegment(pool.table)], batch, config, observe=survival.observe)
        hits: dict[str, list[list[float]]] = {"decoder": [], "codes": []}
        for query, ids in enumerate(survival.ids):
            vector = as_floats(batch[query])
            scale = np.float32(ranker.scale(vector, ranker.spread.target_spread(frozenset())))
            scores = ranker.scores(
                vector * scale, pool.table.ids[ids], density_cost=config.density_weight
            )
            by_codes = ids[np.argsort(-scores, kind="stable")]
            hits["decoder"].append(survival.expected_hits(query, ids))
            hits["codes"].append(survival.expected_hits(query, by_codes))
        yield survival.survived, hits


def check_queries(
    data: MBeir,
    model: Genius,
    config: EvaluationConfig,
    folder: Path,
    *,
    router: Literal["generator", "geometry"],
    progress: Progress,
) -> CodeCheck:
    """Check the codes of a data set's candidates, and follow the right answers of its queries.

    ``folder`` receives features and codes, as for ``research.evaluate``.
    """
    if model.codebooks.fine is not None:
        raise UsageError(
            f"{model.folder} has fine codes, so its IDs alone rank no items; leave out DATA, or "
            "check a model of `genius fit`"
        )
    rows = chosen_rows(data, config)
    pools = EvaluationPools(data, model, rows, folder, config, progress=progress)
    settings = dataclasses.replace(
        PAPER_SEARCH, beam=config.beam, density_weight=config.density_weight, scores=config.scores
    )
    decoder = model.decoder if router == "generator" else model.router
    pool = pools.of(rows[0], "global")
    survived: list[np.ndarray] = []
    hits: dict[str, list[list[float]]] = {}
    progress.begin("follow queries", len(rows))
    for number, row in enumerate(rows, start=1):
        queries = embed_row_queries(data, model, row, folder, config, progress=progress)
        qrels = filter_to_pool(read_judgements(row, queries.qids), pool)
        targets = find_answers(pool, [qrels[qid] for qid in queries.qids])
        for batch, expected in follow_queries(
            decoder, model.ranker, pool, queries.fused, targets, settings
        ):
            survived.append(batch)
            for order, values in expected.items():
                hits.setdefault(order, []).extend(values)
        progress.advance(number, {})
    survival = np.concatenate(survived).mean(axis=0).tolist()
    codes = pool.codes[:, : len(model.codebooks.sizes)]
    levels = [
        check._replace(survival=share)
        for check, share in zip(check_levels(codes, model.codebooks.sizes), survival, strict=True)
    ]
    names = {"decoder": f"by the {router}", "codes": "by code vectors"}
    if router == "geometry":
        del hits["decoder"]
    measures = [f"R@{k}" for k in KS]
    predicted = {
        names[order]: dict(zip(measures, np.mean(values, axis=0).tolist(), strict=True))
        for order, values in hits.items()
    }
    count = sum(len(batch) for batch in survived)
    return CodeCheck(len(pool), levels, count, config.beam, predicted)


def find_answers(
    pool: PoolCandidates, judgements: Sequence[Mapping[str, int]]
) -> list[Int64[np.ndarray, " answers"]]:
    """Return the positions of each query's right answers in a pool that has all answers."""
    numbers = []
    for judged in judgements:
        positives = [did for did, relevance in judged.items() if relevance > 0]
        numbers.append([candidate_number(did) for did in positives])
    positions, _ = rows_of_ids(pool.dids, np.concatenate(numbers).astype(np.int64))
    return np.split(positions, np.cumsum([len(answers) for answers in numbers])[:-1])


def check_training(model: Genius) -> CodeCheck:
    """Check the codes of the candidates that a model was trained on."""
    folder = model.folder / "features" / "candidates"
    if not folder.exists():
        raise UsageError(
            f"{model.folder} has no features of its training candidates; give a data set, whose "
            "pool is encoded"
        )
    if open_artifact(folder, kind=FEATURES_KIND).config.get("columns") != list(ROW.names or ()):
        raise UsageError(
            f"{folder} was written by another version of this program; give a data set, whose pool "
            "is encoded"
        )
    codes = encode_features(model.codebooks, Features.open(folder)).codes
    return CodeCheck(len(codes), check_levels(codes, model.codebooks.sizes))


def problems_of(check: CodeCheck) -> Iterator[str]:
    """Yield a sentence for each finding that costs recall, and what to do about it."""
    last = check.levels[-1]
    if last.colliding > MAX_COLLIDING:
        yield (
            f"{last.colliding:.1%} of the items share their whole ID with another item, and no "
            "order of IDs separates them: more levels or larger codebooks ([quantizer]), or rank "
            "by embeddings"
        )
    semantic = [level for level in check.levels if level.codes > NUM_MODALITIES]
    unused = [str(level.level) for level in semantic if level.used < MIN_USED]
    if unused:
        yield (
            f"fewer than {MIN_USED:.0%} of the codes of level {', '.join(unused)} are used: "
            "smaller codebooks, or longer training of stage 1"
        )
    uneven = [str(level.level) for level in semantic if level.most_frequent > MAX_MOST_FREQUENT]
    if uneven:
        yield (
            f"one code of level {', '.join(uneven)} has more than {MAX_MOST_FREQUENT:.0%} of the "
            "items: look for duplicates among the items, or train stage 1 longer"
        )
    survival = [1.0, *(level.survival for level in check.levels if level.survival is not None)]
    losses = [before - after for before, after in pairwise(survival)]
    if losses and max(losses) > MAX_LOSS:
        worst = int(np.argmax(losses))
        yield (
            f"level {worst} loses the right answers of {losses[worst]:.1%} of the queries: a wider "
            f"beam than {check.beam}, or more epochs in stage 2"
        )


def print_check(check: CodeCheck) -> None:
    """Print the levels as a table, the predicted recall, and what to do."""
    columns = (
        "level",
        "codes",
        "used",
        "top code",
        "entropy",
        "perplexity",
        "prefixes",
        "colliding",
    )
    lines = []
    for level in check.levels:
        line = [
            f"{level.level}",
            f"{level.codes:,}",
            f"{level.used:.1%}",
            f"{level.most_frequent:.1%}",
        ]
        line += [f"{level.entropy:.2f}", f"{level.perplexity:,.1f}", f"{level.prefixes:,}"]
        line += [f"{level.colliding:.2%}"]
        lines.append(line if level.survival is None else [*line, f"{level.survival:.3f}"])
    print_table((*columns, "survival") if check.queries else columns, lines)
    print_text(f"{plural(check.items, 'item')}; entropy in bits")
    if check.queries:
        print_text(
            f"survival: share of {check.queries:,} queries with a right answer under "
            f"{check.beam} beams"
        )
        measures = list(next(iter(check.predicted.values())))
        lines = [
            [order, *(f"{recall[measure]:.3f}" for measure in measures)]
            for order, recall in check.predicted.items()
        ]
        print_table(("predicted, ranked", *measures), lines, left=("predicted, ranked",))
    for problem in problems_of(check):
        print_text(problem)


@command
class CheckCodes(DeviceOptions, JsonOption):
    """Check the IDs of a model's items, level by level: collisions, entropy, use of the codebooks.

    With a data set, its pool is encoded, and its queries show at which level beams lose the right
    answers and what recall follows. Without one, the training candidates are checked. A file of IDs
    of another project, such as LETTER's .index.json, is checked alone.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a model, or a JSON file of items and their codes."""

    data: Annotated[Path | None, tyro.conf.Positional, optional("[DATA]")] = None
    """Folder of a data set, in M-BEIR's layout, with queries and a pool."""

    split: str = "test"
    """Split of the data set."""

    rows: tuple[str, ...] = ()
    """Rows whose queries are followed, named as in file names; none means all."""

    beam: int = 50
    """IDs kept at each level."""

    max_queries: int = 200
    """Queries of each row at most, evenly spaced; 0 means all."""

    max_candidates: int = 0
    """Candidates at most, as in research.evaluate; 0 means all."""

    router: Annotated[Literal["generator", "geometry"] | None, optional("{generator,geometry}")] = (
        None
    )
    """Leads the beams; default: the generator, if the model has one."""

    evaluation: OptionalFolder = None
    """Folder for features and codes; default: evaluation/ in the model's folder."""

    def run(self) -> None:
        """Check and print."""
        with TerminalProgress() as progress:
            check = self._check(progress)
        if self.json:
            print_json({**check.to_json(), "problems": list(problems_of(check))})
        else:
            print_check(check)

    def _check(self, progress: Progress) -> CodeCheck:
        if self.model.is_file():
            if self.data is not None:
                raise UsageError(
                    f"{self.model} is a file of IDs, and no decoder writes these; measure it with "
                    "`python -m research.baselines.generative --kind file`"
                )
            ids = read_id_file(self.model)
            return CodeCheck(len(ids.codes), check_levels(ids.codes, ids.sizes))
        model = Genius.open(
            self.model,
            device=self.device,
            download=self.download,
            with_encoder=self.data is not None,
        )
        if self.data is None:
            return check_training(model)
        router = self.router or ("generator" if model.has_generator else "geometry")
        if router == "generator" and not model.has_generator:
            raise UsageError(f"{self.model} has no generator; use --router geometry")
        config = EvaluationConfig(
            split=self.split,
            rows=self.rows,
            beam=self.beam,
            max_queries=self.max_queries,
            max_candidates=self.max_candidates,
            pools=("global",),
            methods=("generative",),
        )
        return check_queries(
            MBeir(self.data),
            model,
            validate_settings(config),
            self.evaluation or self.model / "evaluation",
            router=router,
            progress=progress,
        )


main = partial(run, CheckCodes, "check_codes")


if __name__ == "__main__":
    sys.exit(main())
