"""What can be wrong with a data set, counted, with the first few examples of each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

from genius.data.lines import BadLines

Severity = Literal["error", "warning"]
Kind = Literal[
    "bad-line",
    "broken-image",
    "conflicting-id",
    "duplicate-id",
    "layout",
    "missing-image",
    "missing-instruction",
    "missing-qrels",
    "no-images",
    "no-instructions",
    "no-positives",
    "oversized-image",
    "positives-outside-global-pool",
    "positives-outside-local-pool",
    "qrels-disagree",
    "some-positives-outside-global-pool",
    "some-positives-outside-local-pool",
    "task-mismatch",
]

_WARNINGS: Final = frozenset[Kind](
    {
        "missing-qrels",
        "no-images",
        "no-instructions",
        "no-positives",
        "some-positives-outside-global-pool",
        "some-positives-outside-local-pool",
    }
)

NUM_EXAMPLES: Final = 5
"""How many of a kind are named; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how often, and the first few by name."""

    severity: Severity
    kind: Kind
    count: int
    examples: tuple[str, ...]


@dataclass(slots=True)
class Findings:
    """Collects what is wrong."""

    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[str]] = field(default_factory=dict)

    def add(self, kind: Kind, example: str, count: int = 1) -> None:
        """Count one more of a kind, or several; the first few are remembered."""
        self.counts[kind] += count
        kept = self.examples.setdefault(kind, [])
        if len(kept) < NUM_EXAMPLES:
            kept.append(example)

    def add_bad_lines(self, bad: BadLines) -> None:
        """Count the lines of a file that could not be used."""
        for problem in bad.problems[:NUM_EXAMPLES]:
            self.add("bad-line", str(problem))
        self.counts["bad-line"] += bad.count - len(bad.problems[:NUM_EXAMPLES])

    def all(self) -> tuple[Finding, ...]:
        """Errors first, each kind in the order of the alphabet."""
        found = [
            Finding("warning" if kind in _WARNINGS else "error", kind, count, tuple(self.examples[kind]))
            for kind, count in self.counts.items()
            if count
        ]
        return tuple(sorted(found, key=lambda finding: (finding.severity, finding.kind)))
