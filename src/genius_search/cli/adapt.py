"""``genius calibrate``: fit an index to what is searched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import JsonOption, OpenIndexOptions, WaitOption, command
from genius_search.cli.terminal import TerminalProgress, print_json


@command
class Calibrate(WaitOption, OpenIndexOptions, JsonOption):
    """Calibrate an index with queries of a data set, so that hits have the probability of being right.

    The items of the index must be candidates of the data set, with their ids. First the weight of
    densities (density_weight) is chosen that finds the most answers, and stored as the index's default.
    A search can then say that it has no good match. Half of the queries are used to fit, the other half to
    measure. Calibrate again when the index has grown much.
    """

    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    split: str = "val"
    """Split of the data set."""

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Share of good matches that should be right; sets the threshold of a good match."""

    def run(self) -> None:
        """Fit, measure, print and store the calibration."""
        from genius_search.data.mbeir import MBeir
        from genius_search.index.calibrate import ABSENT, calibrate, measure_hubness

        with TerminalProgress() as progress:
            index = self.open_index()
            hubness = measure_hubness(index, MBeir(self.data), split=self.split, progress=progress)
            index.keep_hubness(hubness, wait_seconds=self.wait)
            fitted = calibrate(
                index, MBeir(self.data), split=self.split, precision=self.precision, progress=progress
            )
            index.keep_calibration(fitted, wait_seconds=self.wait)
        if self.json:
            print_json({**dataclasses.asdict(fitted), "hubness": dataclasses.asdict(hubness)})
            return
        recalls = ", ".join(f"{recall:.3f} with {weight}" for weight, recall in hubness.recalls.items())
        print(f"Weight of densities: {hubness.weight:g} (R@5 of {hubness.queries:,} queries: {recalls}).")
        print(
            f"{fitted.queries:,} other queries of {fitted.data}, each with and without its answers among "
            f"{fitted.items:,} items ({ABSENT:.0%} without): the first hits have a probability of "
            f"{fitted.promised:.2f} on average, and {fitted.right:.2f} of them are right."
        )
        if fitted.threshold is None:
            print(
                f"No probability is high enough for {fitted.precision:.0%} right first hits, so no match is "
                "ever called good; try a lower --precision."
            )
        else:
            print(
                f"A first hit is a good match from {fitted.threshold:.2f} on: {fitted.good:.0%} of the "
                f"queries have one, and {fitted.good_and_right:.0%} of those are right; "
                f"{fitted.refused:.0%} of the queries without an answer have none."
            )
