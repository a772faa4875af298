"""ID schemes of other papers: the IDs that items get, new ones included, and what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from genius_search.data.features import Batch
from genius_search.errors import UsageError
from genius_search.progress import Silent
from genius_search.recipe import TrainingConfig
from genius_search.search.table import IdTable
from research.baselines.ids import SCHEMES, Candidates, ClusterTree, RetrievalTokenizer, TrainingSet

DIM = 8
OTHERS = list(SCHEMES)
NUMBERED = ("grace-numeric", "grace-string")
NEW = [name for name in OTHERS if name not in NUMBERED]
WORDS = ["dog", "cat", "red", "runs", "sits", "here"]


def draw_items(count=150, seed=0, *, first=0):
    vectors = F.normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)
    texts = [
        None if row % 3 == 0 else " ".join(WORDS[(row * step) % 6] for step in (1, 2, 5))
        for row in range(count)
    ]
    return Candidates(vectors, np.zeros((count, 2), dtype=np.int16), np.arange(first, first + count), texts)


class FirstPairs:
    """The first items are the targets of the first queries."""

    def __len__(self):
        return 64

    def draw(self, step, batch_size, *, seed):
        rows = np.arange(batch_size)
        return Batch(rows, rows, torch.zeros(batch_size, batch_size, dtype=torch.bool))


def fit(name, items, folder, *, seed=0, query_texts=None):
    data = TrainingSet(
        candidates=items,
        queries=items.embeddings.half(),
        query_numbers=np.array([5, 5, 3, *range(100, 97 + len(items.embeddings))]),
        query_texts={5: "a dog", 3: "a red cat", 100: ""} if query_texts is None else query_texts,
        pairs=FirstPairs(),
        training=TrainingConfig(seed=seed, batch_size=32, max_steps=2),
        folder=folder,
        progress=Silent(),
    )
    return SCHEMES[name].fit(data)


@pytest.mark.parametrize("name", OTHERS)
def test_ids_fit_their_alphabets_and_a_table_and_follow_the_seed(name, tmp_path):
    items = draw_items()
    scheme = fit(name, items, tmp_path)
    codes = scheme.assign(items)
    assert codes.shape == (150, len(scheme.sizes))
    assert (codes >= 0).all()
    assert (codes.max(axis=0) < np.array(scheme.sizes)).all()
    assert IdTable.build(codes, np.zeros(150)).num_items == 150
    np.testing.assert_array_equal(fit(name, items, tmp_path).assign(items), codes)


@pytest.mark.parametrize("name", NEW)
def test_new_items_get_ids_too(name, tmp_path):
    known, new = draw_items(), draw_items(60, seed=4, first=1000)
    scheme = fit(name, known, tmp_path)
    some = known.select(np.array([9, 3, 77]))
    np.testing.assert_array_equal(scheme.assign(some), scheme.assign(known)[[9, 3, 77]])
    codes = scheme.assign(new)
    assert codes.shape == (60, len(scheme.sizes))
    assert (codes.max(axis=0) < np.array(scheme.sizes)).all()


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_cannot_be_given_to_new_items(name, tmp_path):
    scheme = fit(name, draw_items(), tmp_path)
    mixed = draw_items(160)
    with pytest.raises(UsageError, match=r"10 items have no ID.* 150 items known in training"):
        scheme.assign(mixed)


@pytest.mark.parametrize("name", ["grace-structured", "dsi", "nci"])
def test_the_tree_leads_known_items_to_their_ids(name, tmp_path):
    items = draw_items()
    scheme = fit(name, items, tmp_path)
    np.testing.assert_array_equal(
        scheme.assign(items._replace(numbers=np.full(len(items.numbers), -1))), scheme.assign(items)
    )


def test_an_item_without_a_text_takes_the_words_of_the_nearest_query(tmp_path):
    items = draw_items()
    scheme = fit("grace-semantic", items, tmp_path)
    # Query 5 has two instructions, of which the first counts; query 3 comes third; query 100 has no words.
    product = items.embeddings[0] @ items.embeddings.half()[[0, 2]].float().T
    words = ["a dog", "a red cat"][int(product.argmax())].split()
    assert [scheme.words[code] for code in scheme.assign(items)[0, : len(words)]] == words


def draw(items, seed=0, dim=6):
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


def build(items, *, branches=3, leaf=4, seed=0):
    return ClusterTree.build(
        items, branches=branches, leaf=leaf, generator=torch.Generator().manual_seed(seed)
    )


@settings(max_examples=30)
@given(
    items=st.integers(1, 120), branches=st.integers(2, 6), leaf=st.integers(1, 8), seed=st.integers(0, 1000)
)
def test_each_item_has_a_path_of_its_own_and_none_begins_another(items, branches, leaf, seed):
    _, paths = build(draw(items, seed), branches=branches, leaf=leaf)
    distinct = set(paths)
    assert len(distinct) == items
    assert not any(path[:length] in distinct for path in distinct for length in range(len(path)))
    assert max(max(path[:-1], default=0) for path in paths) < branches
    assert max(path[-1] for path in paths) < leaf


@settings(max_examples=30)
@given(items=st.integers(1, 120), seed=st.integers(0, 1000))
def test_going_down_to_the_nearest_centroid_finds_the_paths_again(items, seed):
    vectors = draw(items, seed)
    tree, paths = build(vectors)
    assert tree.paths(vectors) == paths


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
