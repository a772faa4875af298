"""The notebooks in docs/notebooks/ run without a network, and are stored without outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genius_search.errors import EXTRAS

NOTEBOOKS = sorted(Path(__file__).parents[2].glob("docs/notebooks/*.ipynb"))
PATH = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
)
"""Notebooks import `research` from the clone."""
RUN = """
import ast, json, sys

names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            print(getattr(value, "_repr_html_", value.__repr__)())
"""
OUTPUTS = {"photos": "PIL.Image.Image", "texts": "bicycle's chain", "train": "<td>"}
"""A part of the output of each notebook."""


def read(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))


def missing_packages(notebook):
    """Return packages that are not installed, of the extras that a notebook names."""
    text = "".join(line for cell in read(notebook)["cells"] for line in cell["source"])
    extras = set(",".join(re.findall(r"genius-search\[([\w,]+)\]", text)).split(",")) - {""}
    assert extras <= set(EXTRAS.values())
    return [
        package
        for package, extra in EXTRAS.items()
        if extra in extras and importlib.util.find_spec(package) is None
    ]


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem != "texts" else [])
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(notebook, tmp_path):
    if missing := missing_packages(notebook):
        pytest.skip(f"{notebook.name} needs {', '.join(missing)}")
    process = subprocess.run(  # noqa: S603  another process, because this one checks types
        [sys.executable, "-c", RUN, notebook],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATH},
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert OUTPUTS[notebook.stem] in process.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook):
    code = [cell for cell in read(notebook)["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
