"""Baselines from end to end: fitted, searched, measured."""

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

ID_KINDS = ("grace-numeric", "grace-semantic", "genius", "grace-structured", "irgen")


class Workspace(NamedTuple):
    """Data, model, and a folder for the features of the pools."""

    data: MBeir
    model: Genius
    evaluation: Path

    def config(self, id_kind):
        return BaselineConfig(kind=id_kind, epochs=0.1, batch_size=32)

    def fit(self, config, folder, progress=None):
        return fit_baseline(
            self.data,
            self.model,
            config,
            folder=folder,
            evaluation=self.evaluation,
            progress=progress or Silent(),
        )


@pytest.fixture(scope="module")
def workspace(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    return Workspace(MBeir(trained.data), Genius.open(trained.model), folder / "evaluation")


@pytest.mark.parametrize("id_kind", ID_KINDS)
def test_a_search_ranks_different_items_of_the_pool_by_score(workspace, tmp_path, id_kind):
    baseline = workspace.fit(workspace.config(id_kind), tmp_path / "decoder")
    table = baseline.id_table(baseline.numbers[-50:])
    assert table.num_items == 50
    for ranking in baseline.search(table, torch.randn(3, workspace.model.dim), beam=10, k=7):
        assert len(ranking.items) == len(set(ranking.items.tolist())) == 7
        assert (np.diff(ranking.scores) <= 0).all()
        assert ranking.num_ranked >= 7


@pytest.mark.parametrize("id_kind", ["grace-string", "nci"])
def test_the_program_trains_and_measures(workspace, tmp_path, capsys, id_kind):
    words = [str(workspace.data.root), "--model", str(workspace.model.folder), "--json"]
    words += ["--kind", id_kind, "--epochs", "0.1"]
    words += ["--out", str(tmp_path), "--evaluation", str(workspace.evaluation)]
    assert main([*words, "--options.pools", "global", "--options.max-queries", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["method"] for row in rows} == {id_kind}
    assert len(rows) == 8


def test_the_decoder_differs_from_the_models_in_guide_dropout_softmax_and_training(workspace):
    model_config = workspace.model.generator.config
    config = generator_config(workspace.model, workspace.config("irgen"))
    differing = {
        name: getattr(model_config, name) for name in ("guide", "dropout", "softmax", "training")
    }
    assert dataclasses.replace(config, **differing) == model_config
    assert generator_config(workspace.model, BaselineConfig(kind="nci")).head == "per-level"


@pytest.fixture(scope="module")
def id_file(workspace, tmp_path_factory):
    """The model's IDs of all candidates in the format of LETTER."""
    file = tmp_path_factory.mktemp("ids") / "catalogue.index.json"
    words = [str(workspace.model.folder), str(workspace.data.root), "--training"]
    words += ["--out", str(file), "--evaluation", str(workspace.evaluation)]
    assert export_ids(words) == 0
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
    # The vectors are fitted to the codes of the model, so that little is lost.
    expected = np.mean([row.measures["R@10"] for row in exact.rows])
    assert np.mean([row["R@10"] for row in rows]) > 0.7 * expected > 0


def test_a_decoder_of_ids_from_a_file_is_opened_again(workspace, id_file, tmp_path, monkeypatch):
    config = BaselineConfig(kind="file", id_file=str(id_file), epochs=0.1, batch_size=32)
    trained = workspace.fit(config, tmp_path / "decoder")
    monkeypatch.setattr("research.baselines.generative._train", None)  # no second training
    reopened = workspace.fit(config, tmp_path / "decoder")
    query = torch.randn(1, workspace.model.dim)
    rankings = [
        next(baseline.search(baseline.id_table(baseline.numbers[:50]), query, beam=10, k=7))
        for baseline in (trained, reopened)
    ]
    assert rankings[0].items.tolist() == rankings[1].items.tolist()


def test_an_interrupted_training_of_a_baseline_continues(workspace, tmp_path):
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

    with pytest.raises(KeyboardInterrupt):
        workspace.fit(config, tmp_path / "decoder", Interrupting())
    workspace.fit(config, tmp_path / "decoder", Interrupting())
    assert steps[:4] == [1, 2, 3, 3]  # the step whose checkpoint was not written is repeated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "file"}, "--id-file"),
        ({"kind": "dsi", "id_file": "ids.json"}, "--id-file"),
        ({"kind": "dsi", "router": "geometry"}, "no code vectors"),
    ],
)
def test_kinds_and_options_that_contradict_are_refused(workspace, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        workspace.fit(BaselineConfig(**options), tmp_path / "decoder")


def test_help_has_whole_sentences_without_line_breaks_of_the_source(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    sentence = "The vectors of a file's codes are fitted to the embeddings of their items."
    assert sentence in capsys.readouterr().out
