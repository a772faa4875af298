"""What may be a weight: floating and finite, given in single precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.encoders.uniir_weights import all_sound, sound
from genius_search.errors import ArtifactMismatch


def test_single_precision_stays_in_the_files_own_memory():
    tensor = torch.randn(3, 4).t()
    assert sound(tensor, name="a", what="x.pth") is tensor


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_single(kind):
    found = sound(torch.tensor([0.5, -2.0], dtype=kind), name="a", what="x.pth")
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5, -2.0]


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused_naming_the_tensor_and_the_kind(kind):
    name = str(kind).removeprefix("torch.")
    with pytest.raises(ArtifactMismatch, match=f"x.pth: b holds {name} numbers, expected floating-point"):
        all_sound({"a": torch.ones(2), "b": torch.ones(2, dtype=kind)}, "ab", what="x.pth")


@given(
    place=st.integers(0, 11),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_one_number_that_is_none_is_enough(place, value, kind):
    tensor = torch.ones(12, dtype=kind)
    tensor[place] = value
    with pytest.raises(ArtifactMismatch, match=r"a holds NaN or infinity"):
        sound(tensor.view(3, 4), name="a", what="x.pth")


def test_a_number_too_large_for_single_precision_is_refused():
    with pytest.raises(ArtifactMismatch, match="a holds NaN or infinity"):
        sound(torch.tensor([1e300], dtype=torch.float64), name="a", what="x.pth")


def test_an_empty_tensor_is_refused():
    with pytest.raises(ArtifactMismatch, match="a holds no numbers"):
        sound(torch.ones(0, 3), name="a", what="x.pth")
