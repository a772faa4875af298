from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genius.config import GeneratorConfig, SearchConfig
from genius.models.generator import Generator
from genius.search.beam import NOTHING, search
from genius.search.table import IdTable

DIM = 5
TOLERANCE = 1e-4
"""Float32 sums over a few levels differ by less."""


class Case(NamedTuple):
    """A random generator, a pool of random IDs, some random queries."""

    generator: Generator
    table: IdTable
    queries: torch.Tensor


def build(sizes: tuple[int, ...], items: int, queries: int, config: GeneratorConfig, seed: int) -> Case:
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, items) for size in sizes], axis=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(DIM, sizes, config).eval()
        asked = torch.randn(queries, DIM)
    return Case(generator, IdTable.build(codes, random.random(items).astype(np.float32)), asked)


CONFIGS = st.builds(
    GeneratorConfig,
    layers=st.integers(1, 2),
    width=st.just(8),
    feedforward=st.just(8),
    heads=st.just(2),
    head_width=st.just(4),
    prefixes=st.integers(1, 3),
    head=st.sampled_from(["tied", "per-level"]),
)
CASES = st.builds(
    lambda *drawn: lambda: build(*drawn),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 25),
    st.integers(1, 4),
    CONFIGS,
    st.integers(0, 10_000),
)
"""Built inside the tests, since hypothesis wants no other random numbers while it draws."""


def teacher_forced(case: Case, query: int, scores: str) -> np.ndarray:
    """Log-probabilities of all IDs of the pool, each decoded with its true codes given."""
    codes = torch.from_numpy(case.table.ids.astype(np.int64))
    with torch.no_grad():
        hidden = case.generator(case.queries[query : query + 1].expand(len(codes), -1), codes)
        parts = [
            case.generator.log_probabilities(hidden[:, level], level, scores)
            .gather(1, codes[:, level : level + 1])
            .squeeze(1)
            for level in range(codes.shape[1])
        ]
    return torch.stack(parts, dim=1).numpy()


@settings(max_examples=50)
@given(CASES, st.sampled_from(["level", "vocabulary"]))
def test_a_wide_beam_ranks_every_id_like_brute_force(drawn, scores):
    case = drawn()
    beams = search(
        case.generator, case.table, case.queries, SearchConfig(beam=len(case.table), scores=scores)
    )
    for query in range(len(case.queries)):
        expected = teacher_forced(case, query, scores)
        rows = beams.rows[query]
        assert sorted(rows) == list(range(len(case.table)))
        np.testing.assert_allclose(beams.log_probabilities[query], expected[rows], atol=TOLERANCE)
        ranked = expected.sum(axis=1)[rows]
        assert (np.diff(ranked) <= TOLERANCE).all()


@settings(max_examples=50)
@given(CASES, st.integers(1, 8))
def test_a_beam_holds_ids_of_the_pool_without_duplicates_and_scores_that_never_rise(drawn, beam):
    case = drawn()
    beams = search(case.generator, case.table, case.queries, SearchConfig(beam=beam))
    assert beams.log_probabilities.shape == (*beams.rows.shape, case.table.num_levels)
    assert beams.rows.shape[1] <= beam
    for query, rows in enumerate(beams.rows):
        filled = rows[rows != NOTHING]
        assert len(filled) == min(beam, len(case.table))
        assert len(set(filled.tolist())) == len(filled)
        assert ((filled >= 0) & (filled < len(case.table))).all()
        scores = beams.scores()[query]
        assert (np.diff(scores[: len(filled)]) <= 1e-5).all()
        assert np.isneginf(scores[len(filled) :]).all()
        expected = teacher_forced(case, query, "level")[filled]
        np.testing.assert_allclose(beams.log_probabilities[query, : len(filled)], expected, atol=TOLERANCE)


@settings(max_examples=30)
@given(CASES, st.integers(1, 6))
def test_a_batch_of_one_is_a_row_of_a_batch(drawn, beam):
    case = drawn()
    config = SearchConfig(beam=beam)
    together = search(case.generator, case.table, case.queries, config)
    for query in range(len(case.queries)):
        alone = search(case.generator, case.table, case.queries[query : query + 1], config)
        np.testing.assert_allclose(alone.scores()[0], together.scores()[query], atol=TOLERANCE)
        gaps = np.abs(np.diff(alone.scores()[0]))
        if (gaps > TOLERANCE).all():
            everyone = teacher_forced(case, query, "level").sum(axis=1)
            next_best = np.sort(np.delete(everyone, alone.rows[0]))[-1:]
            if not len(next_best) or (np.abs(everyone[alone.rows[0]] - next_best) > TOLERANCE).all():
                assert alone.rows[0].tolist() == together.rows[query].tolist()


@settings(max_examples=30)
@given(CASES, st.data())
def test_forcing_level_0_finds_the_best_of_those_ids_and_no_other(drawn, data):
    case = drawn()
    codes = st.frozensets(st.integers(0, case.generator.sizes[0] - 1))
    level0 = data.draw(st.lists(codes, min_size=len(case.queries), max_size=len(case.queries)))
    beams = search(
        case.generator, case.table, case.queries, SearchConfig(beam=len(case.table)), level0=level0
    )
    for wanted, rows in zip(level0, beams.rows, strict=True):
        expected = {
            row for row, code in enumerate(case.table.ids[:, 0].tolist()) if not wanted or code in wanted
        }
        assert set(rows[rows != NOTHING].tolist()) == expected
