"""The code is as large as docs/design.md says: it grows by decision, not by accident."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DESIGN = ROOT / "docs" / "design.md"
SLACK = 0.15
HEAD = "| part | lines |\n|---|---|\n"
ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \|$", re.MULTILINE)


def lines(folder: Path, *patterns: str) -> int:
    files = {path for pattern in patterns for path in folder.glob(pattern)}
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def measured() -> dict[str, int]:
    """Lines of each part as they stand; of Python, where nothing else is named."""
    product = ROOT / "src" / "genius_search"
    sizes = {"src/genius_search/*.py": lines(product, "*.py")}
    for folder in sorted(path.parent for path in product.glob("*/__init__.py")):
        sizes[f"src/genius_search/{folder.name}"] = lines(folder, "**/*.py")
    sizes["src, Python"] = sum(sizes.values())
    sizes["src, C"] = lines(product, "**/*.c")
    sizes["src, the page"] = lines(product / "serve" / "page", "*.js", "*.css", "*.html")
    sizes["research"] = lines(ROOT / "research", "**/*.py")
    sizes["tests"] = lines(ROOT / "tests", "**/*.py")
    return sizes


def table() -> str:
    return "\n".join(f"| `{part}` | {size:,} |" for part, size in measured().items())


def test_no_part_differs_from_the_table_of_sizes() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    told = {part: int(size.replace(",", "")) for part, size in ROW.findall(text)}
    found = measured()
    assert told.keys() == found.keys(), f"python tests/test_size.py writes this table:\n{table()}"
    wrong = {
        part: size for part, size in found.items() if abs(size - told[part]) > SLACK * told[part]
    }
    assert not wrong, (
        f"the table differs from {wrong}; python tests/test_size.py writes this one:\n{table()}"
    )


if __name__ == "__main__":
    before, _, after = DESIGN.read_text(encoding="utf-8").partition(HEAD)
    after = after[after.index("\n\n") :]
    DESIGN.write_text(before + HEAD + table() + after, encoding="utf-8")
