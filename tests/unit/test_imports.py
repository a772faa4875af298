"""What opening and searching an index imports: counted in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from model2vec import StaticModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from genius_search.data.mbeir import MBeir
from genius_search.index.index import Index
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.training.fit import fit

NEVER = ("torch", "transformers", "scipy", "pandas", "fastapi", "PIL")
"""Packages that take long to import, or belong to other tasks."""
OF_OTHERS = ("training", "lab", "serve", "hub", "data", "embed")
"""Our own packages and modules that searching does not need."""

COUNT = """
import json, sys
from pathlib import Path
from types import ModuleType
{code}
own = {{name: module for name, module in sys.modules.items() if name.partition(".")[0] == "genius_search"}}
lines = sum(len(Path(module.__file__).read_text().splitlines()) for module in own.values())
roots = {{name.partition(".")[0] for name in sys.modules}}
print(json.dumps([sorted(own), lines, sorted(roots)]), file=sys.stderr)
"""


class Loaded(NamedTuple):
    own: list[str]
    lines: int
    packages: list[str]


def loaded_by(code: str) -> Loaded:
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", COUNT.format(code=code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Loaded(*json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index of texts by static embeddings, without training."""
    place = tmp_path_factory.mktemp("imports")
    words = {word: number for number, word in enumerate(["red", "green", "anchor", "on", "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106  no password
    tokenizer.pre_tokenizer = Whitespace()
    StaticModel(np.eye(5, 4, dtype=np.float32), tokenizer).save_pretrained(place / "static")
    pool = place / "pool"
    pool.mkdir()
    for number, text in enumerate(["red", "green", "anchor", "red anchor", "green anchor", "red on green"]):
        (pool / f"{number}.txt").write_text(text)
    Index.create(place / "i", pool=pool, encoder=f"text:{place / 'static'}")
    return place / "i"


def check(loaded: Loaded, most_lines: int) -> None:
    assert not set(NEVER) & set(loaded.packages)
    assert not [name for name in loaded.own if name.split(".")[1:2] and name.split(".")[1] in OF_OTHERS]
    assert loaded.lines <= most_lines, f"{len(loaded.own)} modules, {loaded.lines} lines"


def test_opening_and_searching_from_python(index):
    code = f"import genius_search; assert genius_search.Index.open({str(index)!r}).search('red anchor')"
    check(loaded_by(code), 8_150)


def test_the_command_search(index):
    code = f"from genius_search.cli import main; assert main(['search', {str(index)!r}, 'red anchor']) == 0"
    check(loaded_by(code), 9_300)


def test_a_trained_index_of_the_small_encoder(trained, tmp_path):
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    Index.create(tmp_path / "i", model=trained.model, pool=pool)
    code = f"from genius_search.cli import main; assert main(['search', {str(tmp_path / 'i')!r}, 'a red bag']) == 0"
    check(loaded_by(code), 9_550)


def test_a_trained_index_that_is_led_by_a_generator_of_several_blocks(trained, tmp_path):
    shutil.copytree(
        trained.model, tmp_path / "model", ignore=shutil.ignore_patterns("generator", "model.json")
    )
    tiny = preset("tiny")
    training = replace(tiny.generator.training, max_steps=3)
    deep = replace(tiny, generator=replace(tiny.generator, layers=3, training=training))
    fit(MBeir(trained.data), "small", tmp_path / "model", deep, progress=Silent())
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    Index.create(tmp_path / "i", model=tmp_path / "model", pool=pool)
    words = ["search", str(tmp_path / "i"), "a red bag", "--router", "generator", "--candidates", "5"]
    check(loaded_by(f"from genius_search.cli import main; assert main({words!r}) == 0"), 9_550)
