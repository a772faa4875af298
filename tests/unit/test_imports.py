"""What opening and searching an index imports: counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from model2vec import StaticModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from genius_search.index.index import Index

NEVER = ("torch", "transformers", "scipy", "pandas", "fastapi", "PIL")
"""Packages that take long to import, or belong to other tasks."""
OF_OTHERS = ("training", "evaluate", "serve", "hub", "data")
"""Our own packages and modules that searching does not need."""

COUNT = """
import json, sys
{code}
own = [name for name in sys.modules if name.partition(".")[0] == "genius_search"]
roots = {{name.partition(".")[0] for name in sys.modules}}
print(json.dumps([sorted(own), sorted(roots)]), file=sys.stderr)
"""


class Loaded(NamedTuple):
    own: list[str]
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
    for number, text in enumerate(
        ["red", "green", "anchor", "red anchor", "green anchor", "red on green"]
    ):
        (pool / f"{number}.txt").write_text(text)
    Index.create(place / "i", pool, encoder=f"text:{place / 'static'}")
    return place / "i"


def check(loaded: Loaded) -> None:
    assert not set(NEVER) & set(loaded.packages)
    assert not [
        name for name in loaded.own if name.split(".")[1:2] and name.split(".")[1] in OF_OTHERS
    ]


def test_opening_and_searching_from_python(index):
    code = f"import genius_search; assert genius_search.Index.open({str(index)!r}).search('red anchor')"
    check(loaded_by(code))


def test_the_command_search(index):
    code = f"from genius_search.cli import main; assert main(['search', {str(index)!r}, 'red anchor']) == 0"
    check(loaded_by(code))


def test_following_folders_in_which_nothing_is_new_opens_no_encoder(index):
    (index.parent / "pool" / "0.txt").touch()
    code = (
        f"from genius_search.cli import main; assert main(['index', 'sync', {str(index)!r}]) == 0"
    )
    assert not {"torch", "model2vec"} & set(loaded_by(code).packages)
