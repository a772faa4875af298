"""ID schemes of other papers: the IDs that items get, new ones included, and what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.data.features import Batch
from genius_search.errors import UsageError
from genius_search.progress import Silent
from genius_search.recipe import TrainingConfig
from genius_search.search.table import IdTable
from research.baselines.ids import SCHEMES, Candidates, TrainingSet

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
