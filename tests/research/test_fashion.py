"""A shop's catalogue as a data set: queries and answers, and disjoint splits."""

from __future__ import annotations

import json

import pytest

from genius_search.data.mbeir import MBeir, read_pool, read_queries
from research.fashion import SPLITS, main


@pytest.fixture
def catalogue(tmp_path):
    """Twenty makers of shoes, each with a shoe in two colours, and another shoe."""
    shoes = (("Run", "Red"), ("Run", "Blue"), ("Walk", "Green"))
    rows = [
        {
            "id": f"{maker}{number}",
            "name": f"Maker{maker} {name}",
            "gender": "Men",
            "articleType": "Shoes",
            "baseColour": colour,
        }
        for maker in range(20)
        for number, (name, colour) in enumerate(shoes)
    ]
    (tmp_path / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "photos").mkdir()
    return tmp_path


def test_names_photos_and_colours_answer_each_other_within_a_split(catalogue, tmp_path):
    assert main([str(catalogue), "--out", str(tmp_path / "data")]) == 0
    data, makers = MBeir(tmp_path / "data"), {}
    for split in SPLITS:
        pool = {item.did: item for item in read_pool(data.global_pool(split))}
        queries = [query for row in data.rows(split) for query in read_queries(row.queries)]
        assert len({query.qid for query in queries}) == len(queries)
        assert {did for query in queries for did in query.positives} <= set(pool)
        makers[split] = {item.text.split()[0] for item in pool.values() if item.text}
        groups = len(makers[split])
        counts = {task: sum(query.task_id == task for query in queries) for task in (0, 3, 4, 7)}
        assert counts == {0: 2 * groups, 3: 3 * groups, 4: 2 * groups, 7: 3 * groups}
        for query in queries:
            if query.task_id == 7:
                assert query.image not in {pool[did].image for did in query.positives}
                assert query.text in ("the same in red", "the same in blue", "the same in green")
    assert sorted(map(len, makers.values())) == [3, 3, 14]
    assert len(set().union(*makers.values())) == 20
