"""``genius search``: ask an index."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genius_search.cli.terminal import print_json

if TYPE_CHECKING:
    from genius_search.config import SearchConfig
    from genius_search.index.query import SearchHit

Modality = Literal["image", "text", "image-text"]
Rerank = Literal["none", "codes", "embeddings"]
Scores = Literal["level", "vocabulary", "children"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search an index with a text, a picture, or both.

    Settings that are not given are the index's own where `genius tune` chose them, else the usual ones.
    Exit status 3 when nothing is found.
    """

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""

    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = None
    """What you look for, in words; put it in quotes."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A picture of what you look for, or that the text talks about."""

    instruction: Annotated[str | None, tyro.conf.arg(metavar="WORDS")] = None
    """What kind of result is wanted, in words."""

    modality: Annotated[Modality | None, tyro.conf.arg(metavar="{image,text,image-text}")] = None
    """Find only items of this modality."""

    where: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")] = ()
    """Find only items whose fields meet a condition, as 'price<20', 'brand=acme', 'colour in red,blue',
    'title~umbrella'; give it several times for several, all of which hold."""

    match: Annotated[str | None, tyro.conf.arg(metavar="WORDS")] = None
    """Find only items whose text contains these words; "a phrase" in double quotes, beginnings with a *."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """How many."""

    beam: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """IDs kept at each level, at least -k: wider finds more and takes longer. Usually 50."""

    rerank: Annotated[Rerank | None, tyro.conf.arg(metavar="{none,codes,embeddings}")] = None
    """Order by the generator's probability, by the codes' vectors, or by stored embeddings. Usually codes."""

    candidates: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With --rerank: stop decoding as soon as at most so many IDs lie under the beams, and order them all;
    0 decodes all levels. Usually 1000."""

    shortlist: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """With --rerank embeddings: compare only so many (at least -k), the best by codes; 0, the usual, means
    all."""

    generator_weight: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """With --rerank codes, or a shortlist: add so many times the log-probability that the generator gave the
    codes it decoded. Usually 0."""

    density_weight: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """With --rerank: take so many times the density around an item from its score, so that those that are
    near to everything come later. Usually 0.3; 0 takes nothing."""

    scores: Annotated[Scores | None, tyro.conf.arg(metavar="{level,vocabulary,children}")] = None
    """Normalise the generator's steps over a level's codes (the usual), over its whole vocabulary, or over
    the codes that exist there."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    codes: bool = False
    """Show the ID of each hit too."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Search and print."""
        from genius_search.config import SearchConfig, checked
        from genius_search.index.index import Index

        flags = {name: getattr(self, name) for name in SETTINGS}
        given = {name: value for name, value in flags.items() if value is not None}
        checked(SearchConfig(**given))
        index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
        config = dataclasses.replace(index.settings, **given)
        _check_flags(self, config)
        hits = index.search(
            self.text,
            image=self.image,
            instruction=self.instruction,
            modality=self.modality,
            where=self.where,
            match=self.match,
            k=self.k,
            config=config,
        )
        if self.json:
            print_json(
                {"hits": [{**dataclasses.asdict(hit), "modality": hit.modality.value} for hit in hits]}
            )
        elif hits:
            Console().print(_table(hits, with_codes=self.codes))
            if index.good_match(hits) is False:
                print("no good match: the first hit is more likely wrong than you want", file=sys.stderr)
        else:
            print("nothing found", file=sys.stderr)
        return 0 if hits else 3


SETTINGS = ("beam", "rerank", "candidates", "shortlist", "generator_weight", "density_weight", "scores")
"""Flags in whose place the index's own settings stand when they are not given."""


def _check_flags(asked: Search, config: SearchConfig) -> None:
    """Refuse flags that would change nothing."""
    from genius_search.errors import UsageError

    if asked.candidates and config.rerank == "none":
        raise UsageError(
            "--candidates needs --rerank codes or embeddings: something has to order the candidates"
        )
    if asked.shortlist and config.rerank != "embeddings":
        raise UsageError("--shortlist needs --rerank embeddings: it says how many are compared by them")
    if asked.generator_weight and config.rerank != "codes" and not config.shortlist:
        raise UsageError(
            "--generator-weight needs --rerank codes, or --shortlist: it is added to scores by codes"
        )
    if asked.density_weight and config.rerank == "none":
        raise UsageError("--density-weight needs --rerank codes or embeddings: it corrects their scores")


def _table(hits: list[SearchHit], *, with_codes: bool) -> Table:
    """Hits for a person; ids are never cut, so that they can be copied."""
    table = Table(box=None, expand=True)
    table.add_column("rank", justify="right", no_wrap=True, min_width=4)
    table.add_column("score", no_wrap=True, min_width=max(len(f"{hit.score:.4f}") for hit in hits))
    if hits[0].probability is not None:
        table.add_column("probability", justify="right", no_wrap=True, min_width=11)
    table.add_column("item", no_wrap=True, min_width=max(len(hit.id) for hit in hits))
    table.add_column("text or picture", no_wrap=True, overflow="ellipsis", ratio=1)
    for hit in hits:
        shown = " ".join((hit.text or hit.image or "").split())
        likely = [] if hit.probability is None else [f"{hit.probability:.3f}"]
        cells: list[str | Text] = [str(hit.rank), f"{hit.score:.4f}", *likely, Text(hit.id)]
        table.add_row(*cells, Text(shown))
        if with_codes:
            ids = Text(" · ".join(str(code) for code in hit.codes))
            table.add_row(*[""] * len(cells), ids, style="dim")
    return table
