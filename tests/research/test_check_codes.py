"""The check of IDs: measures of levels, survival of right answers, and predicted recall."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.mbeir import MBeir
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.training.records import embed_pool
from research.check_codes import check_levels, expected_hit, main
from research.evaluate import main as evaluate
from research.id_files import write_id_file


def test_levels_of_a_small_example_are_measured():
    codes = np.array([[0, 3], [0, 3], [0, 1], [1, 1]])
    first, second = check_levels(codes, (2, 4))
    assert (first.used, first.most_frequent) == (1.0, 0.75)
    assert (first.prefixes, first.colliding) == (2, 0.75)
    assert first.entropy == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)
    assert first.perplexity == pytest.approx(2**first.entropy)
    assert (second.used, second.most_frequent) == (0.5, 0.5)
    assert (second.prefixes, second.colliding) == (3, 0.5)
    assert (second.entropy, second.perplexity) == (1.0, 2.0)


def test_items_with_the_same_id_have_no_entropy_and_all_collide():
    (level,) = check_levels(np.zeros((3, 1), dtype=np.int64), (256,))
    assert (level.entropy, level.perplexity, level.colliding) == (0.0, 1.0, 1.0)


BUCKETS = st.lists(
    st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))),
    min_size=1,
    max_size=3,
)


@given(buckets=BUCKETS, k=st.integers(1, 9))
def test_the_expected_hit_is_the_mean_over_all_orders_within_ids(buckets, k):
    items, answers = map(np.array, zip(*buckets, strict=True))
    orders = [
        set(itertools.permutations([True] * right + [False] * (size - right)))
        for size, right in buckets
    ]
    hits = [any([*itertools.chain(*rows)][:k]) for rows in itertools.product(*orders)]
    assert expected_hit(items, answers, k) == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("router", ["generator", "geometry"])
def test_the_predicted_recall_is_close_to_the_measured_one(trained, tmp_path, capsys, router):
    words = [str(trained.model), str(trained.data), "--evaluation", str(tmp_path), "--json"]
    assert main([*words, "--router", router]) == 0
    check = json.loads(capsys.readouterr().out)
    methods = {
        "generator": {"by the generator": "generative", "by code vectors": "generative+codes"},
        "geometry": {"by code vectors": "routing+codes"},
    }[router]
    words = [str(trained.data), "--model", str(trained.model), "--out", str(tmp_path), "--json"]
    assert evaluate([*words, "--pools", "global", "--methods", *methods.values()]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert check["predicted"].keys() == methods.keys()
    for order, method in methods.items():
        for measure, predicted in check["predicted"][order].items():
            measured = np.mean([row[measure] for row in rows if row["method"] == method])
            assert predicted == pytest.approx(measured, abs=0.03)
    survival = [level["survival"] for level in check["levels"]]
    assert survival == sorted(survival, reverse=True)
    assert survival[-1] >= max(recall["R@10"] for recall in check["predicted"].values()) - 1e-9


def test_a_table_is_printed_even_without_queries(trained, tmp_path, capsys):
    shutil.copytree(trained.model, tmp_path / "model")
    data, model = MBeir(trained.data), Genius.open(tmp_path / "model")
    folder = tmp_path / "model" / "features" / "candidates"
    embed_pool(data, data.training_pools(), model.encoder, folder, progress=Silent())
    assert main([str(tmp_path / "model")]) == 0
    assert "colliding" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert main([str(tmp_path / "model")]) == 2
    assert "give a data set" in capsys.readouterr().err


def test_a_table_of_a_file_of_ids_is_printed(trained, tmp_path, capsys):
    file = tmp_path / "pool.index.json"
    write_id_file(file, ["0", "1"], np.array([[1, 2], [1, 2]]))
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert "100.0% of the items share their whole ID" in printed
    assert main([str(file), str(trained.data)]) == 2
    assert "--kind file" in capsys.readouterr().err
