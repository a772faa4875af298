"""``genius search``: what an index finds, its items, and the way of an item through a search."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import tyro

from genius_search.cli.cluster import AddressOption, is_cluster, open_cluster
from genius_search.cli.options import (
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalInt,
    Words,
    command,
    optional,
    read_search_toml,
    read_vectors,
)
from genius_search.cli.terminal import (
    TerminalProgress,
    escape_controls,
    print_json,
    print_table,
    print_text,
    shorten,
)
from genius_search.errors import ArtifactError, BadData, UsageError, plural

if TYPE_CHECKING:
    from genius_search.index.explain import Explanation, Sibling
    from genius_search.index.index import Index
    from genius_search.index.request import SearchHit

SYNC_SECONDS: Final = 10.0
"""Longest wait for another process that brings the index of a folder up to date."""
NUM_ALTERNATIVES: Final = 3
"""Other codes shown at each level of an explanation."""


def is_folder_of_files(folder: Path) -> bool:
    """Return whether this is a folder of somebody's files rather than an index or a model."""
    from genius_search.index.store import CLUSTER, CURRENT, LOCK, WORK
    from genius_search.model import MODEL_FILE

    names = (CLUSTER, CURRENT, LOCK, WORK, MODEL_FILE)
    return folder.is_dir() and not any((folder / name).exists() for name in names)


def open_folder(folder: Path, *, device: str, download: bool) -> Index:
    """Open the index of a folder of pictures and texts, after making it or bringing it up to date.

    Of several processes that search a new folder one indexes it, and the others wait. An index that cannot be
    read is set aside, since it may hold choices, and items that were added without files.
    """
    print_text(f"reading {folder}", error=True)
    from genius_search.data.folder import user_cache
    from genius_search.index.store import CURRENT, has_lost_manifest
    from genius_search.index.writer import HeldByAnother, rename_damaged_index, writing_lock

    whole = folder.resolve()
    place = user_cache() / f"{whole.name}-{hashlib.sha256(bytes(whole)).hexdigest()[:12]}.index"
    with TerminalProgress() as progress:
        while True:
            index = None
            if (place / CURRENT).exists():
                index = _follow(folder, place, progress, device=device, download=download)
            elif has_lost_manifest(place):
                aside = rename_damaged_index(place, lambda: has_lost_manifest(place))
                _say_aside(progress, folder, f"{place} has lost its {CURRENT}", aside)
            else:
                try:
                    index = _index(folder, place, progress, device=device, download=download)
                except HeldByAnother:
                    progress.say(f"another process is indexing {folder}; waiting for it")
                    with writing_lock(place, wait_seconds=math.inf):
                        continue
                except UsageError:
                    if not (
                        place / CURRENT
                    ).exists():  # otherwise another process has just created it
                        raise
                    continue
            if index is not None:
                return index


def _follow(
    folder: Path, place: Path, progress: TerminalProgress, *, device: str, download: bool
) -> Index | None:
    """Open an index and bring it up to date; set it aside and return None if it cannot be read."""
    from genius_search.cli.index import report_added
    from genius_search.index.index import Index, current_state
    from genius_search.index.snapshot import MAX_BYTES_CHECKED_FIRST
    from genius_search.index.store import CURRENT, read_head
    from genius_search.index.writer import HeldByAnother, rename_damaged_index

    head = read_head(place / CURRENT)
    try:
        index = Index.open(place, device=device, download=download)
        current_state(index).snapshot.check_files(max_bytes=MAX_BYTES_CHECKED_FIRST)
        done = index.sync(folder, progress=progress, wait_seconds=SYNC_SECONDS)
        if done.added or done.deleted or done.missing:
            report_added(progress, done, as_json=False, again=True)
    except HeldByAnother:
        progress.say(f"another process is updating the index of {folder}; searching it as it is")
    except ArtifactError as error:  # of another version, or damaged
        if head:  # otherwise another process has just set it aside
            aside = rename_damaged_index(place, lambda: read_head(place / CURRENT) == head)
            _say_aside(progress, folder, str(error), aside)
        return None
    return index


def _say_aside(progress: TerminalProgress, folder: Path, problem: str, aside: Path | None) -> None:
    if aside is not None:
        progress.say(
            f"{problem}. The index is now {aside}, and may hold choices and items that {folder} does not; "
            "a new one is made"
        )


def _index(
    folder: Path, place: Path, progress: TerminalProgress, *, device: str, download: bool
) -> Index:
    """Create the index of a folder."""
    from genius_search.cli.index import choose_encoder, report_added
    from genius_search.index.index import Index
    from genius_search.index.pool import open_pool
    from genius_search.index.store import CURRENT

    try:
        pool = open_pool(folder, captions=True)
    except BadData as error:
        if inside := next(folder.glob(f"*.index/{CURRENT}"), None):
            raise UsageError(f"{error}; did you mean {inside.parent}?") from None
        raise
    encoder, download = choose_encoder(pool, download=download)
    progress.say(f"indexing {folder} once; the index is kept in {place}")
    index = Index.create(
        place, pool, encoder=encoder, device=device, download=download, progress=progress
    )
    report_added(progress, index.last_change, as_json=False)
    return index


@command
class Search(AddressOption, OpenIndexOptions, JsonOption):
    """Search an index, a cluster, or a folder of pictures and texts, with a text, an image, or both.

    Without a query, items are listed, what was added last first: those that --where, --match and --modality
    allow, or all.
    A folder is indexed in the user's cache when it is first searched, and brought up to date at each search.
    Exit status 3 if nothing is found.
    """

    text: Annotated[tuple[str, ...], tyro.conf.Positional, optional("[TEXT]")] = ()
    """Text of the query; "beach -people" leaves out people."""

    image: OptionalFile = None
    """Image of the query; alone, or together with the text."""

    vector: OptionalFile = None
    """Search with the vector in a .npy file, a feature of the index's encoder."""

    instruction: Words = None
    """Instruction that says in words what kind of result is wanted."""

    modality: Annotated[
        Literal["image", "text", "image-text"] | None, optional("{image,text,image-text}")
    ] = None
    """Search only items of this modality."""

    where: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")
    ] = ()
    """Search only items whose fields meet a condition: 'price<20', 'colour in red,blue', 'title~umbrella',
    'taken=2024-05', 'price is missing'. Several --where must all hold."""

    match: Words = None
    """Only items whose text contains these words: this OR that -without "a phrase" begin*."""

    no_hybrid: bool = False
    """Do not raise items because they have words or codes of the query."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    offset: int = 0
    """Number of hits to skip, for later pages."""

    beam: OptionalInt = None
    """IDs kept at each level. Default: 10; 128 above 500,000 items."""

    rerank: Annotated[
        Literal["none", "codes", "embeddings"] | None, optional("{none,codes,embeddings}")
    ] = None
    """Rank in the generator's order, by codes, or by stored embeddings. Default: as suits the index."""

    router: Annotated[Literal["generator", "geometry"] | None, optional("{generator,geometry}")] = (
        None
    )
    """What finds candidates. Default: geometry, by distance."""

    candidates: OptionalInt = None
    """Stop when this many IDs are left; 0: never. Default: all up to 100,000, or a share of more."""

    config: OptionalFile = None
    """TOML file with other settings, by the names of the fields of genius_search.SearchConfig."""

    files_only: bool = False
    """Print only the path of each hit's file; of a text in an index, its id."""

    full: bool = False
    """Print long texts, or the passages that were found, to their end."""

    explain: Annotated[str | None, optional("ID")] = None
    """Print why the search finds the item of this id, or does not: its way through the codes."""

    def run(self) -> int:
        from genius_search.config import SearchConfig
        from genius_search.index.index import current_state
        from genius_search.index.match import split_excluded
        from genius_search.index.query import adjust_settings

        if self.json and self.files_only:
            raise UsageError("--json prints all of a hit; leave out --files-only")
        if self.explain is not None and (self.files_only or is_cluster(self.index)):
            raise UsageError(
                "--explain prints the way of an item through the codes of one index: leave out --files-only, "
                "and of a cluster give a folder in its shards/"
            )
        vectors = read_vectors(self.vector)
        text = " ".join(self.text)
        is_listing = not split_excluded(text)[0] and self.image is None and vectors is None
        where: Any = self.where
        if is_listing:
            from genius_search.index.filters import Filter  # only here

            where = Filter.parse(where)  # also without conditions
        options: dict[str, Any] = {
            "image": self.image,
            "vector": None if vectors is None else vectors.squeeze(),
            "instruction": self.instruction,
            "modality": self.modality,
            "where": where,
            "match": self.match,
            "hybrid": not self.no_hybrid,
            "k": self.k,
            "offset": self.offset,
        }
        if is_cluster(self.index):
            if self.config or self._options():
                raise UsageError(
                    f"{self.index} is a cluster; its shards have their own settings, so give none"
                )
            with open_cluster(
                self.index, self, device=self.device, download=self.download
            ) as searcher:
                return self._show(searcher.search(text or None, **options), {})
        if is_folder_of_files(self.index):
            index = open_folder(self.index, device=self.device, download=self.download)
        else:
            index = self.open_index(with_encoder=not is_listing)
        of_file = SearchConfig() if self.config is None else read_search_toml(self.config)
        changed = dataclasses.replace(of_file, **self._options())
        config = adjust_settings(index.settings, index.model, changed)
        if self.explain is not None:
            print_explanation(
                index.explain(self.explain, text or None, **options, config=config),
                index,
                as_json=self.json,
            )
            return 0
        hits = index.search(text or None, **options, config=config)
        if (
            not hits
            and self.modality
            and self.modality not in current_state(index).snapshot.modalities
        ):
            print(
                f"no item is {self.modality}: encoders of texts find pictures as text",
                file=sys.stderr,
            )
        settings = {
            "beam": max(config.beam, self.k + self.offset),
            "candidates": config.candidates,
            "rerank": config.rerank,
            "router": "generator" if index.model.uses_generator(config) else "geometry",
        }
        good_match = None if is_listing else hits.good_match
        about = {"index": str(index.folder), "settings": settings, "good_match": good_match}
        return self._show(hits, about)

    def _show(self, hits: Sequence[SearchHit], about: dict[str, Any]) -> int:
        """Print hits; return the exit status."""
        if self.json:
            print_json({**about, "hits": [dataclasses.asdict(hit) for hit in hits]})
        elif not hits:
            print("nothing found", file=sys.stderr)
        elif self.files_only:
            home = self.index.resolve() if is_folder_of_files(self.index) else Path()
            for file in (hit.image or str(home / hit.id) for hit in hits):
                if sys.stdout.isatty():
                    print(escape_controls(file))
                else:
                    sys.stdout.flush()
                    sys.stdout.buffer.write(os.fsencode(file) + b"\n")  # the name as it is
        else:
            print_hits(hits, full=self.full)
        if hits and about.get("good_match") is False:
            print("no good match: the first hits are probably wrong", file=sys.stderr)
        if len(hits) == self.k and not hits[0].codes:  # a list
            print(f"for more: --offset {self.offset + self.k}", file=sys.stderr)
        return 0 if hits else 3

    def _options(self) -> dict[str, Any]:
        """Return the options of the search that flags name."""
        options = {name: getattr(self, name) for name in ("beam", "rerank", "router", "candidates")}
        return {name: value for name, value in options.items() if value is not None}


def print_hits(hits: Sequence[SearchHit], *, full: bool = False) -> None:
    """Print hits as a table; ids are never cut, so that they can be copied, nor texts if ``full``."""
    has_score = any(hit.codes for hit in hits)  # not without a query
    has_probability = any(hit.probability is not None for hit in hits)
    rows = []
    for hit in hits:
        text = hit.passage or hit.text or ""
        words = " ".join(text.split()) if full else shorten(text)
        content = [words or hit.image] if sys.stdout.isatty() else [hit.image, words]
        scores = [str(hit.rank), *([f"{hit.score:.4f}"] if has_score else [])]
        if has_probability:
            scores.append("" if hit.probability is None else f"{hit.probability:.2f}")
        rows.append([*scores, hit.id, " ".join(filter(None, content))])
    scores = [*(["score"] if has_score else []), *(["probability"] if has_probability else [])]
    print_table(
        ["rank", *scores, "item", "text or picture"], rows, left=("item",), fill=True, cut=not full
    )


def print_explanation(found: Explanation, index: Index, *, as_json: bool) -> None:
    """Print the way of an item through a search."""
    item = found.item
    if as_json:
        names = ("id", "modality", "text", "image", "fields")
        shown = {name: getattr(item, name) for name in names}
        print_json({**dataclasses.asdict(found), "item": shown})
        return
    print_text(f"{item.id}  {shorten(item.text or item.image or '')}".rstrip())
    rows = []
    for step in found.levels:
        others = [one for one in step.siblings if one.code != step.code][:NUM_ALTERNATIVES]
        described = (f"{_code(one)} ({plural(one.items, 'item')})" for one in others)
        rank = f"{step.rank:,} of {step.num_siblings:,}"
        name = (
            "modality"
            if index.model.codebooks.has_modality_level and step.level == 0
            else str(step.level)
        )
        rows.append((name, _code(step), rank, f"{step.items:,}", "; ".join(described)))
    print_table(
        ("level", "code", "rank", "items", "better, or next"), rows, left=("code",), fill=True
    )
    for choice in found.raised_by:
        query = repr(choice.text) if choice.text else "a similar query"
        print_text(
            f"Raised from the rank below: it was chosen for {query}, cosine {choice.cosine:.2f}."
        )
    if not found.is_allowed:
        print("The search may not find it: it has another modality, or a condition excludes it.")
    elif found.rank is not None:
        print(
            f"Found: rank {found.rank:,} of {found.touched:,} ranked items, score {found.score:.4f}."
        )
    else:
        print(
            f"Not found: it is not among the {found.touched:,} items that the search ranked with a beam of "
            f"{found.beam:,}; a wider --beam may reach it."
        )


def _code(one: Sibling) -> str:
    """Return a code, with its probability where a generator leads the search."""
    return str(one.code) if one.probability is None else f"{one.code} ({one.probability:.1%})"
