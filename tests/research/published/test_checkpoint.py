"""Opening published files: weights are read, code is refused and never executed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from genius_search.errors import ArtifactMismatch
from research.published.checkpoint import open_checkpoint

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


class Malicious:
    """An object whose ordinary unpickling creates a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.fixture
def save(tmp_path):
    def save(value, **options):
        path = tmp_path / "file.pth"
        torch.save(value, path, **options)
        return path

    return save


def test_only_weights_are_read(save):
    moments = {0: {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}}
    path = save(
        {"model": WEIGHTS, "optimizer": {"state": moments, "groups": [{"lr": 1e-4}]}, "epoch": 20}
    )
    checkpoint = open_checkpoint(path)
    assert {name: tensor.tolist() for name, tensor in checkpoint.tensors.items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }


def test_a_file_with_an_omegaconf_configuration_is_read(save):
    omegaconf = pytest.importorskip("omegaconf")
    plain = {
        "lr": 1e-4,
        "none": None,
        "list": [1, "x", True, {"deep": 2.5}],
        "link": "${lr}",
        "gap": "???",
    }
    checkpoint = open_checkpoint(
        save({"model": WEIGHTS, "config": omegaconf.OmegaConf.create(plain)})
    )
    assert checkpoint.tensors.keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ({"model": {f"_orig_mod.module.{name}": tensor for name, tensor in WEIGHTS.items()}}, {}),
        (
            {
                "state_dict": {f"model.{name}": tensor for name, tensor in WEIGHTS.items()},
                "epoch": 3,
            },
            {},
        ),
        ({"model_state_dict": WEIGHTS, "optimizer": {}}, {}),
        ({"model": WEIGHTS}, {"_use_new_zipfile_serialization": False}),
        ({"model": WEIGHTS, "args": argparse.Namespace(lr=1e-5)}, {}),
    ],
)
def test_files_of_other_trainers_are_read(save, value, options):
    assert open_checkpoint(save(value, **options)).tensors.keys() == WEIGHTS.keys()


def test_code_in_a_file_is_named_and_not_executed(save, tmp_path):
    target = tmp_path / "executed"
    path = save({"model": WEIGHTS, "config": Malicious(target)})
    with pytest.raises(ArtifactMismatch, match="getattr besides weights"):
        open_checkpoint(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # ordinary loading executes it


def test_parts_of_names_that_compilation_adds_are_removed(save):
    weights = {"_orig_mod.a": WEIGHTS["a.bias"], "b._orig_mod.c": WEIGHTS["a.bias"]}
    assert list(open_checkpoint(save({"model": weights})).tensors) == ["a", "b.c"]


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {"net": WEIGHTS, "ema": WEIGHTS},
        {"model": {}},
        {"model": {"a": torch.ones(1), "b": 3}},
        {"model": {"a": torch.ones(2, 2).to_sparse()}},
    ],
)
def test_a_file_without_weights_is_refused(value, save):
    with pytest.raises(ArtifactMismatch, match="no dict of plain tensors under 'model'"):
        open_checkpoint(save(value))


def test_damaged_files_and_texts_are_refused(save):
    path = save({"model": WEIGHTS})
    content = path.read_bytes()
    for damaged, message in (
        (content[: len(content) // 2], "is damaged"),
        (b"", "is damaged"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactMismatch, match=message):
            open_checkpoint(path)
