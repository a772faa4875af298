"""Our modules give the numbers of the authors' code on the same weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius.config import SearchConfig
from genius.data.features import FeatureBatch
from genius.models.losses import alignment_loss, contrastive_loss
from genius.search.beam import search
from genius.search.table import IdTable


@pytest.fixture(scope="module")
def training(reference, checkpoint_quantizer):
    """The training batch's embeddings: all queries, then their candidates."""
    parts = []
    for side in "qc":
        mask = reference.numbers(f"train_{side}_mask")
        image = reference.numbers(f"train_{side}_img") * mask[:, :1]
        text = reference.numbers(f"train_{side}_txt") * mask[:, 1:]
        with torch.no_grad():
            parts.append(checkpoint_quantizer.fusion(image, text))
    return torch.cat(parts)


@torch.no_grad()
def test_fused_embeddings_equal_the_authors(reference, checkpoint_quantizer):
    image = reference.numbers("img") * reference.numbers("img_mask")
    text = reference.numbers("txt") * reference.numbers("txt_mask")
    embeddings = checkpoint_quantizer.fusion(image, text)
    torch.testing.assert_close(embeddings, reference.numbers("z"), rtol=0, atol=1e-5)


@torch.no_grad()
def test_codes_equal_the_authors_exactly(reference, checkpoint_quantizer):
    quantized = checkpoint_quantizer.quantize(reference.numbers("z"))
    assert torch.equal(quantized.codes, reference.numbers("code"))


@torch.no_grad()
def test_the_vector_of_an_id_equals_the_authors(reference, checkpoint_quantizer):
    vectors = checkpoint_quantizer.decode(reference.numbers("code"))
    torch.testing.assert_close(F.normalize(vectors, dim=-1), reference.numbers("quant"), rtol=0, atol=1e-5)


def test_the_raw_sum_that_reranks_equals_the_authors(reference):
    masks = [reference.golden[name][:, 0] > 0 for name in ("img_mask", "txt_mask")]
    image_places, text_places = (np.where(mask, np.arange(len(mask)), -1) for mask in masks)
    batch = FeatureBatch.of(reference.numbers("img"), reference.numbers("txt"), image_places, text_places)
    total = F.normalize(batch.total(), dim=-1)
    torch.testing.assert_close(total, reference.numbers("rerank"), rtol=0, atol=1e-5)


@torch.no_grad()
def test_teacher_forced_logits_equal_the_authors(reference, checkpoint_generator):
    hidden = checkpoint_generator(reference.numbers("z"), reference.numbers("target"))
    logits = checkpoint_generator.logits(hidden.flatten(0, 1), slice(None)).unflatten(0, hidden.shape[:2])
    # A fused attention rounds differently from the authors' explicit one.
    torch.testing.assert_close(logits, reference.numbers("logits"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [1, 10, 50])
def test_constrained_beams_and_scores_equal_the_authors(width, reference, checkpoint_generator):
    pool = reference.golden["pool"]
    table = IdTable.build(pool, np.zeros(len(pool)))
    config = SearchConfig(beam=width, scores="vocabulary")
    beams = search(checkpoint_generator, table, reference.numbers("z"), config)
    expected = reference.golden[f"score{width}"]
    np.testing.assert_allclose(beams.scores(), expected, rtol=0, atol=1e-3)
    found = table.ids[beams.rows]
    different = (found != reference.golden[f"beam{width}"]).any(axis=2)
    # IDs may trade places only where their scores are as close as the comparison is exact.
    gaps = np.abs(expected[:, :, None] - expected[:, None, :]) + np.eye(width)
    assert (gaps.min(axis=2)[different] < 2e-4).all()
    assert not different[:, 0].any()


def test_training_codes_equal_the_authors(reference, checkpoint_quantizer, training):
    with torch.no_grad():
        assert torch.equal(checkpoint_quantizer.quantize(training).codes, reference.numbers("train_code"))


def test_the_contrastive_loss_equals_the_authors(reference, training):
    queries, candidates = training.chunk(2)
    nothing = torch.zeros(len(queries), len(queries), dtype=torch.bool)
    loss = contrastive_loss(queries, candidates, nothing, temperature=0.01, direction="both")
    torch.testing.assert_close(loss, reference.numbers("loss_cl"), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_quantization_and_alignment_losses_equal_the_authors(reference, checkpoint_quantizer, training):
    quantized = checkpoint_quantizer.quantize(training)
    torch.testing.assert_close(quantized.loss, reference.numbers("loss_rq"), rtol=1e-5, atol=0)
    alignment = alignment_loss(*quantized.vectors.chunk(2))
    torch.testing.assert_close(alignment, reference.numbers("loss_mse"), rtol=1e-5, atol=0)


@torch.no_grad()
def test_one_moving_average_step_equals_the_authors(reference, checkpoint_quantizer, training):
    quantizer = copy.deepcopy(checkpoint_quantizer)
    revived = quantizer.follow(quantizer.quantize(training), generator=torch.Generator().manual_seed(0))
    assert revived == 0
    first, second, last = (quantizer.codebooks[level] for level in (0, 1, 8))
    torch.testing.assert_close(first.embed, reference.numbers("ema_level0"), rtol=0, atol=1e-6)
    torch.testing.assert_close(second.embed, reference.numbers("ema_level1"), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        second.cluster_size, reference.numbers("cluster_size_level1"), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        last.embed.mean(dim=0), reference.numbers("ema_level8_mean"), rtol=0, atol=1e-6
    )
