"""``genius refit``: let a model's codebooks follow the items that will be searched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.nn.health import Health


@dataclass(frozen=True, kw_only=True)
class Refit:
    """Fit a model's codebooks to a pool unlike its training data, without training.

    Makes a new model. The table that is printed shows whether there was a need: items that the model does not
    know crowd under few codes, and are far from the vectors of their IDs. IDs of the new model are others, so
    create indexes again. Give all that will be searched, not only what is new.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model, or the name under which it was pulled."""

    pool: Path
    """A folder of pictures and texts, or a .jsonl file of candidates in M-BEIR's layout."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Where the new model goes."""

    passes: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 20
    """How often the items are gone through."""

    seed: int = 0
    """Of the order of the items."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON: {"before": {...}, "after": {...}, "model": FOLDER}."""

    def run(self) -> None:
        """Refit, and print how well the codes fit now."""
        from genius_search.model import Genius
        from genius_search.refit import refit

        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            done = refit(model, self.pool, self.out, passes=self.passes, seed=self.seed, progress=progress)
            progress.say(
                f"the model is in {self.out}; `genius index create INDEX --model {self.out}` uses it"
            )
        if self.json:
            print_json(
                {
                    "model": str(self.out),
                    "before": dataclasses.asdict(done.before),
                    "after": dataclasses.asdict(done.after),
                }
            )
        else:
            Console().print(_table(done.before, done.after))


def _table(before: Health, after: Health) -> Table:
    table = Table("IDs of the pool", "before", "after")
    table.add_row(
        "mean cosine of an item to its ID", f"{before.reconstruction:.4f}", f"{after.reconstruction:.4f}"
    )
    table.add_row("items that share their ID", f"{before.collision_rate:.2%}", f"{after.collision_rate:.2%}")
    for old, new in zip(before.levels, after.levels, strict=True):
        table.add_row(
            f"level {old.level}: largest share of a code",
            f"{old.largest_share:.2%}",
            f"{new.largest_share:.2%}",
        )
    table.add_row("verdict", before.verdict, after.verdict)
    return table
