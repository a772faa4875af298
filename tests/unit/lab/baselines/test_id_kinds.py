"""Which IDs items get, and what later items get."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.errors import BadData, UsageError
from genius_search.lab.baselines.ids import (
    LONGEST,
    TRAITS,
    Items,
    KnownTexts,
    RetrievalTokenizer,
    Vocabulary,
    giver_of,
    make_ids,
    nearest,
)
from genius_search.search.table import IdTable

DIM = 8
UNIQUE = ("grace-numeric", "grace-string", "grace-structured", "dsi", "nci")
LATER = [kind for kind in TRAITS if kind not in ("grace-numeric", "grace-string")]


def items(count=150, seed=0, *, first=0):
    random = torch.Generator().manual_seed(seed)
    vectors = F.normalize(torch.randn(count, DIM, generator=random), dim=1)
    words = ["dog", "cat", "red", "runs", "sits", "here"]
    texts = [
        None if row % 3 == 0 else " ".join(words[(row * step) % 6] for step in (1, 2, 5))
        for row in range(count)
    ]
    codes = np.stack([np.arange(count) % 3, np.arange(count) % 7], axis=1).astype(np.int16)
    return Items(np.arange(first, first + count), vectors, texts, codes)


def make(kind, given, seed=0):
    tokenizer = None
    if kind == "irgen":
        torch.manual_seed(seed)
        tokenizer = RetrievalTokenizer(DIM, levels=3, codes=8)
        tokenizer.start(given.embeddings, generator=torch.Generator().manual_seed(seed))
    texts = KnownTexts(["a dog", "a red cat"], given.embeddings[:2])
    return make_ids(kind, given, seed=seed, texts=texts, tokenizer=tokenizer, own_sizes=(3, 7))


@pytest.mark.parametrize("kind", TRAITS)
def test_ids_fit_their_alphabets_and_a_table_and_follow_the_seed(kind):
    given = items()
    made = make(kind, given)
    assert made.codes.shape == (150, len(made.sizes))
    assert (made.codes >= 0).all()
    assert (made.codes.max(axis=0) < np.array(made.sizes)).all()
    assert IdTable.build(made.codes, np.zeros(150)).num_items == 150
    np.testing.assert_array_equal(make(kind, given).codes, made.codes)


@pytest.mark.parametrize("kind", UNIQUE)
def test_these_kinds_give_each_item_an_id_of_its_own(kind):
    assert len(np.unique(make(kind, items()).codes, axis=0)) == 150


@pytest.mark.parametrize("kind", ["grace-semantic", "genius"])
def test_these_kinds_give_alike_items_the_same_id(kind):
    assert len(np.unique(make(kind, items()).codes, axis=0)) < 150


@pytest.mark.parametrize("kind", LATER)
def test_later_items_get_ids_that_fit_also_from_what_was_stored(kind):
    given, later = items(), items(60, seed=4, first=1000)
    made = make(kind, given)
    found = made.giver.give(later)
    assert found.shape == (60, len(made.sizes))
    assert (found.max(axis=0) < np.array(made.sizes)).all()
    again = giver_of(kind, made.giver.state(), levels=len(made.sizes))
    np.testing.assert_array_equal(again.give(later), found)


@pytest.mark.parametrize("kind", ["grace-structured", "dsi", "nci"])
def test_the_tree_gives_known_items_their_ids_again(kind):
    given = items()
    made = make(kind, given)
    np.testing.assert_array_equal(made.giver.give(given), made.codes)


@pytest.mark.parametrize("kind", ["grace-numeric", "grace-string"])
def test_numbers_say_nothing_so_later_items_get_none(kind):
    made = make(kind, items())
    assert made.giver is None
    assert giver_of(kind, make("genius", items()).giver.state(), levels=3) is None


def test_frequent_words_come_first_and_unknown_ones_are_left_out():
    words = Vocabulary.of(["A dog, a DOG.", "a cat"])
    assert words.words == ("a", "dog", "cat")
    assert words.codes("a zebra dog") == [0, 1]
    assert len(words.codes("a " * 40)) == LONGEST


def test_an_item_without_a_text_takes_over_the_nearest_known_one():
    given = items()
    made = make("grace-semantic", given)
    silent = given.embeddings[[0]]
    wanted = ["a dog", "a red cat"][int(nearest(silent, given.embeddings[:2]))]
    words = made.giver.vocabulary.codes(wanted)
    assert made.codes[0].tolist()[: len(words)] == words


def test_without_a_known_text_only_items_that_have_one_are_served():
    nothing = torch.zeros(0, DIM)
    assert nearest(nothing, nothing).tolist() == []
    with pytest.raises(BadData, match="150 items have no text of their own"):
        nearest(items().embeddings, nothing)


def test_what_a_kind_needs_is_asked_for():
    with pytest.raises(UsageError, match="training texts"):
        make_ids("grace-semantic", items(), seed=0)
    with pytest.raises(UsageError, match="tokenizer"):
        make_ids("irgen", items(), seed=0)
    with pytest.raises(UsageError, match="own quantizer"):
        make_ids("genius", items()._replace(codes=None), seed=0)
    with pytest.raises(BadData, match="another kind"):
        Vocabulary.of(["...", ""])
