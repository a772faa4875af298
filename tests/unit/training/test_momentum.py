"""The slow copy, its queue, and targets that are partly its own: against the same written out plainly."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from genius_search.training.encoder import NO_CANDIDATE, MomentumPair, Views

DIM, BATCH, QUEUE = 6, 3, 7


def unit(*shape, seed):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def views(seed):
    return Views(unit(BATCH, DIM, seed=seed), unit(BATCH, DIM, seed=seed + 1))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return MomentumPair(
        nn.Linear(4, DIM), dim=DIM, queue=QUEUE, decay=0.9, generator=torch.Generator().manual_seed(1)
    )


def test_the_copy_begins_as_the_network_and_follows_it_by_a_moving_average(pair):
    assert torch.equal(pair.slow.weight, pair.network.weight)
    before = pair.slow.weight.clone()
    with torch.no_grad():
        pair.network.weight += 1
    pair.follow()
    torch.testing.assert_close(pair.slow.weight, 0.9 * before + 0.1 * pair.network.weight)


def test_only_the_network_is_trained_and_everything_is_kept(pair):
    trained = {name for name, weight in pair.named_parameters() if weight.requires_grad}
    assert trained == {"network.weight", "network.bias"}
    kept = {"slow.weight", "slow.bias", "queued_queries", "queued_candidates", "queued_numbers"}
    assert trained | kept == pair.state_dict().keys()


def test_the_queue_begins_with_strangers_and_forgets_the_oldest(pair):
    assert (pair.queued_numbers == NO_CANDIDATE).all()
    torch.testing.assert_close(pair.queued_queries.norm(dim=1), torch.ones(QUEUE))
    batches = [views(10 * number) for number in range(4)]
    for number, batch in enumerate(batches):
        pair.remember(batch, torch.full((BATCH,), number))
    assert pair.queued_numbers.tolist() == [3, 3, 3, 2, 2, 2, 1]
    expected = torch.cat([batch.candidates for batch in reversed(batches)])[:QUEUE]
    assert torch.equal(pair.queued_candidates, expected)


@pytest.mark.parametrize("softness", [0.0, 0.4, 1.0])
def test_the_loss_is_that_of_the_same_written_out(pair, softness):
    earlier, slow, fast = views(50), views(60), views(70)
    pair.remember(earlier, torch.tensor([4, 5, 8]))
    numbers = torch.tensor([4, 9, 9])  # the first was in the queue, the other two are one candidate
    false_negatives = torch.zeros(BATCH, BATCH, dtype=torch.bool)
    false_negatives[0, 1] = True
    found = pair.loss(fast, slow, numbers, false_negatives, temperature=0.1, softness=softness)

    given = [*numbers.tolist(), *pair.queued_numbers.tolist()]
    total = 0.0
    for fast_side, slow_side, others, wrong in (
        (fast.queries, slow.queries, [*slow.candidates, *pair.queued_candidates], false_negatives),
        (fast.candidates, slow.candidates, [*slow.queries, *pair.queued_queries], false_negatives.T),
    ):
        for row in range(BATCH):
            right = [
                number == given[row] or (place < BATCH and bool(wrong[row, place]))
                for place, number in enumerate(given)
            ]
            guess = softmax([float(slow_side[row] @ other) / 0.1 for other in others])
            said = softmax([float(fast_side[row] @ other) / 0.1 for other in others])
            total -= sum(
                (softness * guessed + (1 - softness) * is_right / sum(right)) * math.log(probability)
                for guessed, is_right, probability in zip(guess, right, said, strict=True)
            )
    assert float(found) == pytest.approx(total / (2 * BATCH), rel=1e-4)


def test_the_copy_gets_no_gradient(pair):
    given = torch.randn(BATCH, 4)
    fast = F.normalize(pair.network(given))
    slow = F.normalize(pair.slow(given))
    numbers, nobody = torch.arange(BATCH), torch.zeros(BATCH, BATCH, dtype=torch.bool)
    pair.loss(Views(fast, fast), Views(slow, slow), numbers, nobody, temperature=0.1, softness=0.4).backward()
    assert pair.network.weight.grad is not None
    assert pair.slow.weight.grad is None


def softmax(values):
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]
