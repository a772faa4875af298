"""``genius demo``: from nothing to a page of pictures in two minutes."""

from __future__ import annotations

from pathlib import Path

from genius_search.cli.options import JsonOption, command
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.lab.cli.evaluate import print_tables


@command
class Demo(JsonOption):
    """Generate a catalogue, train on it, index it, search it; writes a page of pictures to open."""

    out: Path = Path("demo")
    """Folder that receives catalogue/, model/, catalogue.index/ and index.html."""

    items: int = 10_400
    """Candidates in the pool."""

    train_products: int = 4000
    """Products to learn from; none of them is in the pool."""

    beam: int = 50
    """IDs kept at each level."""

    seed: int = 0
    """Seed of the catalogue and the training."""

    json: bool = False
    """Print the table as JSON."""

    def run(self) -> None:
        """Run all steps and print the table."""
        from genius_search.lab.demo import demo
        from genius_search.lab.results import task_tables, to_json

        with TerminalProgress() as progress:
            result = demo(
                self.out,
                items=self.items,
                train_products=self.train_products,
                beam=self.beam,
                seed=self.seed,
                progress=progress,
            )
            progress.say(f"IDs of the pool: {result.health.verdict}")
        if self.json:
            print_json(to_json(result.rows))
            return
        print_tables(task_tables(result.rows))
        print("Methods: exact-… compare a query with every item. generative… find items by the generator,")
        print("routing… by distance to the codes; they are ranked by what follows the +.\n")
        for search in result.searches[::4]:
            picture = " + a picture" if search.query_image and search.query_text else ""
            best = search.hits[0]
            mark = "correct" if best.id in search.positives else "wrong"
            print(f"{search.task}: {search.instruction} {search.query_text or 'a picture'}{picture}")
            print(f"    found {best.id}, {mark}: {best.text or 'a picture'}")
        print(f"\nOpen {result.page} to see them all. Then try:")
        query = "a striped green umbrella"
        print(f'  genius search {result.index_folder} "{query}" --modality image')
