"""Rivals from end to end: fitted, indexed, searched, measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from research.baselines.generative import (
    BaselineConfig,
    fit_baseline,
    generator_config,
    main,
)
from research.evaluate import evaluate
from research.id_files import main as export_ids
from research.settings import EvaluationConfig

KINDS = ("grace-numeric", "grace-semantic", "genius", "grace-structured", "irgen")


class Place(NamedTuple):
    """Data, model, and a folder for the features of the pools."""

    data: MBeir
    model: Genius
    evaluation: Path

    def config(self, kind):
        return BaselineConfig(kind=kind, epochs=0.1, batch_size=32)


@pytest.fixture(scope="module")
def workspace(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    return Place(MBeir(trained.data), Genius.open(trained.model), folder / "evaluation")


@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_items_of_the_pool_each_once_best_first(workspace, tmp_path, kind):
    rival = fit_baseline(
        workspace.data,
        workspace.model,
        workspace.config(kind),
        folder=tmp_path / "decoder",
        evaluation=workspace.evaluation,
        progress=Silent(),
    )
    index = rival.id_table(rival.numbers[-50:])
    assert index.num_items == 50
    for found in rival.search(index, torch.randn(3, workspace.model.dim), beam=10, k=7):
        assert len(found.items) == len(set(found.items.tolist())) == 7
        assert (np.diff(found.scores) <= 0).all()
        assert found.num_ranked >= 7


@pytest.mark.parametrize("kind", ["grace-string", "nci"])
def test_the_program_trains_and_measures(workspace, tmp_path, capsys, kind):
    words = [
        str(workspace.data.root),
        "--model",
        str(workspace.model.folder),
        "--kind",
        kind,
        "--epochs",
        "0.1",
    ]
    words += ["--out", str(tmp_path), "--evaluation", str(workspace.evaluation), "--json"]
    assert main([*words, "--options.pools", "global", "--options.max-queries", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in found["rows"]} == {kind}
    assert len(found["rows"]) == 8


def test_the_decoder_is_the_models_but_for_guide_dropout_and_the_kinds_head(workspace):
    own, rival = (
        workspace.model.generator.config,
        generator_config(workspace.model, workspace.config("irgen")),
    )
    changed = {
        "guide": own.guide,
        "dropout": own.dropout,
        "softmax": own.softmax,
        "training": own.training,
    }
    assert dataclasses.replace(rival, **changed) == own
    assert generator_config(workspace.model, BaselineConfig(kind="nci")).head == "per-level"


@pytest.fixture(scope="module")
def id_file(workspace, tmp_path_factory):
    """The model's own IDs of all candidates, as LETTER would write them."""
    file = tmp_path_factory.mktemp("ids") / "catalogue.index.json"
    words = [
        str(workspace.model.folder),
        str(workspace.data.root),
        "--training",
        "--out",
        str(file),
    ]
    assert export_ids([*words, "--evaluation", str(workspace.evaluation)]) == 0
    return file


def test_ids_of_a_file_are_searched_by_code_vectors_without_training(
    workspace, id_file, tmp_path, capsys
):
    words = [str(workspace.data.root), "--model", str(workspace.model.folder), "--json"]
    words += ["--kind", "file", "--id-file", str(id_file), "--router", "geometry"]
    words += ["--evaluation", str(workspace.evaluation), "--out", str(tmp_path)]
    assert main([*words, "--options.pools", "global"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 8
    config = EvaluationConfig(pools=("global",), methods=("exact-fused",))
    exact = evaluate(workspace.data, workspace.model, config, tmp_path / "exact", progress=Silent())
    # The vectors are fitted to the file's codes, which are the model's, so little is lost.
    expected = np.mean([row.measures["R@10"] for row in exact.rows])
    assert np.mean([row["R@10"] for row in rows]) > 0.7 * expected > 0


def test_a_decoder_learns_the_ids_of_a_file_and_is_kept(workspace, id_file, tmp_path, monkeypatch):
    config = BaselineConfig(kind="file", id_file=str(id_file), epochs=0.1, batch_size=32)

    def fit():
        folder = tmp_path / "decoder"
        return fit_baseline(
            workspace.data,
            workspace.model,
            config,
            folder=folder,
            evaluation=workspace.evaluation,
            progress=Silent(),
        )

    trained = fit()
    monkeypatch.setattr("research.baselines.generative._train", None)  # no second training
    opened = fit()
    query = torch.randn(1, workspace.model.dim)
    rankings = [
        next(rival.search(rival.id_table(rival.numbers[:50]), query, beam=10, k=7))
        for rival in (trained, opened)
    ]
    assert rankings[0].items.tolist() == rankings[1].items.tolist()


def test_an_interrupted_training_of_a_rival_continues(workspace, tmp_path):
    config = dataclasses.replace(workspace.config("genius"), epochs=1.0)
    # The shared model was trained with a checkpoint after every step.
    assert generator_config(workspace.model, config).training.checkpoint_seconds == 0
    steps: list[int] = []

    class Interrupting(Silent):
        def advance(self, done, measures):
            if "loss" in measures:
                steps.append(done)
                if len(steps) == 3:
                    raise KeyboardInterrupt

    def fit():
        fit_baseline(
            workspace.data,
            workspace.model,
            config,
            folder=tmp_path / "decoder",
            evaluation=workspace.evaluation,
            progress=Interrupting(),
        )

    with pytest.raises(KeyboardInterrupt):
        fit()
    fit()
    assert steps[:4] == [1, 2, 3, 3]  # the step whose checkpoint was not written is repeated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "file"}, "--id-file"),
        ({"kind": "dsi", "id_file": "ids.json"}, "--id-file"),
        ({"kind": "dsi", "router": "geometry"}, "no code vectors"),
    ],
)
def test_kinds_and_options_that_do_not_fit_are_refused(workspace, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        fit_baseline(
            workspace.data,
            workspace.model,
            BaselineConfig(**options),
            folder=tmp_path / "decoder",
            evaluation=workspace.evaluation,
            progress=Silent(),
        )
