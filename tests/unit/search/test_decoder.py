"""The generator laid out for search: what it refuses, what it leaves alone, that it can be traced."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from genius_search.config import GeneratorConfig
from genius_search.errors import UsageError
from genius_search.nn.generator import Generator
from genius_search.search.decoder import OPENING_CODES, T5Decoder

DIM = 6
SIZES = (3, 5, 4, 6)
START_ONLY = torch.zeros(3, 0, dtype=torch.int64)


def make(sizes=SIZES, **settings):
    torch.manual_seed(0)
    config = GeneratorConfig(
        **{
            "layers": 2,
            "width": 12,
            "feedforward": 20,
            "heads": 3,
            "head_width": 4,
            "prefixes": 5,
            "dropout": 0.5,
            **settings,
        }
    )
    generator = Generator(DIM, sizes, config).eval()
    for name, weight in generator.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 3.0)
    return generator


def draw(sizes=SIZES, items=3):
    random = torch.Generator().manual_seed(1)
    codes = [torch.randint(size, (items,), generator=random) for size in sizes]
    return torch.randn(items, DIM, generator=random), torch.stack(codes, dim=1)


def said(decoder, queries, codes):
    """Log-probabilities of each level given the codes before it."""
    hidden = decoder.advance(decoder.start(queries), codes[:, :-1]).hidden
    return [
        decoder.log_probabilities(hidden[:, level], level, "level") for level in range(len(decoder.sizes))
    ]


def test_the_generator_is_left_as_it_was_and_may_change_without_the_decoder():
    generator = make()
    before = {name: weight.clone() for name, weight in generator.state_dict().items()}
    decoder = T5Decoder(generator)
    queries, codes = draw()
    expected = said(decoder, queries, codes)
    after = generator.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    with torch.no_grad():
        for weight in generator.parameters():
            weight.fill_(0.5)
    torch.testing.assert_close(said(decoder, queries, codes), expected, rtol=0, atol=0)


def test_dropout_is_never_active_even_if_the_generator_is_in_training():
    generator = make()
    queries, codes = draw()
    expected = said(T5Decoder(generator), queries, codes)
    generator.train()
    torch.testing.assert_close(said(T5Decoder(generator), queries, codes), expected, rtol=0, atol=0)


def test_no_gradient_is_recorded_even_if_the_query_wants_one():
    decoder = T5Decoder(make())
    queries, codes = draw()
    step = decoder.advance(decoder.start(queries.requires_grad_()), codes[:, :1])
    assert not step.hidden.requires_grad
    assert not decoder.log_probabilities(step.hidden[:, 1], 1, "vocabulary").requires_grad


@pytest.mark.parametrize("scale", [1e-4, 1e-2])
@torch.no_grad()
def test_rows_of_almost_no_length_are_normed_as_in_training(scale):
    generator = make()
    for weight in (generator.embedding.weight, *generator.prefix_projection.parameters()):
        weight.mul_(scale)
    queries, codes = draw()
    hidden = generator(queries, codes)
    for level, found in enumerate(said(T5Decoder(generator), queries, codes)):
        expected = generator.log_probabilities(hidden[:, level], level, "level")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("first", [1, OPENING_CODES, OPENING_CODES + 1])
@torch.no_grad()
def test_what_is_computed_ahead_for_few_first_codes_equals_what_is_computed_for_many(first, count):
    sizes = (first, 5, 4, 6)
    generator = make(sizes)
    queries, codes = draw(sizes)
    decoder = T5Decoder(generator)
    hidden = generator(queries, codes)
    step = decoder.advance(decoder.start(queries), codes[:, :count])
    for level in range(count + 1):
        torch.testing.assert_close(
            decoder.log_probabilities(step.hidden[:, level], level, "level"),
            generator.log_probabilities(hidden[:, level], level, "level"),
            rtol=1e-4,
            atol=1e-5,
        )


def test_ids_of_one_level_are_written_too():
    generator = make((5,))
    queries, _ = draw((5,))
    decoder = T5Decoder(generator)
    step = decoder.advance(decoder.start(queries), START_ONLY)
    with torch.no_grad():
        hidden = generator(queries, torch.zeros(3, 1, dtype=torch.int64))
        expected = generator.log_probabilities(hidden[:, 0], 0, "vocabulary")
    found = decoder.log_probabilities(step.hidden[:, 0], 0, "vocabulary")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_last_level_is_predicted_but_not_written_and_nothing_is_no_code():
    decoder = T5Decoder(make())
    queries, codes = draw()
    fresh = decoder.start(queries)
    with pytest.raises(UsageError, match="4 codes after 0 tokens of an ID of 4 levels"):
        decoder.advance(fresh, codes)
    begun = decoder.advance(fresh, START_ONLY).state
    with pytest.raises(UsageError, match="0 codes after 1 tokens"):
        decoder.advance(begun, START_ONLY)
    assert decoder.advance(begun, codes[:, :3]).state.level == len(SIZES)


def test_a_state_can_be_continued_twice():
    decoder = T5Decoder(make())
    queries, codes = draw()
    begun = decoder.advance(decoder.start(queries), codes[:, :1]).state
    once = decoder.advance(begun, codes[:, 1:2])
    before = [tensor.clone() for tensor in (once.hidden, *once.state.past)]
    decoder.advance(begun, (codes[:, 1:2] + 1) % SIZES[1])
    torch.testing.assert_close([once.hidden, *once.state.past], before, rtol=0, atol=0)


_TRACE = """
import torch
from genius_search.config import GeneratorConfig
from genius_search.nn.generator import Generator
from genius_search.search.decoder import OPENING_CODES, T5Decoder

for first in (3, OPENING_CODES + 1):
    config = GeneratorConfig(layers=2, width=12, feedforward=20, heads=3, head_width=4, prefixes=5)
    decoder = T5Decoder(Generator(6, (first, 5, 4, 6), config))
    queries, codes = torch.randn(3, 6), torch.zeros(6, 3, dtype=torch.int64)

    def whole(advance):
        step = advance(decoder.start(queries), codes[:3, :1])
        state = step.state.select(None, torch.tensor([[0, 0], [1, 1], [2, 2]]))
        return advance(state, codes[:, 1:3]).hidden

    traced = torch.compile(decoder.advance, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(whole(traced), whole(decoder.advance), rtol=0, atol=0)
"""


def test_a_step_traces_into_one_graph():
    # In a process of its own, where types are not checked: the checks cannot be traced.
    subprocess.run(  # noqa: S603
        [sys.executable, "-c", _TRACE],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
