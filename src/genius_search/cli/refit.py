"""``genius refit``: fit a model's codebooks to the items that will be searched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import DeviceOptions, JsonOption, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table


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
