"""``genius calibrate`` and ``refit``: adapt an index or a model to what is searched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DeviceOptions, JsonOption, OpenIndexOptions, WaitOption, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table


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


@command
class Refit(DeviceOptions, JsonOption):
    """Fit a model's codebooks to a pool unlike its training data, without training.

    Writes a new model. The printed table shows whether that was needed: unfamiliar items crowd under few
    codes and lie far from the vectors of their IDs. The new model has other IDs, so create indexes again.
    Give all items that will be searched, not only new ones.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model, or the name under which it was pulled."""

    pool: Path
    """A folder of pictures and texts, or a .jsonl file of candidates in M-BEIR's layout."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new model."""

    passes: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 20
    """Passes over the items."""

    seed: int = 0
    """Seed for the order of the items."""

    json: bool = False
    """Print JSON: {"before": {...}, "after": {...}, "model": FOLDER}."""

    def run(self) -> None:
        """Refit, and print how well the codes fit before and after."""
        from genius_search.model import Genius
        from genius_search.refit import refit

        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            done = refit(model, self.pool, self.out, passes=self.passes, seed=self.seed, progress=progress)
            progress.say(
                f"the model is in {self.out}; `genius index create INDEX --model {self.out}` uses it"
            )
        healths = (done.before, done.after)
        if self.json:
            before, after = map(dataclasses.asdict, healths)
            print_json({"model": str(self.out), "before": before, "after": after})
            return
        rows = [
            ("mean cosine of an item to its ID", *(f"{one.reconstruction:.4f}" for one in healths)),
            ("items that share their ID", *(f"{one.collision_rate:.2%}" for one in healths)),
        ]
        for number, level in enumerate(done.before.levels):
            shares = (f"{one.levels[number].largest_share:.2%}" for one in healths)
            rows.append((f"level {level.level}: largest share of a code", *shares))
        print_table(("IDs of the pool", "before", "after"), rows, left=("IDs of the pool",))
        print(f"before: {done.before.verdict}\nafter: {done.after.verdict}")
