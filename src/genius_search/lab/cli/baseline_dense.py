"""``genius baseline dense``: embedding search, exact or with faiss's indexes, beside GENIUS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.lab.cli.evaluate import pools_of


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Measure embedding search as `genius evaluate` measures GENIUS: same queries, pools, files.

    The encoder is a model's, or one that `genius train encoder` or `genius embed` left in a folder: small of
    any kind (clip-sf, clip-ff, blip-sf, blip-ff), or published weights. Centroids and codes are learned from
    the training candidates, as IDs are.
    """

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    encoder_model: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """What `genius train encoder`, `genius embed` or `genius fit` was given as --out."""

    kinds: str = "exact"
    """Of index: exact (compare with every item), hnsw (a graph of neighbours), ivf-pq (product codes in
    lists), ivf-rq (residual codes in lists); several with commas between, or all."""

    code_bytes: int = 14
    """Of an item, where codes are kept: as many as an ID of the preset small with norm and density; ivf-pq takes
    the next number that divides a vector."""

    effort: int = 16
    """Nodes that hnsw keeps in view, lists that the other two look through."""

    split: str = "test"
    """Of the data set."""

    pools: str = "local,global"
    """Each query against its own task's pool (local), against the union (global), or both."""

    rows: str = "all"
    """Of the data set, as in its file names: mscoco_task0,cirr_task7; commas between."""

    max_queries: int = 0
    """At most this many queries for each row; 0 means all."""

    seed: int = 0
    """Of the choice of instructions, and of the sample that codes are learned from."""

    evaluation: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where features of pools and queries are or go; default: evaluation/ in the encoder's folder."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where runs and results.json go; default: dense/ in the encoder's folder."""

    device: str = "cpu"
    """Or cuda, for the encoder."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON: {"rows": [...], "timings": [...]}."""

    def run(self) -> None:
        """Index, search, measure, print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.lab import results as tables
        from genius_search.lab.baselines.dense import kinds_of
        from genius_search.lab.baselines.evaluate import DenseConfig, evaluate_dense
        from genius_search.lab.evaluate import EvaluationConfig
        from genius_search.training.fit import reopen_embedded

        names = () if self.rows == "all" else tuple(name.strip() for name in self.rows.split(","))
        with TerminalProgress() as progress:
            result = evaluate_dense(
                MBeir(self.data),
                reopen_embedded(self.encoder_model, device=self.device, download=self.download),
                EvaluationConfig(
                    split=self.split,
                    pools=pools_of(self.pools),
                    rows=names,
                    max_queries=self.max_queries,
                    seed=self.seed,
                ),
                DenseConfig(
                    kinds=kinds_of(self.kinds), code_bytes=self.code_bytes, effort=self.effort, seed=self.seed
                ),
                self.out or self.encoder_model / "dense",
                evaluation=self.evaluation or self.encoder_model / "evaluation",
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        console = Console()
        console.print(tables.to_rich(result.rows))
        times = Table("method", "candidates", "fit, s", "index, s", "queries", "ms a query", box=None)
        for timing in result.timings:
            times.add_row(
                timing.method,
                f"{timing.pool_size:,}",
                f"{timing.fit_seconds:.2f}",
                f"{timing.index_seconds:.2f}",
                f"{timing.queries:,}",
                f"{timing.ms_per_query:.3f}",
            )
        console.print(times)
