"""The main job on a small world, from nothing to the page."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from genius_search.config import preset
from genius_search.lab import short_queries
from genius_search.lab.demo import demo
from genius_search.lab.settings import METHODS
from genius_search.progress import Silent
from genius_search.records import TASKS

SIZE = {"items": 1000, "train_products": 60, "queries_per_task": 8, "beam": 10}


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo(out, **SIZE, progress=Silent(), settings=preset("tiny"))


def test_the_demo_measures_every_method_on_all_eight_tasks(small_demo):
    _, result = small_demo
    assert {(row.task_id, row.method) for row in result.rows} == {
        (task, method) for task in TASKS for method in METHODS
    }


def test_the_demo_leaves_one_page_that_shows_every_search(small_demo):
    out, result = small_demo
    page = (out / "index.html").read_text()
    HTMLParser().feed(page)
    assert "http://" not in page
    assert "https://" not in page
    assert page.count('data-task="task-') == len(TASKS)
    for search in result.searches:
        assert search.hits
        for hit in search.hits:
            assert hit.id in page
            assert len(hit.codes) >= len(hit.log_probabilities)


def test_the_demo_measures_short_queries(small_demo):
    _, result = small_demo
    names = [kind.name for kind in result.short_queries]
    assert names[:4] == ["one word", "two words", "three words", "full caption"]
    for kind in result.short_queries:
        assert kind.queries > 0
        assert set(kind.measures) == set(short_queries.METHODS)


def test_running_the_demo_again_changes_nothing_but_the_page(small_demo):
    out, before = small_demo
    kept = (out / "model" / "model.json").read_bytes()
    after = demo(out, **SIZE, progress=Silent(), settings=preset("tiny"))
    assert (out / "model" / "model.json").read_bytes() == kept
    assert after.rows == before.rows
