"""``genius search``: ask an index."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genius.cli.terminal import print_json

Modality = Literal["image", "text", "image-text"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search an index with a text, a picture, or both.

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

    beam: int = 50
    """IDs kept at each level, at least -k: wider finds more and takes longer."""

    rerank: Literal["none", "codes", "embeddings"] = "none"
    """Order by the generator's probability, by the codes' vectors, or by stored embeddings."""

    leaves: int = 0
    """With --rerank: stop decoding as soon as at most so many IDs lie under the beams, and order them all;
    0 decodes all levels."""

    shortlist: int = 0
    """With --rerank embeddings: compare only so many, the best by codes; 0 means all."""

    scores: Literal["level", "vocabulary", "children"] = "level"
    """Normalise the generator's steps over a level's codes, over its whole vocabulary, or over the codes
    that exist there."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Search and print."""
        from genius.config import SearchConfig, checked
        from genius.index import Index

        config = checked(
            SearchConfig(
                beam=self.beam,
                rerank=self.rerank,
                scores=self.scores,
                leaves=self.leaves,
                shortlist=self.shortlist,
            )
        )
        index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
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
                {"hits": [{**dataclasses.asdict(hit), "modality": hit.modality.label} for hit in hits]}
            )
        elif hits:
            table = Table("rank", "score", "item", "text", "codes", box=None)
            for hit in hits:
                codes = " · ".join(str(code) for code in hit.codes)
                table.add_row(
                    str(hit.rank), f"{hit.score:.4f}", Text(hit.item_id), Text(_short(hit.text)), codes
                )
            Console().print(table)
        else:
            print("nothing found", file=sys.stderr)
        return 0 if hits else 3


def _short(text: str | None, width: int = 60) -> str:
    words = " ".join((text or "").split())
    return words if len(words) <= width else words[: width - 1] + "…"
