"""What is found first where it is no right answer: the wrong modality, another data set, nearly right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from genius.data.records import TASKS, parse_id
from genius.evaluation.qrels import Qrels
from genius.evaluation.runs import Run
from genius.report.drawing import BLUE, GREY, ORANGE, PURPLE, SKY, VERMILION, Drawing, blank, quiet
from genius.report.evaluated import Evaluated, Pool, System
from genius.report.table import Cell, Table

KINDS: Final = {
    "right": BLUE,
    "wrong modality": VERMILION,
    "wrong data set": PURPLE,
    "right item further down": SKY,
    "another item": ORANGE,
    "nothing found": GREY,
}
"""What the first hit of a query can be, in the order in which it is asked, with its colour."""


class Misses(NamedTuple):
    """One system: what its first hits are, in shares of all queries, every task counting the same."""

    label: str
    shares: Mapping[str, float]


def misses_of(
    system: System, pool: Pool, method: str, modalities: Mapping[str, int], *, label: str
) -> Misses:
    """The mean over seeds and tasks.

    Parameters
    ----------
    modalities
        candidate id -> code of its modality.
    """
    tasks = system.tasks(pool)
    counted = [_shares(one, pool, method, task.name, task.task_id, modalities)
               for one in system.seeds for task in tasks]  # fmt: skip
    return Misses(label, {kind: sum(one[kind] for one in counted) / len(counted) for kind in KINDS})


def misses_table(found: Sequence[Misses]) -> Table:
    """A line for each system."""
    lines: list[tuple[Cell, ...]] = [
        (one.label, *(100 * one.shares[kind] for kind in KINDS)) for one in found
    ]
    return Table(
        name="misses",
        title="What stands at rank 1",
        note="Global pool; share of queries in percent, every task counting the same. A wrong first hit is "
        "counted once: of another modality than the one that is asked for; else of another data set than "
        "every right answer; else with a right answer among the other hits that were kept (50); else another "
        "item.",
        headings=("system", *KINDS),
        lines=lines,
        decimals=1,
    )


def misses_figure(found: Sequence[Misses]) -> Drawing:
    """The same as bars."""
    kinds = [kind for kind in KINDS if any(one.shares[kind] > 0 for one in found)]
    figure = blank(9.0, 1.6 + 0.36 * len(found))
    axes = figure.add_subplot()
    left = [0.0] * len(found)
    places = range(len(found))
    for kind in kinds:
        widths = [100 * one.shares[kind] for one in found]
        axes.barh(places, widths, left=left, color=KINDS[kind], edgecolor="white", height=0.72, label=kind)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [one.label for one in found])
    axes.set_ylim(len(found) - 0.5, -0.5)  # the first on top, no room above or below
    axes.set_xlim(0, 100)
    quiet(axes, x="queries, %", y="")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return Drawing(
        name="misses",
        title="What stands at rank 1",
        alt=f"Shares of {', '.join(kinds)} among the first hits of {len(found)} systems",
        figure=figure,
    )


def kind_of(run: Run, qrels: Qrels, qid: str, *, wanted: int, modalities: Mapping[str, int]) -> str:
    """What one query's first hit is."""
    ranking = run.hits.get(qid, ())
    if not ranking:
        return "nothing found"
    right = {did for did, relevance in qrels[qid].items() if relevance > 0}
    first = ranking[0].did
    if first in right:
        return "right"
    if modalities[first] != wanted:
        return "wrong modality"
    if parse_id(first)[0] not in {parse_id(did)[0] for did in right}:
        return "wrong data set"
    return "right item further down" if any(hit.did in right for hit in ranking) else "another item"


def _shares(
    one: Evaluated, pool: Pool, method: str, task: str, task_id: int, modalities: Mapping[str, int]
) -> dict[str, float]:
    qrels, run = one.qrels(pool, task), one.run(pool, method, task)
    wanted = TASKS[task_id][1].code
    counts = Counter(kind_of(run, qrels, qid, wanted=wanted, modalities=modalities) for qid in qrels)
    return {kind: counts[kind] / len(qrels) for kind in KINDS}
