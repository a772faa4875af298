"""Weights on disk: readable by others, whatever lies behind the tensors."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from genius_search import writing
from genius_search.nn import weights
from genius_search.nn.weights import write_weights


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_rights_of_any_other_new_file(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_weights(tmp_path / "a.safetensors", {"a": torch.ones(2)})
        write_weights(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@given(data=st.data())
def test_views_of_one_memory_are_written_as_they_read(data, tmp_path_factory):
    memory = torch.arange(40.0)
    bounds = st.tuples(st.integers(0, 39), st.integers(0, 40), st.integers(1, 3))
    tensors = {"whole": memory, "again": memory, "across": memory.view(5, 8).t()}
    for number, (start, stop, step) in enumerate(data.draw(st.lists(bounds, max_size=5))):
        tensors[f"part{number}"] = memory[start:stop:step]
    path = tmp_path_factory.getbasetemp() / "views.safetensors"
    write_weights(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", fail)
    monkeypatch.setattr(writing, "FULL_BYTES", 1 << 62)
    with pytest.raises(OSError, match="No space left") as failed:
        write_weights(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    assert failed.value.errno == errno.ENOSPC
