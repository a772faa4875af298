"""The feature files that GENIUS's and UniIR's authors write, converted for ``precomputed:``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.encoders.base import ImageInput, ItemKey, TextInput
from genius_search.encoders.precomputed import open_precomputed
from genius_search.errors import ArtifactMissing, BadData
from genius_search.records import candidate_number, query_number
from research.published.features import convert_features, main

DIM = 3


def write_dict(path, ids, *, start=0.0, tensor_keys=False, img_mask=None):
    """GENIUS's file: row r holds start + r in its image, the negative of it in its text."""
    rows = (torch.arange(len(ids)).float() + start).unsqueeze(1).expand(-1, DIM)
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = torch.tensor(ids) if tensor_keys else ids
    torch.save(
        {
            "img": rows.clone(),
            "text": -rows,
            "img_mask": torch.tensor(img_mask or [1.0] * len(ids)).unsqueeze(1),
            "text_mask": torch.ones(len(ids), dtype=torch.int64),
            "id_to_index": {key: row for row, key in enumerate(keys)},
        },
        path,
    )


def images(encoder, role, *ids):
    return encoder.image_features([ImageInput(None, ItemKey(role, one)) for one in ids])[:, 0].tolist()


def texts(encoder, role, *ids):
    return encoder.text_features([TextInput("", ItemKey(role, one)) for one in ids])[:, 0].tolist()


def test_genius_files_are_found_by_role_and_split_and_read_by_id(tmp_path):
    source = tmp_path / "source"
    queries = [query_number("9:7"), query_number("0:2")]
    write_dict(source / "train" / "query_SFpretrained_IT_dict.pt", queries, tensor_keys=True)
    write_dict(source / "query_test_IT_dict.pt", queries, start=50)
    candidates = [candidate_number("9:7"), candidate_number("0:2")]
    write_dict(
        source / "cand" / "mbeir_union_cand_pool_IT_dict.pt", candidates, start=10, img_mask=[1.0, 0.0]
    )
    write_dict(source / "cand_pool_mscoco_IT_dict.pt", [*candidates, candidate_number("0:1")], start=10)
    convert_features(source, tmp_path / "out", split="train")
    encoder = open_precomputed(tmp_path / "out")
    assert images(encoder, "query", "0:2", "9:7") == [1, 0]
    assert texts(encoder, "candidate", "9:7", "0:1") == [-10, -12]
    assert images(encoder, "candidate", "9:7", "0:2") == [10, 11]  # from the file that has it


def test_a_vector_for_both_of_uniir_stands_for_either(tmp_path, capsys):
    source = tmp_path / "source" / "test"
    source.mkdir(parents=True)
    for name, ids in (
        ("mbeir_x_test", [query_number("9:1")]),
        ("mbeir_x_cand_pool", [candidate_number("9:5")]),
    ):
        np.save(source / f"{name}_embed.npy", np.ones((1, DIM), dtype=np.float16))
        np.save(source / f"{name}_ids.npy", np.array(ids))
    words = ["--source", str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--split", "test"]
    assert main(words) == 0
    assert "query_text: 1 rows" in capsys.readouterr().out
    encoder = open_precomputed(tmp_path / "out")
    assert images(encoder, "candidate", "9:5") == texts(encoder, "query", "9:1") == [1]
    with pytest.raises(ArtifactMissing, match="split train"):
        convert_features(source / "nothing", tmp_path / "other", split="train")


def test_what_is_no_feature_file_is_refused(tmp_path):
    torch.save({"img": torch.ones(1)}, tmp_path / "pool_IT_dict.pt")
    with pytest.raises(BadData, match="no feature file of GENIUS"):
        convert_features(tmp_path, tmp_path / "out", split="train")
