"""ID schemes of other papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from genius_search.data.features import Batch
from genius_search.progress import Silent
from genius_search.recipe import TrainingConfig
from genius_search.search.table import IdTable
from research.baselines.ids import (
    SCHEMES,
    Candidates,
    RetrievalTokenizer,
    TrainingSet,
    encode_words,
    tree_paths,
)

DIM = 8
WORDS = ["dog", "cat", "red", "runs", "sits", "here"]


def draw_items(count=150, seed=0):
    vectors = F.normalize(
        torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1
    )
    texts = [
        None if row % 3 == 0 else " ".join(WORDS[(row * step) % 6] for step in (1, 2, 5))
        for row in range(count)
    ]
    return Candidates(vectors, np.zeros((count, 2), dtype=np.int16), np.arange(count), texts)


class FirstPairs:
    """The first items are the targets of the first queries."""

    def __len__(self):
        return 64

    def draw(self, step, batch_size, *, seed):
        rows = np.arange(batch_size)
        return Batch(rows, rows, torch.zeros(batch_size, batch_size, dtype=torch.bool))


def assign_ids(name, items, folder, *, seed=0):
    data = TrainingSet(
        candidates=items,
        num_training=len(items.numbers) - 30,
        queries=items.embeddings.half(),
        query_numbers=np.array([5, 5, 3, *range(100, 97 + len(items.embeddings))]),
        query_texts={5: "a dog", 3: "a red cat", 100: ""},
        pairs=FirstPairs(),
        training=TrainingConfig(seed=seed, batch_size=32, max_steps=2),
        folder=folder,
        progress=Silent(),
    )
    return SCHEMES[name](data)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_ids_fit_sizes_and_a_table_and_depend_on_the_seed(name, tmp_path):
    items = draw_items()
    codes, sizes, *_ = assign_ids(name, items, tmp_path)
    assert codes.shape == (150, len(sizes))
    assert (codes >= 0).all()
    assert (codes.max(axis=0) < np.array(sizes)).all()
    assert IdTable.build(codes, np.zeros(150)).num_items == 150
    np.testing.assert_array_equal(assign_ids(name, items, tmp_path).codes, codes)


def test_an_item_without_a_text_takes_the_words_of_the_nearest_query(tmp_path):
    items = draw_items()
    codes = assign_ids("grace-semantic", items, tmp_path).codes
    # Rows 0 and 1 are query 5 with two instructions, row 2 is query 3; the others have no words.
    products = items.embeddings[0] @ items.embeddings.half()[[0, 2]].float().T
    text = ["a dog", "a red cat"][int(products.argmax())]
    with_text = items._replace(texts=[text, *items.texts[1:]])
    expected = assign_ids("grace-semantic", with_text, tmp_path).codes
    num_words = len(encode_words(text, dict.fromkeys(text.split(), 0)))
    assert len(set(codes[0].tolist())) == num_words + 1  # and the end code
    assert codes[0].tolist() == expected[0].tolist()


def draw_vectors(items, seed=0, dim=6):
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


@given(
    items=st.integers(1, 120),
    branches=st.integers(2, 6),
    leaf=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_paths_differ_and_none_is_a_prefix_of_another(items, branches, leaf, seed):
    random = torch.Generator().manual_seed(seed)
    paths = tree_paths(draw_vectors(items, seed), branches=branches, leaf=leaf, generator=random)
    distinct = set(paths)
    assert len(distinct) == items
    assert not any(path[:length] in distinct for path in distinct for length in range(len(path)))
    assert max(max(path[:-1], default=0) for path in paths) < branches
    assert max(path[-1] for path in paths) < leaf


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_tokenizer(items=300, seed=0):
    """Return a tokenizer with codebooks by k-means, and the vectors of the k-means."""
    torch.manual_seed(seed)
    vectors = F.normalize(torch.randn(items, 12, generator=seeded(seed)), dim=1)
    tokenizer = RetrievalTokenizer(12, levels=3, codes=16)
    tokenizer.start(vectors, generator=seeded(seed))
    return tokenizer, vectors


def test_each_level_has_the_code_that_is_nearest_to_the_residual():
    tokenizer, vectors = make_tokenizer()
    codes = tokenizer.encode(vectors)
    residuals = vectors
    for level, table in enumerate(tokenizer.tables()):
        assert torch.equal(torch.cdist(residuals, table).argmin(dim=1), codes[:, level])
        residuals = residuals - table[codes[:, level]]
    torch.testing.assert_close(tokenizer.prefixes(vectors).sums[-1], vectors - residuals)


def test_longer_prefixes_are_closer_to_the_vectors_and_the_loss_trains_the_network():
    tokenizer, vectors = make_tokenizer()
    targets = vectors[:20]
    false_negatives = torch.zeros(20, 20, dtype=torch.bool)
    loss, prefixes = tokenizer.loss(targets + 0.1 * vectors[20:40], targets, false_negatives)
    loss.backward()
    assert float(tokenizer.down.weight.grad.norm()) > 0
    distances = (prefixes.sums.detach() - targets).norm(dim=2).mean(dim=1)
    assert (distances[1:] < distances[:-1]).all()
