"""A type checker and an editor know every option of the Python interface."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from mypy import api

from genius_search import Index, SearchRequest
from genius_search.index.request import SearchOptions

WRONG_CALLS = [
    'index.search("a", kk=3)',
    'index.search("a", where=5)',
    'index.search("a", modality="imag")',
    'index.search("a", combine="all")',
    'index.search(["a", "b"], k="3")',
    'index.search(text="a")',
    'Index.create("folder", ["a"], embeddings="fuse")',
    'Index.create("folder", vectors=[[0.0]])',
    "index.add(5)",
    'index.learn("id", "a", imag="a.png")',
]
RIGHT_CALLS = [
    'hits: Hits = index.search("a", image="a.png", k=3, modality="image", where={"a": {"<": 2}})',
    'many: list[Hits] = index.search(["a", "b"], k=3, combine="any")',
    'request: Hits = index.search(SearchRequest(text="a", modality="text"))',
    'both: list[Hits] = index.search([SearchRequest(text="a")], config=SearchConfig(beam=20))',
    'made: Index = Index.create("folder", "Pictures", encoder="clip:models/clip")',
    'vectors: Index = Index.from_vectors("folder", [[0.0, 1.0]], ids=["a"], modalities="image")',
    'added: int = index.add("more").added + index.last_change.replaced',
    'index.learn("id", "a", image="a.png")',
    "good: bool | None = hits.good_match",
    'threshold: float | None = index.calibrate("pairs.jsonl").threshold',
]
HEAD = "from genius_search import Hits, Index, SearchConfig, SearchRequest\n\n"
FUNCTION = "def use(index: Index) -> None:\n"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[int, str]:
    """The first error in each line of a user's file: the wrong calls, then the right ones."""
    folder = tmp_path_factory.mktemp("user")
    calls = "".join(f"    {call}\n" for call in [*WRONG_CALLS, *RIGHT_CALLS])
    (folder / "user.py").write_text(HEAD + FUNCTION + calls)
    source = Path(inspect.getfile(Index)).parents[2]
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {source}\nfollow_untyped_imports = false\n"
        "[mypy-torch.*,transformers.*,ray.*,pandas.*,PIL.*,pydantic.*,fastapi.*,tyro.*]\n"
        "follow_imports = skip\nignore_missing_imports = true\n"
    )
    output, problems, _ = api.run(
        [
            str(folder / "user.py"),
            "--config-file",
            str(folder / "mypy.ini"),
            "--cache-dir",
            str(folder / "cache"),
            "--hide-error-context",
        ]
    )
    assert not problems
    errors: dict[int, str] = {}
    for line, message in re.findall(r"user\.py:(\d+): error: (.*)", output):
        errors.setdefault(int(line), message)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WRONG_CALLS)), ids=WRONG_CALLS.__getitem__)
def test_a_wrong_call_is_an_error(report, number):
    assert number + 4 in report


@pytest.mark.slow
def test_right_calls_are_none(report):
    assert {line: message for line, message in report.items() if line > 3 + len(WRONG_CALLS)} == {}


def test_an_editor_lists_the_options():
    """Editors and help() show the parameters of the signature, so they stand there by name."""
    shown = inspect.signature(Index.search).parameters
    assert list(shown)[2:] == list(SearchOptions.__annotations__)
    fields = inspect.signature(SearchRequest).parameters
    assert {name: shown[name].default for name in list(shown)[2:-1]} == {
        name: fields[name].default for name in list(shown)[2:-1]
    }


def test_jedi_lists_the_options():
    jedi = pytest.importorskip("jedi")
    code = "from genius_search.index.index import Index\nIndex.open('x').search("
    names = {completion.name for completion in jedi.Script(code).complete()}
    assert {f"{name}=" for name in SearchOptions.__annotations__} <= names
