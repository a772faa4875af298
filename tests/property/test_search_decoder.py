"""The generator read step by step, as a search does, equals training's teacher forcing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from genius_search.nn.generator import Generator
from genius_search.recipe import GeneratorConfig

DIM = 5


CONFIGS = st.builds(
    GeneratorConfig,
    layers=st.integers(1, 2),
    width=st.sampled_from([4, 12]),
    feedforward=st.sampled_from([6, 16]),
    heads=st.integers(1, 3),
    head_width=st.sampled_from([2, 4]),
    prefixes=st.integers(1, 5),
    head=st.sampled_from(["tied", "per-level"]),
)
PLANS = st.tuples(
    st.integers(0, 10_000), CONFIGS, st.lists(st.integers(1, 6), min_size=1, max_size=5)
)


def make(seed, config, sizes):
    """A generator with norms of its own; every other one has levels that share their codes."""
    torch.manual_seed(seed)
    common_vocabulary = seed % 2 > 0
    sizes = sizes[:1] * len(sizes) if common_vocabulary else sizes
    generator = Generator(DIM, tuple(sizes), config, common_vocabulary=common_vocabulary).eval()
    for name, weight in generator.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 3.0)
    return generator


def written(generator, items):
    """Queries and IDs."""
    codes = [torch.randint(size, (items,)) for size in generator.sizes]
    return torch.randn(items, DIM), torch.stack(codes, dim=1)


@torch.no_grad()
def agree(generator, hidden, level, queries, codes):
    """Compare what is said of one level with training's forward pass."""
    padded = torch.zeros(len(codes), len(generator.sizes), dtype=torch.int64)
    padded[:, :level] = codes[:, :level]
    torch.testing.assert_close(hidden, generator(queries, padded)[:, level], rtol=1e-4, atol=1e-4)


@given(plan=PLANS, items=st.integers(1, 4), data=st.data())
def test_any_cut_into_steps_equals_teacher_forcing_at_every_level(plan, items, data):
    generator = make(*plan)
    queries, codes = written(generator, items)
    levels = len(generator.sizes)
    state = generator.start(queries)
    hidden = []
    while state.level < levels:
        done = max(0, state.level - 1)
        fewest = 0 if state.level == 0 else 1
        count = data.draw(st.integers(fewest, levels - 1 - done), label="codes at once")
        step = generator.advance(state, codes[:, done : done + count])
        hidden += step.hidden.unbind(dim=1)
        state = step.state
    assert len(hidden) == levels
    for level in range(levels):
        agree(generator, hidden[level], level, queries, codes)


@given(plan=PLANS, data=st.data())
def test_selected_beams_say_what_they_would_if_written_from_the_start(plan, data):
    generator = make(*plan)
    queries, codes = written(generator, 3)
    levels = len(generator.sizes)
    owner, codes, width = torch.arange(3), codes[:, :0], 1
    step = generator.advance(generator.start(queries), codes)
    for level in range(levels):
        agree(generator, step.hidden[:, -1], level, queries[owner], codes)
        if level == levels - 1:
            break
        # Some queries, in any order and perhaps twice; of each some of its beams, in any order.
        present = len(owner) // width
        kept = data.draw(
            st.lists(st.integers(0, present - 1), min_size=1, max_size=3), label="queries"
        )
        everyone = kept == list(range(present))
        kept = torch.tensor(kept)
        chosen = torch.randint(width, (len(kept), data.draw(st.integers(1, 4), label="beams")))
        rows = kept[:, None] * width + chosen
        state = step.state.select(None if everyone else kept, rows)
        owner, codes, width = owner[rows.flatten()], codes[rows.flatten()], rows.shape[1]
        new = torch.randint(generator.sizes[level], (len(codes), 1))
        codes = torch.cat([codes, new], dim=1)
        step = generator.advance(state, new)


@pytest.mark.parametrize("scores", ["level", "vocabulary"])
@torch.no_grad()
def test_levels_that_share_their_codes_share_their_rows(scores):
    config = GeneratorConfig(layers=1, width=4, feedforward=4, heads=1, head_width=4, prefixes=1)
    generator = Generator(DIM, (6, 6, 6), config, common_vocabulary=True).eval()
    assert len(generator.embedding.weight) == 3 + 6
    hidden = torch.randn(2, 4)
    first, last = (generator.log_probabilities(hidden, level, scores) for level in (0, 2))
    assert torch.equal(first, last)
