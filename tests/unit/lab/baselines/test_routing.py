import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.lab.baselines.routing import CodeRouter
from genius_search.search.rank import CodeRanker, Evidence, rank_items
from genius_search.search.table import IdTable, Part

DIM = 4


def draw(sizes, num_items, num_queries, seed):
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, num_items) for size in sizes], axis=1)
    tables = [torch.from_numpy(random.standard_normal((size, DIM)).astype(np.float32)) for size in sizes]
    queries = torch.from_numpy(random.standard_normal((num_queries, DIM)).astype(np.float32))
    return codes, tables, queries


def table_of(codes):
    return IdTable.build(codes, np.zeros(len(codes)))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    num_items=st.integers(1, 30),
    has_modality_level=st.booleans(),
    beam=st.integers(1, 10),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_the_nearest_prefixes_that_exist_and_are_wanted_are_taken(
    sizes, num_items, has_modality_level, beam, seed, data
):
    codes, tables, queries = draw(sizes, num_items, 3, seed)
    cut = data.draw(st.integers(1, num_items))
    parts = [Part(table_of(part)) for part in (codes[:cut], codes[cut:]) if len(part)]
    level0 = data.draw(
        st.none() | st.lists(st.frozensets(st.integers(0, sizes[0] - 1)), min_size=3, max_size=3)
    )
    router = CodeRouter(parts, tables, has_modality_level=has_modality_level)
    beams = router.route(queries, beam=beam, level0=level0)
    depth = 2 if has_modality_level else 1
    for query in range(3):
        wanted = level0[query] if level0 and level0[query] else range(sizes[0])
        exist = {tuple(row[:depth]) for row in codes.tolist() if row[0] in wanted}
        away = {
            prefix: float(
                (queries[query] - sum(t[c] for t, c in zip(tables, prefix, strict=False))).square().sum()
            )
            for prefix in exist
        }
        filled = beams.filled()[query]
        assert filled.sum() == min(beam, len(exist))
        np.testing.assert_allclose(
            -2 * beams.scores()[query][filled], sorted(away.values())[:beam], rtol=1e-4, atol=1e-4
        )
        for place in np.flatnonzero(filled):
            under = np.concatenate(
                [
                    part.table.ids[beams.low[query, place, number] : beams.high[query, place, number]]
                    for number, part in enumerate(parts)
                ]
            )
            prefix = tuple(under[0, :depth].tolist())
            everything = [
                row for part in parts for row in part.table.ids.tolist() if tuple(row[:depth]) == prefix
            ]
            assert under.tolist() == everything
            assert -2 * beams.scores()[query, place] == pytest.approx(away[prefix], rel=1e-4, abs=1e-4)


def test_leaves_under_all_prefixes_ranked_by_codes_are_exact_search_over_codes():
    codes, tables, queries = draw((3, 5, 5), 60, 4, seed=1)
    part = Part(table_of(codes))
    beams = CodeRouter([part], tables, has_modality_level=True).route(queries, beam=15)
    evidence = Evidence(codes=CodeRanker(tables))
    vectors = sum(table[torch.from_numpy(codes[:, level])] for level, table in enumerate(tables))
    for query in range(4):
        answer = rank_items(
            [part], beams, query, queries[query], config=SearchConfig(rerank="codes"), evidence=evidence, k=10
        )
        expected = (vectors @ queries[query]).sort(descending=True).values[:10]
        assert answer.touched == 60
        np.testing.assert_allclose(answer.scores, expected.numpy(), atol=1e-5)


def test_a_modality_that_no_item_has_leads_nowhere():
    codes, tables, queries = draw((3, 4), 10, 2, seed=2)
    codes[:, 0] = 1
    beams = CodeRouter([Part(table_of(codes))], tables, has_modality_level=True).route(
        queries, beam=3, level0=[frozenset({2}), frozenset()]
    )
    assert not beams.filled()[0].any()
    assert beams.filled()[1].any()
    assert np.isneginf(beams.scores()[0]).all()


def test_ids_without_a_semantic_level_cannot_be_routed():
    codes, tables, _ = draw((3,), 5, 1, seed=3)
    with pytest.raises(UsageError, match="no semantic level"):
        CodeRouter([Part(table_of(codes))], tables, has_modality_level=True)
