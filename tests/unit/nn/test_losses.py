"""The losses against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from genius_search.nn.losses import contrastive_loss, phrase_loss, prefix_loss, word_loss

TEMPERATURE = 0.07


def by_loops(queries, candidates, false_negatives, direction):
    size = len(queries)
    cosines = [[float(q @ c) / TEMPERATURE for c in candidates] for q in queries]

    def row(own, others):
        return -own + math.log(sum(math.exp(other) for other in [own, *others]))

    forward = backward = 0.0
    for i in range(size):
        others = [j for j in range(size) if j != i]
        forward += row(cosines[i][i], [cosines[i][j] for j in others if not false_negatives[i, j]])
        backward += row(cosines[i][i], [cosines[j][i] for j in others if not false_negatives[j, i]])
    return forward / size if direction == "query" else (forward + backward) / size / 2


@given(
    size=st.integers(1, 7),
    seed=st.integers(0, 10_000),
    direction=st.sampled_from(["both", "query"]),
)
def test_the_contrastive_loss_leaves_out_known_false_negatives_like_a_loop(size, seed, direction):
    random = torch.Generator().manual_seed(seed)
    queries, candidates = F.normalize(torch.randn(2, size, 4, generator=random), dim=-1)
    false_negatives = torch.rand(size, size, generator=random) < 0.3
    false_negatives.fill_diagonal_(False)
    loss = contrastive_loss(
        queries, candidates, false_negatives, temperature=TEMPERATURE, direction=direction
    )
    assert float(loss) == pytest.approx(
        by_loops(queries, candidates, false_negatives, direction), rel=1e-4, abs=1e-4
    )


def test_bfloat16_does_not_blur_the_cosines_that_the_temperature_magnifies():
    queries, candidates = F.normalize(torch.randn(2, 32, 64), dim=-1)
    nothing = torch.zeros(32, 32, dtype=torch.bool)
    exact = contrastive_loss(queries, candidates, nothing, temperature=0.01, direction="both")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = contrastive_loss(queries, candidates, nothing, temperature=0.01, direction="both")
    torch.testing.assert_close(mixed, exact, rtol=1e-6, atol=0)


def words_by_loops(images, words, present):
    counts = present.sum(dim=0).tolist()
    total = 0.0
    for image, row in zip(images, present.tolist(), strict=True):
        logits = [
            float(image @ word) / TEMPERATURE + math.log(n)
            for word, n in zip(words, counts, strict=True)
        ]
        log_sum = math.log(sum(math.exp(logit) for logit in logits))
        weights = [here / math.sqrt(n) for here, n in zip(row, counts, strict=True)]
        total -= sum(w * (logit - log_sum) for w, logit in zip(weights, logits, strict=True)) / sum(
            weights
        )
    return total / len(images)


@given(images=st.integers(1, 5), words=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_the_word_loss_is_the_weighted_cross_entropy_of_a_loop(images, words, seed):
    random = torch.Generator().manual_seed(seed)
    vectors = F.normalize(torch.randn(images + words, 4, generator=random), dim=-1).split(
        [images, words]
    )
    present = torch.rand(images, words, generator=random) < 0.4
    present[torch.arange(images), torch.randint(words, (images,), generator=random)] = True
    present = present[:, present.any(dim=0)]
    own = vectors[1][: present.shape[1]]
    loss = word_loss(vectors[0], own, present, temperature=TEMPERATURE)
    assert float(loss) == pytest.approx(
        words_by_loops(vectors[0], own, present), rel=1e-4, abs=1e-5
    )
    without = torch.cat([present, torch.zeros(1, present.shape[1], dtype=torch.bool)])
    more = word_loss(torch.cat([vectors[0], vectors[0][:1]]), own, without, temperature=TEMPERATURE)
    torch.testing.assert_close(more, loss)


def test_the_phrase_loss_is_the_mean_over_the_images_that_a_phrase_fits():
    random = torch.Generator().manual_seed(0)
    phrases, images = (
        F.normalize(torch.randn(size, 4, generator=random), dim=-1) for size in (2, 3)
    )
    relevant = torch.tensor([[True, False, True], [False, True, False]])
    logs = (phrases @ images.T / TEMPERATURE).log_softmax(dim=1)
    expected = -((logs[0, 0] + logs[0, 2]) / 2 + logs[1, 1]) / 2
    torch.testing.assert_close(
        phrase_loss(phrases, images, relevant, temperature=TEMPERATURE), expected
    )
    assert float(phrase_loss(phrases[:0], images, relevant[:0], temperature=TEMPERATURE)) == 0.0


def prefix_loss_by_loops(scores, codes, excluded):
    queries, ids, levels = codes.shape
    losses = torch.zeros(levels)
    for level in range(levels):
        for query in range(queries):
            totals = {}
            for number in range(ids):
                prefix = tuple(codes[query, number, : level + 1].tolist())
                if prefix not in totals or (
                    number and totals[prefix] is None and not excluded[query, number]
                ):
                    own = (
                        None
                        if excluded[query, number]
                        else float(scores[query, number, : level + 1].sum())
                    )
                    totals.setdefault(prefix, own)
            own = totals[tuple(codes[query, 0, : level + 1].tolist())]
            others = [total for total in totals.values() if total is not None]
            losses[level] += math.log(sum(math.exp(total) for total in others)) - own
    return losses / queries


@given(
    queries=st.integers(1, 4),
    ids=st.integers(1, 6),
    levels=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_the_loss_of_prefixes_counts_equal_ones_once_like_a_loop(queries, ids, levels, seed):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, ids, levels, generator=random)
    codes = torch.randint(0, 3, (queries, ids, levels), generator=random)
    excluded = torch.rand(queries, ids, generator=random) < 0.3
    excluded[:, 0] = False
    torch.testing.assert_close(
        prefix_loss(scores, codes, excluded),
        prefix_loss_by_loops(scores, codes, excluded),
        rtol=1e-4,
        atol=1e-4,
    )
