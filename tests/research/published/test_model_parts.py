"""Published tensors get our names; unexpected ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genius_search.errors import ArtifactMismatch
from genius_search.nn.generator import Generator
from genius_search.nn.quantizer import Quantizer
from research.published.checkpoint import Checkpoint
from research.published.models import read_generator, read_quantizer


def open_weights(weights):
    return Checkpoint(Path("file.pth"), weights)


def read_networks(published):
    quantizer, generator = open_weights(published.quantizer), open_weights(published.generator)
    return read_quantizer(quantizer), read_generator(generator, quantizer)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dim=st.integers(1, 9),
    hidden=st.integers(1, 5),
    codes=st.integers(2, 9),
    levels=st.integers(1, 4),
    heads=st.integers(1, 3),
    layers=st.integers(1, 3),
    prefixes=st.integers(1, 4),
)
def test_all_sizes_are_read_from_shapes(
    make_published, dim, hidden, codes, levels, heads, layers, prefixes
):
    sizes = {"dim": dim, "hidden": hidden, "codes": codes, "levels": levels, "heads": heads}
    published = make_published(**sizes, width=6, layers=layers, prefixes=prefixes)
    quantizer, generator = read_networks(published)
    config = quantizer.config
    assert (quantizer.dim, config.fusion.hidden) == (dim, hidden)
    assert (config.codebook_size, config.levels) == (codes, levels)
    Quantizer(dim, config).load_state_dict(quantizer.state, strict=True)
    assert generator.sizes == (3, *[codes] * levels)
    config = generator.config
    assert (config.layers, config.width, config.feedforward) == (layers, 6, 12)
    assert (config.heads, config.head_width, config.prefixes) == (heads, 6 // heads, prefixes)
    Generator(dim, generator.sizes, config).load_state_dict(generator.state, strict=True)


def test_codebooks_that_were_never_initialised_are_refused(make_published):
    published = make_published()
    published.quantizer["residual_rq.layers.1._codebook.initted"] = torch.zeros(1)
    with pytest.raises(ArtifactMismatch, match="never initialised"):
        read_quantizer(open_weights(published.quantizer))


def test_files_of_different_models_are_refused(make_published):
    published = make_published()
    name = "encoder.combiner_layer.bias"
    published.quantizer[name] = published.quantizer[name] + 1
    with pytest.raises(ArtifactMismatch, match=rf"another quantizer.*1 tensors.*quantizer\.{name}"):
        read_networks(published)
