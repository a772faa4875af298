"""All published numbers as one document: ``docs/results-published.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from genius.data.mbeir import PAPER_ROWS
from genius.evaluation.published import (
    CAPTION_RESULTS,
    MISPRINTS,
    RESULTS,
    SIZES,
    UNION_SIZE,
    Published,
    misprint_of,
)

_INTRODUCTION: Final = """\
# Published results

Written by `genius repro --list`; a test fails when it is stale. Percent throughout. On M-BEIR R@5, but R@10
for Fashion200K and FashionIQ, where R@k is the share of queries with any right answer among the first k; the
average gives all 16 rows the same weight. *local* is each row's own pool of candidates, *global* the union of
all 16. *released* are measurements of weights that were published later than the paper: those of CLIP_SF were
trained again and score below the paper's, so a reproduction from the published files is compared with them. A
star marks a number that is printed wrong somewhere and corrected here; what is wrong where stands at the end.
"""


def page() -> str:
    """The whole document, Markdown."""
    parts = [_INTRODUCTION]
    for pool in ("local", "global"):
        systems = [one for one in RESULTS if one.pool == pool]
        parts += [
            f"## M-BEIR, {pool} pool\n",
            _by_row([one for one in systems if one.rows]),
            _averages(systems),
        ]
    parts += [
        "## Text to image, Flickr30K and COCO\n",
        _table(
            ("data set", "system", "trained on", "R@1", "R@5", "R@10", "source"),
            (
                (
                    one.dataset,
                    one.system,
                    one.trained_on,
                    *(shown(recall) for recall in one.recalls),
                    one.source,
                )
                for one in CAPTION_RESULTS
            ),
        ),
        "## What M-BEIR's test rows consist of\n",
        _table(
            ("row", "queries", "local pool"),
            [
                *((name, f"{size.queries:,}", f"{size.pool:,}") for name, size in SIZES.items()),
                ("all", f"{sum(size.queries for size in SIZES.values()):,}", f"{UNION_SIZE:,}"),
            ],
        ),
        "## Misprints\n",
        "\n".join(f"- {one} ({one.pool} pool)" for one in MISPRINTS) + "\n",
    ]
    return "\n".join(parts)


def to_json() -> dict[str, object]:
    """The same for scripts."""
    return {
        "rows": [{"name": name, **SIZES[name]._asdict()} for name in PAPER_ROWS],
        "results": [
            {**one._asdict(), "rows": dict(zip(PAPER_ROWS, one.rows, strict=True)) if one.rows else {}}
            for one in RESULTS
        ],
        "captions": [one._asdict() for one in CAPTION_RESULTS],
        "misprints": [one._asdict() for one in MISPRINTS],
    }


def _by_row(systems: Sequence[Published]) -> str:
    """The papers' table: a line for each row, a column for each system."""
    lines = ((name, *(_value(one, name) for one in systems)) for name in PAPER_ROWS)
    return _table(("row", *(_titled(one) for one in systems)), lines)


def _averages(systems: Sequence[Published]) -> str:
    return _table(
        ("system", "kind", "average", "source"),
        ((_titled(one), one.kind, _value(one, "average"), one.source) for one in systems),
    )


def _titled(one: Published) -> str:
    return f"{one.system}, released" if one.weights == "released" else one.system


def _value(one: Published, row: str) -> str:
    value = one.value(row)
    return "" if value is None else f"{shown(value)}{'*' if misprint_of(one, row) else ''}"


def shown(value: float) -> str:
    """With as many decimals as were published, one or two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def _table(header: Sequence[str], lines: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    rows = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*rows, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"
