"""``genius search``: print the hits of a query, list items, or explain the rank of an item."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import tyro

from genius_search.cli.cluster import AddressOption, is_cluster, open_cluster
from genius_search.cli.options import (
    JsonOption,
    OcrOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalInt,
    OptionalName,
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
from genius_search.cli.thumbnails import print_thumbnails
from genius_search.errors import ArtifactError, BadData, UsageError, plural

if TYPE_CHECKING:
    from genius_search.index.explain import Explanation, Sibling
    from genius_search.index.hits import Hits
    from genius_search.index.index import Index

MAX_SYNC_WAIT_SECONDS: Final = 10.0
"""Maximum wait for another process that brings the index of a folder up to date."""
NUM_ALTERNATIVES: Final = 3
"""Number of other codes to show at each level of an explanation."""


def is_plain_folder(folder: Path) -> bool:
    """Return whether a folder contains files of the user, rather than an index or a model."""
    from genius_search.index.store import CLUSTER, CURRENT, LOCK, WORK
    from genius_search.model import MODEL_FILE

    names = (CLUSTER, CURRENT, LOCK, WORK, MODEL_FILE)
    return folder.is_dir() and not any((folder / name).exists() for name in names)


def open_folder(folder: Path, *, device: str, download: bool) -> Index:
    """Open the index of a folder of pictures and texts, creating or updating it first.

    The index is in the user's cache. If several processes search a new folder, one of them indexes
    it and the others wait. An index that cannot be read is renamed and never deleted, since it may
    contain choices, and items that were added without files.
    """
    print_text(f"reading {folder}", error=True)
    from genius_search.data.cache import user_cache
    from genius_search.index.store import CURRENT, has_lost_manifest
    from genius_search.index.writer import HeldByAnother, rename_damaged_index, writing_lock

    # ~/Pictures -> ~/.cache/genius-search/Pictures-0123456789ab.index
    absolute = folder.resolve()
    path_hash = hashlib.sha256(bytes(absolute)).hexdigest()[:12]
    index_folder = user_cache() / f"{absolute.name}-{path_hash}.index"
    options: dict[str, Any] = {"device": device, "download": download}
    with TerminalProgress() as progress:
        while True:
            index = None
            if (index_folder / CURRENT).exists():
                index = _open_and_sync(folder, index_folder, progress, **options)
            elif has_lost_manifest(index_folder):
                renamed = rename_damaged_index(
                    index_folder, lambda: has_lost_manifest(index_folder)
                )
                problem = f"{index_folder} has lost its {CURRENT}"
                _report_renamed_index(progress, folder, problem, renamed)
            else:
                try:
                    index = _create_index(folder, index_folder, progress, **options)
                except HeldByAnother:
                    progress.say(f"another process is indexing {folder}; waiting for it")
                    with writing_lock(index_folder, wait_seconds=math.inf):
                        continue
                except UsageError:
                    # If the index exists now, another process has just created it.
                    if not (index_folder / CURRENT).exists():
                        raise
                    continue
            if index is not None:
                return index


def _open_and_sync(
    folder: Path, index_folder: Path, progress: TerminalProgress, *, device: str, download: bool
) -> Index | None:
    """Open an index and bring it up to date; rename it and return None if it cannot be read."""
    from genius_search.cli.index import report_added
    from genius_search.index.index import Index, current_state
    from genius_search.index.snapshot import MAX_BYTES_CHECKED_FIRST
    from genius_search.index.store import CURRENT, read_head
    from genius_search.index.writer import HeldByAnother, rename_damaged_index

    head = read_head(index_folder / CURRENT)

    def is_unchanged() -> bool:  # an empty file has the same head as a missing one
        return (index_folder / CURRENT).exists() and read_head(index_folder / CURRENT) == head

    try:
        index = Index.open(index_folder, device=device, download=download)
        current_state(index).snapshot.check_files(max_bytes=MAX_BYTES_CHECKED_FIRST)
        summary = index.sync(folder, progress=progress, wait_seconds=MAX_SYNC_WAIT_SECONDS)
        if summary.added or summary.deleted or summary.missing:
            report_added(progress, summary, as_json=False, again=True)
    except HeldByAnother:
        progress.say(
            f"another process is updating the index of {folder}; searching the current state"
        )
    except ArtifactError as error:  # another version, or damaged
        if is_unchanged():  # otherwise another process has just renamed the index
            renamed = rename_damaged_index(index_folder, is_unchanged)
            _report_renamed_index(progress, folder, str(error), renamed)
        return None
    return index


def _report_renamed_index(
    progress: TerminalProgress, folder: Path, problem: str, renamed: Path | None
) -> None:
    if renamed is not None:
        progress.say(
            f"{problem}. The index was renamed to {renamed}, since it may contain choices and "
            f"items that {folder} does not; creating a new index"
        )


def _create_index(
    folder: Path, index_folder: Path, progress: TerminalProgress, *, device: str, download: bool
) -> Index:
    """Create the index of a folder."""
    from genius_search.cli.encoders import choose_encoder
    from genius_search.cli.index import report_added
    from genius_search.index.index import Index
    from genius_search.index.pool import open_pool
    from genius_search.index.store import CURRENT

    try:
        pool = open_pool(folder, captions=True)
    except BadData as error:
        if manifest := next(folder.glob(f"*.index/{CURRENT}"), None):
            raise UsageError(f"{error}; did you mean {manifest.parent}?") from None
        raise
    encoder, download = choose_encoder(pool, download=download)
    progress.say(f"indexing {folder} once; the index is kept in {index_folder}")
    index = Index.create(
        index_folder, pool, encoder=encoder, device=device, download=download, progress=progress
    )
    report_added(progress, index.last_change, as_json=False)
    return index


@command
class Search(AddressOption, OcrOption, OpenIndexOptions, JsonOption):
    """Search an index, a cluster, or a folder of pictures and texts, by text, image, or both.

    Without a query, the command lists the items that match --where, --match and --modality, newest
    first. A folder is indexed in the user's cache at its first search, and brought up to date at
    each further one. The exit status is 3 if nothing is found.
    """

    text: Annotated[tuple[str, ...], tyro.conf.Positional, optional("[TEXT]")] = ()
    """Text of the query. A hyphen excludes words: beach -people."""

    image: OptionalFile = None
    """Image of the query, alone or combined with the text."""

    vector: OptionalFile = None
    """A .npy file with a feature of the index's encoder."""

    instruction: Words = None
    """Description of the results to find, for models that were trained with instructions."""

    modality: Annotated[
        Literal["image", "text", "image-text"] | None, optional("{image,text,image-text}")
    ] = None
    """Find only items of this modality."""

    where: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")
    ] = ()
    """Find only items whose fields meet all conditions: 'price<20', 'colour in red,blue',
    'title~umbrella', 'taken=2024-05', 'price is missing'."""

    match: Words = None
    """Find only items whose text contains these words: this OR that -without "a phrase" begin*."""

    no_hybrid: bool = False
    """Rank by meaning alone, whatever words and codes items contain."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    offset: int = 0
    """Number of hits to skip, for further pages."""

    order_by: OptionalName = None
    """Sort by a field: price, or --order-by=-price."""

    facets: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FIELD")
    ] = ()
    """Count a field's values, or ranges: price:0,10."""

    group_by: OptionalName = None
    """One hit for each value of a field, content or near."""

    rerank: Annotated[
        Literal["none", "codes", "embeddings"] | None, optional("{none,codes,embeddings}")
    ] = None
    """Rank by the generator (none), codes, or embeddings."""

    router: Annotated[Literal["generator", "geometry"] | None, optional("{generator,geometry}")] = (
        None
    )
    """How to find candidates. Default: geometry."""

    beam: OptionalInt = None
    """Where the generator searches: number of partial IDs to follow at each level. Default: 10, or
    128 above 500,000 items."""

    config: OptionalFile = None
    """TOML file with further fields of genius_search.SearchConfig."""

    files_only: bool = False
    """Print only files, or ids of texts."""

    full: bool = False
    """Print long texts and passages in full."""

    explain: Annotated[str | None, optional("ID")] = None
    """Explain the rank of the item with this id."""

    def run(self) -> int:
        self._check_flags()
        text = " ".join(self.text) or None
        options, is_listing = self._read_query()
        if is_cluster(self.index):
            with open_cluster(
                self.index, self, device=self.device, download=self.download
            ) as searcher:
                return self._print_result(searcher.search(text, **options), {})
        if not is_plain_folder(self.index):
            index = self.open_index(with_encoder=not is_listing)
            return self._search_index(index, text, options, is_listing=is_listing)
        index = open_folder(self.index, device=self.device, download=self.download)
        status = self._search_index(index, text, options, is_listing=is_listing)
        sys.stdout.flush()  # hits come before the second pass over new pictures
        with TerminalProgress() as progress:
            self.read_pictures(index, progress)
        return status

    def _check_flags(self) -> None:
        """Raise :class:`UsageError` for flags that exclude each other."""
        if self.json and self.files_only:
            raise UsageError("--json prints complete hits; leave out --files-only")
        if self.explain is not None and (self.files_only or is_cluster(self.index)):
            raise UsageError(
                "--explain follows an item through the codes of a single index; leave out "
                "--files-only, and for a cluster give a folder in its shards/"
            )
        if is_cluster(self.index) and (self.config or self._search_options()):
            raise UsageError(
                f"{self.index} is a cluster, whose shards choose their settings; leave out "
                "--config, --rerank, --router and --beam"
            )

    def _read_query(self) -> tuple[dict[str, Any], bool]:
        """Return the options of the search, and whether it lists items without a query."""
        from genius_search.index.match import split_excluded

        vectors = read_vectors(self.vector)
        text = " ".join(self.text)
        is_listing = not split_excluded(text)[0] and self.image is None and vectors is None
        where: Any = self.where
        if is_listing:
            from genius_search.index.filters import Filter  # only here

            where = Filter.parse(where)  # an empty filter, too, makes the request a listing
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
            "order_by": self.order_by,
            "facets": self.facets,
            "group_by": self.group_by,
        }
        return options, is_listing

    def _search_index(
        self, index: Index, text: str | None, options: dict[str, Any], *, is_listing: bool
    ) -> int:
        """Search an index or explain an item, print the result, and return the exit status."""
        from genius_search.config import SearchConfig
        from genius_search.index.index import current_state
        from genius_search.index.settings import adjust_settings

        # Flags take precedence over the file, and the file over the settings of the index.
        file_config = SearchConfig() if self.config is None else read_search_toml(self.config)
        changes = dataclasses.replace(file_config, **self._search_options())
        config = adjust_settings(index.settings, index.model, changes)
        if self.beam is not None and not index.model.uses_generator(config):
            raise UsageError(
                "--beam is the width of the generator's search, and distances lead this one; leave "
                "out --beam, or add --router generator"
            )
        if self.explain is not None:
            print_explanation(
                index.explain(self.explain, text, **options, config=config),
                index,
                as_json=self.json,
            )
            return 0
        hits = index.search(text, **options, config=config)
        modalities = current_state(index).snapshot.modalities
        if not hits and self.modality and self.modality not in modalities:
            print(
                f"the index has no items of modality {self.modality}; pictures with a caption are "
                "image-text",
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
        return self._print_result(hits, about)

    def _print_result(self, hits: Hits, about: dict[str, Any]) -> int:
        """Print hits and advice, and return the exit status."""
        if self.json:
            listed = [dataclasses.asdict(hit) for hit in hits]
            print_json({**about, **describe_arrangement(hits), "hits": listed})
        elif not hits:
            print("nothing found", file=sys.stderr)
        elif self.files_only:
            base = self.index.resolve() if is_plain_folder(self.index) else Path()
            for file in (hit.image or str(base / hit.id) for hit in hits):
                if sys.stdout.isatty():
                    print(escape_controls(file))
                else:  # the bytes of the name, so that other programs can open the file
                    sys.stdout.flush()
                    sys.stdout.buffer.write(os.fsencode(file) + b"\n")
        else:
            print_thumbnails(hits)
            print_hits(hits, full=self.full)
        if not (self.json or self.files_only):
            print_facets(hits)
        if hits and about.get("good_match") is False:
            print("no good match: the first hits are probably wrong", file=sys.stderr)
        if len(hits) == self.k and not hits[0].codes:  # only hits of a listing have no codes
            print(f"for more items, add --offset {self.offset + self.k}", file=sys.stderr)
        return 0 if hits else 3

    def _search_options(self) -> dict[str, Any]:
        """Return the settings of :class:`SearchConfig` that were given as flags."""
        options = {name: getattr(self, name) for name in ("rerank", "router", "beam")}
        return {name: value for name, value in options.items() if value is not None}


def describe_arrangement(hits: Hits) -> dict[str, Any]:
    """Return counts of values and groups, and which hits were sorted, for JSON."""
    facets = {name: [value._asdict() for value in values] for name, values in hits.facets.items()}
    return {
        "facets": facets or None,
        "more_in_group": hits.more_in_group or None,
        "cut_off": hits.cut_off,
    }


def print_facets(hits: Hits) -> None:
    """Print a table of the counted values of each field."""
    for name, values in hits.facets.items():
        rows = [(str(facet.value), f"{facet.items:,}") for facet in values]
        print_table((name, "items"), rows, left=(name,))


def print_hits(hits: Hits, *, full: bool = False) -> None:
    """Print hits as a table.

    Texts are cut unless ``full`` is given. Ids are never cut, so that they can be copied.
    """
    from genius_search.text import format_seconds

    has_score = any(hit.codes for hit in hits)  # a listing has no scores
    has_probability = any(hit.probability is not None for hit in hits)
    columns = ["rank"]
    if has_score:
        columns.append("score")
    if has_probability:
        columns.append("probability")
    if hits.more_in_group:
        columns.append("others")
    rows = []
    for position, hit in enumerate(hits):
        row = [str(hit.rank)]
        if has_score:
            row.append(f"{hit.score:.4f}")
        if has_probability:
            row.append("" if hit.probability is None else f"{hit.probability:.2f}")
        if hits.more_in_group:
            row.append(f"{hits.more_in_group[position]:,}")
        text = hit.passage or hit.text or ""
        words = " ".join(text.split()) if full else shorten(text)
        if hit.moment is not None:
            words = f"at {format_seconds(hit.moment)} {words}".rstrip()
        content = [words or hit.image] if sys.stdout.isatty() else [hit.image, words]
        if hit.matched and hit.matched != ("caption",):
            content.append(f"[{', '.join(hit.matched)}]")
        rows.append([*row, hit.id, " ".join(filter(None, content))])
    columns += ["item", "text or picture"]
    print_table(columns, rows, left=("item",), fill=True, cut=not full)


def print_explanation(explanation: Explanation, index: Index, *, as_json: bool) -> None:
    """Print the path of an item through the levels of a search, and its rank."""
    item = explanation.item
    if as_json:
        names = ("id", "modality", "text", "image", "fields")
        item_fields = {name: getattr(item, name) for name in names}
        print_json({**dataclasses.asdict(explanation), "item": item_fields})
        return
    print_text(f"{item.id}  {shorten(item.text or item.image or '')}".rstrip())
    rows = []
    for step in explanation.levels:
        siblings = [sibling for sibling in step.siblings if sibling.code != step.code]
        alternatives = "; ".join(
            f"{_format_code(sibling)} ({plural(sibling.items, 'item')})"
            for sibling in siblings[:NUM_ALTERNATIVES]
        )
        is_modality = index.model.codebooks.has_modality_level and step.level == 0
        level = "modality" if is_modality else str(step.level)
        rank = f"{step.rank:,} of {step.num_siblings:,}"
        rows.append((level, _format_code(step), rank, f"{step.items:,}", alternatives))
    print_table(("level", "code", "rank", "items", "alternatives"), rows, left=("code",), fill=True)
    for choice in explanation.raised_by:
        query = repr(choice.text) if choice.text else "a similar query"
        print_text(f"Raised above the rank below: chosen for {query}, cosine {choice.cosine:.2f}.")
    if not explanation.is_allowed:
        print("Excluded: the item has another modality, or does not meet a condition.")
    elif explanation.rank is not None:
        print(
            f"Found: rank {explanation.rank:,} of {explanation.num_ranked:,} ranked items, "
            f"score {explanation.score:.4f}."
        )
    else:
        is_led_by_generator = any(step.probability is not None for step in explanation.levels)
        wider = f"; a --beam above {explanation.beam:,} may reach it" if is_led_by_generator else ""
        print(
            f"Not found among the {explanation.num_ranked:,} items that the search ranked{wider}."
        )


def _format_code(step: Sibling) -> str:
    """Return a code, with its probability if the generator was the router."""
    return str(step.code) if step.probability is None else f"{step.code} ({step.probability:.1%})"
