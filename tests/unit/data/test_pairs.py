"""Batches of pairs: fresh draws, seeded, with the false negatives that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.features import Pairs
from genius_search.errors import BadData
from genius_search.records import Modality, Query, candidate_number, query_number


@pytest.fixture(scope="module")
def shuffled_pairs(make_features):
    """Eight queries (two lines for query 3) over twelve candidates of two modalities, out of order."""
    numbers = [7, 2, 11, 0, 5, 9, 1, 4, 10, 3, 8, 6]
    vector = np.ones(16)
    is_text = [number % 2 == 1 for number in numbers]
    candidates = make_features(
        [candidate_number(f"2:{number}") for number in numbers],
        [None if text else vector for text in is_text],
        [vector if text else None for text in is_text],
    )
    positives = {
        0: [0],
        1: [0, 1, 2],
        2: [3],
        3: [4, 6, 8, 10],
        4: [5, 4],
        5: [7],
        6: [9, 11],
        7: [2],
    }
    rows = [
        (query, wanted, variant)
        for query, dids in positives.items()
        for wanted in sorted({did % 2 for did in dids})
        for variant in range(3)
    ]
    queries = make_features(
        [query_number(f"2:{query}") for query, _, _ in rows],
        [None] * len(rows),
        [vector] * len(rows),
        wanted=[wanted for _, wanted, _ in rows],
    )
    lines = [
        Query(
            f"2:{query}",
            Modality.TEXT,
            "?",
            positives=tuple(f"2:{did}" for did in positives[query]),
        )
        for query in [*positives, 3]
    ]
    return lines, queries, candidates


@given(step=st.integers(0, 50), seed=st.integers(0, 1000), size=st.integers(1, 20))
def test_pairs_belong_together_and_false_negatives_equal_a_brute_force(
    shuffled_pairs, step, seed, size
):
    lines, queries, candidates = shuffled_pairs
    batch = Pairs(*shuffled_pairs).draw(step, size, seed=seed)
    positives = {
        query_number(line.qid): {candidate_number(did) for did in line.positives} for line in lines
    }
    asked = queries.ids[batch.query_rows]
    wanted = candidates.ids[batch.candidate_rows]
    assert len(asked) == len(wanted) == size
    for i in range(size):
        assert wanted[i] in positives[asked[i]]
        # The instruction asks for the modality of the positive that was drawn.
        assert (
            queries.target_modality[batch.query_rows[i]]
            == candidates.modality[batch.candidate_rows[i]]
        )
        for j in range(size):
            expected = i != j and wanted[j] in positives[asked[i]]
            assert bool(batch.false_negatives[i, j]) == expected


@given(size=st.integers(1, 13), seed=st.integers(0, 100))
def test_every_epoch_visits_every_line_once_and_a_repeated_query_as_often_as_it_is_written(
    shuffled_pairs, size, seed
):
    lines, queries, _ = shuffled_pairs
    pairs = Pairs(*shuffled_pairs)
    assert len(pairs) == 9
    steps = -(-3 * len(pairs) // size)
    asked = np.concatenate(
        [queries.ids[pairs.draw(s, size, seed=seed).query_rows] for s in range(steps)]
    )
    expected = sorted(query_number(line.qid) for line in lines)
    for epoch in range(3):
        assert sorted(asked[epoch * 9 : (epoch + 1) * 9].tolist()) == expected


def test_the_same_seed_and_step_give_the_same_batch_whatever_was_drawn_before(shuffled_pairs):
    walked, jumped = Pairs(*shuffled_pairs), Pairs(*shuffled_pairs)
    for step in range(6):
        walked.draw(step, 5, seed=3)
    first, again = walked.draw(6, 5, seed=3), jumped.draw(6, 5, seed=3)
    assert first.query_rows.tolist() == again.query_rows.tolist()
    assert first.candidate_rows.tolist() == again.candidate_rows.tolist()
    others = [jumped.draw(6, 5, seed=seed).query_rows.tolist() for seed in range(4, 8)]
    assert any(other != first.query_rows.tolist() for other in others)


def test_instruction_and_positive_vary_over_epochs(shuffled_pairs):
    _, queries, candidates = shuffled_pairs
    pairs = Pairs(*shuffled_pairs)
    drawn, order = set(), set()
    for epoch in range(60):
        batch = pairs.draw(epoch, 9, seed=0)
        order.add(tuple(queries.ids[batch.query_rows].tolist()))
        for query, candidate in zip(batch.query_rows, batch.candidate_rows, strict=True):
            if queries.ids[query] == query_number("2:1"):
                drawn.add((int(query) % 3, int(candidates.ids[candidate] % 10_000_000)))
    assert drawn == {(variant, did) for variant in range(3) for did in (0, 1, 2)}
    assert len(order) > 50


def test_a_positive_that_is_not_in_the_pool_is_bad_data(shuffled_pairs):
    lines, queries, candidates = shuffled_pairs
    extra = Query("2:0", Modality.TEXT, "?", positives=("2:12",))
    with pytest.raises(BadData, match="2:12"):
        Pairs([*lines, extra], queries, candidates)
