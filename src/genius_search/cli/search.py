"""``genius search`` and ``genius explain``: what an index finds, and the way of an item through a search."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from genius_search.cli.cluster import AddressOption, is_cluster, open_cluster
from genius_search.cli.options import (
    Conditions,
    IndexArgument,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalInt,
    QueryOptions,
    Rerank,
    Router,
    Words,
    command,
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
from genius_search.errors import ArtifactMismatch, BadData, UsageError, plural

if TYPE_CHECKING:
    from genius_search.index.explain import Explanation, Sibling
    from genius_search.index.index import Index
    from genius_search.index.request import SearchHit

NUM_ALTERNATIVES: Final = 3
"""Other codes shown at each level of an explanation."""


def is_folder_of_files(folder: Path) -> bool:
    """Return whether this is a folder of somebody's files rather than an index or a model."""
    from genius_search.index.store import CLUSTER, CURRENT, LOCK, WORK
    from genius_search.model import MODEL_FILE

    names = (CLUSTER, CURRENT, LOCK, WORK, MODEL_FILE)
    return folder.is_dir() and not any((folder / name).exists() for name in names)


def open_folder(folder: Path, *, device: str, download: bool) -> Index:
    """Open the index of a folder of pictures and texts, after making it or bringing it up to date."""
    print_text(f"reading {folder}", error=True)
    from genius_search.cli.index import choose_encoder, report_added
    from genius_search.data.folder import user_cache
    from genius_search.index.index import Index
    from genius_search.index.pool import open_pool
    from genius_search.index.store import CURRENT

    whole = folder.resolve()
    place = user_cache() / f"{whole.name}-{hashlib.sha256(bytes(whole)).hexdigest()[:12]}.index"
    with TerminalProgress() as progress:
        if (place / CURRENT).exists():
            try:
                index = Index.open(place, device=device, download=download)
                done = index.sync(folder, progress=progress)
                if done.added or done.deleted or done.missing:
                    report_added(progress, done, as_json=False, again=True)
            except ArtifactMismatch as error:  # of another version, or damaged
                progress.say(f"the index of {folder} is made again, since {error}")
                shutil.rmtree(place)
            else:
                return index
        try:
            pool = open_pool(folder, captions=True)
        except BadData as error:
            if inside := next(folder.glob(f"*.index/{CURRENT}"), None):
                raise UsageError(f"{error}; did you mean {inside.parent}?") from None
            raise
        encoder, download = choose_encoder(pool, download=download)
        progress.say(f"indexing {folder} once; the index is kept in {place}")
        index, added = Index.create(
            place, pool=pool, encoder=encoder, device=device, download=download, progress=progress
        )
        report_added(progress, added, as_json=False)
    return index


@command
class PageOptions:
    """Which items are printed, and how."""

    match: Words = None
    """Only items whose text contains these words; "a phrase" in double quotes, prefix*."""

    offset: int = 0
    """Number of items to skip, for later pages."""

    full: bool = False
    """Print long texts, or the passages that were found, to their end."""


@command
class Search(AddressOption, QueryOptions, PageOptions, OpenIndexOptions, JsonOption):
    """Search an index, a cluster, or a folder of pictures and texts, with a text, an image, or both.

    Without a query, --where, --match or --modality alone list items, what was added last first.
    A folder is indexed in the user's cache when it is first searched, and brought up to date at each search.
    Exit status 3 if nothing is found.
    """

    vector: OptionalFile = None
    """Search with the vector in a .npy file, a feature of the index's encoder."""

    hybrid: bool = True
    """Raise items that have rare words of the query, and put those with its codes first."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    beam: OptionalInt = None
    """IDs kept at each level, at least -k. Default: 10, in large indexes 30."""

    rerank: Rerank = None
    """Rank by the generator's probability, by the codes' vectors, or by stored embeddings. Default: codes."""

    router: Router = None
    """With --rerank: what finds candidates. Default: geometry."""

    candidates: OptionalInt = None
    """With --rerank: stop decoding at this many IDs; 0: never. Default: all up to 8,000, else a tenth."""

    config: OptionalFile = None
    """TOML file with other settings, by the names of the fields of genius_search.SearchConfig."""

    files_only: bool = False
    """Print only the path of each hit's file; of a text in an index, its id."""

    def run(self) -> int:
        from genius_search.index.query import adjust_settings

        if self.json and self.files_only:
            raise UsageError("--json prints all of a hit; leave out --files-only")
        vectors = read_vectors(self.vector)
        options = {
            **self.query(),
            "vector": None if vectors is None else vectors.squeeze(),
            "match": self.match,
            "hybrid": self.hybrid,
            "k": self.k,
            "offset": self.offset,
        }
        if is_cluster(self.index):
            if self.config or any(value is not None for value in self._given().values()):
                raise UsageError(
                    f"{self.index} is a cluster; its shards have their own settings, so give none"
                )
            with open_cluster(self.index, self, device=self.device, download=self.download) as searcher:
                return self._show(searcher.search(**options), {})
        if is_folder_of_files(self.index):
            index = open_folder(self.index, device=self.device, download=self.download)
        else:
            index = self.open_index()
        usual = index.settings if self.config is None else read_search_toml(self.config, index.settings)
        config = adjust_settings(usual, index.model, **self._given())
        hits = index.search(**options, config=config)
        if not hits and self.modality and self.modality not in index.snapshot.modalities:
            print(f"no item is {self.modality}: encoders of texts find pictures as text", file=sys.stderr)
        settings = {
            "beam": max(config.beam, self.k + self.offset),
            "candidates": config.candidates,
            "rerank": config.rerank,
            "router": "generator" if index.model.uses_generator(config) else "geometry",
        }
        about = {"index": str(index.folder), "settings": settings, "good_match": index.good_match(hits)}
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
        return 0 if hits else 3

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("beam", "rerank", "router", "candidates")}


@command
class List(PageOptions, JsonOption, IndexArgument):
    """List the items of an index, what was added last first; no model is needed.

    Exit status 3 if there are none.
    """

    where: Conditions = ()
    """List only items whose fields meet a condition, as in `genius search`."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 100
    """Number of items."""

    def run(self) -> int:
        from genius_search.index.filters import Filter
        from genius_search.index.query import browse
        from genius_search.index.request import SearchRequest
        from genius_search.index.snapshot import Snapshot

        wanted = Filter.parse(self.where, self.match)
        items = browse(Snapshot.open(self.index), SearchRequest(where=wanted, k=self.k, offset=self.offset))
        if self.json:
            names = ("id", "modality", "text", "image", "fields")
            print_json([{name: getattr(item, name) for name in names} for item in items])
        else:
            print_hits(items, full=self.full)
        if len(items) == self.k:
            print(f"for more: --offset {self.offset + self.k}", file=sys.stderr)
        return 0 if items else 3


def print_hits(hits: Sequence[SearchHit], *, full: bool = False) -> None:
    """Print hits as a table; ids are never cut, so that they can be copied.

    Parameters
    ----------
    full
        print long texts to their end.
    """
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
    print_table(["rank", *scores, "item", "text or picture"], rows, left=("item",), fill=True, cut=not full)


@command
class Explain(QueryOptions, OpenIndexOptions, JsonOption):
    """Explain why a search finds an item, or does not: its way through the codes, level by level.

    Settings are those of the index, as in `genius search`.
    """

    item: Annotated[str, tyro.conf.arg(metavar="ID")]
    """Id of the item to follow."""

    beam: OptionalInt = None
    """IDs kept at each level; default: the index's own setting."""

    router: Router = None
    """What the search is led by; default: the index's own setting."""

    def run(self) -> None:
        from genius_search.index.query import adjust_settings

        index = self.open_index()
        config = adjust_settings(index.settings, index.model, router=self.router)
        found = index.explain(self.item, **self.query(), beam=self.beam, config=config)
        if self.json:
            print_json(_plain(dataclasses.asdict(found)))
        else:
            _print_explanation(found, has_modality_level=index.model.codebooks.has_modality_level)


def _plain(value: Any) -> Any:
    """Return a value for JSON: items become objects with their fields."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if hasattr(value, "_asdict"):
        return {name: getattr(value, name) for name in ("id", "modality", "text", "image", "fields")}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _print_explanation(found: Explanation, *, has_modality_level: bool) -> None:
    item = found.item
    print_text(f"{item.id}  {shorten(item.text or item.image or '')}".rstrip())
    rows = []
    for step in found.levels:
        others = [one for one in step.siblings if one.code != step.code][:NUM_ALTERNATIVES]
        described = (f"{_code(one)} ({plural(one.items, 'item')})" for one in others)
        rank = f"{step.rank:,} of {step.num_siblings:,}"
        name = "modality" if has_modality_level and step.level == 0 else str(step.level)
        rows.append((name, _code(step), rank, f"{step.items:,}", "; ".join(described)))
    print_table(("level", "code", "rank", "items", "better, or next"), rows, left=("code",), fill=True)
    for choice in found.raised_by:
        print_text(
            f"Raised: it was chosen for {choice.text or 'a similar query'!r}, cosine {choice.cosine:.2f}."
        )
    if not found.is_allowed:
        print("The search may not find it: it has another modality, or a condition excludes it.")
    elif found.rank is not None:
        print(f"Found: rank {found.rank:,} of {found.touched:,} ranked items, score {found.score:.4f}.")
    else:
        print(
            f"Not found: it is not among the {found.touched:,} items that the search ranked with a beam of "
            f"{found.beam:,}; a wider --beam may reach it."
        )


def _code(one: Sibling) -> str:
    """Return a code, with its probability where a generator leads the search."""
    return str(one.code) if one.probability is None else f"{one.code} ({one.probability:.1%})"
