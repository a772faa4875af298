"""A benchmark's tables as a document that can be read, compared and committed as text."""

from __future__ import annotations

from genius.bench.results import Result
from genius.report.table import Table


def markdown(result: Result) -> str:
    """Every table that can be read, with its note, and what it was measured on."""
    about = result.about
    tables = [
        Table(
            name=table.name,
            title=table.title,
            note=table.note,
            headings=tuple(heading for _, heading in table.columns),
            lines=table.lines(),
        )
        for table in result.tables
        if not table.is_long
    ]
    parts = [f"# {result.title}", *(table.markdown() for table in tables)]
    parts.append(f"{about.machine}; {about.date}; `{about.command}`; seed {about.seed}")
    return "\n\n".join(parts) + "\n"
