"""ID schemes of other papers: the IDs that items get."""

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


def give(name, items, folder, *, seed=0):
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
def test_ids_fit_their_alphabets_and_a_table_and_follow_the_seed(name, tmp_path):
    items = draw_items()
    codes, sizes, *_ = give(name, items, tmp_path)
    assert codes.shape == (150, len(sizes))
    assert (codes >= 0).all()
    assert (codes.max(axis=0) < np.array(sizes)).all()
    assert IdTable.build(codes, np.zeros(150)).num_items == 150
    np.testing.assert_array_equal(give(name, items, tmp_path).codes, codes)


def test_an_item_without_a_text_takes_the_words_of_the_nearest_query(tmp_path):
    items = draw_items()
    codes = give("grace-semantic", items, tmp_path).codes
    # Query 5 has two instructions, of which the first counts; query 3 comes third; query 100 has no words.
    product = items.embeddings[0] @ items.embeddings.half()[[0, 2]].float().T
    taken = ["a dog", "a red cat"][int(product.argmax())]
    same = give("grace-semantic", items._replace(texts=[taken, *items.texts[1:]]), tmp_path).codes
    assert len(set(codes[0].tolist())) == 1 + len(
        encode_words(taken, dict.fromkeys(taken.split(), 0))
    )
    assert codes[0].tolist() == same[0].tolist()


def draw(items, seed=0, dim=6):
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


@given(
    items=st.integers(1, 120),
    branches=st.integers(2, 6),
    leaf=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_each_item_has_a_path_of_its_own_and_none_begins_another(items, branches, leaf, seed):
    random = torch.Generator().manual_seed(seed)
    paths = tree_paths(draw(items, seed), branches=branches, leaf=leaf, generator=random)
    distinct = set(paths)
    assert len(distinct) == items
    assert not any(path[:length] in distinct for path in distinct for length in range(len(path)))
    assert max(max(path[:-1], default=0) for path in paths) < branches
    assert max(path[-1] for path in paths) < leaf


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def started(items=300, seed=0):
    torch.manual_seed(seed)
    vectors = F.normalize(torch.randn(items, 12, generator=seeded(seed)), dim=1)
    tokenizer = RetrievalTokenizer(12, levels=3, codes=16)
    tokenizer.start(vectors, generator=seeded(seed))
    return tokenizer, vectors


def test_each_level_takes_the_nearest_of_what_is_left():
    tokenizer, vectors = started()
    codes = tokenizer.encode(vectors)
    left = vectors
    for level, table in enumerate(tokenizer.tables()):
        assert torch.equal(torch.cdist(left, table).argmin(dim=1), codes[:, level])
        left = left - table[codes[:, level]]
    torch.testing.assert_close(tokenizer.prefixes(vectors).sums[-1], vectors - left)


def test_every_prefix_of_the_codes_is_supervised():
    tokenizer, vectors = started()
    none = torch.zeros(20, 20, dtype=torch.bool)
    loss, found = tokenizer.loss(vectors[:20] + 0.1 * vectors[20:40], vectors[:20], none)
    loss.backward()
    assert float(tokenizer.down.weight.grad.norm()) > 0
    sums = found.sums.detach()
    closer = (sums[1:] - vectors[:20]).norm(dim=2).mean(dim=1)
    assert (closer < (sums[:-1] - vectors[:20]).norm(dim=2).mean(dim=1)).all()
