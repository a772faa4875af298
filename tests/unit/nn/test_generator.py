"""The decoder in training: losses are what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from genius_search.nn.generator import CODE_ROW_STD, Generator
from genius_search.nn.packed import NUM_SPECIAL
from genius_search.recipe import GeneratorConfig

DIM = 6
SIZES = (3, 5, 4, 6)


def make(seed=0, **settings):
    torch.manual_seed(seed)
    config = GeneratorConfig(
        **{
            "layers": 2,
            "width": 12,
            "feedforward": 20,
            "heads": 3,
            "head_width": 4,
            "prefixes": 5,
            **settings,
        }
    )
    return Generator(DIM, SIZES, config).eval()


def draw(items, seed=0):
    """Queries and their codes."""
    random = torch.Generator().manual_seed(seed)
    codes = [torch.randint(size, (items,), generator=random) for size in SIZES]
    return torch.randn(items, DIM, generator=random), torch.stack(codes, dim=1)


@pytest.mark.parametrize("head", ["tied", "per-level"])
@pytest.mark.parametrize("softmax", ["vocabulary", "level"])
@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_each_level(head, softmax):
    generator = make(head=head, softmax=softmax)
    queries, codes = draw(7)
    hidden = generator(queries, codes)
    if head == "tied":
        logits = (hidden / math.sqrt(12)) @ generator.embedding.weight.T
    else:
        logits = hidden @ generator.head.weight.T
    for level, value in enumerate(generator.loss(queries, codes)):
        start = 3 + sum(SIZES[:level])
        own = logits[:, level]
        target = codes[:, level] + start
        if softmax == "level":
            own, target = own[:, start : start + SIZES[level]], codes[:, level]
        torch.testing.assert_close(value, F.cross_entropy(own, target))


@pytest.mark.parametrize("head", ["tied", "per-level"])
@torch.no_grad()
def test_log_probabilities_normalise_to_one_over_what_they_are_asked_to(head):
    generator = make(head=head)
    hidden = torch.randn(4, 12)
    over_all = []
    for level, size in enumerate(SIZES):
        own = generator.log_probabilities(hidden, level, "level")
        assert own.shape == (4, size)
        torch.testing.assert_close(own.exp().sum(dim=1), torch.ones(4))
        part = generator.log_probabilities(hidden, level, "vocabulary")
        torch.testing.assert_close(
            part - part.logsumexp(dim=1, keepdim=True), own, rtol=1e-4, atol=1e-5
        )
        over_all.append(part.exp().sum(dim=1))
    special = generator.row_logits(hidden, slice(None)).softmax(dim=1)[:, :NUM_SPECIAL].sum(dim=1)
    torch.testing.assert_close(torch.stack(over_all).sum(dim=0) + special, torch.ones(4))


@torch.no_grad()
def test_code_rows_start_as_one_linear_map_of_the_unit_code_vectors():
    generator = make(head="per-level")
    special = generator.embedding.weight[:NUM_SPECIAL].clone()
    random = torch.Generator().manual_seed(1)
    tables = [torch.randn(size, DIM, generator=random) for size in SIZES]
    tables[2][1] = 9 * tables[1][3]
    generator.start_codes(tables, generator=torch.Generator().manual_seed(2))
    rows = generator.embedding.weight[NUM_SPECIAL:]
    units = torch.cat([table / table.norm(dim=1, keepdim=True) for table in tables])
    mapped = torch.linalg.lstsq(units, rows)
    torch.testing.assert_close(units @ mapped.solution, rows, rtol=1e-4, atol=1e-4)
    assert torch.equal(generator.embedding.weight[:NUM_SPECIAL], special)
    start = generator.offsets
    torch.testing.assert_close(
        generator.embedding.weight[start[2] + 1], generator.embedding.weight[start[1] + 3]
    )
    torch.testing.assert_close(generator.head.weight[NUM_SPECIAL:] * math.sqrt(12), rows)
    assert float(rows.std()) == pytest.approx(CODE_ROW_STD, rel=0.5)
