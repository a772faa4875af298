"""Weights on disk, whatever lies behind the tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from genius_search.nn.weights import write_weights


@given(data=st.data())
def test_views_of_one_memory_are_written_as_they_read(data, tmp_path_factory):
    memory = torch.arange(40.0)
    bounds = st.tuples(st.integers(0, 39), st.integers(0, 40), st.integers(1, 3))
    tensors = {"whole": memory, "across": memory[:20].view(4, 5).t()}
    for number, (start, stop, step) in enumerate(data.draw(st.lists(bounds, max_size=5))):
        tensors[f"part{number}"] = memory[start:stop:step]
    path = tmp_path_factory.getbasetemp() / "views.safetensors"
    write_weights(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
