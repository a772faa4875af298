from __future__ import annotations

import json

import pytest

from genius_search.data.mbeir import MBeir, read_candidates
from genius_search.lab.short_queries import make_query_sets
from genius_search.lab.synth.catalogue import draw_catalogue
from genius_search.lab.synth.world import ATTRIBUTES, VALUES
from genius_search.records import Modality


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory) -> MBeir:
    folder = tmp_path_factory.mktemp("catalogue") / "drawn"
    draw_catalogue(folder, items=2_000, train_products=1, queries_per_task=5, seed=1, workers=1)
    return MBeir(folder)


@pytest.fixture(scope="module")
def sets(catalogue):
    return make_query_sets(catalogue)


@pytest.fixture(scope="module")
def pictures(catalogue):
    """The pool's pictures: their number, file and product."""
    (row,) = (row for row in catalogue.rows("test") if row.task_id == 0)
    return {
        one.did: (one.image, json.loads(one.source)["product"]) for one in read_candidates(row.local_pool)
    }


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("one word", ["shape"]),
        ("two words", ["colour", "shape"]),
        ("three words", ["fill", "colour", "shape"]),
    ],
)
def test_every_picture_with_the_words_of_a_query_answers_it(sets, pictures, name, attributes):
    for query in sets[name]:
        answers = {
            did
            for did, (_, product) in pictures.items()
            if query.text.removeprefix("a ").removeprefix("an ")
            == " ".join(product[one] for one in attributes)
        }
        assert answers == set(query.positives) != set()
        assert query.modality is Modality.TEXT


def test_single_words_are_the_names_of_shapes(sets):
    assert {query.text for query in sets["one word"]} <= set(VALUES["shape"])


@pytest.mark.parametrize("which", ["one", "any"])
def test_the_same_in_another_colour(sets, pictures, which):
    products = dict(pictures.values())
    for query in sets[f"the same in COLOUR, {which}"]:
        shown = products[query.image]
        colour = query.text.removeprefix("the same in ")
        assert colour != shown["colour"]
        for did in query.positives:
            answer = pictures[did][1]
            assert answer["colour"] == colour
            same = [name for name in ATTRIBUTES if answer[name] == shown[name]]
            assert "shape" in same
            if which == "one":
                assert len(same) == len(ATTRIBUTES) - 1


def test_the_same_seed_asks_the_same(catalogue, sets):
    assert make_query_sets(catalogue) == sets
    assert make_query_sets(catalogue, seed=1) != sets
