"""``genius evaluate``: how much an index, or a model, finds."""

from __future__ import annotations

from genius_search.cli.options import (
    DataArgument,
    DeviceOptions,
    JsonOption,
    OptionalFolder,
    command,
    split_names,
)
from genius_search.cli.terminal import TerminalProgress, print_json, print_table
from genius_search.errors import UsageError

SHOWN = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
"""Measures of the table."""


@command
class Evaluate(DeviceOptions, JsonOption):
    """Evaluate an index or a model with the queries of a data set, beside exact search.

    R@k is M-BEIR's: the share of queries with any right answer among the first k. The items of the index must
    be candidates of the data set, with their ids; of a model, the union of the data set's pools is indexed
    first.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    index: OptionalFolder = None
    """Folder of the index."""

    model: OptionalFolder = None
    """Folder of a model, instead of an index."""

    out: OptionalFolder = None
    """With --model: folder of the index that is made; default: one in evaluation/ in the
    model's folder."""

    split: str = "test"
    """Split of the data set."""

    rows: str = "all"
    """Rows of the data set, as in its file names: mscoco_task0,cirr_task7; separated by commas."""

    max_queries: int = 0
    """Queries of each row at most, spread evenly; 0 means all."""

    def run(self) -> None:
        """Evaluate and print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.evaluate import EvaluationConfig, evaluate_index, evaluate_model
        from genius_search.index.index import Index
        from genius_search.model import Genius

        if (self.index is None) == (self.model is None):
            raise UsageError("give either --index or --model")
        config = EvaluationConfig(
            split=self.split,
            rows=() if self.rows == "all" else split_names(self.rows),
            max_queries=self.max_queries,
        )
        with TerminalProgress() as progress:
            data = MBeir(self.data)
            if self.index is not None:
                index = Index.open(self.index, device=self.device, download=self.download)
                found = evaluate_index(index, data, config, progress=progress)
            elif self.model is not None:
                model = Genius.open(self.model, device=self.device, download=self.download)
                folder = self.out or self.model / "evaluation" / f"{data.name}-{self.split}.index"
                found = evaluate_model(model, data, folder, config, progress=progress)
            if found.left_out:
                progress.say(f"{found.left_out:,} queries are left out: their answers are not in the index")
        if self.json:
            print_json(found.to_json())
            return
        lines = []
        for one in found.rows:
            numbers = (f"{one.measures[name]:.3f}" for name in SHOWN)
            lines.append((one.row, one.method, f"{one.queries:,}", *numbers, f"{one.touched:,.0f}"))
        columns = ("row", "method", "queries", *SHOWN, "scored")
        print_table(columns, lines, left=columns[:2])
