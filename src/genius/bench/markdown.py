"""A benchmark's tables as a document that can be read, compared and committed as text."""

from __future__ import annotations

from genius.bench.results import Result, Table


def markdown(result: Result) -> str:
    """Every table that can be read, with its note, and what it was measured on."""
    about = result.about
    parts = [f"# {result.title}", *(_table(table) for table in result.tables if not table.is_long)]
    parts.append(f"{about.machine}; {about.date}; `{about.command}`; seed {about.seed}")
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [
        [heading for _, heading in table.columns],
        ["---", *("---:" for _ in table.columns[1:])],
        *table.lines(),
    ]
    rows = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"## {table.title}\n\n{table.note}\n\n{rows}"
