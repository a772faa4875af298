"""``genius demo``: two minutes from nothing to a page of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from genius_search.cli.terminal import TerminalProgress, print_json


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Draw a catalogue, train on it, index it, search it; leaves a page of pictures to open."""

    out: Path = Path("demo")
    """Folder that receives catalogue/, model/, catalogue.index/ and index.html."""

    items: int = 10_400
    """Candidates in the pool."""

    train_products: int = 4000
    """Products to learn from; none of them is in the pool."""

    beam: int = 50
    """IDs kept at each level."""

    seed: int = 0
    """Seed of the drawing and the training."""

    json: bool = False
    """The table as JSON."""

    def run(self) -> None:
        """Do it all and print the table."""
        from genius_search.lab.demo import DemoConfig, demo
        from genius_search.lab.results import to_json, to_rich

        config = DemoConfig(
            items=self.items, train_products=self.train_products, beam=self.beam, seed=self.seed
        )
        with TerminalProgress() as progress:
            result = demo(self.out, config, progress=progress)
            progress.say(f"IDs of the pool: {result.health.verdict}")
        if self.json:
            print_json(to_json(result.rows))
            return
        console = Console()
        console.print(to_rich(result.rows))
        for search in result.searches[::4]:
            picture = " + a picture" if search.query_image and search.query_text else ""
            query = search.query_text or "a picture"
            best = search.hits[0]
            mark = "right" if best.is_relevant else "not the one"
            console.print(
                f"[bold]{search.task}[/]  {search.instruction} [italic]{query}[/]{picture}\n"
                f"    found {best.item_id}, {mark}: {best.text or 'a picture'}",
                highlight=False,
            )
        console.print(f"\nOpen {result.page} to see them all. Then try:")
        console.print(
            f'  genius search {result.index_folder} "a striped green umbrella" --modality image',
            highlight=False,
            markup=False,
            emoji=False,
        )
