"""The feature files that GENIUS's and UniIR's authors write, looked up by id."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from genius_search.encoders.base import (
    Encoder,
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    load_encoder,
)
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.lab.published.embeddings import PublishedEncoder, PublishedJointEncoder, open_features
from genius_search.records import candidate_number, query_number

DIM = 3


def opened(path):
    return open_features(str(path))


def text(*key):
    return TextInput("", ItemKey(*key))


def image(*key):
    return ImageInput(None, ItemKey(*key))


def joint(*key):
    return JointInput(None, "", ItemKey(*key), has_image=True)


def write_dict(path, ids, *, tensor_keys=False, start=0.0, dtype=torch.float32, column=False, img_mask=None):
    """GENIUS's file: row r holds start + r in its image, the negative of it in its text."""
    rows = (torch.arange(len(ids)).float() + start).unsqueeze(1).expand(-1, DIM).to(dtype)
    mask = torch.ones(len(ids)) if img_mask is None else torch.tensor(img_mask)
    keys = torch.tensor(ids) if tensor_keys else ids
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "img": rows.clone(),
            "text": -rows,
            "img_mask": mask.unsqueeze(1) if column else mask,
            "text_mask": torch.ones(len(ids), 1) if column else torch.ones(len(ids), dtype=torch.int64),
            "id_to_index": {key: row for row, key in enumerate(keys)},
        },
        path,
    )
    return path


def write_uniir(folder, name, ids, *, start=0.0, dim=DIM):
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.repeat(np.arange(len(ids), dtype=np.float16)[:, None] + np.float16(start), dim, axis=1)
    np.save(folder / f"mbeir_{name}_embed.npy", rows)
    np.save(folder / f"mbeir_{name}_ids.npy", np.array(ids, dtype=np.int64))


@pytest.mark.parametrize(
    ("tensor_keys", "column", "dtype"), [(False, False, torch.float32), (True, True, torch.float16)]
)
def test_genius_files_of_a_folder_are_found_by_role_and_id(tmp_path, tensor_keys, column, dtype):
    queries = [query_number("9:7"), query_number("0:2")]
    candidates = [candidate_number("9:7"), candidate_number("0:2"), candidate_number("0:1")]
    settings = {"tensor_keys": tensor_keys, "column": column, "dtype": dtype}
    write_dict(tmp_path / "train" / "query_SFpretrained_instruction_IT_dict.pt", queries, **settings)
    write_dict(tmp_path / "cand" / "mbeir_union_cand_pool_IT_dict.pt", candidates, start=10, **settings)
    encoder = opened(tmp_path)
    assert isinstance(encoder, PublishedEncoder)
    assert isinstance(encoder, Encoder)
    assert not isinstance(encoder, JointEncoder)
    assert encoder.dim == DIM
    found = encoder.image_features([image("query", "0:2"), image("candidate", "0:1"), image("query", "9:7")])
    assert found[:, 0].tolist() == [1, 12, 0]
    assert encoder.text_features([text("candidate", "9:7")]).tolist() == [[-10] * DIM]
    assert found.dtype == np.float32


def test_a_local_and_a_union_file_may_hold_the_same_candidates(tmp_path):
    ids = [candidate_number(f"9:{n}") for n in range(1, 5)]
    write_dict(tmp_path / "cand_pool_mscoco_task0_test_IT_dict.pt", ids, start=5)
    write_dict(
        tmp_path / "mbeir_union_cand_pool_IT_dict.pt",
        [*ids, candidate_number("3:1")],
        start=5,
        tensor_keys=True,
    )
    found = opened(tmp_path).image_features([image("candidate", d) for d in ("9:2", "3:1", "9:1")])
    assert found[:, 0].tolist() == [6, 9, 5]


def test_a_row_whose_mask_is_zero_has_no_such_modality(tmp_path):
    ids = [candidate_number("9:1"), candidate_number("9:2")]
    path = write_dict(tmp_path / "pool_SFpretrained_IT_dict.pt", ids, img_mask=[1.0, 0.0])
    encoder = opened(path)
    assert encoder.image_features([image("candidate", "9:1")]).tolist() == [[0] * DIM]
    assert encoder.text_features([text("candidate", "9:2")]).tolist() == [[-1] * DIM]
    with pytest.raises(BadData, match=r"candidate 9:2 is marked as missing in .*pool_SFpretrained"):
        encoder.image_features([image("candidate", "9:1"), image("candidate", "9:2")])
    with pytest.raises(ArtifactMissing, match="a folder that holds the query files too"):
        encoder.text_features([text("query", "9:1")])


def test_a_name_that_does_not_say_whose_features_they_are_is_refused(tmp_path):
    path = write_dict(tmp_path / "features_IT_dict.pt", [1])
    for given in (path, tmp_path):
        with pytest.raises(UsageError, match="start with query_, or with pool_ or cand_pool_"):
            opened(given)


def test_a_torch_file_that_could_run_code_is_not_opened(tmp_path):
    path = tmp_path / "query_x_IT_dict.pt"
    torch.save({"img": DIM, "evil": np.random.default_rng}, path)
    with pytest.raises(ArtifactMismatch, match=r"numpy\.random.*could run code"):
        opened(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"img_mask": None}, "img_mask is no tensor"),
        ({"img_mask": torch.ones(3)}, "img_mask has 3 entries, but img has 2 rows"),
        ({"img": torch.ones(2)}, "expected floating point numbers"),
        ({"img": torch.ones(3, DIM), "img_mask": torch.ones(3)}, "different numbers of rows"),
        ({"id_to_index": {1: 2}}, "rows that are not there"),
        ({"id_to_index": [1, 2]}, "no mapping"),
        ({"id_to_index": {"a": 1}}, "other than numbers"),
        ({"text": torch.ones(2, DIM + 1)}, "must have one width"),
    ],
)
def test_a_genius_file_that_does_not_fit_together_is_refused(tmp_path, change, problem):
    path = write_dict(tmp_path / "query_x_IT_dict.pt", [1, 2])
    torch.save({**torch.load(path), **change}, path)
    with pytest.raises(BadData, match=problem):
        opened(path)


def test_a_genius_file_that_lacks_an_entry_is_refused(tmp_path):
    path = tmp_path / "query_x_IT_dict.pt"
    torch.save({"img": torch.ones(1, DIM)}, path)
    with pytest.raises(BadData, match="lacks text, img_mask, text_mask, id_to_index"):
        opened(path)


def test_a_torch_file_of_something_else_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "query_x_IT_dict.pt")
    with pytest.raises(BadData, match="holds a list"):
        opened(tmp_path / "query_x_IT_dict.pt")


def test_the_fingerprint_of_a_torch_file_follows_its_contents(tmp_path):
    prints = [
        opened(write_dict(tmp_path / name / "pool_x_IT_dict.pt", [1, 2], start=start)).fingerprint
        for name, start in [("a", 0), ("b", 0), ("c", 1)]
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_torch_file_without_checksums_is_known_by_its_bytes(tmp_path):
    prints = []
    torch.serialization.set_crc32_options(False)
    try:
        for name, start in [("a", 0), ("b", 0), ("c", 1)]:
            path = write_dict(tmp_path / name / "pool_x_IT_dict.pt", [1, 2], start=start)
            with zipfile.ZipFile(path) as archive:
                assert {entry.CRC for entry in archive.infolist()} == {0}
            prints.append(opened(path).fingerprint)
    finally:
        torch.serialization.set_crc32_options(True)
    assert prints[0] == prints[1] != prints[2]


def test_uniirs_embeddings_are_found_below_a_folder_as_one_vector(tmp_path):
    write_uniir(tmp_path / "test", "mscoco_task0_test", [query_number("9:3"), query_number("9:1")])
    write_uniir(tmp_path / "test", "oven_task6_test", [query_number("5:1")], start=20)
    write_uniir(tmp_path / "cand_pool", "mscoco_task0_test_cand_pool", [candidate_number("9:1")], start=30)
    write_uniir(
        tmp_path / "cand_pool",
        "union_cand_pool",
        [candidate_number("9:1"), candidate_number("9:2")],
        start=30,
    )
    for folder in (tmp_path, tmp_path / "test"):
        encoder = opened(folder)
        assert isinstance(encoder, PublishedJointEncoder)
        assert isinstance(encoder, JointEncoder)
        asked = [joint("query", "9:1"), joint("candidate", "9:2"), joint("query", "5:1")]
        assert encoder.joint_features(asked)[:, 0].tolist() == [1, 31, 20]
    with pytest.raises(UsageError, match="one vector for image and text together"):
        encoder.text_features([text("query", "9:1")])
    with pytest.raises(UsageError, match="one vector for image and text together"):
        encoder.image_features([image("query", "9:1")])


def test_absent_ids_are_counted_and_some_are_named(tmp_path):
    write_uniir(tmp_path, "union_cand_pool", [candidate_number("9:1")])
    encoder = opened(tmp_path)
    with pytest.raises(
        BadData,
        match=r"7 candidates \(9:2, 9:3, 9:4, 9:5, 9:6, …\) are not among the ids in .*7 of 8 looked up",
    ):
        encoder.joint_features([joint("candidate", f"9:{n}") for n in range(1, 9)])


def test_queries_of_two_splits_with_one_number_are_told_apart(tmp_path):
    write_uniir(tmp_path / "test", "cirr_task7_test", [query_number("8:1"), query_number("8:2")])
    write_uniir(tmp_path / "val", "cirr_task7_val", [query_number("8:2"), query_number("8:1")], start=10)
    encoder = opened(tmp_path)
    asked = [joint("query", "8:1", split) for split in ("val", "test")]
    assert encoder.joint_features(asked)[:, 0].tolist() == [11, 0]
    with pytest.raises(UsageError, match=r"several splits, .*test.* and .*val.*query 8:1"):
        encoder.joint_features([joint("query", "8:1")])
    for split, number in (("test", 0), ("val", 11)):
        found = opened(tmp_path / split).joint_features([joint("query", "8:1")])
        assert found.tolist() == [[number] * DIM]


def test_a_query_of_another_split_is_never_answered(tmp_path):
    write_uniir(tmp_path / "u", "cirr_task7_test", [query_number("8:1")])
    with pytest.raises(BadData, match=r"query 8:1 is of split val, .*cirr_task7_test_embed\.npy \(test\)"):
        opened(tmp_path / "u").joint_features([joint("query", "8:1", "val")])
    path = write_dict(tmp_path / "g" / "query_SFpretrained_instruction_IT_dict.pt", [query_number("9:7")])
    write_dict(tmp_path / "g" / "mbeir_union_cand_pool_IT_dict.pt", [candidate_number("9:7")], start=5)
    encoder = opened(tmp_path / "g")
    assert encoder.text_features([text("query", "9:7", "train")]).tolist() == [[0] * DIM]
    with pytest.raises(BadData, match=rf"query 9:7 is of split test, .*{path.name} \(train\)"):
        encoder.text_features([text("query", "9:7", "test")])
    before = encoder.fingerprint
    path.rename(path.with_name("query_SFpretrained_instruction_test_IT_dict.pt"))
    renamed = opened(tmp_path / "g")
    assert renamed.text_features([text("query", "9:7", "test")]).tolist() == [[0] * DIM]
    assert renamed.fingerprint != before  # it gives other features now


def test_genius_files_of_both_splits_serve_training_and_evaluation(tmp_path):
    write_dict(tmp_path / "train" / "query_x_IT_dict.pt", [query_number("9:1")])
    write_dict(tmp_path / "test" / "query_x_IT_dict.pt", [query_number("9:1")], start=5)
    encoder = opened(tmp_path)
    found = encoder.image_features([image("query", "9:1", split) for split in ("test", "train", "test")])
    assert found[:, 0].tolist() == [5, 0, 5]


def test_query_files_that_do_not_say_their_split_count_for_each(tmp_path):
    write_uniir(tmp_path, "mine", [query_number("9:1")])
    assert opened(tmp_path).joint_features([joint("query", "9:1", "val")]).tolist() == [[0] * DIM]
    write_uniir(tmp_path, "cirr_task7_test", [query_number("8:1")], start=5)
    encoder = opened(tmp_path)
    for asked, number in (("9:1", 0), ("8:1", 5)):
        assert encoder.joint_features([joint("query", asked, "test")]).tolist() == [[number] * DIM]


def test_vectors_of_two_encoders_are_not_mixed(tmp_path):
    write_uniir(tmp_path / "CLIP_SF", "union_cand_pool", [candidate_number("9:1")], start=1)
    write_uniir(tmp_path / "BLIP_FF", "union_cand_pool", [candidate_number("9:1")], start=2)
    with pytest.raises(BadData, match=r"different joint features of candidate 9:1"):
        opened(tmp_path)


def test_files_of_two_widths_or_two_layouts_are_refused(tmp_path):
    write_uniir(tmp_path, "cirr_task7_test", [1])
    write_uniir(tmp_path, "cirr_task7_cand_pool", [1], dim=DIM + 1)
    with pytest.raises(BadData, match="must have one width"):
        opened(tmp_path)
    write_dict(tmp_path / "query_x_IT_dict.pt", [1])
    with pytest.raises(UsageError, match="give the folder of one"):
        opened(tmp_path)


def test_embeddings_need_ids_of_the_same_number(tmp_path):
    write_uniir(tmp_path, "cirr_task7_test", [1, 2])
    np.save(tmp_path / "mbeir_cirr_task7_test_ids.npy", np.array([1]))
    with pytest.raises(BadData, match="expected one integer for each of the 2 rows"):
        opened(tmp_path)
    (tmp_path / "mbeir_cirr_task7_test_ids.npy").unlink()
    with pytest.raises(ArtifactMissing, match=r"has no mbeir_cirr_task7_test_ids\.npy beside it"):
        opened(tmp_path / "mbeir_cirr_task7_test_embed.npy")


@pytest.mark.parametrize("identifier", ["9", "9:1:2", "9:x", "9:500000", "-1:2"])
def test_an_id_that_is_no_m_beir_id_is_named(tmp_path, identifier):
    write_uniir(tmp_path, "cirr_task7_test", [query_number("9:1")])
    with pytest.raises(BadData, match=f"id '{identifier}'"):
        opened(tmp_path).joint_features([joint("query", "9:1"), joint("query", identifier)])


def test_nothing_and_a_folder_without_published_features_are_refused(tmp_path):
    with pytest.raises(ArtifactMissing, match="no such file or folder"):
        opened(tmp_path / "nothing")
    with pytest.raises(ArtifactMissing, match="holds no published features"):
        opened(tmp_path)


def test_the_kind_is_known_by_its_entry_point(tmp_path):
    write_uniir(tmp_path, "cirr_task7_test", [query_number("8:1")])
    encoder = load_encoder(f"published:{tmp_path}")
    assert isinstance(encoder, PublishedJointEncoder)
    assert encoder.spec == f"published:{tmp_path}"
