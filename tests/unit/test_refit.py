"""Codebooks that follow a pool."""

from __future__ import annotations

import dataclasses
import json
from itertools import product

import pytest
import torch

from genius_search.cli import main
from genius_search.config import GeneratorConfig, from_json, to_json
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.nn.density import NormAndDensity
from genius_search.nn.generator import Generator
from genius_search.progress import Silent
from genius_search.records import Modality
from genius_search.refit import refit

WORDS = (
    ["invoice", "letter", "ledger", "receipt"],
    ["paid", "overdue", "signed"],
    ["of march", "of june", "by hand"],
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Papers, where the model knows pictographs."""
    path = tmp_path_factory.mktemp("refit") / "pool.jsonl"
    lines = [
        {"did": f"9:{number}", "modality": "text", "txt": f"{' '.join(words)} {number % 7}", "img_path": None}
        for number, words in enumerate(product(*WORDS, ["a", "b", "c"]))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_codes_explain_the_pool_better_and_the_rest_of_the_model_stays(trained, pool, tmp_path):
    model = Genius.open(trained.model)
    vectors = torch.cat(model.quantizer.tables()).clone()
    done = refit(model, pool, tmp_path / "new", passes=20, progress=Silent())
    assert done.after.reconstruction > done.before.reconstruction + 0.01
    assert done.before.candidates == done.after.candidates == 108
    assert torch.equal(torch.cat(model.quantizer.tables()), vectors)  # the old one is as it was
    opened = Genius.open(tmp_path / "new")
    assert opened.fingerprint not in {model.fingerprint, None}
    for part in ("fusion", "encoder"):
        assert not (tmp_path / "new" / "features").exists(), part
    for name, weights in model.generator.state_dict().items():
        assert torch.equal(weights, opened.generator.state_dict()[name])
    for name, weights in model.quantizer.fusion.state_dict().items():
        assert torch.equal(weights, opened.quantizer.fusion.state_dict()[name])
    assert opened.instructions == model.instructions
    index, _ = Index.create(tmp_path / "index", model=opened, pool=pool)
    assert index.search("ledger signed of june a 3", modality="text")


def test_the_same_seed_gives_the_same_model(trained, pool, tmp_path):
    model = Genius.open(trained.model)
    made = [refit(model, pool, tmp_path / name, passes=2, progress=Silent()).model for name in "ab"]
    assert made[0].fingerprint == made[1].fingerprint


def test_a_sample_of_the_pool_says_how_crowded_it_is_around_an_item(trained, pool, tmp_path):
    model = Genius.open(trained.model)
    refit(model, pool, tmp_path / "new", passes=2, progress=Silent())
    assert len(model.quantizer.pool_sample) == 0
    quantizer = Genius.open(tmp_path / "new").quantizer
    sample = quantizer.pool_sample.long()
    assert 1 < len(sample) <= 108
    assert (sample[:, 0] == Modality.TEXT.code).all()
    tables = quantizer.tables()
    expected = NormAndDensity(tables, has_modality_level=True, sample=sample).columns(sample)
    assert torch.equal(quantizer.norm_and_density.columns(sample), expected)
    assert not torch.equal(expected, NormAndDensity(tables, has_modality_level=True).columns(sample))


def test_a_guide_is_given_the_new_vectors(trained, pool, tmp_path):
    model = Genius.open(trained.model)
    manifest = model.generator_manifest
    config = dataclasses.replace(from_json(GeneratorConfig, manifest.config), guide="geometry")
    model.generator = Generator(model.dim, model.quantizer.sizes, config)
    model.generator_manifest = manifest.model_copy(update={"config": to_json(config)})
    refit(model, pool, tmp_path / "new", passes=2, progress=Silent())
    opened = Genius.open(tmp_path / "new")
    assert opened.generator.guide is not None
    assert torch.equal(opened.generator.guide.vectors, torch.cat(opened.quantizer.tables()))


def test_the_command_shows_before_and_after_and_spares_a_model(trained, pool, tmp_path, capsys):
    words = ["refit", trained.model, "--pool", pool, "--out", tmp_path / "new", "--json"]
    assert main([str(word) for word in words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == str(tmp_path / "new")
    assert told["before"]["candidates"] == told["after"]["candidates"] == 108
    assert main([str(word) for word in words]) == UsageError.exit_code
    assert "holds a model already" in capsys.readouterr().err
    assert (
        main([str(word) for word in [*words[:-2], tmp_path / "other", "--passes", "0"]])
        == UsageError.exit_code
    )
