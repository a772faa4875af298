"""What ``genius bench decode`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genius.bench.agreement import Agreement
from genius.bench.profile import ProfileRow
from genius.bench.results import Table


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """One way of searching."""

    variant: str
    cpu_ms: float
    """A query."""
    rounds_cpu_ms: tuple[float, ...]
    cheaper: float | None
    """Than Hugging Face's generate, so many times; nothing if that was left out."""
    constraint_share: float | None
    """Of the time: what keeps to IDs that exist."""
    other_share: float | None
    """What is neither the decoder's nor the constraint's: choosing and moving beams, ranking items."""
    full_share: float | None
    """Of the IDs that the full search finds: those among the leaves."""
    leaves: float | None
    """IDs under the beams when it ended, on average."""


@dataclass(frozen=True, kw_only=True)
class AgreementRow:
    """Rankings beside those of Hugging Face's ``generate``."""

    variant: str
    compared: int
    identical: int
    tied: int
    """Different only among IDs whose scores differ by 1e-4 or less."""
    share: float


def decode_table(rows: Sequence[DecodeRow], *, title: str, measured: str) -> Table:
    """What each way of searching costs."""
    return Table(
        name="decode",
        title=title,
        note=f"{measured}. CPU-milliseconds a query on one core, the median of rounds in turns. Constraint: "
        "share of the time that keeps to IDs that exist; other: choosing and moving beams, ranking items; "
        "what is left is the decoder's. Leaves: IDs under the beams at the end; of full: share of the IDs of "
        "the full search with level scores that are among them.",
        columns=(
            ("variant", "variant"),
            ("cpu_ms", "CPU-ms a query"),
            ("cheaper", "times cheaper than HF"),
            ("constraint_share", "constraint"),
            ("other_share", "other"),
            ("leaves", "leaves"),
            ("full_share", "of full"),
        ),
        brief=(
            ("variant", "variant"),
            ("cpu_ms", "CPU-ms"),
            ("cheaper", "times cheaper"),
            ("leaves", "leaves"),
            ("full_share", "of full"),
        ),
        rows=rows,
    )


def agreement_table(found: Mapping[str, Agreement]) -> Table:
    """Whether rankings are those of ``generate``."""
    rows = [
        AgreementRow(
            variant=name, compared=one.compared, identical=one.identical, tied=one.tied, share=one.share
        )
        for name, one in found.items()
    ]
    return Table(
        name="agreement",
        title="The same ranking as Hugging Face's generate",
        note="Queries whose IDs are the same in the same order; tied: different only among IDs whose scores "
        "differ by 1e-4 or less.",
        columns=(
            ("variant", "variant"),
            ("compared", "queries"),
            ("identical", "identical"),
            ("tied", "tied"),
            ("share", "share"),
        ),
        rows=rows,
    )


def profile_table(rows: Sequence[ProfileRow], *, title: str, queries: int) -> Table:
    """Where a single query's time goes."""
    return Table(
        name="profile",
        title=title,
        note=f"CPU-microseconds, the mean of {queries} queries, one at a time. Watching itself takes time, "
        "which the last two lines compare.",
        columns=(
            ("part", "part"),
            ("calls", "calls"),
            ("cpu_us", "CPU-µs a query"),
            ("share", "share"),
        ),
        rows=rows,
    )
