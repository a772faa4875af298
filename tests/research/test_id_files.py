"""IDs of other projects, read and written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import candidate_number
from genius_search.search.table import IdTable
from genius_search.training.records import embed_pool
from research.id_files import MAX_CODE, ItemIds, main, read_id_file, write_id_file


def write(folder: Path, text: object) -> Path:
    file = folder / "pool.index.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


@st.composite
def ids_of_items(draw) -> ItemIds:
    levels = draw(st.integers(1, 26))
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=9, unique=True))
    row = st.lists(st.integers(0, MAX_CODE), min_size=levels, max_size=levels)
    codes = [draw(row) for _ in names]
    return ItemIds(names, np.array(codes, dtype=np.int16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ids")


@given(ids=ids_of_items())
def test_ids_that_are_written_can_be_read(folder, ids):
    file = folder / "pool.index.json"
    write_id_file(file, ids.names, ids.codes)
    read = read_id_file(file)
    assert read.names == ids.names
    assert (read.codes == ids.codes).all()


def test_a_file_of_letter_becomes_a_table(tmp_path):
    file = write(
        tmp_path, {"0": ["<a_171>", "<b_57>"], "2": ["<a_3>", "<b_9>"], "1": ["<a_171>", "<b_57>"]}
    )
    ids = read_id_file(file)
    assert ids.sizes == (172, 58)
    numbers = np.array([candidate_number(f"7:{number}") for number in range(3)])
    codes = ids.codes[ids.rows_of(numbers)]
    assert codes.tolist() == [[171, 57], [171, 57], [3, 9]]
    assert len(IdTable.build(codes, np.zeros(3))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({}, "has no items"),
        ([], "has no items"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"0": ["<a_1>", "<b_2>"], "5": ["<a_1>"]}, "item '5' has 1 code, and item '0' has 2"),
        ('{"0": ["<a_1>"], "1": ["<a_2>"], "0": ["<a_3>"]}', "more than once: 0"),
        ({"0": ["<a_1>", "<b_2>"], "5": ["<b_1>", "<a_1>"]}, "of the levels b, a"),
        ({"0": ["a_1"]}, "item '0' has the code \"a_1\""),
        ({"0": [7]}, "item '0' has the code 7"),
        ({"0": ["<a_40000>"]}, "up to 32,767"),
        ({"0": []}, "item '0' has \\[\\]"),
        ({"0": "<a_1>"}, "expected codes such as"),
    ],
)
def test_a_file_without_ids_is_refused(tmp_path, text, message):
    with pytest.raises(BadData, match=message):
        read_id_file(write(tmp_path, text))


def test_candidates_without_an_id_are_named():
    ids = ItemIds(["7:1"], np.zeros((1, 2), dtype=np.int16))
    with pytest.raises(BadData, match="1 candidate of 2 have no ID in the file: 7:2"):
        ids.rows_of(np.array([candidate_number("7:1"), candidate_number("7:2")]))


def test_bare_numbers_do_not_name_candidates_of_several_data_sets():
    ids = ItemIds(["1"], np.zeros((1, 2), dtype=np.int16))
    with pytest.raises(BadData, match="2 data sets"):
        ids.rows_of(np.array([candidate_number("7:1"), candidate_number("8:1")]))


def test_ids_of_more_levels_than_letters_are_refused(tmp_path):
    with pytest.raises(UsageError, match="27 levels"):
        write_id_file(tmp_path / "ids.json", ["0"], np.zeros((1, 27), dtype=np.int16))


def test_a_model_exports_the_ids_of_its_candidates(trained, tmp_path):
    file = tmp_path / "catalogue.index.json"
    words = [str(trained.model), str(trained.data), "--out", str(file)]
    assert main([*words, "--bare-numbers", "--evaluation", str(tmp_path)]) == 0
    data, model = MBeir(trained.data), Genius.open(trained.model)
    pool = data.global_pool("test")
    features = embed_pool(data, pool, model.encoder, tmp_path / "features", progress=Silent())
    first = model.encode(features.gather(np.arange(9)), features.modality[:9])
    ids = read_id_file(file)
    assert (ids.codes[ids.rows_of(features.ids[:9])] == first.codes).all()
