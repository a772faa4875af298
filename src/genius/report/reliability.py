"""Whether scores can be trusted: is 0.8 right 8 times of 10, and are sure answers right more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64
from matplotlib.axes import Axes
from scipy import special, stats

from genius.evaluation.reliability import Told, calibration_error, reliability
from genius.report.drawing import COLOURS, GREY, Drawing, blank, quiet
from genius.report.evaluated import Pool, System
from genius.report.table import Cell, Table

FEW: Final = 20
"""A bin with fewer queries is drawn without a claim: hollow."""
PROBABILITIES: Final = ("generative",)
"""Methods whose scores are sums of log-probabilities, if they were normalised over a level."""


class Answers(NamedTuple):
    """The first hits of one system: how sure it was, and whether they are right."""

    label: str
    method: str
    scores: Float64[np.ndarray, " queries"]
    right: Bool[np.ndarray, " queries"]
    promised: Float64[np.ndarray, " queries"] | None
    """Probability of the first hit among the hits that were kept, where scores are log-probabilities."""

    @property
    def sureness(self) -> Float64[np.ndarray, " queries"]:
        """What says how sure an answer is: the promise, or else the score."""
        return self.scores if self.promised is None else self.promised


def answers_of(system: System, pool: Pool, method: str, *, label: str) -> Answers:
    """Of all seeds and tasks together; queries without any hit are left out."""
    scores, right, promised = [], [], []
    for one in system.seeds:
        for task in system.tasks(pool):
            qrels = one.qrels(pool, task.name)
            for qid, ranking in one.run(pool, method, task.name).hits.items():
                if ranking:
                    scores.append(ranking[0].score)
                    right.append(qrels[qid].get(ranking[0].did, 0) > 0)
                    promised.append(first_among([hit.score for hit in ranking]))
    return Answers(
        label,
        method,
        np.array(scores, dtype=np.float64),
        np.array(right, dtype=bool),
        np.array(promised, dtype=np.float64) if method in PROBABILITIES else None,
    )


def first_among(scores: Sequence[float]) -> float:
    """The first of some log-probabilities as a share of all of them.

    A sum over levels by itself is next to nothing: most IDs that could be written do not exist.
    """
    return math.exp(scores[0] - float(special.logsumexp(scores)))


def reliability_table(found: Sequence[Answers]) -> Table:
    """Figures of each."""
    lines: list[tuple[Cell, ...]] = []
    for one in found:
        promised = one.promised
        lines.append(
            (
                one.label,
                one.method,
                100 * float(one.right.mean()),
                None if promised is None else 100 * float(promised.mean()),
                None
                if promised is None
                else 100 * calibration_error(reliability(_told(promised, one.right))),
                None if (area := separation(one.sureness, one.right)) is None else 100 * area,
                100 * accuracy_of_surest(one, 0.5),
            )
        )
    return Table(
        name="reliability",
        title="Reliability of scores",
        note="Of first hits, in percent. Promised: the mean probability of the first hit among those that "
        "were kept (50). Calibration error: "
        "mean distance between promise and share of right answers, by tenths of the promise. "
        "Separation: how often a right first hit has a higher promise (or score) than a wrong one (the area "
        "under the ROC curve; 50 is chance). Only sums of log-probabilities promise anything.",
        headings=("system", "method", "right", "promised", "calibration error", "separation",
                  "right among the surest half"),
        lines=lines,
        text_columns=2,
    )  # fmt: skip


def reliability_figure(found: Sequence[Answers]) -> Drawing:
    """Promise against truth, and how many answers are right among the surest."""
    figure = blank(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    left.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1)
    for number, one in enumerate(found):
        promised = one.promised
        if promised is not None:
            _draw_promises(left, promised, one.right, COLOURS[number], one.label)
        order = np.argsort(-one.sureness, kind="stable")
        kept = np.arange(1, len(order) + 1)
        share = np.cumsum(one.right[order]) / kept
        begin = max(1, len(order) // 20)  # the first few are noise
        right.plot(
            100 * kept[begin:] / len(order),
            100 * share[begin:],
            color=COLOURS[number],
            label=f"{one.label}, {one.method}",
        )
    quiet(left, x="promised probability, %", y="right first hits, %")
    left.set_title("What is promised", loc="left", fontsize=11)
    quiet(right, x="queries answered, the surest first, %", y="right first hits, %")
    right.set_title("Answering only when sure", loc="left", fontsize=11)
    right.legend(frameon=False, loc="lower left", fontsize=9)
    left.legend(frameon=False, loc="upper left", fontsize=9)
    return Drawing(
        name="reliability",
        title="Reliability of scores",
        alt="Share of right first hits against the promised probability, and against the share of queries "
        "that are answered",
        figure=figure,
    )


def separation(scores: Float64[np.ndarray, " queries"], right: Bool[np.ndarray, " queries"]) -> float | None:
    """Mann and Whitney's statistic (scipy's) as a share of the pairs; nothing without both kinds."""
    if right.all() or not right.any():
        return None
    statistic = stats.mannwhitneyu(scores[right], scores[~right]).statistic
    return float(statistic) / (int(right.sum()) * int((~right).sum()))


def accuracy_of_surest(answers: Answers, share: float) -> float:
    """Right answers among the surest so many."""
    order = np.argsort(-answers.sureness, kind="stable")
    return float(answers.right[order[: max(1, round(share * len(order)))]].mean())


def _told(promised: Float64[np.ndarray, " queries"], right: Bool[np.ndarray, " queries"]) -> Told:
    return Told(promised, right, np.ones(len(promised)))


def _draw_promises(
    axes: Axes,
    promised: Float64[np.ndarray, " queries"],
    right: Bool[np.ndarray, " queries"],
    colour: str,
    label: str,
) -> None:
    """A point for each bin, with the interval of its share (Wilson's, 95 %)."""
    x, y, sizes = map(np.array, zip(*reliability(_told(promised, right)), strict=True))
    bounds = [
        stats.binomtest(round(share * size), round(size)).proportion_ci(method="wilson")
        for share, size in zip(y, sizes, strict=True)
    ]
    errors = np.abs([[bound.low, bound.high] for bound in bounds] - y[:, None]).T
    axes.errorbar(100 * x, 100 * y, yerr=100 * errors, color=colour, marker="o", capsize=2, label=label)
    few = sizes < FEW
    axes.plot(
        100 * x[few],
        100 * y[few],
        color=colour,
        marker="o",
        markerfacecolor="white",
        linestyle="none",
        zorder=5,
    )
