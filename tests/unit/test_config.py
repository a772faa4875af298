"""Settings: within their limits, strictly read, round trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.cli.options import read_toml, to_toml
from genius_search.config import (
    CELL_MARGIN,
    CELL_SHORTLIST,
    PAPER_SEARCH,
    FusionConfig,
    SearchConfig,
    SearchSettings,
    SmallEncoderConfig,
    default_cell_search,
    default_search,
    from_json,
    narrow_search,
    to_json,
    validate_settings,
)
from genius_search.errors import UsageError
from genius_search.recipe import (
    PRESETS,
    EncoderConfig,
    FitConfig,
    GeneratorConfig,
    QuantizerConfig,
    TrainingConfig,
    preset,
)

counts = st.integers(1, 10_000)
positive = st.floats(1e-12, 1e6)
shares = st.floats(0, 1)

trainings = st.builds(
    TrainingConfig,
    epochs=positive,
    max_steps=st.integers(0, 10**9),
    batch_size=counts,
    learning_rate=positive,
    final_share=shares,
    warmup_steps=st.integers(0, 10**6),
    beta2=st.floats(0, 1, exclude_max=True),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 2**40),
)
quantizers = st.builds(
    QuantizerConfig,
    levels=st.integers(1, 32),
    codebook_size=st.integers(2, 32767),
    level0=st.sampled_from(["learned", "assigned", "classifier", "none"]),
    shared_codebook=st.booleans(),
    decay=shares,
    gradient=st.sampled_from(["once", "per-level"]),
    fusion=st.builds(FusionConfig, hidden=counts),
    training=trainings,
)
generators = st.builds(
    GeneratorConfig,
    layers=st.integers(1, 256),
    dropout=st.floats(0, 0.9),
    head=st.sampled_from(["tied", "per-level"]),
    softmax=st.sampled_from(["vocabulary", "level"]),
    augmentation=st.sampled_from(["paper", "reference", "none"]),
    training=trainings,
)
encoders = st.builds(
    EncoderConfig,
    network=st.builds(SmallEncoderConfig, dim=counts),
    temperature=positive,
    training=trainings,
)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_within_its_limits(name):
    assert validate_settings(preset(name)) == preset(name)


def test_the_paper_preset_has_the_papers_numbers():
    config = preset("paper")
    assert (config.quantizer.levels + 1, config.quantizer.codebook_size) == (9, 4096)
    assert config.quantizer.level0 == "learned"
    assert config.quantizer.quantization_weight == config.quantizer.alignment_weight == 100
    assert config.quantizer.temperature == 0.01
    assert (config.quantizer.training.epochs, config.quantizer.training.batch_size) == (20, 256)
    generator = config.generator
    assert (generator.layers, generator.width, generator.feedforward, generator.heads) == (
        6,
        512,
        2048,
        8,
    )
    assert (generator.prefixes, generator.training.epochs, generator.training.learning_rate) == (
        30,
        30,
        1e-4,
    )


@given(config=st.builds(FitConfig, encoder=encoders, quantizer=quantizers, generator=generators))
def test_settings_survive_a_round_trip_through_toml(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "settings.toml"
    file.write_text(to_toml(config))
    assert read_toml(file, preset_name="tiny") == config
    assert (
        from_json(FitConfig, json.loads(json.dumps(to_json(config))))
        == validate_settings(config)
        == config
    )


def test_the_settings_of_the_released_code_can_be_read():
    recipe = Path(__file__).parents[2] / "recipes" / "reference.toml"
    config = read_toml(recipe)
    assert config.quantizer.gradient == "per-level"
    assert config.generator.training.epochs == 31
    assert config.generator.width == preset("paper").generator.width


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (QuantizerConfig, {"levles": 3}, "levles"),
        (FitConfig, {"generator": {"training": {"x": 1}}}, r"generator\.training\.x"),
        (EncoderConfig, {"network": {"vocabulary": 5}}, r"network\.vocabulary = 5"),
        (QuantizerConfig, {"levels": 0}, "levels = 0"),
        (QuantizerConfig, {"level0": "guessed"}, "level0 = 'guessed'"),
        (TrainingConfig, {"learning_rate": float("nan")}, "learning_rate = nan"),
        (TrainingConfig, {"epochs": float("inf")}, "epochs = inf"),
        (TrainingConfig, {"batch_size": 1.5}, "batch_size = 1.5"),
        (GeneratorConfig, {"dropout": 1.0}, "dropout = 1.0"),
        (SearchConfig, {"k": 3}, "k = 3"),
        (SearchSettings, {**to_json(PAPER_SEARCH), "beam": None}, "beam = None"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_named(kind, value, named):
    with pytest.raises(UsageError, match=named):
        from_json(kind, value)


@pytest.mark.parametrize(
    ("items", "candidates", "beam"),
    [
        (10, 1000, 10),
        (32_368, 32_368, 10),
        (300_000, 100_000, 10),
        (1_000_000, 96_000, 128),
        (100_000_000, 960_000, 128),
    ],
)
def test_candidates_grow_with_the_items_and_then_with_their_root_and_so_does_the_beam(
    items, candidates, beam
):
    usual = default_search(items)
    assert (usual.candidates, usual.beam) == (candidates, beam)


def test_a_search_of_few_allowed_items_of_a_large_pool_leaves_out_more():
    settings = default_cell_search(1_000_000)
    narrowed = narrow_search(settings, 1_000_000, 100_000)
    assert (narrowed.margin, narrowed.shortlist) == (settings.margin - 0.5, settings.shortlist / 2)
    hundredth, few = (narrow_search(settings, 1_000_000, allowed) for allowed in (10_000, 1000))
    assert (hundredth.margin, hundredth.shortlist) == (CELL_MARGIN, CELL_SHORTLIST)
    assert few == hundredth
    assert narrow_search(settings, 1_000_000, 1_000_000) == settings
    assert narrow_search(settings, 1_000_000, settings.shortlist) == settings
    small = default_cell_search(100_000)
    assert narrow_search(small, 100_000, 1000) == small
