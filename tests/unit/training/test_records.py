"""Records become rows: each training query once under each instruction, however often its file repeats it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genius_search.data.features import Pairs
from genius_search.data.mbeir import MBeir, read_queries
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData
from genius_search.progress import Silent
from genius_search.records import query_number
from genius_search.training.records import TrainingRecords, embed_training


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    candidates = [{"did": f"9:{n}", "modality": "text", "txt": f"text {n}"} for n in range(1, 4)]
    write_lines(root / "cand_pool" / "global" / "mbeir_union_train_cand_pool.jsonl", candidates)
    queries = [
        {
            "qid": f"9:{n}",
            "query_modality": "text",
            "query_txt": f"ask {n}",
            "pos_cand_list": [f"9:{n}"],
        }
        for n in (1, 2, 1, 3, 1, 1)
    ]
    write_lines(root / "query" / "union_train" / "mbeir_union_up_train.jsonl", queries)
    (root / "instructions").mkdir()
    (root / "instructions" / "query_instructions.tsv").write_text(
        "query_modality\tcand_modality\tdataset_name\tdataset_id\tprompt_1\tprompt_2\n"
        "text\ttext\tMSCOCO\t9\tFind it.\tGet it.\n"
    )
    return MBeir(root)


@pytest.fixture
def encoder(tmp_path):
    np.save(tmp_path / "text_features.npy", np.arange(9, dtype=np.float16).reshape(3, 3))
    return PrecomputedEncoder(tmp_path / "text_features.npy")


def test_a_query_on_several_lines_is_embedded_once_and_drawn_as_often_as_it_is_there(
    data, encoder, tmp_path
):
    features = embed_training(
        TrainingRecords(data), encoder, tmp_path / "features", progress=Silent()
    )
    assert features.queries.ids.tolist() == [query_number(f"9:{n}") for n in (1, 1, 2, 2, 3, 3)]
    pairs = Pairs(read_queries(data.training_queries()[0]), features.queries, features.candidates)
    assert len(pairs) == 6
    drawn = features.queries.ids[pairs.draw(0, 6, seed=0).query_rows] % 10
    assert sorted(drawn.tolist()) == [1, 1, 1, 1, 2, 3]


def test_a_training_query_whose_positive_is_not_in_the_pool_is_refused(data, encoder, tmp_path):
    pool = data.training_pools()[0]
    pool.write_text("".join(pool.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(BadData, match="query 9:3 has the positive 9:3"):
        embed_training(TrainingRecords(data), encoder, tmp_path / "features", progress=Silent())
