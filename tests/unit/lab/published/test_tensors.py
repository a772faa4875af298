"""Tensors of a checkpoint: strict names and shapes; floating and finite, returned in single precision."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import ArtifactMismatch
from genius_search.lab.published.checkpoint import check_names, single_precision

SHAPES = {f"layer.{number}": (number, 2) for number in range(1, 20)}
NAMES = st.sets(st.sampled_from(sorted(SHAPES)))


def tensors(shapes):
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_all_names_and_shapes_pass_and_tolerated_ones_may_come_along():
    found = tensors({**SHAPES, "extra.weight": (1,)})
    check_names(found, SHAPES, tolerated=[re.compile(r"extra\..*")], what="a file")


@given(gone=NAMES, bent=NAMES, extra=st.sets(st.sampled_from(["x", "y.z"])))
def test_every_kind_of_difference_is_counted_and_named(gone, bent, extra):
    found = {name: shape for name, shape in SHAPES.items() if name not in gone}
    found |= dict.fromkeys(bent - gone, (1,)) | dict.fromkeys(extra, (1,))
    wrong = {"missing": gone, "unknown": extra, "of another shape": bent - gone}
    if not any(wrong.values()):
        check_names(tensors(found), SHAPES, what="the file")
        return
    with pytest.raises(ArtifactMismatch) as caught:
        check_names(tensors(found), SHAPES, what="the file")
    message = str(caught.value)
    assert message.startswith("the file: of 19 tensors expected")
    for kind, names in wrong.items():
        assert (f"{len(names)} {kind}: " in message) == bool(names)
        if 0 < len(names) <= 8:
            assert all(name in message for name in names)


def test_a_tolerated_pattern_covers_whole_names_only():
    with pytest.raises(ArtifactMismatch, match=r"1 unknown: my\.extra\.weight"):
        check_names(
            tensors({"my.extra.weight": (1,)}), {}, tolerated=[re.compile(r"extra\..*")], what="a file"
        )


def test_a_wrong_shape_is_shown_beside_the_right_one():
    with pytest.raises(ArtifactMismatch, match=r"a \(3,\), expected \(2, 1\)"):
        check_names(tensors({"a": (3,)}), {"a": (2, 1)}, what="a file")


def single(tensor):
    return single_precision({"a": tensor}, "a", what="x.pth")["a"]


def test_single_precision_stays_in_the_files_own_memory():
    tensor = torch.randn(3, 4).t()
    assert single(tensor) is tensor


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_single(kind):
    found = single(torch.tensor([0.5, -2.0], dtype=kind))
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5, -2.0]


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused_naming_the_tensor_and_the_kind(kind):
    name = str(kind).removeprefix("torch.")
    with pytest.raises(ArtifactMismatch, match=f"x.pth: b holds {name} numbers, expected floating-point"):
        single_precision({"a": torch.ones(2), "b": torch.ones(2, dtype=kind)}, "ab", what="x.pth")


@given(
    place=st.integers(0, 11),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_one_number_that_is_none_is_enough(place, value, kind):
    tensor = torch.ones(12, dtype=kind)
    tensor[place] = value
    with pytest.raises(ArtifactMismatch, match=r"a holds NaN or infinity"):
        single(tensor.view(3, 4))


def test_a_number_too_large_for_single_precision_is_refused():
    with pytest.raises(ArtifactMismatch, match="a holds NaN or infinity"):
        single(torch.tensor([1e300], dtype=torch.float64))


def test_an_empty_tensor_is_refused():
    with pytest.raises(ArtifactMismatch, match="a holds no numbers"):
        single(torch.ones(0, 3))
