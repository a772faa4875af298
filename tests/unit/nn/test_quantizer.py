"""Residual quantization, its moving average and its kinds of level 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from genius_search.config import FusionConfig
from genius_search.nn.codebooks import normalize, sum_codes
from genius_search.nn.coder import Coder
from genius_search.nn.quantizer import Quantizer
from genius_search.recipe import QuantizerConfig

DIM = 5


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make(seed=0, **settings):
    """A quantizer with random codebooks."""
    config = QuantizerConfig(
        **{"levels": 3, "codebook_size": 7, "fusion": FusionConfig(hidden=4), **settings}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for the classifier
        quantizer = Quantizer(DIM, config)
    random = seeded(seed)
    books = {id(book): book for book in quantizer.codebooks}
    for level, book in enumerate(books.values()):
        size = len(book.embed)
        book.initialise(
            torch.randn(size, DIM, generator=random) * 0.6**level,
            5 * torch.rand(size, generator=random) + 3,
        )
    return quantizer


def embeddings(items, seed=0):
    return F.normalize(torch.randn(items, DIM, generator=seeded(seed)), dim=-1)


def plainly(quantizer, vector, modality=None):
    """Codes and residuals of one vector in ordinary numbers (equations 4 to 6)."""
    residual = [float(x) for x in vector]
    codes, residuals = [], []
    for level, table in enumerate(book.embed for book in quantizer.books):
        rows = table.tolist()
        distances = [sum((r - e) ** 2 for r, e in zip(residual, row, strict=True)) for row in rows]
        code = distances.index(min(distances))
        if level == 0 and modality is not None:
            code = modality
        residuals.append(residual)
        codes.append(code)
        residual = [r - e for r, e in zip(residual, rows[code], strict=True)]
    return codes, residuals


@given(
    items=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    levels=st.integers(1, 4),
    level0=st.sampled_from(["learned", "assigned", "none"]),
    shared=st.booleans(),
)
def test_codes_and_residuals_equal_a_plain_reference(items, seed, levels, level0, shared):
    quantizer = make(seed, levels=levels, level0=level0, shared_codebook=shared)
    vectors = embeddings(items, seed + 1)
    modalities = torch.randint(3, (items,), generator=seeded(seed))
    given_modalities = modalities if level0 == "assigned" else None
    quantized = quantizer.quantize(vectors, given_modalities)
    for item in range(items):
        modality = int(modalities[item]) if level0 == "assigned" else None
        codes, residuals = plainly(quantizer, vectors[item], modality)
        assert quantized.codes[item].tolist() == codes
        torch.testing.assert_close(
            quantized.residuals[:, item], torch.tensor(residuals), rtol=1e-5, atol=1e-5
        )


def test_the_quantization_loss_pulls_embeddings_and_not_codebooks():
    quantizer = make()
    vectors = embeddings(4).requires_grad_()
    quantized = quantizer.quantize(vectors)
    quantized.loss.backward()
    # Every residual is the embedding minus constants, so the gradient is the sum over levels.
    left = [
        quantized.residuals[level] - quantizer.books[level].embed[quantized.codes[:, level]]
        for level in range(len(quantizer.books))
    ]
    expected = 2 * torch.stack(left).sum(dim=0) / (4 * DIM * len(quantizer.books))
    torch.testing.assert_close(vectors.grad, expected, rtol=1e-5, atol=1e-6)
    assert not any(book.embed.requires_grad for book in quantizer.books)


@pytest.mark.parametrize(("gradient", "identities"), [("once", 1), ("per-level", 4)])
def test_the_gradient_goes_straight_through_to_the_embedding(gradient, identities):
    quantizer = make(gradient=gradient)
    vectors = embeddings(3).requires_grad_()
    weights = torch.randn(3, DIM)
    (quantizer.quantize(vectors).vectors * weights).sum().backward()
    torch.testing.assert_close(vectors.grad, identities * weights)


def test_dead_codes_move_to_current_residuals_and_count_anew():
    quantizer = make(dead_below=2.0, decay=0.5)
    for book in quantizer.codebooks:
        book.cluster_size[:2] = 0.1
        book.embed[:2] = 50  # nobody chooses them
    quantized = quantizer.quantize(embeddings(30))
    revived = quantizer.update_averages(quantized, generator=seeded(0))
    total = 0
    for level, book in enumerate(quantizer.codebooks):
        now = quantized.residuals[level]
        is_residual = (book.embed[:, None] == now[None]).all(dim=2).any(dim=1)
        if level == 0:
            assert not is_residual.any()
            assert float(book.cluster_size[0]) < 2
        else:
            assert is_residual[:2].all()
            assert (book.cluster_size[is_residual] == 2).all()
            assert torch.equal(book.embed_avg[is_residual], 2 * book.embed[is_residual])
            assert (book.cluster_size >= 2).all()
            total += int(is_residual.sum())
    assert revived == total


@pytest.mark.parametrize(
    ("level0", "sizes", "known"),
    [
        ("learned", (3, 7, 7, 7), [-1, -1, -1]),
        ("assigned", (3, 7, 7, 7), [0, 1, 2]),
        ("classifier", (3, 7, 7, 7), [0, 1, 2]),
        ("none", (7, 7, 7), [-1, -1, -1]),
    ],
)
def test_each_kind_of_level_0_says_what_it_knows(level0, sizes, known):
    quantizer = make(level0=level0)
    assert tuple(len(book.embed) for book in quantizer.books) == sizes
    assert quantizer.has_modality_level == (level0 != "none")
    assert quantizer.to_codebooks().level0_modality.tolist() == known


def test_codebooks_start_by_kmeans_on_the_residuals_of_the_levels_before():
    quantizer = make(level0="assigned", levels=2)
    vectors, modalities = embeddings(60), torch.arange(60) % 3
    quantizer.initialise_codebooks(
        vectors, modalities, batch_size=15, random=np.random.default_rng(0)
    )
    first, second, third = quantizer.codebooks
    for modality in range(3):
        torch.testing.assert_close(
            first.embed[modality], vectors[modalities == modality].mean(dim=0)
        )
    # Sixty embeddings were seen, a batch has 2 x 15.
    assert first.cluster_size.tolist() == [10, 10, 10]
    assert float(second.cluster_size.sum()) == pytest.approx(30)
    quantized = quantizer.quantize(vectors, modalities)
    for book, residuals, codes in zip(
        (second, third), quantized.residuals[1:], quantized.codes.T[1:], strict=True
    ):
        for code in codes.unique():
            torch.testing.assert_close(
                book.embed[code], residuals[codes == code].mean(dim=0), atol=1e-5, rtol=0
            )
    norms = quantized.residuals.norm(dim=2).mean(dim=1)
    assert (norms.diff() < 0).all()


@pytest.mark.parametrize("level0", ["learned", "assigned", "classifier", "none"])
def test_an_item_is_its_fused_embedding_its_id_and_how_near_they_are(level0):
    quantizer = make(level0=level0)
    image, text = torch.randn(2, 9, DIM, generator=seeded(1))
    modalities = torch.arange(9) % 3
    codebooks, fused = quantizer.to_codebooks(), quantizer.fusion(image, text).detach()
    for count in (9, 2):  # many and few are fused in different ways
        found = codebooks.fuse(image[:count].numpy(), text[:count].numpy())
        np.testing.assert_allclose(found, fused[:count], atol=1e-6)
    items = Coder(codebooks).encode_items(fused.numpy(), modalities.numpy())
    assert items.codes.tolist() == quantizer.quantize(fused, modalities).codes.tolist()
    vectors = sum_codes(codebooks.tables(), items.codes)
    np.testing.assert_allclose(
        items.code_cosine, np.vecdot(normalize(vectors), fused.numpy()), atol=1e-6
    )
