"""A report as a page of the documentation: its Markdown, and its figures small enough for a repository.

Usage: python benchmarks/publish.py REPORT docs/lab/results.md
REPORT is what `genius report --out` wrote. The figures go into a folder that has the page's name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from PIL import Image
from research.report.report import DOCUMENT

WIDTH = 1600
"""Pixels; a page shows no more."""
COLOURS = 128


def publish(report: Path, page: Path) -> None:
    """Write the page, and its figures beside it."""
    text = (report / DOCUMENT).read_text(encoding="utf-8")
    figures = page.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    # Only those that are shown: a folder may hold the figures of an earlier report, too.
    for name in sorted(set(re.findall(r"\]\(figures/([^)]+\.png)\)", text))):
        path = report / "figures" / name
        figure = Image.open(path).convert("RGB")
        figure.thumbnail((WIDTH, figure.height))
        figure.quantize(COLOURS).save(figures / path.name, optimize=True)
    page.write_text(text.replace("](figures/", f"]({figures.name}/"), encoding="utf-8")


if __name__ == "__main__":
    publish(*map(Path, sys.argv[1:]))
