"""Models that are trained with ID schemes of other papers, indexed and searched like any other."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace

import pytest

from genius_search import Index
from genius_search.cli import main
from genius_search.data.mbeir import MBeir
from genius_search.data.pairs import Pairs
from genius_search.errors import UsageError
from genius_search.lab.baselines.ids import SCHEMES
from genius_search.lab.evaluate import evaluate
from genius_search.lab.settings import EvaluationConfig
from genius_search.model import Genius
from genius_search.nn.quantizer import load_quantizer
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.training.embed import TrainingRecords
from genius_search.training.fit import fit_generator, reopen_embedded


@pytest.fixture(scope="module")
def pools(trained):
    folder = trained.data / "cand_pool" / "global"
    return folder / "mbeir_union_train_cand_pool.jsonl", folder / "mbeir_union_val_cand_pool.jsonl"


def test_irgen_from_fit_to_search_on_the_command_line(trained, pools, tmp_path, capsys):
    model, index = tmp_path / "model", tmp_path / "index"
    for part in ("encoder", "features", "quantizer"):  # as an earlier run left them
        shutil.copytree(trained.model / part, model / part)
    commands = (
        f"fit {trained.data} --preset tiny --encoder small --ids irgen --out {model}",
        f"index create {index} --model {model} --pool {pools[1]}",
    )
    for command in commands:
        assert main(command.split()) == 0
    capsys.readouterr()
    assert main(["search", str(index), "a red bag", "-k", "5", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert len({hit["id"] for hit in hits}) == 5
    assert {len(hit["codes"]) for hit in hits} == {4}


@pytest.fixture(scope="module")
def fit_with(trained, tmp_path_factory):
    """Train a model with a scheme, on the encoder and the quantizer of the shared one."""

    @functools.cache
    def fit_with(name):
        folder = tmp_path_factory.mktemp(name)
        for part in ("features", "quantizer"):
            shutil.copytree(trained.model / part, folder / part)
        settings = preset("tiny").generator
        settings = replace(settings, training=replace(settings.training, max_steps=3, batch_size=16))
        records = TrainingRecords(MBeir(trained.data))
        encoder, features = reopen_embedded(trained.model)
        fit_generator(
            records,
            encoder,
            Pairs(records.lines(), *features),
            load_quantizer(folder / "quantizer"),
            folder,
            settings,
            ids=name,
            progress=Silent(),
        )
        return folder

    return fit_with


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "genius"])
def test_a_model_with_the_scheme_indexes_and_searches_items(fit_with, pools, tmp_path, name):
    folder = fit_with(name)
    model = Genius.open(folder)
    train_pool, val_pool = pools
    index, _ = Index.create(tmp_path / "known", model=folder, pool=train_pool)
    hits = index.search(text="a red bag", k=5)
    assert len(hits) == len({hit.id for hit in hits}) == 5
    assert all(len(hit.codes) == len(model.sizes) for hit in hits)
    if name in ("grace-numeric", "grace-string"):
        with pytest.raises(UsageError, match=r"items, for example .* have no ID"):
            Index.create(tmp_path / "new", model=folder, pool=val_pool)
        assert not (tmp_path / "new" / "index.json").exists()
    else:
        index, _ = Index.create(tmp_path / "new", model=folder, pool=val_pool)
        assert len(index.search(text="a red bag", k=5)) == 5


def test_a_model_with_the_scheme_is_evaluated_without_methods_that_need_code_vectors(
    fit_with, trained, tmp_path
):
    data, model = MBeir(trained.data), Genius.open(fit_with("dsi"))
    config = EvaluationConfig(pools=("global",), split="val", max_queries=2, beam=10)
    result = evaluate(data, model, config, tmp_path, progress=Silent())
    methods = {row.method for row in result.rows}
    assert "generative" in methods
    assert not {"exact-codes", "generative+codes", "routing+codes"} & methods
    with pytest.raises(UsageError, match=r"'dsi'.*exact-codes"):
        evaluate(data, model, replace(config, methods=("exact-codes",)), tmp_path, progress=Silent())
