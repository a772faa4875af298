"""Strict names and shapes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.encoders.uniir_weights import check_names
from genius_search.errors import ArtifactMismatch

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
