"""``genius bench``: what search costs, beside its rivals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from genius_search.cli.terminal import TerminalProgress
from genius_search.lab.cli.bench_results import counts, finish, keep_to_one_thread

Folder = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
PROFILED: Final = 200
"""Queries whose time is taken apart."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Time one decoder's search as the authors do it (Hugging Face's generate) and as it is done here.

    The same queries over an invented pool: scores over the whole vocabulary (whose ranking is compared with
    generate's), scores over a level, stopping when few leaves are left. CPU time of one core.
    """

    out: Folder
    """Where results.json and index.html go."""

    items: int = 1_000_000
    """Of the invented pool."""

    pool: Literal["skewed", "uniform"] = "skewed"
    """How its codes are spread."""

    queries: int = 8
    """In a batch."""

    beam: int = 50
    """IDs kept at each level."""

    small_beam: int = 10
    """The same of the shallow search."""

    small_candidates: int = 1000
    """Leaf budget of the shallow search."""

    decoder: Literal["reference", "tiny"] = "reference"
    """Drawn weights of the paper's size, or of one layer of width 128."""

    model: Path | None = None
    """Folder of a trained model, in place of drawn weights."""

    rounds: int = 3
    """Times that each variant is timed, in turns."""

    compared: int = 40
    """Queries whose rankings are compared with generate's."""

    hf: bool = True
    """Time Hugging Face's generate too (--no-hf leaves it out: its trie takes about 1.5 KB of memory an
    item)."""

    profile: bool = False
    """List where the time of a single query goes (--profile)."""

    seed: int = 0
    """Of the pool, the queries and the drawn weights."""

    json: bool = False
    """Print what results.json holds."""

    def run(self) -> None:
        """Measure and print."""
        keep_to_one_thread()
        from genius_search.lab.bench.decode import DecodeSettings, bench_decode
        from genius_search.lab.bench.stand_ins import stand_in, subject_of
        from genius_search.lab.bench.timing import one_thread
        from genius_search.model import Genius

        one_thread()
        settings = DecodeSettings(
            items=self.items,
            pool=self.pool,
            queries=self.queries,
            beam=self.beam,
            small_beam=self.small_beam,
            small_candidates=self.small_candidates,
            rounds=self.rounds,
            hf=self.hf,
            compared=self.compared,
            profiled=PROFILED if self.profile else 0,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            subject = (
                stand_in(self.decoder, seed=self.seed)
                if self.model is None
                else subject_of(Genius.open(self.model))
            )
            tables = bench_decode(settings, subject, progress=progress)
        finish(self, "decode", self.out, "Decoding", tables, [], as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Measure building, opening and searching pools of 10,000 to 100,000,000 invented items.

    Leaves a page with the figures against the size of the pool.
    """

    out: Folder
    """Where results.json and index.html go; tables are built here and removed again."""

    sizes: str = "1e4,1e5,1e6,1e7,1e8"
    """Items in the pools; commas between."""

    pool: Literal["skewed", "uniform"] = "skewed"
    """How codes are spread."""

    beam: int = 50
    """IDs kept at each level by the decoder of the paper's size."""

    small_beam: int = 10
    """The same of the small decoder."""

    small_candidates: int = 1000
    """Leaf budget of the small decoder."""

    queries: int = 20
    """Asked one by one with the decoder of the paper's size; the small one is asked ten times as many."""

    batch: int = 64
    """Queries asked together."""

    rounds: int = 3
    """Times that a batch is timed."""

    flat_items: int = 1_000_000
    """Exact search is measured up to so many items, as far as memory reaches, and calculated beyond; 0
    leaves it out."""

    seed: int = 0
    """Of the pools, the queries and the drawn weights."""

    json: bool = False
    """Print what results.json holds."""

    def run(self) -> None:
        """Measure and print."""
        keep_to_one_thread()
        from genius_search.lab.bench.scale import ScaleSettings, bench_scale
        from genius_search.lab.bench.timing import one_thread

        one_thread()
        settings = ScaleSettings(
            sizes=counts("--sizes", self.sizes),
            pool=self.pool,
            beam=self.beam,
            small_beam=self.small_beam,
            small_candidates=self.small_candidates,
            queries=self.queries,
            small_queries=10 * self.queries,
            batch=self.batch,
            rounds=self.rounds,
            flat_items=self.flat_items,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            found = bench_scale(settings, self.out, progress=progress)
        finish(
            self,
            "scale",
            self.out,
            "Against the size of the pool",
            found.tables,
            found.figures,
            as_json=self.json,
        )


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """Compare recall, time and bytes with exact search, HNSW, IVF, IVF-PQ and residual codes on real queries.

    All methods search the same embeddings of one row of a data set. With --grow the pool is padded with
    invented neighbours, which are never right answers.
    """

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    model: Path
    """Folder of the model."""

    out: Folder
    """Where features, results.json and index.html go."""

    split: str = "test"
    """Of the data set."""

    row: str = ""
    """Of the data set, as in its file names; needed where it has several."""

    pool: Literal["global", "local"] = "global"
    """Search the union of all pools, or the row's own."""

    methods: str = "all"
    """exact, hnsw, ivf, ivf-pq, residual, routing (the nearest code vectors, without the generator), ours;
    commas between."""

    grow: int = 0
    """Pad the pool to so many items; 0 leaves it as it is."""

    queries: int = 0
    """At most so many; 0 means all."""

    timed: int = 200
    """Queries asked one by one."""

    batch: int = 64
    """Queries asked together."""

    rounds: int = 3
    """Times that a batch is timed."""

    trie: bool = True
    """Build the pointer trie of the usual way too, for its bytes (--no-trie leaves it out)."""

    seed: int = 0
    """Of the padding, of training samples and of the choice of instructions."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """Print what results.json holds."""

    def run(self) -> None:
        """Measure and print."""
        keep_to_one_thread()
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.bench.methods import FAMILIES
        from genius_search.lab.bench.rivals import RivalSettings, bench_rivals
        from genius_search.lab.bench.timing import one_thread
        from genius_search.model import Genius

        one_thread()
        settings = RivalSettings(
            split=self.split,
            row=self.row,
            pool=self.pool,
            families=FAMILIES
            if self.methods == "all"
            else tuple(name.strip() for name in self.methods.split(",")),
            grow=self.grow,
            queries=self.queries,
            timed=self.timed,
            batch=self.batch,
            rounds=self.rounds,
            trie=self.trie,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, download=self.download)
            found = bench_rivals(MBeir(self.data), model, settings, self.out, progress=progress)
        finish(self, "rivals", self.out, "Beside its rivals", found.tables, found.figures, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Show how much of exact search the IDs keep, beside geometry without a generator and faiss.

    For each task and their mean: exact search, the paper's full-depth search, search within a leaf budget,
    the same routed by geometry alone, and faiss's IVF-PQ and IVF residual quantizer at as many bytes and
    candidates. Then the generator against geometry at equally many leaves, recall over CPU time for a grid
    of beams and leaves, and the health of the IDs.
    """

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    model: Path
    """Folder of the model."""

    out: Folder
    """Where features, results.json, quality.md and index.html go."""

    split: str = "test"
    """Of the data set."""

    row: str = ""
    """Rows of the data set, as in its file names; commas between. Left out: all of them."""

    pool: Literal["global", "local"] = "global"
    """Search the union of all pools, or each row's own."""

    queries: int = 0
    """Of each row at most so many, spread evenly; 0 means all."""

    beam: int = 50
    """Of the search within a leaf budget."""

    candidates: int = 500
    """Its budget."""

    generator_weight: float = 0.0
    """Also rank by codes with so many times the log-probability; 0 leaves that out."""

    budgets: str = "150,300,600,1200,2000"
    """Leaves at which the generator and geometry are compared; commas between."""

    grid_beams: str = "1,2,5,10,20,50,100"
    """Beams of the curves; commas between."""

    grid_candidates: str = "0,150,500,1500,5000"
    """Leaf budgets of the curves; 0 decodes all levels."""

    grid_queries: int = 200
    """Of each row at most so many for the curves; 0 leaves the curves out."""

    no_faiss: bool = False
    """Leave faiss out."""

    seed: int = 0
    """Of training samples and of the choice of instructions."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """Print what results.json holds."""

    def run(self) -> None:
        """Measure and print."""
        keep_to_one_thread()
        from genius_search.artifact import write_file
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.bench.quality import QualitySettings, bench_quality
        from genius_search.lab.bench.results import markdown
        from genius_search.lab.bench.timing import one_thread
        from genius_search.model import Genius

        one_thread()
        settings = QualitySettings(
            split=self.split,
            rows=tuple(name.strip() for name in self.row.split(",")) if self.row else (),
            pool=self.pool,
            queries=self.queries,
            beam=self.beam,
            candidates=self.candidates,
            generator_weight=self.generator_weight,
            budgets=counts("--budgets", self.budgets),
            grid_beams=counts("--grid-beams", self.grid_beams),
            grid_candidates=counts("--grid-candidates", self.grid_candidates),
            grid_queries=self.grid_queries,
            faiss=not self.no_faiss,
            seed=self.seed,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, download=self.download)
            found = bench_quality(MBeir(self.data), model, settings, self.out, progress=progress)
        result = finish(
            self, "quality", self.out, "Quality of the IDs", found.tables, found.figures, as_json=self.json
        )
        write_file(self.out / "quality.md", markdown(result).encode())
