"""The demo on a small catalogue, from drawing it to the page."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from random import Random
from statistics import mean

import pytest

from genius_search.data.mbeir import MBeir, read_pool
from genius_search.index.index import Index
from genius_search.progress import Silent
from genius_search.recipe import preset
from genius_search.records import TASKS, task_name
from research.demo import demo

SIZE = {"items": 1000, "train_products": 60, "queries_per_task": 8, "beam": 10}


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """The demo's folder and its result."""
    out = tmp_path_factory.mktemp("demo")
    return out, demo(out, **SIZE, progress=Silent(), settings=preset("tiny"))


def test_the_demo_measures_every_method_on_all_eight_tasks(small_demo):
    _, result = small_demo
    assert {(row.task, row.method) for row in result.rows if row.task} == {
        (task_name(task), method) for task in TASKS for method in ("search", "exact", "generator")
    }


def test_the_demo_leaves_one_page_that_shows_every_search(small_demo):
    out, result = small_demo
    page = (out / "index.html").read_text()
    pictures = re.findall(r'<img src="([^"]+)"', page)
    assert pictures
    assert page.index(pictures[0]) < page.index("Mean of all tasks")
    query = "Do you sell a green striped kite in a round frame, on a white background?"
    assert Index.open(out / "catalogue.index").search(query, k=1)[0].probability is not None
    assert all((out / name).is_file() for name in pictures)
    assert page.count("<h3>") == len(result.searches) == 4 * len(TASKS)
    assert all(hit.id in page for search in result.searches for hit in search.hits)


def test_running_the_demo_again_changes_nothing_but_the_page(small_demo):
    out, before = small_demo
    model_file = (out / "model" / "model.json").read_bytes()
    after = demo(out, **SIZE, progress=Silent(), settings=preset("tiny"))
    assert (out / "model" / "model.json").read_bytes() == model_file
    assert after.rows == before.rows


@pytest.fixture(scope="module")
def full_demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("full")
    return out, demo(out, progress=Silent())


def readme_searches():
    """Yield text, image and modality of every search of the demo in the README."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\$ genius search demo/catalogue\.index (.*)$", readme, re.MULTILINE):
        parser = argparse.ArgumentParser()
        parser.add_argument("text", nargs="?")
        for flag in ("--image", "--modality", "-k"):
            parser.add_argument(flag)
        yield parser.parse_args(shlex.split(line))


def products_of(data):
    return {
        candidate.did: json.loads(candidate.source)["product"]
        for candidate in read_pool(data.global_pool("test"))
    }


@pytest.mark.slow
def test_searches_of_the_readme_find_the_right_product_first(full_demo):
    out, result = full_demo
    data = MBeir(out / "catalogue")
    products = products_of(data)
    index = Index.open(result.index_folder)
    searches = list(readme_searches())
    assert any(search.image for search in searches)
    assert any(search.text for search in searches)
    for search in searches:
        image = search.image and out / Path(search.image).relative_to("demo")
        [hit] = index.search(search.text, image=image, modality=search.modality, k=1)
        first = products[hit.id]
        if search.text:
            named = [first[name] in search.text for name in ("fill", "colour", "shape")]
            assert all(named), (search.text, first)
        else:
            [pictured] = (
                products[candidate.did]
                for candidate in read_pool(data.global_pool("test"))
                if candidate.image and image == data.root / candidate.image
            )
            assert first == pictured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "min_first", "min_among_five"),
    [(("shape",), 0.65, 0.9), (("fill", "colour", "shape"), 0.5, 0.85)],
    ids=["one word", "three words"],
)
def test_short_queries_find_pictures_of_the_right_products(
    full_demo, names, min_first, min_among_five
):
    out, result = full_demo
    products, index = products_of(MBeir(out / "catalogue")), Index.open(result.index_folder)
    pictures = [products[item.id] for item in index if item.text is None]
    pictures = {tuple(product[name] for name in names) for product in pictures}
    chosen = Random(0).sample(sorted(pictures), min(200, len(pictures)))
    right = []
    for words in chosen:
        hits = index.search(f"a {' '.join(words)}", modality="image", k=5)
        right.append([tuple(products[hit.id][name] for name in names) == words for hit in hits])
    assert mean(first for first, *_ in right) >= min_first
    assert mean(map(any, right)) >= min_among_five


@pytest.mark.slow
def test_a_green_umbrella_is_an_umbrella_in_most_hits(full_demo):
    out, result = full_demo
    products = products_of(MBeir(out / "catalogue"))
    hits = Index.open(result.index_folder).search("a green umbrella", k=10)
    assert sum(products[hit.id]["shape"] == "umbrella" for hit in hits) >= 5
