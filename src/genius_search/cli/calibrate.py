"""``genius calibrate``: probabilities in place of scores."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from genius_search.cli.options import OptionalFile, ValidationOptions, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table

if TYPE_CHECKING:
    from genius_search.calibrate import Calibrated, Predictions


@command
class Calibrate(ValidationOptions):
    """Calibrate an index with validation queries, so that hits have the probability of being right.

    The items of the index must be candidates of the data set, with their ids. A search can then say that it
    has no good match. Half of the queries are used to fit, the other half to measure. Calibrate again after
    `genius tune`, and when the index has grown much.
    """

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Share of good matches that should be right; sets the threshold of a good match."""

    absent: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.2
    """Expected share of queries without an answer in the index."""

    queries: int = 0
    """Queries of each row at most; 0 means all."""

    figure: OptionalFile = None
    """Draw predicted against observed probabilities, as .svg or .png; the numbers are written as .json."""

    def run(self) -> None:
        """Fit, measure, print and store the calibration."""
        from genius_search.calibrate import CalibrateConfig, calibrate
        from genius_search.data.mbeir import MBeir
        from genius_search.index.settings import to_dict

        config = CalibrateConfig(
            precision=self.precision,
            absent=self.absent,
            split=self.split,
            rows=self.rows,
            queries=self.queries,
            seed=self.seed,
        )
        if self.figure is not None:
            check_figure_path(self.figure)
        with TerminalProgress() as progress:
            index = self.open_index()
            found = calibrate(index, MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_calibration(found.calibration, wait_seconds=self.wait)
        facts = to_dict(found.calibration)
        if self.figure is not None:
            from genius_search.artifact import write_json

            draw_reliability(found.held_out, self.figure, threshold=found.calibration.threshold)
            write_json(
                self.figure.with_suffix(".json"), {**facts, "figure": reliability_facts(found.held_out)}
            )
        if self.json:
            print_json({"kept": not self.dry_run, "left_out": found.left_out, **facts})
        else:
            self._print(found)

    def _print(self, found: Calibrated) -> None:
        fitted, measured = found.calibration, found.calibration.held_out
        rows = [
            (f"{one.predicted:.2f}", f"{one.observed:.2f}", f"{one.queries:,.0f}") for one in measured.bins
        ]
        print_table(("probability", "right", "queries"), rows)
        if fitted.threshold is None:
            matched = (
                f"No probability is high enough for {fitted.wanted_precision:.0%} right first hits, so no "
                "match is ever called good; try a lower --precision. "
            )
        else:
            matched = (
                f"A first hit is a good match from {fitted.threshold:.2f} on: {measured.coverage:.0%} of "
                f"the queries have one, and {measured.precision:.0%} of those are right; "
                f"{measured.refused:.0%} of the queries without an answer have none. "
            )
        print(
            f"First hits of {measured.queries:,} held-out queries of {fitted.data}, each with and without "
            f"its answers among {fitted.items:,} items ({fitted.absent:.0%} without): calibration error "
            f"{measured.error:.3f}, Brier score {measured.brier:.3f} (constant: {measured.base_brier:.3f}). "
            + matched
            + ("Nothing was changed." if self.dry_run else "Hits of this index now have probabilities.")
        )


def check_figure_path(path: Path) -> None:
    """Check that a figure can be written, before any work is done.

    Raises
    ------
    UsageError
        The suffix is not .svg or .png, or the folder does not exist.
    ModuleNotFoundError
        Matplotlib is not installed.
    """
    from genius_search.errors import UsageError

    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise UsageError(f"--figure {path}: expected a name ending in .svg or .png, in an existing folder")
    import matplotlib.figure  # noqa: F401


def reliability_facts(cases: Predictions) -> dict[str, Any]:
    """Return the numbers behind the figure."""
    from genius_search.calibrate import accept, reliability

    curve = accept(cases)
    return {
        "bins": [one._asdict() for one in reliability(cases)],
        "acceptance": {
            name: [round(value, 6) for value in getattr(curve, name).tolist()]
            for name in ("threshold", "coverage", "precision")
        },
    }


def draw_reliability(cases: Predictions, path: Path, *, threshold: float | None) -> None:
    """Draw predicted against observed probabilities, and precision against coverage, as SVG or PNG."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from genius_search.artifact import write_file
    from genius_search.calibrate import accept, calibration_error, reliability

    ink, blue, vermilion = "#33302b", "#0072B2", "#D55E00"
    figure = Figure(figsize=(10, 4.6), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    bins = reliability(cases)
    total = sum(one.weight for one in bins)
    left.plot([0, 1], [0, 1], color=ink, linewidth=1, linestyle=":")
    left.scatter(
        [one.predicted for one in bins],
        [one.observed for one in bins],
        s=[20 + 260 * one.weight / total for one in bins],
        color=blue,
        zorder=3,
    )
    left.set_xlabel("probability of the first hit", color=ink)
    left.set_ylabel("share that is right", color=ink)
    left.set_title(f"error {calibration_error(bins):.3f}; area: number of queries", fontsize=10)

    curve = accept(cases)
    right.plot(curve.coverage, curve.precision, color=blue, linewidth=2)
    if threshold is not None and (curve.threshold >= threshold).any():
        place = int(np.flatnonzero(curve.threshold >= threshold)[-1])
        point = (float(curve.coverage[place]), float(curve.precision[place]))
        right.plot([point[0]], [point[1]], "o", color=vermilion, markersize=9)
        right.annotate(
            f"good match from {threshold:.2f} on",
            point,
            xytext=(-8, -22),
            textcoords="offset points",
            ha="right",
            color=vermilion,
        )
    right.set_xlabel("share of the queries that are answered", color=ink)
    right.set_ylabel("share of those that is right", color=ink)
    right.set_title("answering only from a probability on", fontsize=10)
    for axes in (left, right):
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(visible=True, color="#e4e0d8", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)

    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "genius", "svg.fonttype": "none"}):  # equal figures, equal bytes
        figure.savefig(buffer, format=path.suffix[1:], metadata=metadata)
    write_file(path, buffer.getvalue())
