"""A scroll through a changing index lists each item that exists throughout exactly once."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.index.index import Index

NAMES = [*"abcdefgh", "A", "ä", "\U0001f389", "aa", "a b", "10", "9"]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scroll") / "index"
    vectors = np.random.default_rng(0).normal(size=(9, 4))
    Index.from_vectors(folder, vectors, ids=NAMES[:9])
    return folder


changes = st.tuples(st.sampled_from(["add", "delete", "update", "compact"]), st.sampled_from(NAMES))


@given(limit=st.integers(1, 4), rounds=st.lists(st.lists(changes, max_size=2), max_size=12))
def test_each_item_that_exists_throughout_comes_exactly_once(template, limit, rounds):
    with tempfile.TemporaryDirectory() as folder:
        index = Index.open(shutil.copytree(template, Path(folder) / "index"))
        throughout = {item.id for item in index}
        listed: list[str] = []
        cursor = None
        remaining = iter(rounds)
        while True:
            page = index.scroll(cursor, limit=limit)
            listed += [item.id for item in page.items]
            cursor = page.cursor
            if cursor is None:
                break
            for change, name in next(remaining, []):
                if change == "add":
                    index.add_vectors(np.ones((1, 4)), ids=[name])
                elif change == "update":
                    index.update(name, fields={"changes": len(listed)})
                elif change == "delete":
                    index.delete(name)
                    throughout.discard(name)
                else:
                    index.compact(min_deleted=0)
        counts = Counter(listed)
        assert listed == sorted(listed)
        assert max(counts.values(), default=1) == 1
        assert throughout <= counts.keys()
