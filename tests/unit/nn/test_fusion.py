"""Fusion against the specification, written out plainly."""

from __future__ import annotations

import pytest
import torch

from genius_search.config import FusionConfig
from genius_search.nn.fusion import Fusion

DIM = 6


@pytest.fixture
def fusion():
    torch.manual_seed(3)
    return Fusion(DIM, FusionConfig(hidden=5))


def plainly(weights, image, text):
    """Section 3 of the specification for one item, text first."""

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    both = torch.cat(
        [linear("text_projection_layer", text).relu(), linear("image_projection_layer", image).relu()]
    )
    output = linear("output_layer", linear("combiner_layer", both).relu())
    share = linear("dynamic_scalar.3", linear("dynamic_scalar.0", both).relu()).sigmoid()
    result = output + share * text + (1 - share) * image
    return result / result.norm()


@torch.no_grad()
def test_fusion_agrees_with_the_specification_for_every_combination_of_modalities(fusion):
    image, text = torch.randn(2, 9, DIM)
    image[:3] = 0
    text[3:6] = 0
    expected = [plainly(fusion.state_dict(), i, t) for i, t in zip(image, text, strict=True)]
    torch.testing.assert_close(fusion(image, text), torch.stack(expected), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_batch_of_one_equals_the_row_of_a_batch(fusion):
    image, text = torch.randn(2, 5, DIM)
    together = fusion(image, text)
    for row in range(5):
        alone = fusion(image[row : row + 1], text[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-6)
