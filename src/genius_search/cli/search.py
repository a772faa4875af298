"""``genius search``: search an index."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.options import (
    Conditions,
    JsonOption,
    OpenIndexOptions,
    OptionalFloat,
    OptionalInt,
    QueryOptions,
    Words,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_json, print_table

if TYPE_CHECKING:
    from genius_search.config import SearchConfig
    from genius_search.index.index import Index
    from genius_search.index.query import SearchHit

Rerank = Literal["none", "codes", "embeddings"]
Scores = Literal["level", "vocabulary", "children"]


def is_folder_of_files(folder: Path) -> bool:
    """Return whether this is a folder of somebody's files rather than an index or a model."""
    from genius_search.index.store import CURRENT
    from genius_search.index.writer import LOCK, WORK
    from genius_search.model.file import MODEL_FILE

    return folder.is_dir() and not any((folder / name).exists() for name in (CURRENT, LOCK, WORK, MODEL_FILE))


def cached_index(folder: Path) -> Path:
    """Return the place of the index of a folder of files, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = folder.resolve()
    return cache / "genius-search" / f"{folder.name}-{hashlib.sha256(bytes(folder)).hexdigest()[:12]}.index"


@command
class Search(QueryOptions, OpenIndexOptions, JsonOption):
    """Search an index, or a folder of pictures and texts, with a text, an image, or both.

    A folder is indexed in the user's cache when it is first searched, and brought up to date at each search.
    Settings that are not given are those that `genius tune` stored in the index, else the defaults.
    Exit status 3 if nothing is found.
    """

    where: Conditions = ()
    """Search only items whose fields meet a condition: 'price<20', 'brand=acme', 'colour in red,blue',
    'title~umbrella'. If given several times, all conditions must hold."""

    match: Words = None
    """Search only items whose text contains these words; "a phrase" in double quotes, prefix*."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    beam: OptionalInt = None
    """IDs kept at each level, at least -k: a wider beam finds more and takes longer. Default: 50."""

    rerank: Annotated[
        Rerank | None, tyro.conf.arg(metavar="{none,codes,embeddings}", help_behavior_hint="")
    ] = None
    """Rank by the generator's probability, by the codes' vectors, or by stored embeddings. Default: codes."""

    candidates: OptionalInt = None
    """With --rerank: stop decoding once the beams cover at most this many IDs, and rank them all.
    Default: 1000; 0 decodes all levels."""

    shortlist: OptionalInt = None
    """With --rerank embeddings: compare only this many hits (at least -k), the best by codes.
    Default: 0, all."""

    generator_weight: OptionalFloat = None
    """With --rerank codes, or a shortlist: weight of the generator's log-probability of the decoded codes,
    added to the score. Default: 0."""

    density_weight: OptionalFloat = None
    """With --rerank: weight of the density around an item, subtracted from its score, so that items close
    to everything rank lower. Default: 0.3."""

    scores: Annotated[
        Scores | None, tyro.conf.arg(metavar="{level,vocabulary,children}", help_behavior_hint="")
    ] = None
    """Normalise the generator's scores over a level's codes (the default), over its whole vocabulary, or over
    the codes that exist at that point."""

    codes: bool = False
    """Show the ID of each hit too."""

    def run(self) -> int:
        """Search and print the hits."""
        from genius_search.config import SearchConfig, checked

        flags = {field.name: getattr(self, field.name) for field in dataclasses.fields(SearchConfig)}
        given = {name: value for name, value in flags.items() if value is not None}
        checked(SearchConfig(**given))
        index = self._open()
        config = dataclasses.replace(index.settings, **given)
        self._check_effects(config)
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
            print_json({"hits": [dataclasses.asdict(hit) for hit in hits]})
        elif hits:
            self._print_hits(hits)
            if index.good_match(hits) is False:
                print("no good match: the first hit is probably wrong", file=sys.stderr)
        else:
            print("nothing found", file=sys.stderr)
        return 0 if hits else 3

    def _open(self) -> Index:
        """Open the index, or the one of a folder of pictures and texts."""
        if not is_folder_of_files(self.index):
            return self.open_index()
        from genius_search.cli.index import choose_encoder
        from genius_search.index.index import Index
        from genius_search.index.store import CURRENT

        place = cached_index(self.index)
        with TerminalProgress() as progress:
            if (place / CURRENT).exists():
                index = Index.open(place, device=self.device, download=self.download)
                index.sync(self.index, progress=progress)
            else:
                encoder, download = choose_encoder(self.index, captions=True, download=self.download)
                progress.say(f"indexing {self.index} once; the index is kept in {place}")
                index, _ = Index.create(
                    place,
                    pool=self.index,
                    encoder=encoder,
                    device=self.device,
                    download=download,
                    progress=progress,
                )
        return index

    def _check_effects(self, config: SearchConfig) -> None:
        """Refuse flags that would have no effect."""
        from genius_search.errors import UsageError

        if self.candidates and config.rerank == "none":
            raise UsageError("--candidates needs --rerank codes or embeddings, which rank the candidates")
        if self.shortlist and config.rerank != "embeddings":
            raise UsageError("--shortlist needs --rerank embeddings: it limits how many are compared")
        if self.generator_weight and config.rerank != "codes" and not config.shortlist:
            raise UsageError(
                "--generator-weight needs --rerank codes, or --shortlist: it is added to scores by codes"
            )
        if self.density_weight and config.rerank == "none":
            raise UsageError("--density-weight needs --rerank codes or embeddings: it corrects their scores")

    def _print_hits(self, hits: list[SearchHit]) -> None:
        """Print hits as a table; ids are never cut, so that they can be copied."""
        columns = ["rank", "score", "relevance", "item", "text or picture"]
        rows = []
        for hit in hits:
            relevance = "" if hit.relevance is None else f"{hit.relevance:.2f}"
            content = " ".join((hit.text or hit.image or "").split())
            rows.append([str(hit.rank), f"{hit.score:.4f}", relevance, hit.id, content])
            if self.codes:
                rows.append([*[""] * 4, " · ".join(map(str, hit.codes))])
        if all(hit.relevance is None for hit in hits):
            for row in (columns, *rows):
                del row[2]
        print_table(columns, rows, left=("item",), fill=True)
