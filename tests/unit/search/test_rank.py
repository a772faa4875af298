from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius.errors import UsageError
from genius.search.beam import NOTHING, Beams
from genius.search.rank import CodeRanker, best_first, embedding_scores
from genius.search.searcher import Evidence, rank_items
from genius.search.table import IdTable

SIZES = (2, 4, 3)
DIM = 6


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def tables(random) -> list[torch.Tensor]:
    return [torch.randn(size, DIM, generator=random) for size in SIZES]


@pytest.fixture
def table() -> IdTable:
    """IDs 0 (items 2, 0), 1 (item 1), 2 (items 4, 3)."""
    codes = np.array([[0, 1, 1], [0, 2, 0], [0, 1, 1], [1, 0, 2], [1, 0, 2]])
    return IdTable.build(codes, np.array([0.2, 0.5, 0.9, 0.3, 0.4], dtype=np.float32))


def beams_of(rows: list[int], scores: list[float]) -> Beams:
    parts = np.array([[score / 2, score / 4, score / 4] for score in scores], dtype=np.float32)
    return Beams(np.array([rows], dtype=np.int64), parts[None])


def rows_of(stored: np.ndarray) -> Callable[[np.ndarray], torch.Tensor]:
    return lambda items: torch.from_numpy(stored[items]).float()


BEAMS = beams_of([2, 0, 1], [-1.0, -2.0, -3.0])


def test_the_score_by_codes_is_the_inner_product_with_the_sum_of_the_code_vectors(tables, random):
    query = torch.randn(DIM, generator=random)
    ids = np.array([[0, 0, 0], [1, 3, 2], [0, 3, 1]], dtype=np.int16)
    expected = [
        float(query @ sum(tables[level][code] for level, code in enumerate(id_))) for id_ in ids.tolist()
    ]
    np.testing.assert_allclose(CodeRanker(tables).scores(query, ids), expected, rtol=1e-5, atol=1e-5)


def test_the_score_by_embeddings_is_the_cosine(random):
    stored = F.normalize(torch.randn(7, DIM, generator=random), dim=1)
    query = F.normalize(torch.randn(DIM, generator=random), dim=0)
    items = np.array([6, 0, 3])
    found = embedding_scores(query, stored[torch.from_numpy(items)].half())
    expected = F.cosine_similarity(query[None], stored[torch.from_numpy(items)])
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)


def test_equal_scores_keep_their_order():
    assert best_first(np.array([1, 2, 1, 2], dtype=np.float32)).tolist() == [1, 3, 0, 2]


def test_without_re_ranking_the_generators_order_stays_and_the_typical_come_first_inside_an_id(table):
    answer = rank_items(table, BEAMS, 0, torch.zeros(DIM), rerank="none", evidence=Evidence(), k=10)
    assert answer.items.tolist() == [4, 3, 2, 0, 1]
    assert answer.scores.tolist() == [-1.0, -1.0, -2.0, -2.0, -3.0]
    assert answer.beams.tolist() == [0, 0, 1, 1, 2]
    assert answer.touched == 5


def test_re_ranking_by_codes_orders_the_ids_anew_and_keeps_the_typical_first(table, tables, random):
    query = torch.randn(DIM, generator=random)
    ranker = CodeRanker(tables)
    answer = rank_items(table, BEAMS, 0, query, rerank="codes", evidence=Evidence(codes=ranker), k=10)
    by_id = ranker.scores(query, table.ids)
    expected = [item for row in np.argsort(-by_id) for item in table.bucket(int(row)).tolist()]
    assert answer.items.tolist() == expected
    assert (np.diff(answer.scores) <= 0).all()
    for item, beam in zip(answer.items, answer.beams, strict=True):
        assert item in table.bucket(int(BEAMS.rows[0, beam]))


def test_re_ranking_by_embeddings_orders_every_item_by_its_own(table, random):
    stored = F.normalize(torch.randn(5, DIM, generator=random), dim=1).half().numpy()
    query = F.normalize(torch.randn(DIM, generator=random), dim=0)
    answer = rank_items(
        table, BEAMS, 0, query, rerank="embeddings", evidence=Evidence(embeddings=rows_of(stored)), k=10
    )
    cosines = stored.astype(np.float32) @ query.numpy()
    assert answer.items.tolist() == np.argsort(-cosines).tolist()
    np.testing.assert_allclose(answer.scores, np.sort(cosines)[::-1], atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_cuts_after_the_ordering_and_touched_still_counts_every_item(table, k):
    whole = rank_items(table, BEAMS, 0, torch.zeros(DIM), rerank="none", evidence=Evidence(), k=10)
    cut = rank_items(table, BEAMS, 0, torch.zeros(DIM), rerank="none", evidence=Evidence(), k=k)
    assert cut.items.tolist() == whole.items[:k].tolist()
    assert cut.touched == 5


def test_only_the_items_under_the_beams_are_touched(table):
    some = beams_of([1, NOTHING, NOTHING], [-1.0, -np.inf, -np.inf])
    answer = rank_items(table, some, 0, torch.zeros(DIM), rerank="none", evidence=Evidence(), k=10)
    assert (answer.items.tolist(), answer.touched) == ([1], 1)


@pytest.mark.parametrize("rerank", ["none", "codes", "embeddings"])
def test_a_query_that_found_no_id_has_an_empty_answer(table, tables, rerank):
    nothing = beams_of([NOTHING, NOTHING], [-np.inf, -np.inf])
    evidence = Evidence(CodeRanker(tables), rows_of(np.zeros((5, DIM), dtype=np.float16)))
    answer = rank_items(table, nothing, 0, torch.zeros(DIM), rerank=rerank, evidence=evidence, k=10)
    assert answer.items.tolist() == answer.scores.tolist() == []
    assert answer.touched == 0


@pytest.mark.parametrize(
    ("rerank", "advice"), [("codes", "codebooks"), ("embeddings", "--embeddings fused"), ("luck", "luck")]
)
def test_re_ranking_without_its_evidence_is_refused_with_advice(table, rerank, advice):
    with pytest.raises(UsageError, match=advice):
        rank_items(table, BEAMS, 0, torch.zeros(DIM), rerank=rerank, evidence=Evidence(), k=10)
