import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.config import GeneratorConfig, SearchConfig
from genius_search.lab.baselines.generate import NOTHING, HfGenerate
from genius_search.nn.generator import Generator
from genius_search.search.beam import search
from genius_search.search.decoder import T5Decoder
from genius_search.search.table import IdTable, SearchSegment

DIM = 5
TOLERANCE = 1e-4
"""Float32 sums over a few levels differ by less."""


def build(sizes, num_items, layers=1, head="tied", seed=0):
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, num_items) for size in sizes], axis=1)
    config = GeneratorConfig(
        layers=layers, width=8, feedforward=12, heads=2, head_width=4, prefixes=3, head=head
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(DIM, sizes, config)
        with torch.no_grad():  # norms begin as ones, which would hide a missing copy
            for name, weight in generator.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
        queries = torch.randn(3, DIM)
    return generator.eval(), IdTable.build(codes, np.zeros(num_items)), queries


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    num_items=st.integers(1, 40),
    layers=st.integers(1, 3),
    head=st.sampled_from(["tied", "per-level"]),
    beam=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
def test_it_ranks_as_our_search_does_with_scores_over_the_vocabulary(
    sizes, num_items, layers, head, beam, seed
):
    generator, table, queries = build(sizes, num_items, layers, head, seed)
    theirs = HfGenerate(generator, table.ids).search(queries, beam=beam)
    config = SearchConfig(beam=beam, scores="vocabulary")
    ours = search(T5Decoder(generator), [SearchSegment(table)], queries, config)
    for query in range(len(queries)):
        filled = ours.filled()[query]
        expected, count = ours.scores()[query][filled], int(filled.sum())
        assert count == min(beam, len(table))
        np.testing.assert_allclose(theirs.scores[query, :count], expected, atol=TOLERANCE)
        assert np.isneginf(theirs.scores[query, count:]).all()
        assert (theirs.codes[query, count:] == NOTHING).all()
        if (np.diff(expected) < -TOLERANCE).all():  # else ties may trade places
            rows = ours.low[query, filled, 0]
            assert theirs.codes[query, :count].tolist() == table.ids[rows].tolist()


@pytest.mark.parametrize("beam", [1, 7])
def test_without_scores_the_ids_are_the_same(beam):
    generator, table, queries = build((3, 6, 6), 60)
    rival = HfGenerate(generator, table.ids)
    assert rival.codes(queries, beam=beam).tolist() == rival.search(queries, beam=beam).codes.tolist()


def test_a_model_that_was_training_is_searched_without_dropout():
    generator, table, queries = build((3, 6, 6), 60)
    expected = HfGenerate(generator, table.ids).search(queries, beam=5)
    again = HfGenerate(generator.train(), table.ids).search(queries, beam=5)
    assert again.scores.tolist() == expected.scores.tolist()
