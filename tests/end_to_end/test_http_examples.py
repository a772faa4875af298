"""The examples of docs/http.md and docs/serve.md, run against a service."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genius_search.index.index import Index

from .test_serve_kill import serving

PAGES = "".join(
    (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    for name in ("http.md", "serve.md")
)
# Blocks below a comment such as "<!-- not run: needs a network -->" are not run.
EXAMPLES = re.findall(r"(?<!-->\n)^```bash\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
STRICT = """
set -euo pipefail
curl() { command curl --silent --show-error --fail-with-body --max-time 60 "$@"; echo; }
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_example_is_answered(trained, tmp_path):
    pool = next((trained.data / "cand_pool" / "global").glob("*test*.jsonl"))
    Index.create(tmp_path / "photos.index", pool, model=trained.model)
    Image.effect_noise((300, 200), 90).convert("RGB").save(tmp_path / "umbrella.jpg")
    with serving(tmp_path / "photos.index") as (_, url):
        assert len(EXAMPLES) >= 7
        for example in EXAMPLES:
            script = STRICT + example.replace("localhost:8000", url.removeprefix("http://"))
            process = subprocess.run(  # noqa: S603
                ["bash", "-c", script],  # noqa: S607
                cwd=tmp_path,
                env={**os.environ, "KEY": "anything"},
                capture_output=True,
                text=True,
                check=False,
            )
            output = process.stdout[-1000:] + process.stderr
            assert process.returncode == 0, f"{example}\n{output}"
        with Image.open(tmp_path / "thumbnail.jpg") as thumbnail:
            assert thumbnail.size == (128, 85)


def test_the_program_with_httpx_fills_filters_counts_changes_and_deletes(tmp_path, capsys):
    [program] = re.findall(r"^```python\n(import httpx.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
    Index.from_vectors(tmp_path / "kites.index", np.eye(3, dtype=np.float32))
    with serving(tmp_path / "kites.index") as (_, url):
        exec(program.replace("http://localhost:8000", url), {})  # noqa: S102  our page
    facets = {"price:0,20,40": [{"value": "0..20", "items": 1}, {"value": "20..40", "items": 2}]}
    hits = ["kite 2", "kite 3"]
    assert capsys.readouterr().out.splitlines() == [f"{hits} {facets}", "{'items': 1}"]
