"""A report on disk: one Markdown file to read, every table as CSV and LaTeX, every figure as PNG and SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from genius.artifact import write_file
from genius.report.drawing import Drawing
from genius.report.table import Table

DOCUMENT: Final = "report.md"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, in the order in which it is read."""

    title: str
    about: tuple[str, ...]
    """Paragraphs before all else: what was measured, on which machine."""
    parts: tuple[Table | Drawing, ...]


def write(folder: Path, report: Report) -> list[Path]:
    """Write everything; the files that were written, ``report.md`` first."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "figures").mkdir(exist_ok=True)
    blocks = [f"# {report.title}", *report.about]
    files: list[tuple[Path, bytes]] = []
    for part in _named(report.parts):
        match part:
            case Table():
                files += [
                    (folder / "tables" / f"{part.name}.csv", part.csv().encode()),
                    (folder / "tables" / f"{part.name}.tex", part.latex().encode()),
                ]
                blocks.append(part.markdown())
            case Drawing():
                files += [
                    (folder / "figures" / f"{part.name}.png", part.save("png")),
                    (folder / "figures" / f"{part.name}.svg", part.save("svg")),
                ]
                blocks += [f"![{part.alt}](figures/{part.name}.png)", f"*{part.title}.*"]
    files.insert(0, (folder / DOCUMENT, ("\n\n".join(blocks) + "\n").encode()))
    for path, data in files:
        write_file(path, data)
    return [path for path, _ in files]


def _named(parts: Sequence[Table | Drawing]) -> Iterator[Table | Drawing]:
    """Each with files of its own: the second table of a name is ``name-2``."""
    seen: Counter[tuple[type, str]] = Counter()
    for part in parts:
        seen[type(part), part.name] += 1
        count = seen[type(part), part.name]
        yield part if count == 1 else replace(part, name=f"{part.name}-{count}")


def appendix(lines: Sequence[tuple[str, str, str, str, str]]) -> Table:
    """Every row with what made it."""
    return Table(
        name="rows",
        title="What made each row",
        headings=("row", "seed", "state", "seconds", "commands"),
        lines=lines,
        text_columns=5,
    )
