"""Beam search over dictionaries, written to be obviously right, and cases to compare the real one with it.

A case is a query with its own wishes; ten of them are asked of a drawn pool together. ``GENIUS_CASES=10000``
compares so many, the default is fewer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from genius_search.config import PAPER_SEARCH, SearchSettings
from genius_search.nn.generator import Generator
from genius_search.recipe import GeneratorConfig
from genius_search.search.beam import Beams, find_beams
from genius_search.search.table import Allowed, IdTable, SearchSegment

QUERIES = 10
CASES = int(os.environ.get("GENIUS_CASES", "600"))
POOLS = CASES // QUERIES
SOME_POOLS = POOLS // 4
DIM = 5
TOLERANCE = 1e-4
"""Float32 sums over a few levels differ by less."""
NUM_MODELS = 60

Id = tuple[int, ...]
Foretold = Callable[[Id, list[int]], list[float]]
"""After a prefix: the log-probability of each of the codes that exist there."""
Trie = dict[int, "Trie"]


class Found(NamedTuple):
    """An ID and what each of its codes added to its score."""

    id: Id
    gained: tuple[float, ...]

    @property
    def score(self) -> float:
        return sum(self.gained)


def trie_of(ids: Iterable[Id]) -> Trie:
    root: Trie = {}
    for id_ in sorted(set(ids)):
        node = root
        for code in id_:
            node = node.setdefault(code, {})
    return root


def plain_search(
    foretold: Foretold, ids: Iterable[Id], width: int, *, tolerance: float | None = TOLERANCE
) -> Iterator[list[Found]]:
    """The ``width`` best IDs, best first, decoded level by level and always to the end.

    Rounding may decide between scores that differ by less than the tolerance: every result it may lead to is
    yielded, almost always one. Without a tolerance equal scores keep the order of their parents, then codes.
    IDs of probability 0 are not found.
    """
    root = trie_of(ids)
    beam = [(Found((), ()), root)] if root else []
    return _grown(foretold, beam, width, tolerance)


def _grown(foretold, beam, width, tolerance):
    if not any(node for _, node in beam):
        yield [found for found, _ in beam]
        return
    longer = []
    for found, node in beam:
        for code, gain in zip(node, foretold(found.id, list(node)), strict=True):
            if gain > -np.inf:
                longer.append((Found((*found.id, code), (*found.gained, gain)), node[code]))
    longer.sort(key=lambda grown: -grown[0].score)
    for kept in _cut(longer, width, tolerance):
        yield from _grown(foretold, kept, width, tolerance)


def _cut(longer, width, tolerance):
    if len(longer) <= width or tolerance is None:
        return [longer[:width]]
    limit = longer[width - 1][0].score
    sure = [grown for grown in longer if grown[0].score > limit + tolerance]
    unsure = [grown for grown in longer if abs(grown[0].score - limit) <= tolerance]
    return [
        sorted([*sure, *some], key=lambda grown: -grown[0].score)
        for some in itertools.combinations(unsure, width - len(sure))
    ]


def agrees(found: list[Found], expected: list[Found]) -> bool:
    """The same IDs with the same log-probabilities, in the same order but for rounding."""
    by_id = {one.id: one for one in expected}
    if len(found) != len(expected) or {one.id for one in found} != by_id.keys():
        return False
    scores = [by_id[one.id].score for one in found]
    is_ordered = all(after <= before + TOLERANCE for before, after in itertools.pairwise(scores))
    return is_ordered and all(
        np.allclose(one.gained, by_id[one.id].gained, rtol=0, atol=TOLERANCE) for one in found
    )


def plain_score(
    query: Sequence[float], item: Sequence[float], density_byte: int, *, weight: float, scale: float
) -> float:
    """The product of a query and an item, less what its density costs, number by number.

    A byte of 128 is no density; 800 steps are 1. Densities fade with the third power of the
    distance in cosine, from .75 on, to nothing at 1. A query that is multiplied by ``scale`` notices them less.
    """
    product = math.fsum(float(one) * float(other) for one, other in zip(query, item, strict=True))
    share = min(max((1 - product) / 0.25, 0.0), 1.0) ** 3
    return product - weight * share * (density_byte - 128) / 800 / scale


class Pool(NamedTuple):
    """Some parts with the codes of their items, and what was deleted."""

    codes: list[np.ndarray]
    alive: list[np.ndarray | None]
    segments: list[SearchSegment]

    @staticmethod
    def of(codes: Sequence[np.ndarray], alive: Sequence[np.ndarray | None] | None = None) -> Pool:
        """Build the tables."""
        alive = alive or [None] * len(codes)
        segments = []
        for own, living in zip(codes, alive, strict=True):
            table = IdTable.build(own, np.linspace(0, 1, len(own), dtype=np.float32))
            segments.append(
                SearchSegment(table, None if living is None else Allowed.of(table, living))
            )
        return Pool(list(codes), list(alive), segments)

    def restricted(
        self, masks: Sequence[np.ndarray | None] | None
    ) -> tuple[Allowed | None, ...] | None:
        """What a query with these masks may find."""
        if masks is None:
            return None
        return tuple(
            None if mask is None else Allowed.of(segment.table, mask)
            for segment, mask in zip(self.segments, masks, strict=True)
        )

    def ids(
        self, masks: Sequence[np.ndarray | None] | None = None, level0: frozenset[int] = frozenset()
    ) -> set[Id]:
        """All IDs under which there is an item that may be found."""
        seen = set()
        for codes, mask in zip(self.codes, self.alive if masks is None else masks, strict=True):
            for id_, is_seen in zip(
                codes.tolist(), [True] * len(codes) if mask is None else mask, strict=True
            ):
                if is_seen and (not level0 or id_[0] in level0):
                    seen.add(tuple(id_))
        return seen

    def found(self, beams: Beams, query: int) -> list[Found]:
        """What the beams of a query hold, which must be whole IDs."""
        found = []
        for beam in np.flatnonzero((beams.high > beams.low)[query].any(axis=1)):
            rows = [
                (segment.table, low, high)
                for segment, low, high in zip(
                    self.segments, beams.low[query, beam], beams.high[query, beam], strict=True
                )
                if high > low
            ]
            assert all(high - low == 1 for _, low, high in rows)
            ids = {tuple(table.ids[low].tolist()) for table, low, _ in rows}
            assert len(ids) == 1
            found.append(Found(ids.pop(), tuple(beams.log_probabilities[query, beam].tolist())))
        return found


class Case(NamedTuple):
    """A batch of queries, each with its own wishes, and what it is asked of."""

    pool: Pool
    queries: torch.Tensor
    config: SearchSettings
    level0: list[frozenset[int]] | None
    masks: list[list[np.ndarray | None] | None]
    """Of each query: what it may find, part by part."""
    widths: list[int] | None

    def search(self, decoder, **changes) -> Beams:
        """What the search finds, all together."""
        asked = {
            "level0": self.level0,
            "restrictions": [self.pool.restricted(masks) for masks in self.masks],
            "widths": self.widths,
            **changes,
        }
        return find_beams(decoder, self.pool.segments, self.queries, self.config, **asked)

    def only(self, query: int) -> Case:
        """One of its queries alone."""
        own = slice(query, query + 1)
        return self._replace(
            queries=self.queries[own],
            level0=self.level0 and self.level0[own],
            masks=self.masks[own],
            widths=self.widths and self.widths[own],
        )

    def replaced(self, **settings) -> Case:
        """The same with other settings."""
        return self._replace(config=dataclasses.replace(self.config, **settings))

    def width(self, query: int) -> int:
        return self.config.beam if self.widths is None else self.widths[query]

    def ids(self, query: int) -> set[Id]:
        """What a query may find."""
        return self.pool.ids(
            self.masks[query], frozenset() if self.level0 is None else self.level0[query]
        )


def sizes_of(number: int) -> tuple[int, ...]:
    """Codes at the levels of one of a few models."""
    return tuple(np.random.default_rng(number).integers(1, 7, 1 + number % 5).tolist())


@cache
def model(number: int) -> Generator:
    """One of a few random generators."""
    random = np.random.default_rng([number, 1])
    config = GeneratorConfig(
        layers=int(random.integers(1, 3)),
        width=8,
        feedforward=8,
        heads=2,
        head_width=4,
        prefixes=int(random.integers(1, 4)),
        head=("tied", "per-level")[number % 2],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        return Generator(DIM, sizes_of(number), config).eval()


def teacher_forced(
    generator: Generator, queries: torch.Tensor, ids: set[Id], scores: str
) -> list[Foretold]:
    """For each query what the generator, as it is trained, says after the prefixes of these IDs."""
    distinct = sorted(ids)
    rows = {id_[:level]: row for row, id_ in enumerate(distinct) for level in range(len(id_))}
    codes = torch.tensor(distinct, dtype=torch.int64).reshape(len(distinct), len(generator.sizes))
    with torch.no_grad():
        hidden = generator(
            queries.repeat_interleave(len(codes), dim=0), codes.repeat(len(queries), 1)
        )
        values = [
            generator.log_probabilities(hidden[:, level], level, scores)
            for level in range(len(generator.sizes))
        ]

    def of_query(query: int) -> Foretold:
        def foretold(prefix: Id, codes: list[int]) -> list[float]:
            return values[len(prefix)][query * len(distinct) + rows[prefix], codes].tolist()

        return foretold

    return [of_query(query) for query in range(len(queries))]


def draw_pool(random: np.random.Generator, sizes: tuple[int, ...]) -> Pool:
    """One to three parts of up to forty items, with shared IDs and some items deleted."""
    known = np.stack([random.integers(0, size, 40) for size in sizes], axis=1)
    codes, alive = [], []
    for _ in range(random.integers(1, 4)):
        num_items = int(random.integers(random.integers(0, 2), 41))
        codes.append(known[random.integers(0, len(known), num_items)])
        alive.append(
            random.random(num_items) < random.choice([0.2, 0.8]) if random.random() < 0.5 else None
        )
    return Pool.of(codes, alive)


def draw_case(seed: int, sizes: tuple[int, ...], **config) -> Case:
    """A pool and a few queries with mixed wishes."""
    random = np.random.default_rng(seed)
    pool = draw_pool(random, sizes)
    level0 = None
    if random.random() < 0.5:  # the last of these codes no ID begins with
        level0 = [
            frozenset(random.choice(sizes[0] + 1, random.integers(0, 3)).tolist())
            for _ in range(QUERIES)
        ]
    masks: list[list[np.ndarray | None] | None] = []
    for _ in range(QUERIES):
        if random.random() < 0.5:
            masks.append(None)
            continue
        share = random.choice([0.0, 0.1, 0.5, 0.9])
        masks.append(
            [
                _both(random.random(len(codes)) < share, alive) if random.random() < 0.8 else alive
                for codes, alive in zip(pool.codes, pool.alive, strict=True)
            ]
        )
    widths = random.integers(1, 10, QUERIES).tolist() if random.random() < 0.5 else None
    settings = {"beam": int(random.choice([1, 2, 3, 5, 8, 50])), **config}
    settings.setdefault("scores", str(random.choice(["level", "vocabulary"])))
    queries = torch.from_numpy(random.standard_normal((QUERIES, DIM)).astype(np.float32))
    queries[:, 0] = torch.arange(QUERIES)  # their numbers, to an exact decoder
    return Case(pool, queries, dataclasses.replace(PAPER_SEARCH, **settings), level0, masks, widths)


def _both(first: np.ndarray, second: np.ndarray | None) -> np.ndarray:
    return first if second is None else first & second


class WrittenState(NamedTuple):
    """What each row has written: the query's number, then codes."""

    level: int
    rows: list[tuple[int, Id]]
    num_queries: int

    def select(self, queries: torch.Tensor | None, rows: torch.Tensor) -> WrittenState:
        kept = list(range(self.num_queries)) if queries is None else queries.tolist()
        assert len(rows) == len(kept)
        width = len(self.rows) // self.num_queries
        for query, own in zip(kept, rows.tolist(), strict=True):
            assert all(row // width == query for row in own)
        return WrittenState(
            self.level, [self.rows[row] for row in rows.flatten().tolist()], len(kept)
        )


class WrittenStep(NamedTuple):
    hidden: torch.Tensor
    state: WrittenState


class ExactDecoder:
    """Says quarters drawn for every query and prefix: sums are exact, and many are equal."""

    device = torch.device("cpu")

    def __init__(self, sizes: tuple[int, ...], seed: int, *, impossible: float = 0.0) -> None:
        self.sizes = sizes
        self.seed = seed
        self.impossible = impossible
        self.num_rows = 0
        self._drawn: dict[tuple[int, ...], np.ndarray] = {}

    def start(self, queries: torch.Tensor, level0=None) -> WrittenState:
        return WrittenState(
            0, [(int(number), ()) for number in queries[:, 0].tolist()], len(queries)
        )

    def advance(self, state: WrittenState, codes: torch.Tensor) -> WrittenStep:
        rows = state.rows
        if state.level == 0 and len(codes) % len(rows) == 0:  # several openings of each query
            rows = [row for row in rows for _ in range(len(codes) // len(rows))]
        assert len(codes) == len(rows)
        self.num_rows += codes.numel()
        said, written = [], []
        for (query, prefix), new in zip(rows, codes.tolist(), strict=True):
            steps = [
                (*prefix, *new[:count])
                for count in range(0 if state.level == 0 else 1, len(new) + 1)
            ]
            said.append([[query, *step, *[-1] * (len(self.sizes) - len(step))] for step in steps])
            written.append((query, (*prefix, *new)))
        level = state.level + codes.shape[1] + (state.level == 0)
        return WrittenStep(
            torch.tensor(said, dtype=torch.float32), WrittenState(level, written, state.num_queries)
        )

    def log_probabilities(self, hidden: torch.Tensor, level: int, scores: str) -> torch.Tensor:
        rows = [
            self.drawn(int(query), tuple(int(code) for code in prefix[:level]))
            for query, *prefix in hidden.tolist()
        ]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.sizes[level])

    def drawn(self, query: int, prefix: Id) -> np.ndarray:
        """Log-probabilities of all codes after a prefix."""
        key = (query, *prefix)
        if key not in self._drawn:
            random = np.random.default_rng([self.seed, *(1 + segment for segment in key)])
            drawn = (-random.integers(0, 6, self.sizes[len(prefix)]) / 4).astype(np.float32)
            drawn[random.random(len(drawn)) < self.impossible] = -np.inf
            self._drawn[key] = drawn
        return self._drawn[key]

    def foretold(self, query: int) -> Foretold:
        """The same for the plain search."""
        return lambda prefix, codes: self.drawn(query, prefix)[codes].tolist()
