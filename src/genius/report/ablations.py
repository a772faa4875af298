"""What each part of the method is worth: one thing changed, everything else the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from genius.report.drawing import COLOURS, MARKERS, Drawing, blank, quiet
from genius.report.evaluated import Pool, System
from genius.report.significance import Pair, Tested, compared, shown_p
from genius.report.table import Cell, Table

POOL: Final[Pool] = "global"
TITLES: Final = {
    "ablations": "Ablations",
    "decoder": "The decoder's size",
    "codes": "Codebooks: codes of a level × levels",
}
SHOWN: Final = (
    ("generative", "R@1"),
    ("generative", "R@5"),
    ("generative+raw", "R@5"),
    ("exact-codes", "R@1"),
    ("exact-codes", "R@5"),
    ("exact-fused", "R@5"),
)
TESTED: Final = ("generative", "R@5")
"""What differences are tested on: the paper's measure of the paper's search."""


def ablation_table(kind: str, whole: System | None, changed: Sequence[System]) -> Table | None:
    """The whole system, and each with one change; nothing where nothing was changed.

    Without the whole system, which failed or was not made, there is nothing to compare with.
    """
    changed = [system for system in changed if TESTED[0] in system.methods(POOL)]
    if not changed:
        return None
    method, measure = TESTED
    rows: list[tuple[System, Tested | None]] = [(system, None) for system in changed]
    if whole is not None:
        before = whole.per_query(POOL, method, measure)
        pairs = [
            Pair(system.title, whole.title, measure, (system.per_query(POOL, method, measure), before))
            for system in changed
        ]
        rows = [(whole, None), *zip(changed, compared(pairs), strict=True)]
    lines: list[tuple[Cell, ...]] = []
    for system, test in rows:
        difference = None if test is None else f"{100 * test.found.difference:+.1f}".replace("-", "−")
        lines.append(
            (
                system.title,
                len(system.seeds),
                *(system.average(POOL, *one) for one in SHOWN),
                difference,
                None if test is None else shown_p(test.p),
            )
        )
    return Table(
        name=kind,
        title=TITLES[kind],
        note="Mean over the tasks of the global pool, in percent, ± standard deviation of seeds. "
        + (
            "The row that these are changes of is not there, so nothing is compared."
            if whole is None
            else f"Difference: {measure} of {method} against the first line, in points; p of the paired "
            "randomisation test, corrected by Holm for the lines of this table; – where other queries were "
            "answered."
        ),
        headings=(
            "system",
            "seeds",
            *(f"{method} {measure}" for method, measure in SHOWN),
            "difference",
            "p",
        ),
        lines=lines,
    )


def beam_table(beams: Sequence[System]) -> Table | None:
    """Recall by the beam's width."""
    beams = _in_order(beams)
    methods = _by_beam(beams)
    if not methods:
        return None
    return Table(
        name="beam",
        title="The beam's width",
        note="Mean over all tasks of the global pool, in percent. Re-ranking compares the items under the "
        "beam's IDs, so its number of candidates grows with the beam.",
        headings=(
            "beam",
            *(f"{method} {measure}" for method in methods for measure in ("R@1", "R@5")),
            "touched",
        ),
        lines=[
            (
                str(system.seeds[0].beam),
                *(system.average(POOL, method, measure) for method in methods for measure in ("R@1", "R@5")),
                _touched(system, methods[-1]),
            )
            for system in beams
        ],
    )


def beam_figure(beams: Sequence[System]) -> Drawing | None:
    """The same drawn, the seeds' spread as bars."""
    beams = _in_order(beams)
    shown = [(method, measure) for method in _by_beam(beams) for measure in ("R@1", "R@5")]
    if len(beams) < 2 or not shown:
        return None
    figure = blank()
    axes = figure.add_subplot()
    widths = [system.seeds[0].beam for system in beams]
    for number, (method, measure) in enumerate(shown):
        found = [
            (width, estimate)
            for width, system in zip(widths, beams, strict=True)
            if (estimate := system.average(POOL, method, measure)) is not None
        ]
        axes.errorbar(
            [width for width, _ in found],
            [one.value for _, one in found],
            yerr=[one.sd or 0.0 for _, one in found],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
            capsize=3,
            label=f"{method}, {measure}",
        )
    axes.set_xscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    quiet(axes, x="beam: IDs kept at each level", y="mean over tasks, %")
    axes.legend(frameon=False, loc="best")
    return Drawing(
        name="beam",
        title="Recall and the beam's width",
        alt="R@1 and R@5 against the beam's width, with and without re-ranking",
        figure=figure,
    )


def _in_order(beams: Sequence[System]) -> list[System]:
    found = [system for system in beams if system.methods(POOL)]
    return sorted(found, key=lambda system: system.seeds[0].beam)


def _by_beam(beams: Sequence[System]) -> list[str]:
    """Methods that a beam decides, and that all of these were evaluated with."""
    return [
        method
        for method in (beams[0].methods(POOL) if beams else ())
        if method.startswith(("generative", "routing"))
        and all(method in system.methods(POOL) for system in beams)
    ]


def _touched(system: System, method: str) -> float:
    rows = [row for one in system.seeds for row in one.rows if (row.pool, row.method) == (POOL, method)]
    return sum(row.candidates_touched for row in rows) / len(rows)
