"""precomputed: features on disk, looked up by id; never zeros in place of something absent."""

import numpy as np
import pytest

from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.records import candidate_number, query_number


def text_features(encoder, *keys):
    return [encoder.text_features([""], [ItemKey(*key)])[0].tolist() for key in keys]


def rows(count, *, dim=3, start=0.0, dtype=np.float16):
    return (np.arange(count * dim, dtype=dtype) + dtype(start)).reshape(count, dim)


def test_without_ids_row_r_is_number_r_plus_one_of_any_data_set(tmp_path):
    np.save(tmp_path / "text_features.npy", rows(4))
    encoder = PrecomputedEncoder(tmp_path / "text_features.npy")
    keys = [ItemKey("candidate", "7:4"), ItemKey("candidate", "30:1")]
    found = encoder.text_features(["", ""], keys)
    assert found.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert text_features(encoder, ("query", "30:1")) == [[0, 1, 2]]
    assert found.dtype == np.float32
    assert isinstance(encoder, Encoder)
    assert encoder.dim == 3
    assert not encoder.needs_pixels
    assert encoder.spec == f"precomputed:{tmp_path / 'text_features.npy'}"


def test_features_of_queries_and_candidates_may_lie_apart(tmp_path):
    np.save(tmp_path / "text_features.npy", rows(2))
    np.save(tmp_path / "query_text_features.npy", rows(2, start=20))
    np.save(tmp_path / "candidate_image_features.npy", rows(2, start=40))
    encoder = PrecomputedEncoder(tmp_path)
    assert text_features(encoder, ("query", "0:1"), ("candidate", "0:1")) == [
        [20, 21, 22],
        [0, 1, 2],
    ]
    assert encoder.image_features([None], [ItemKey("candidate", "0:1")]).tolist() == [[40, 41, 42]]
    with pytest.raises(
        ArtifactMissing, match=r"no image features for query 0:1: put image_features\.npy"
    ):
        encoder.image_features([None], [ItemKey("query", "0:1")])


@pytest.mark.parametrize("name", ["ids.npy", "text_features_ids.npy"])
def test_ids_beside_the_features_say_which_row_is_whose(tmp_path, name):
    np.save(tmp_path / "text_features.npy", rows(3, dtype=np.float32))
    np.save(tmp_path / name, np.array(["9:30", "9:7", "10:7"]))
    encoder = PrecomputedEncoder(tmp_path)
    found = text_features(encoder, ("candidate", "10:7"), ("query", "9:30"), ("candidate", "9:7"))
    assert found == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]


def test_integer_ids_are_m_beirs_numbers_of_each_role(tmp_path):
    np.save(tmp_path / "query_text_features.npy", rows(2))
    np.save(
        tmp_path / "query_text_features_ids.npy",
        np.array([query_number("9:2"), query_number("9:1")]),
    )
    np.save(tmp_path / "candidate_text_features.npy", rows(2))
    np.save(
        tmp_path / "candidate_text_features_ids.npy",
        np.array([candidate_number("9:1"), candidate_number("0:0")]),
    )
    encoder = PrecomputedEncoder(tmp_path)
    found = text_features(encoder, ("query", "9:1"), ("candidate", "9:1"), ("candidate", "0:0"))
    assert found == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("identifier", "error", "match"),
    [
        ("9:8", BadData, r"query 9:8 is not among the 2 ids of .*ids\.npy.* instruction"),
        ("0:1", BadData, r"query 0:1 is not among the 2 ids of .*ids\.npy"),
        ("", UsageError, "cannot embed new content"),
    ],
)
def test_what_is_not_in_the_files_is_refused(tmp_path, identifier, error, match):
    np.save(tmp_path / "text_features.npy", rows(2))
    np.save(tmp_path / "ids.npy", np.array(["9:30", "9:7"]))
    with pytest.raises(error, match=match):
        text_features(PrecomputedEncoder(tmp_path), ("query", identifier))


def test_the_fingerprint_follows_the_contents_and_not_the_place(tmp_path):
    prints = []
    for name, start, ids in [("a", 0, "9:1"), ("b", 0, "9:1"), ("c", 1, "9:1"), ("d", 0, "9:2")]:
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "text_features.npy", rows(1, start=start))
        np.save(folder / "ids.npy", np.array([ids]))
        prints.append(PrecomputedEncoder(folder).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("features", "ids", "problem"),
    [
        (np.zeros(3, dtype=np.float32), None, "expected floating point numbers, one row per item"),
        (
            np.zeros((3, 2), dtype=np.int64),
            None,
            "expected floating point numbers, one row per item",
        ),
        (
            np.zeros((3, 0), dtype=np.float32),
            None,
            "expected floating point numbers, one row per item",
        ),
        (rows(3), np.array(["9:1", "9:2"]), "expected one integer or text for each of the 3 rows"),
        (rows(3), np.array(["9:1", "9:2", "9:1"]), "1 ids more than once"),
        (rows(3), np.array([0.5, 1.5, 2.5]), "expected one integer or text"),
    ],
)
def test_arrays_that_are_no_features_or_no_ids_of_them_are_refused(
    tmp_path, features, ids, problem
):
    np.save(tmp_path / "text_features.npy", features)
    if ids is not None:
        np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(BadData, match=problem):
        PrecomputedEncoder(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "", "features.npy"])
def test_what_is_not_there_is_refused(tmp_path, name):
    np.save(tmp_path / "features.npy", rows(3))
    with pytest.raises(ArtifactMissing, match=r"neither a folder with text_features\.npy"):
        PrecomputedEncoder(tmp_path / name)
