"""The package of docs/extending.md: installed, trained with and searched with."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from genius_search.data.mbeir import MBeir
from genius_search.encoders import open as opening
from genius_search.errors import UsageError
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.publish import save
from genius_search.recipe import preset
from genius_search.training.fit import fit

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def blocks(language):
    return "\n".join(
        re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Install the package of docs/extending.md; return its module."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "my_parts.py").write_text(blocks("python"))
    info = folder / "my_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1\n")
    groups = tomllib.loads(blocks("toml"))["project"]["entry-points"]
    lines = [
        line
        for group, named in groups.items()
        for line in (f"[{group}]", *map(" = ".join, named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("my_parts")
    del sys.modules["my_parts"]


def test_an_encoder_of_another_package_is_trained_with_indexed_and_searched(
    parts, trained, tmp_path, monkeypatch
):
    tiny = preset("tiny")
    quick = replace(tiny.quantizer.training, max_steps=3, batch_size=16)
    settings = replace(
        tiny,
        quantizer=replace(tiny.quantizer, training=quick),
        generator=replace(tiny.generator, training=quick),
    )
    fitted = fit(MBeir(trained.data), "letters:x", tmp_path / "model", settings, progress=Silent())
    model = Genius.open(tmp_path / "model")
    assert isinstance(model.encoder, parts.LetterEncoder)
    assert model.fingerprint == fitted.fingerprint
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    index = Index.create(tmp_path / "index", pool, model=tmp_path / "model")
    assert len(index.search("a red bag", k=5)) == 5
    saved = save(fitted.folder, tmp_path / "saved", name="me/model")
    assert Genius.open(saved).fingerprint == fitted.fingerprint
    monkeypatch.setattr(opening, "entry_points", lambda **_: EntryPoints([]))
    with pytest.raises(UsageError, match="letters"):
        Genius.open(tmp_path / "model")
