"""Decoder for search equals training's teacher forcing, however it is cut into steps, beams and batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from genius_search.config import GeneratorConfig
from genius_search.nn.generator import Generator
from genius_search.search.decoder import OPENING_CODES, T5Decoder

DIM = 5


class Plan(NamedTuple):
    """Of a generator of random shape."""

    seed: int
    sizes: tuple[int, ...]
    config: GeneratorConfig


@st.composite
def plans(draw):
    config = GeneratorConfig(
        layers=draw(st.integers(1, 2)),
        width=draw(st.sampled_from([4, 12])),
        feedforward=draw(st.sampled_from([6, 16])),
        heads=draw(st.integers(1, 3)),
        head_width=draw(st.sampled_from([2, 4])),
        prefixes=draw(st.integers(1, 5)),
        head=draw(st.sampled_from(["tied", "per-level"])),
    )
    first = draw(st.sampled_from([1, 3, OPENING_CODES + 2]))
    sizes = (first, *draw(st.lists(st.integers(1, 6), max_size=4)))
    return Plan(draw(st.integers(0, 10_000)), sizes, config)


def make(plan):
    """The generator, with norms of their own."""
    torch.manual_seed(plan.seed)
    generator = Generator(DIM, plan.sizes, plan.config).eval()
    for name, weight in generator.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 3.0)
    return generator


def written(generator, items):
    """Queries and IDs."""
    codes = [torch.randint(size, (items,)) for size in generator.sizes]
    return torch.randn(items, DIM), torch.stack(codes, dim=1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def agree(decoder, generator, hidden, level, queries, codes):
    """Compare what is said of one level with training's forward pass."""
    padded = torch.zeros(len(codes), len(generator.sizes), dtype=torch.int64)
    padded[:, :level] = codes[:, :level]
    expected = generator(queries, padded)[:, level]
    for scores in ("level", "vocabulary"):
        close(
            decoder.log_probabilities(hidden, level, scores),
            generator.log_probabilities(expected, level, scores),
        )
    start = generator.offsets[level]
    close(
        decoder.logits(hidden, level),
        generator.logits(expected, slice(start, start + generator.sizes[level])),
    )


@settings(max_examples=40)
@given(plan=plans(), items=st.integers(1, 4), data=st.data())
def test_any_cut_into_steps_equals_teacher_forcing_at_every_level(plan, items, data):
    generator = make(plan)
    decoder = T5Decoder(generator)
    queries, codes = written(generator, items)
    levels = len(generator.sizes)
    state = decoder.start(queries)
    hidden = []
    while state.level < levels:
        done = max(0, state.level - 1)
        fewest = 0 if state.level == 0 else 1
        count = data.draw(st.integers(fewest, levels - 1 - done), label="codes at once")
        step = decoder.advance(state, codes[:, done : done + count])
        hidden += step.hidden.unbind(dim=1)
        state = step.state
    assert len(hidden) == levels
    for level in range(levels):
        agree(decoder, generator, hidden[level], level, queries, codes)


@settings(max_examples=40)
@given(plan=plans(), data=st.data())
def test_selected_beams_say_what_they_would_if_written_from_the_start(plan, data):
    generator = make(plan)
    decoder = T5Decoder(generator)
    queries, codes = written(generator, 3)
    levels = len(generator.sizes)
    owner, codes, width = torch.arange(3), codes[:, :0], 1
    step = decoder.advance(decoder.start(queries), codes)
    for level in range(levels):
        agree(decoder, generator, step.hidden[:, -1], level, queries[owner], codes)
        if level == levels - 1:
            break
        # Some queries, in any order and perhaps twice; of each some of its beams, in any order.
        for _ in range(data.draw(st.integers(1, 2), label="selections before a step")):
            present = len(owner) // width
            kept = data.draw(st.lists(st.integers(0, present - 1), min_size=1, max_size=3), label="queries")
            everyone = kept == list(range(present))
            kept = torch.tensor(kept)
            chosen = torch.randint(width, (len(kept), data.draw(st.integers(1, 4), label="beams")))
            rows = kept[:, None] * width + chosen
            before = step.state
            state = before.select(None if everyone else kept, rows)
            assert state.level == before.level
            owner, codes, width = owner[rows.flatten()], codes[rows.flatten()], rows.shape[1]
            step = step._replace(state=state)
        new = torch.randint(generator.sizes[level], (len(codes), 1))
        codes = torch.cat([codes, new], dim=1)
        step = decoder.advance(step.state, new)


@settings(max_examples=20)
@given(plan=plans(), beams=st.integers(1, 3))
def test_queries_dropped_before_the_start_and_several_ids_of_one_query(plan, beams):
    generator = make(plan)
    decoder = T5Decoder(generator)
    queries, _ = written(generator, 4)
    kept = torch.tensor([3, 1])
    state = decoder.start(queries).select(kept, kept[:, None])
    _, codes = written(generator, 2 * beams)
    step = decoder.advance(state, codes[:, :-1])
    for level in range(len(generator.sizes)):
        owners = queries[kept.repeat_interleave(beams)]
        agree(decoder, generator, step.hidden[:, level], level, owners, codes)


@settings(max_examples=20)
@given(plan=plans(), items=st.integers(2, 5))
def test_a_batch_of_one_equals_the_row_of_a_batch(plan, items):
    generator = make(plan)
    decoder = T5Decoder(generator)
    queries, codes = written(generator, items)
    together = decoder.advance(decoder.start(queries), codes[:, :-1]).hidden
    for row in range(items):
        mine = slice(row, row + 1)
        close(decoder.advance(decoder.start(queries[mine]), codes[mine, :-1]).hidden, together[mine])
