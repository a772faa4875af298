"""A generator that starts from geometry: what it says before training, and that search says the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.nn.generator import Generator, Guide
from genius_search.recipe import GeneratorConfig
from genius_search.search.beam import GuidedDecoder

SIZES = (3, 8, 8, 5)
DIM = 12
CONFIG = GeneratorConfig(
    layers=2,
    width=16,
    feedforward=32,
    heads=2,
    head_width=8,
    prefixes=3,
    dropout=0.0,
    softmax="level",
    guide="geometry",
)


def draw_generator(config: GeneratorConfig = CONFIG) -> Generator:
    torch.manual_seed(0)
    generator = Generator(DIM, SIZES, config).eval()
    tables = [torch.randn(size, DIM) for size in SIZES]
    generator.start_codes(tables, generator=torch.Generator().manual_seed(1))
    return generator


def guide_of(generator: Generator) -> Guide:
    assert generator.guide is not None
    return generator.guide


def draw_queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    queries = F.normalize(torch.randn(count, DIM, generator=random), dim=1)
    codes = torch.stack([torch.randint(size, (count,), generator=random) for size in SIZES], dim=1)
    return queries, codes


def test_without_a_decoder_the_most_probable_prefix_is_the_nearest() -> None:
    generator = draw_generator()
    guide = guide_of(generator)
    with torch.no_grad():
        guide.gate.zero_()
    queries, codes = draw_queries(20)
    residuals = guide.residuals(queries, codes)
    tables = guide.tables()
    for level in range(len(SIZES)):
        prefix = sum(
            (tables[before][codes[:, before]] for before in range(level)), torch.zeros(20, DIM)
        )
        longer = prefix[:, None] + tables[level][None]
        distances = (queries[:, None] - longer).square().sum(dim=2)
        logits = guide.combine(torch.zeros(20, SIZES[level]), residuals[:, level], level)
        assert torch.equal(logits.argmax(dim=1), distances.argmin(dim=1))


def test_the_code_vectors_are_the_quantizers_and_stay_so() -> None:
    generator = draw_generator()
    guide = guide_of(generator)
    before = guide.vectors.clone()
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    generator.loss(*draw_queries(6)).mean().backward()
    optimizer.step()
    assert torch.equal(guide.vectors, before)
    assert not torch.equal(guide.bias, torch.zeros_like(guide.bias))
    assert guide.gate.grad is not None
    assert guide.log_scale.grad is not None


def test_search_says_what_training_learned() -> None:
    generator = draw_generator()
    guide = guide_of(generator)
    with torch.no_grad():
        guide.bias.normal_(generator=torch.Generator().manual_seed(3))
    decoder = GuidedDecoder(generator)
    queries, codes = draw_queries(5)
    with torch.no_grad():
        expected = generator.loss(queries, codes)
        step = decoder.advance(decoder.start(queries), codes[:, :1])
        hidden = [step.hidden[:, 0], step.hidden[:, 1]]
        state = step.state.select(None, torch.arange(5)[:, None])
        for level in (1, 2):
            step = decoder.advance(state, codes[:, level : level + 1])
            hidden.append(step.hidden[:, 0])
            state = step.state
        found = torch.stack(
            [
                F.nll_loss(
                    decoder.log_probabilities(hidden[level], level, "level"), codes[:, level]
                )
                for level in range(len(SIZES))
            ]
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_distances_of_different_levels_are_not_compared() -> None:
    generator = draw_generator()
    decoder = GuidedDecoder(generator)
    hidden = decoder.advance(
        decoder.start(draw_queries(2)[0]), torch.zeros((2, 0), dtype=torch.int64)
    ).hidden
    with pytest.raises(UsageError, match='scores="level"'):
        decoder.log_probabilities(hidden[:, 0], 0, "vocabulary")


@pytest.mark.parametrize("head", ["tied", "per-level"])
def test_the_scores_of_a_path_are_the_logits_of_its_codes(head) -> None:
    generator = draw_generator(dataclasses.replace(CONFIG, head=head))
    guide, (queries, codes) = guide_of(generator), draw_queries(9)
    with torch.no_grad():
        guide.bias.normal_()
        scores, hidden = generator.score_ids(queries, codes, queries), generator(queries, codes)
        for level, residuals in enumerate(guide.residuals(queries, codes).unbind(dim=1)):
            decoded = generator.logits(hidden[:, level], level)
            logits = guide.combine(decoded, residuals, level)
            expected = logits.gather(1, codes[:, level : level + 1]).ravel()
            torch.testing.assert_close(scores[:, level], expected, rtol=1e-5, atol=1e-4)
    vectors = sum(table[codes[:, level]] for level, table in enumerate(guide.tables()))
    torch.testing.assert_close(guide.vectors_of(codes), vectors)
