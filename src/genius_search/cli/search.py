"""``genius search``: search an index."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.options import (
    Conditions,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalInt,
    QueryOptions,
    RouterOption,
    Words,
    command,
    read_vectors,
)
from genius_search.cli.terminal import TerminalProgress, escape_controls, print_json, print_table
from genius_search.errors import UsageError, plural

if TYPE_CHECKING:
    from genius_search.config import SearchConfig
    from genius_search.index.hits import SearchHit
    from genius_search.index.index import Index

Rerank = Literal["none", "codes", "embeddings"]


def is_folder_of_files(folder: Path) -> bool:
    """Return whether this is a folder of somebody's files rather than an index or a model."""
    from genius_search.index.store import CLUSTER, CURRENT, LOCK, WORK
    from genius_search.model import MODEL_FILE

    names = (CLUSTER, CURRENT, LOCK, WORK, MODEL_FILE)
    return folder.is_dir() and not any((folder / name).exists() for name in names)


def cached_index(folder: Path) -> Path:
    """Return the place of the index of a folder of files, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = folder.resolve()
    return cache / "genius-search" / f"{folder.name}-{hashlib.sha256(bytes(folder)).hexdigest()[:12]}.index"


@command
class Search(QueryOptions, OpenIndexOptions, JsonOption):
    """Search an index, or a folder of pictures and texts, with a text, an image, or both.

    A folder is indexed in the user's cache when it is first searched, and brought up to date at each search.
    Exit status 3 if nothing is found.
    """

    vector: OptionalFile = None
    """Search with the vector in a .npy file, a feature of the index's encoder."""

    where: Conditions = ()
    """Search only items whose fields meet a condition: 'price<20', 'colour in red,blue', 'title~umbrella'."""

    match: Words = None
    """Search only items whose text contains these words; "a phrase" in double quotes, prefix*."""

    hybrid: bool = True
    """Raise items that have rare words of the query, and put those with its numbers first."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    beam: OptionalInt = None
    """IDs kept at each level, at least -k. Default: 10, in large indexes 30."""

    rerank: Annotated[Rerank | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Rank by the generator's probability, by the codes' vectors, or by stored embeddings. Default: codes."""

    router: RouterOption = None
    """With --rerank: what finds candidates. Default: geometry."""

    candidates: OptionalInt = None
    """With --rerank: stop decoding at this many IDs; 0: never. Default: all up to 8,000, else a tenth."""

    config: OptionalFile = None
    """TOML file with other settings, by the names of the fields of genius_search.SearchConfig."""

    codes: bool = False
    """Show the ID of each hit too."""

    files_only: bool = False
    """Print only the path of each hit's file."""

    def run(self) -> int:
        """Search and print the hits."""
        from genius_search.config import SearchConfig, checked, read_search_toml

        flags = {name: getattr(self, name) for name in ("beam", "rerank", "router", "candidates")}
        given = {name: value for name, value in flags.items() if value is not None}
        checked(SearchConfig(**given))
        if self.text and not self.index.exists():
            from genius_search.data.folder import is_file
            from genius_search.index.store import CURRENT

            if is_file(Path(self.text, CURRENT)):
                raise UsageError(f"no index at {self.index}; did you swap INDEX and TEXT?")
        index = self._open_index()
        config = index.settings
        if self.config is not None:
            config = read_search_toml(self.config, config)
        config = dataclasses.replace(config, **given)
        self._check_effects(config, has_generator=index.model.has_generator)
        hits = index.search(
            self.text,
            image=self.image,
            vector=None if self.vector is None else read_vectors(self.vector).squeeze(),
            instruction=self.instruction,
            modality=self.modality,
            where=self.where,
            match=self.match,
            hybrid=self.hybrid,
            k=self.k,
            config=config,
        )
        is_good = index.good_match(hits)
        if self.json:
            print_json(
                {
                    "index": str(index.folder),
                    "settings": {
                        "beam": max(config.beam, self.k),
                        "candidates": config.candidates,
                        "rerank": config.rerank,
                        "router": "generator" if index.model.uses_generator(config) else "geometry",
                    },
                    "good_match": is_good,
                    "hits": [dataclasses.asdict(hit) for hit in hits],
                }
            )
        elif not hits:
            is_absent = self.modality not in (None, *index.snapshot.count_by_modality())
            why = f": this index has no items of the modality {self.modality}" if is_absent else ""
            print(f"nothing found{why}", file=sys.stderr)
        elif self.files_only:
            self._print_files(hits)
        else:
            self._print_hits(hits)
        if hits and is_good is False:
            print("no good match: the first hit is probably wrong", file=sys.stderr)
        return 0 if hits else 3

    def _open_index(self) -> Index:
        """Open the index, or the one of a folder of pictures and texts."""
        if not is_folder_of_files(self.index):
            return self.open_index()
        from genius_search.cli.index import choose_encoder, report_added
        from genius_search.index.index import Index
        from genius_search.index.store import CURRENT

        place = cached_index(self.index)
        with TerminalProgress() as progress:
            if (place / CURRENT).exists():
                index = Index.open(place, device=self.device, download=self.download)
                index.sync(self.index, progress=progress)
            else:
                if inside := sorted(self.index.glob(f"*.index/{CURRENT}")):
                    raise UsageError(f"{self.index} is no index; did you mean {inside[0].parent}?")
                encoder, download = choose_encoder(self.index, captions=True, download=self.download)
                progress.say(f"indexing {self.index} once; the index is kept in {place}")
                index, added = Index.create(
                    place,
                    pool=self.index,
                    encoder=encoder,
                    device=self.device,
                    download=download,
                    progress=progress,
                )
                report_added(progress, added, as_json=False)
        return index

    def _check_effects(self, config: SearchConfig, *, has_generator: bool) -> None:
        """Refuse flags that would have no effect."""
        if self.json and self.files_only:
            raise UsageError("--json prints all of a hit; leave out --files-only")
        if self.candidates and config.rerank == "none":
            raise UsageError("--candidates needs --rerank codes or embeddings, which rank the candidates")
        if self.router == "generator" and not has_generator:
            raise UsageError(
                f"--router generator: the model of {self.index} has no generator; `genius fit` trains one"
            )
        if self.router == "geometry" and (config.rerank == "none" or config.generator_weight):
            raise UsageError(
                "--router geometry does without the generator, whose log-probabilities --rerank none and "
                "generator_weight need"
            )

    def _file_of(self, hit: SearchHit) -> Path | None:
        """Return the file of a hit, which a text of an index does not have."""
        if hit.image is not None:
            return Path(hit.image)
        return self.index.resolve() / hit.id if is_folder_of_files(self.index) else None

    def _print_files(self, hits: list[SearchHit]) -> None:
        files = [file for file in map(self._file_of, hits) if file is not None]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # paths need not be UTF-8
        for file in files:
            path = escape_controls(str(file)) if sys.stdout.isatty() else str(file)
            print(path)
        if len(files) < len(hits):
            without = plural(len(hits) - len(files), "hit")
            print(f"{without} left out: an index does not know the files of texts", file=sys.stderr)

    def _print_hits(self, hits: list[SearchHit]) -> None:
        """Print hits as a table; ids are never cut, so that they can be copied."""
        is_cut = sys.stdout.isatty()
        columns = ["rank", "score", "probability", "item", "text or picture"]
        rows = []
        for hit in hits:
            probability = "" if hit.probability is None else f"{hit.probability:.2f}"
            words = " ".join((hit.text or "").split())
            content = (words or hit.image or "") if is_cut else " ".join(filter(None, (hit.image, words)))
            rows.append([str(hit.rank), f"{hit.score:.4f}", probability, hit.id, content])
            if self.codes:
                rows.append([*[""] * 4, " · ".join(map(str, hit.codes))])
        if all(hit.probability is None for hit in hits):
            for row in (columns, *rows):
                del row[2]
        print_table(columns, rows, left=("item",), fill=True)
