"""``genius index`` and ``genius search``: one's own items."""

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

from genius.cli.terminal import TerminalProgress, print_facts, print_json

Modality = Literal["image", "text", "image-text"]
IndexFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]


@dataclass(frozen=True, kw_only=True)
class Create:
    """Make an index of a folder of pictures and texts, or of a .jsonl file of candidates."""

    index: IndexFolder
    """Folder of the new index."""

    model: Path
    """Folder of the model."""

    pool: Path
    """A folder, searched through with its subfolders, or a .jsonl file in M-BEIR's layout."""

    embeddings: Literal["none", "fused", "raw"] = "none"
    """Keep an embedding for every item to re-rank hits by: fused ones, or raw sums of the
    encoder's features (the paper's GENIUS^R)."""

    no_captions: bool = False
    """Leave texts that lie beside pictures (.txt, .json, metadata lists) out of the items."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """Say what was added as JSON on stdout."""

    def run(self) -> None:
        """Create it."""
        from genius.index import Index
        from genius.model import Genius

        with TerminalProgress() as progress:
            _, added = Index.create(
                self.index,
                model=Genius.open(self.model, device=self.device, download=self.download),
                pool=self.pool,
                embeddings=self.embeddings,
                captions=not self.no_captions,
                progress=progress,
            )
            _tell(progress, added, as_json=self.json)
            progress.say(f'next: genius search {self.index} "what you look for"')


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add items to an index, without retraining; an item with a known id is replaced."""

    index: IndexFolder
    """Folder of the index."""

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    no_captions: bool = False
    """Leave texts that lie beside pictures out of the items."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """Say what was added as JSON on stdout."""

    def run(self) -> None:
        """Add."""
        from genius.index import Index

        with TerminalProgress() as progress:
            index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
            added = index.add(self.pool, captions=not self.no_captions, progress=progress)
            _tell(progress, added, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What an index holds: items, IDs, collisions, bytes."""

    index: IndexFolder
    """Folder of the index."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Print it."""
        from genius.index import Index

        print_facts(dataclasses.asdict(Index.open(self.index, model=self.model).info()), as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search an index with a text, a picture, or both.

    Exit status 3 when nothing is found.
    """

    index: IndexFolder
    """Folder of the index."""

    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = None
    """What you look for, in words; put it in quotes."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A picture of what you look for, or that the text talks about."""

    instruction: Annotated[str | None, tyro.conf.arg(metavar="WORDS")] = None
    """What kind of result is wanted, in words."""

    modality: Annotated[Modality | None, tyro.conf.arg(metavar="{image,text,image-text}")] = None
    """Find only items of this modality."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """How many."""

    beam: int = 50
    """IDs kept at each level: wider finds more and takes longer."""

    rerank: Literal["none", "codes", "embeddings"] = "none"
    """Order by the generator's probability, by the codes' vectors, or by stored embeddings."""

    scores: Literal["level", "vocabulary"] = "level"
    """Normalise the generator's steps over a level's codes or over its whole vocabulary."""

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

        config = checked(SearchConfig(beam=self.beam, rerank=self.rerank, scores=self.scores))
        index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
        hits = index.search(
            self.text,
            image=self.image,
            instruction=self.instruction,
            modality=self.modality,
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


def _tell(progress: TerminalProgress, added, *, as_json: bool) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Say what became of the items; every file that was left out by name, with its reason."""
    for left_out in added.left_out:
        progress.say(f"left out: {left_out.file}: {left_out.reason}")
    progress.say(
        f"{added.added} items added ({added.replaced} of them replaced), {len(added.left_out)} files left out"
    )
    if as_json:
        print_json(
            {
                "added": added.added,
                "replaced": added.replaced,
                "left_out": [{"file": entry.file, "reason": entry.reason} for entry in added.left_out],
            }
        )
