"""``genius evaluate`` and ``genius doctor``: how good it is, and whether it is well."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.config import SearchConfig

if TYPE_CHECKING:
    from genius_search.lab.results import ResultRow


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model on a data set, beside exact search over the same candidates.

    R@k is M-BEIR's: the share of queries with any right answer among the first k. On M-BEIR's own rows the
    papers' layout is printed, in percent; published numbers stand beside ours where queries and candidates
    are as many as theirs, and a star marks those that are printed wrong in the paper.
    """

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    model: Path
    """Folder of the model."""

    split: str = "test"
    """Of the data set."""

    pools: str = "local,global"
    """Each query against its own task's pool (local), against the union (global), or both."""

    methods: str = "all"
    """exact-raw, exact-fused, exact-fused+hubness, exact-codes; routing+codes, routing+embeddings (the same
    beam, led by the distance of code vectors instead of the generator); generative, generative+codes,
    generative+embeddings, generative+raw; commas between."""

    rows: str = "all"
    """Of the data set, as in its file names: mscoco_task0,cirr_task7; commas between."""

    beam: int = 50
    """IDs kept at each level."""

    scores: Literal["level", "vocabulary", "children"] = "level"
    """Normalise the generator's steps over a level's codes, over its whole vocabulary, or over the codes
    that exist there."""

    candidates: int = 0
    """Where hits are re-ranked: stop decoding as soon as at most so many IDs lie under the beams, and order
    them all; 0 decodes all levels."""

    shortlist: int = 0
    """Where hits are re-ranked by embeddings: only so many, the best by codes; 0 means all."""

    generator_weight: float = 0.0
    """Where hits are ordered by codes: add so many times the log-probability of their beam."""

    density_weight: float = SearchConfig.density_weight
    """Where hits are ordered by codes or by fused embeddings: take so many times the density around each from
    its score. exact-fused stays as it is, exact-fused+hubness is exact search with it."""

    instructions: Literal["hashed", "first", "none", "all"] = "hashed"
    """One of the data set's instructions for each query, chosen by a hash; or the first; or none; or each of
    them in turn, and the mean of the measures."""

    max_queries: int = 0
    """At most this many queries for each row; 0 means all."""

    seed: int = 0
    """Of the choice of instructions."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where features and runs go; default: evaluation/ in the model's folder."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON: {"rows": [...]}."""

    markdown: bool = False
    """As a Markdown table."""

    def run(self) -> None:
        """Evaluate and print the table."""
        from genius_search.data.mbeir import MBeir
        from genius_search.errors import UsageError
        from genius_search.lab.evaluate import EvaluationConfig, evaluate
        from genius_search.lab.results import METHODS
        from genius_search.model import Genius

        if self.json and self.markdown:
            raise UsageError("--json and --markdown are two forms of one answer; give one of them")
        config = EvaluationConfig(
            split=self.split,
            pools=pools_of(self.pools),
            methods=METHODS if self.methods == "all" else _named(self.methods),
            rows=() if self.rows == "all" else _named(self.rows),
            beam=self.beam,
            scores=self.scores,
            candidates=self.candidates,
            shortlist=self.shortlist,
            generator_weight=self.generator_weight,
            density_weight=self.density_weight,
            instructions=self.instructions,
            max_queries=self.max_queries,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            if self.out is None and model.folder != self.model:
                raise UsageError(
                    f"{self.model} is in the hub's cache, and nothing is written there; say where features "
                    "and runs go with --out FOLDER"
                )
            folder = self.out or self.model / "evaluation"
            result = evaluate(MBeir(self.data), model, config, folder, progress=progress)
            progress.say(f"IDs of the candidates: {result.health.verdict}")
        if self.json:
            print_json(result.to_json())
        elif self.markdown:
            print_markdown(result.rows, beam=self.beam, scores=self.scores, instructions=self.instructions)
        else:
            print_tables(result.rows, beam=self.beam, scores=self.scores, instructions=self.instructions)


def _named(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def print_tables(rows: list[ResultRow], *, beam: int, scores: str, instructions: str) -> None:
    """The papers' layout for M-BEIR's rows, a block for each task for other data."""
    from genius_search.lab import results as paper
    from genius_search.lab import results as tables

    console = Console()
    if not paper.applies_to(rows):
        console.print(tables.to_rich(rows))
        return
    for table in paper.paper_tables(rows, beam=beam, scores=scores, instructions=instructions):
        for note in table.above:
            console.print(note, highlight=False, markup=False, emoji=False)
        console.print(paper.paper_to_rich(table, width=console.width))
        for note in table.below:
            console.print(note, highlight=False, markup=False, emoji=False)


def print_markdown(rows: list[ResultRow], *, beam: int, scores: str, instructions: str) -> None:
    """The same as Markdown."""
    from genius_search.lab import results as paper
    from genius_search.lab import results as tables

    if paper.applies_to(rows):
        found = paper.paper_tables(rows, beam=beam, scores=scores, instructions=instructions)
        print("\n".join(paper.paper_to_markdown(table) for table in found))
    else:
        print(tables.to_markdown(rows))


def pools_of(text: str) -> tuple[Literal["local", "global"], ...]:
    """``local,global`` as a tuple."""
    from genius_search.errors import UsageError

    pools: list[Literal["local", "global"]] = []
    for name in text.split(","):
        match name.strip():
            case "local":
                pools.append("local")
            case "global":
                pools.append("global")
            case other:
                raise UsageError(f"--pools {other!r}: expected local, global, or local,global")
    return tuple(pools)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Examine a model's IDs: use of the codes, collisions, purity of the modality level, reconstruction.

    Exit status 1 when something is wrong.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Examine on the global test pool of this data set; default: what was found after training."""

    split: str = "test"
    """Of that data set."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Examine and print."""
        from genius_search.lab.evaluate import doctor

        with TerminalProgress() as progress:
            health = doctor(self.model, self.data, split=self.split, progress=progress)
        if self.json:
            print_json({**dataclasses.asdict(health), "verdict": health.verdict})
            return 1 if health.problems else 0
        console = Console()
        facts = Table(show_header=False, box=None)
        facts.add_row("candidates", f"{health.candidates:,}")
        facts.add_row("distinct IDs", f"{health.distinct_ids:,}")
        facts.add_row("collisions", f"{health.collision_rate:.2%} (largest bucket {health.largest_bucket})")
        if health.purity is not None:
            meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(health.level0_modality))
            facts.add_row("level-0 purity", f"{health.purity:.2%} ({meaning})")
        facts.add_row("reconstruction", f"mean cosine {health.reconstruction:.3f}")
        levels = Table("level", "codes", "used", "perplexity", "largest share")
        for level in health.levels:
            levels.add_row(
                str(level.level),
                str(level.size),
                str(level.used),
                f"{level.perplexity:.0f}",
                f"{level.largest_share:.1%}",
            )
        console.print(facts)
        console.print(levels)
        console.print(f"verdict: {health.verdict}", highlight=False)
        return 1 if health.problems else 0
