from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from genius_search.search.beam import rank_items
from genius_search.search.rank import CodeRanker, Evidence


def leaves(case, beams, query: int) -> set[tuple[int, int]]:
    """Part and row of every ID under the beams of a query."""
    return {
        (segment, row)
        for low, high in zip(beams.low[query], beams.high[query], strict=True)
        for segment, (first, last) in enumerate(zip(low.tolist(), high.tolist(), strict=True))
        for row in range(first, last)
    }


def allowed_leaves(case, beams, query: int) -> set[tuple[int, int]]:
    """Those of them under which there is an item that the query may find."""
    seen = case.pool.ids(case.masks[query])
    mine = case.masks[query] or case.pool.alive
    found = set()
    for segment, row in leaves(case, beams, query):
        table = case.pool.segments[segment].table
        items = table.buckets(np.array([row])).row
        if mine[segment] is None or mine[segment][items].any():
            assert tuple(table.ids[row].tolist()) in seen
            found.add((segment, row))
    return found


def exact(plain, seed: int, **config):
    """A case without rounding, and its decoder."""
    sizes = plain.sizes_of(seed % plain.NUM_MODELS)
    case = plain.draw_case(seed, sizes, scores="level", **config)
    return case, plain.ExactDecoder(sizes, seed)


def test_a_leaf_stop_loses_nothing_that_full_decoding_finds(plain):
    stopped_early = 0
    for seed in range(plain.SOME_POOLS):
        case, decoder = exact(
            plain,
            seed,
            rerank=("codes", "embeddings")[seed % 2],
            candidates=(0, 3, 10, 30)[seed % 4],
        )
        beams = case.search(decoder)
        whole = case.replaced(rerank="none", candidates=0).search(
            plain.ExactDecoder(decoder.sizes, seed)
        )
        for query in range(len(case.queries)):
            found = allowed_leaves(case, beams, query)
            assert found >= allowed_leaves(case, whole, query), (seed, query)
            places = np.flatnonzero((beams.high > beams.low)[query].any(axis=1))
            is_decoded = np.isfinite(beams.log_probabilities[query, places])
            if not is_decoded.all():
                stopped_early += 1
                most = case.config.candidates
                if not is_decoded.any():  # of few IDs none is left out
                    most = math.sqrt(
                        most * sum(len(segment.table) for segment in case.pool.segments)
                    )
                assert len(found) <= max(case.width(query), most), (seed, query)
            depth = is_decoded.sum(axis=1)
            assert len(set(depth.tolist())) <= 1
            assert (is_decoded == (np.arange(len(decoder.sizes)) < depth[:, None])).all()
    assert stopped_early > plain.SOME_POOLS


def test_a_budget_for_the_whole_pool_finds_the_whole_pool_and_decodes_nothing(plain):
    for seed in range(plain.SOME_POOLS):
        case, decoder = exact(plain, seed, rerank="codes", candidates=1000)
        beams = case.search(decoder)
        assert decoder.num_rows == 0
        for query in range(len(case.queries)):
            ids = {
                tuple(case.pool.segments[segment].table.ids[row].tolist())
                for segment, row in allowed_leaves(case, beams, query)
            }
            assert ids == case.ids(query)


def test_a_larger_budget_never_decodes_more_and_never_finds_less(plain):
    for seed in range(plain.SOME_POOLS):
        case, decoder = exact(plain, seed, rerank="codes", candidates=2)
        few = case.search(decoder)
        more = case.replaced(candidates=12).search(other := plain.ExactDecoder(decoder.sizes, seed))
        assert other.num_rows <= decoder.num_rows
        for query in range(len(case.queries)):
            assert allowed_leaves(case, more, query) >= allowed_leaves(case, few, query)


@pytest.mark.parametrize("rerank", ["codes", "embeddings"])
@pytest.mark.parametrize("shortlist", [0, 4])
def test_what_lies_under_the_beams_is_ordered_as_by_brute_force(plain, rerank, shortlist):
    for seed in range(plain.SOME_POOLS):
        case, decoder = exact(
            plain, seed, rerank=rerank, candidates=(0, 12)[seed % 2], shortlist=shortlist
        )
        random = np.random.default_rng(seed)
        # Integers: sums are exact, and many are equal.
        tables = [
            torch.from_numpy(random.integers(-2, 3, (size, 3))).float() for size in decoder.sizes
        ]
        stored = [
            random.integers(-2, 3, (len(codes), 3)).astype(np.float32) for codes in case.pool.codes
        ]
        vectors = [lambda items, own=own: torch.from_numpy(own[items]) for own in stored]
        beams = case.search(decoder)
        for query in range(len(case.queries)):
            asked = torch.from_numpy(random.integers(-2, 3, 3)).float()
            k = int(random.integers(1, 30))
            answer = rank_items(
                case.pool.segments,
                beams,
                query,
                asked,
                config=case.config,
                evidence=Evidence(CodeRanker(tables), vectors),
                k=k,
                restriction=case.pool.restricted(case.masks[query]),
            )
            entries = []
            masks = case.masks[query] or case.pool.alive
            for segment, row in sorted(allowed_leaves(case, beams, query)):
                table = case.pool.segments[segment].table
                by_codes = float(
                    asked
                    @ sum(tables[level][code] for level, code in enumerate(table.ids[row].tolist()))
                )
                entries += [
                    (segment, item, row, by_codes, float(asked.numpy() @ stored[segment][item]))
                    for item in table.buckets(np.array([row])).row.tolist()
                    if masks[segment] is None or masks[segment][item]
                ]
            given = list(
                zip(
                    answer.segments.tolist(),
                    answer.items.tolist(),
                    answer.id_rows.tolist(),
                    strict=True,
                )
            )
            mine = {entry[:3]: entry[3:] for entry in entries}
            assert answer.num_ranked == len(entries)
            assert len(set(given)) == len(given)
            assert mine.keys() >= set(given)
            if rerank == "codes":
                assert (
                    answer.scores.tolist()
                    == sorted((codes for codes, _ in mine.values()), reverse=True)[:k]
                )
                assert answer.scores.tolist() == [mine[hit][0] for hit in given]
                continue
            assert answer.scores.tolist() == [mine[hit][1] for hit in given]
            assert answer.scores.tolist() == sorted(answer.scores.tolist(), reverse=True)
            if shortlist == 0:
                assert (
                    answer.scores.tolist()
                    == sorted((cosine for _, cosine in mine.values()), reverse=True)[:k]
                )
            elif k >= shortlist:
                compared = sorted((mine[hit][0] for hit in given), reverse=True)
                assert compared == sorted((codes for codes, _ in mine.values()), reverse=True)[:k]
