"""``genius index``: create, change and inspect indexes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import tyro

from genius_search.cli.cluster import AddressOption, is_cluster, open_cluster
from genius_search.cli.options import (
    DeviceOptions,
    Embeddings,
    IndexArgument,
    ItemOptions,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    WaitOption,
    Words,
    command,
    optional,
    read_ids,
    read_vectors,
)
from genius_search.cli.terminal import (
    TerminalProgress,
    print_facts,
    print_json,
    print_text,
    to_json,
)
from genius_search.errors import BadData, NetworkNeeded, UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.index.build import ChangeSummary
    from genius_search.index.index import Index
    from genius_search.index.pool import Pool

MANY: Final = 5
"""Names that are listed; of more, the first and their number."""
IMAGES_AND_TEXTS: Final = "onnx:onnx-community/siglip2-base-patch16-224-ONNX"
"""Suggested for pools with images."""
TEXTS_ONLY: Final = "text:sentence-transformers/all-MiniLM-L6-v2"
"""Suggested for pools of texts."""
DESCRIBED: Final = {
    IMAGES_AND_TEXTS: f"{IMAGES_AND_TEXTS} (1,540 MB, licence Apache-2.0, English and many others)",
    TEXTS_ONLY: f"{TEXTS_ONLY} (91 MB, licence Apache-2.0, English)",
}
"""Size of the download, licence and languages."""


@command
class Create(DeviceOptions, ItemOptions, WaitOption, JsonOption, IndexArgument):
    """Create an index of a folder of pictures and texts, or of a .jsonl file of candidates."""

    pool: OptionalFolder = None
    """A folder, with its subfolders, or a .jsonl file in M-BEIR's layout."""

    model: OptionalFolder = None
    """Folder of a trained model. Without one nothing is trained: codebooks are fitted to the pool."""

    encoder: Words = None
    """Encoder of an index without a trained model: st:NAME of a model of sentence-transformers (also clip:,
    siglip: or text:), or onnx:NAME of ONNX graphs, each with a name on the Hugging Face hub or a folder;
    text:wordllama for English texts without a download. Default: one that suits the pool."""

    embeddings: Embeddings = None
    """Store an embedding of every item, for re-ranking: fused ones, or raw sums of the encoder's
    features (the paper's GENIUS^R). Default: none with a model, otherwise fused."""

    embedding_bits: Annotated[Literal[1, 2, 4, 8, 16] | None, optional("{1,2,4,8,16}")] = None
    """Bits of each number of a stored embedding; fewer than 8 only for fused ones. Default: 16 with a model,
    otherwise 4, and 2 from a million items on."""

    levels: OptionalInt = None
    """Codes in an ID, without a model: bytes of an item. More rank closer to exact search. Default: 12."""

    query_vectors: OptionalFile = None
    """Without a model: a .npy file with the encoder's vectors of at least a hundred typical queries, whose
    meaning codes then keep more of."""

    def run(self) -> None:
        print(f"reading {self.pool or self.vectors or self.index}", file=sys.stderr, flush=True)
        from genius_search.index.build import require_free_folder
        from genius_search.index.index import Index
        from genius_search.index.pool import open_pool

        self.require_source()
        encoder, download = self.encoder, self.download
        pool: Path | Pool = self.pool or Path()
        if encoder is None and self.model is None and self.pool is not None:
            require_free_folder(self.index)
            pool = open_pool(self.pool, **self.reading_options())
            encoder, download = choose_encoder(pool, download=download)
        with TerminalProgress() as progress:
            settings: dict[str, Any] = {
                "model": self.model,
                "encoder": encoder,
                "embeddings": self.embeddings,
                "embedding_bits": self.embedding_bits,
                "levels": self.levels,
                "query_vectors": read_vectors(self.query_vectors),
                "device": self.device,
                "download": download,
                "progress": progress,
                "wait_seconds": self.wait,
            }
            vectors = read_vectors(self.vectors)
            if vectors is not None:
                index = Index.from_vectors(self.index, vectors, ids=read_ids(self.ids), **settings)
            else:
                index = Index.create(self.index, pool, **self.reading_options(), **settings)
            report_added(progress, index.last_change, as_json=self.json)
            query = ["what you look for"] if self.vectors is None else ["--vector", "query.npy"]
            progress.say_next("genius", "search", self.index, *query)


@command
class Add(ItemOptions, AddressOption, WaitOption, OpenIndexOptions, JsonOption):
    """Add a folder, a file or a list to an index or a cluster, without retraining.

    Only what is new or has changed is encoded. The index remembers the folder for `genius index sync`. Ids in
    the first folder are paths in it; those in another begin with its name.
    """

    pool: Annotated[Path | None, tyro.conf.Positional, optional("[POOL]")] = None
    """A folder of pictures and texts, one such file, or a .jsonl file of candidates."""

    def run(self) -> None:
        with TerminalProgress() as progress:
            if is_cluster(self.index):
                self._add_to_cluster(progress)
                return
            progress.say(f"reading {self.pool or self.vectors or self.index}")
            self.require_source()
            index = self.open_index(with_encoder=False)
            if self.pool is not None:
                added = index.add(
                    self.pool, **self.reading_options(), progress=progress, wait_seconds=self.wait
                )
            else:
                added = self._add_vectors(index, progress)
            compact(index)
            report_added(progress, added, as_json=self.json)
            suggest_refit(index, progress)

    def _add_vectors(self, index: Index, progress: TerminalProgress) -> ChangeSummary:
        vectors, ids = read_vectors(self.vectors), read_ids(self.ids)
        if vectors is None or ids is None:
            raise UsageError("vectors that are added need --ids, a file with an id for each row")
        return index.add_vectors(vectors, ids=ids, progress=progress, wait_seconds=self.wait)

    def _add_to_cluster(self, progress: TerminalProgress) -> None:
        from genius_search.cluster.searcher import open_addition

        if self.pool is None:
            raise UsageError(f"{self.index} is a cluster; name a POOL to add, without --vectors")
        with open_cluster(self.index, self) as searcher:
            pool = open_addition(
                self.index, searcher, self.pool, captions=not self.no_captions, exclude=self.exclude
            )
            report_added(progress, searcher.add(pool), as_json=self.json)


def compact(index: Index) -> None:
    """Free the space of deleted items after a change, unless another process changes the index already."""
    from genius_search.index.writer import HeldByAnother

    with contextlib.suppress(HeldByAnother):
        index.compact()


def suggest_refit(index: Index, progress: TerminalProgress) -> None:
    """Say how to fit the codebooks of an index that has grown."""
    from genius_search.index.fit import has_outgrown
    from genius_search.index.index import current_state

    if has_outgrown(*current_state(index)):
        progress.say(
            "the index has grown by more than a half since its codebooks were fitted; "
            f"`genius index refit {shlex.quote(str(index.folder))}` fits them anew"
        )


@command
class Sync(WaitOption, OpenIndexOptions, JsonOption):
    """Bring an index up to date with its folders: add, update and move items, and delete those without files.

    Items stay whose folder or disk cannot be read, or of whose folder more than half is gone; exit status 3
    if there are such items.
    """

    folder: Annotated[Path | None, tyro.conf.Positional, optional("[FOLDER]")] = None
    """A folder that was added, a part of one, or its new place if it was moved. Default: all."""

    delete_missing: OptionalInt = None
    """Delete all items whose files are not found, if they are at most so many."""

    dry_run: bool = False
    """Only list what would be done."""

    def run(self) -> int:
        with TerminalProgress() as progress:
            if is_cluster(self.index):
                raise UsageError(
                    f"{self.index} is a cluster, which is not synchronised; `genius index add {self.index} "
                    "FOLDER` adds what is new or has changed, `genius index delete` removes items"
                )
            progress.say(f"reading {self.folder or 'all folders of the index'}")
            index = self.open_index(with_encoder=False)
            done = index.sync(
                self.folder,
                delete_missing=self.delete_missing,
                dry_run=self.dry_run,
                progress=progress,
                wait_seconds=self.wait,
            )
            for change in () if self.json else done.changes:
                before = "" if change.before is None else f"{change.before} -> "
                print_text(f"{change.kind} {before}{change.id}")
            report_added(progress, done, as_json=self.json, again=True)
            if not self.dry_run:
                compact(index)
                suggest_refit(index, progress)
        return 3 if done.missing else 0


@command
class Refit(WaitOption, OpenIndexOptions):
    """Fit the codebooks of an index to its items anew, after it has grown.

    Only for an index that was created with an encoder. Nothing is encoded: the stored embeddings are enough.
    """

    levels: OptionalInt = None
    """Codes in an ID: bytes of an item. Default: as many as now."""

    query_vectors: OptionalFile = None
    """A .npy file with the encoder's vectors of at least a hundred typical queries, as in `index create`.
    Default: those of before."""

    def run(self) -> None:
        with TerminalProgress() as progress:
            progress.say(f"reading {self.index}")
            index = self.open_index()
            query_vectors = read_vectors(self.query_vectors)
            index.refit(
                levels=self.levels,
                query_vectors=query_vectors,
                progress=progress,
                wait_seconds=self.wait,
            )
            progress.say(f"new IDs for {plural(len(index), 'item')}")


@command
class Delete(AddressOption, WaitOption, JsonOption, IndexArgument):
    """Delete items from an index or a cluster by their ids.

    Files stay, and `genius index sync` adds them again unless a .geniusignore leaves them out. Exit status 3
    if the index had none of them.
    """

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, optional("[ID ...]")] = ()
    """Ids of the items, as `genius search` prints them."""

    ids_from: OptionalFile = None
    """File with one more id on each line; - is stdin."""

    compact: bool = False
    """Free the space of all deleted items now, which writes the whole index anew; ids may be left out.
    Otherwise this is done when a fifth of a segment is deleted."""

    def run(self) -> int:
        ids = [*self.ids, *filter(None, read_ids(self.ids_from) or ())]
        if not ids and not self.compact:
            raise UsageError(
                "no ids: name the items to delete, or give a file of ids with --ids-from"
            )
        if is_cluster(self.index):
            if self.compact:
                raise UsageError(
                    "--compact writes one index anew; of a cluster give a folder in its shards/"
                )
            with open_cluster(self.index, self) as searcher:
                done = searcher.delete(ids)
        else:
            from genius_search.index.store import MIN_DELETED_SHARE, read_manifest
            from genius_search.index.writer import open_writer

            read_manifest(self.index)  # a folder that is no index stays as it is
            with open_writer(self.index, wait_seconds=self.wait) as writer:
                done = writer.delete(ids)
                writer.compact(0 if self.compact else MIN_DELETED_SHARE)
        if self.json:
            print_json(done._asdict())
        else:
            for missing in done.missing:
                print_text(f"not in the index: {missing}", error=True)
            print(f"{plural(done.deleted, 'item')} deleted", file=sys.stderr)
        return 0 if done.deleted or not ids else 3


@command
class Learn(WaitOption, OpenIndexOptions):
    """Learn which items were chosen for queries, so that they are found earlier for similar ones.

    Nothing is recorded unless this is run. Also lists and forgets what was learned.
    """

    log: Annotated[Path | None, tyro.conf.Positional, optional("[LOG]")] = None
    """Choices, one JSON object on each line: {"text": "a red kite", "chosen": "kites/7.jpg"}; the query may
    have an image, too, or be a vector."""

    forget: Annotated[str | None, optional("ID")] = None
    """Forget all choices of this item."""

    forget_all: bool = False
    """Forget everything that was learned."""

    export: bool = False
    """Print what was learned, in the format of LOG."""

    def run(self) -> int:
        if sum([self.log is not None, self.forget is not None, self.forget_all, self.export]) != 1:
            raise UsageError("give one of a LOG to learn, --forget ID, --forget-all and --export")
        index = self.open_index()
        if self.export:
            for choice in index.choices():
                print(to_json(choice))
        elif self.log is None:
            count = index.forget(chosen=self.forget, wait_seconds=self.wait)
            print(f"{plural(count, 'choice')} forgotten", file=sys.stderr)
        else:
            choices = _read_choices(self.log)
            unknown = index.learn_many(choices, wait_seconds=self.wait)
            for missing in unknown:
                print_text(f"not in the index: {missing}", error=True)
            print(f"{plural(len(choices) - len(unknown), 'choice')} learned", file=sys.stderr)
            return 0 if len(unknown) < len(choices) else 3
        return 0


def _read_choices(log: Path) -> list[dict[str, Any]]:
    from pydantic import BaseModel, BeforeValidator

    from genius_search.border import as_id, as_path
    from genius_search.data.mbeir import read_json_lines

    class Line(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
        chosen: Annotated[str, BeforeValidator(as_id)]
        text: str | None = None
        image: str | None = None
        vector: list[float] | None = None
        instruction: str | None = None

    choices = []
    for _, line in read_json_lines(log, Line.model_validate):
        choice = line.model_dump(exclude_none=True)
        if line.image is not None:
            choice["image"] = log.parent / as_path(line.image)
        choices.append(choice)
    if not choices:
        raise BadData(f"{log} has no choices")
    return choices


@command
class Info(JsonOption, IndexArgument):
    """Describe an index: items, IDs, collisions, bytes of each part, segments; no model is needed."""

    verify: bool = False
    """Compare every file of an index or a cluster with its checksum instead. Exit status 4 if one is damaged,
    foreign or missing."""

    def run(self) -> None:
        from genius_search.index.info import check, describe_index
        from genius_search.index.snapshot import Snapshot

        if not self.verify:
            facts = dataclasses.asdict(describe_index(self.index, Snapshot.open(self.index)))
            if not self.json:
                facts["bytes_per_item"] = {
                    part: round(size) for part, size in facts["bytes_per_item"].items()
                }
        elif is_cluster(self.index):
            from genius_search.cluster.searcher import Searcher

            facts = Searcher.open(self.index).check()._asdict()
        else:
            facts = check(self.index)._asdict()
        print_facts(facts, as_json=self.json)


def choose_encoder(pool: Pool, *, download: bool) -> tuple[str, bool]:
    """Return the spec of an encoder for a pool, and whether it may be downloaded; ask if that was not said.

    Raises
    ------
    NetworkNeeded
        It is not on this machine, and nobody said that it may be downloaded.
    MissingExtra
        No encoder of texts is installed.
    """
    from genius_search.encoders.static import WORDLLAMA, has_wordllama
    from genius_search.hub import find_cached
    from genius_search.records import Modality

    only_texts = all(item.modality is Modality.TEXT for item in pool.items())
    suggested = TEXTS_ONLY if only_texts else IMAGES_AND_TEXTS
    described = DESCRIBED[suggested]
    can_open = not only_texts or importlib.util.find_spec("sentence_transformers") is not None
    if not can_open and (download or not has_wordllama()):
        small = "wordllama, small and for English (pip install 'genius-search[words]')"
        need_packages(f"texts need {small}, or", "sentence_transformers")
    if can_open and (download or find_cached(suggested.partition(":")[2]) is not None):
        print(f"encoder: {described}", file=sys.stderr)
        return suggested, download
    if only_texts and has_wordllama():
        print(
            f"encoder: text:{WORDLLAMA}, for English, already installed. "
            f"{'' if can_open else 'With the extra models, '}--download fetches {described}, "
            "which finds more",
            file=sys.stderr,
        )
        return f"text:{WORDLLAMA}", False
    if sys.stdin.isatty():
        print(f"no encoder is named; {described} suits this pool.", file=sys.stderr)
        if input("Download it from the Hugging Face hub? [y/N] ").strip().lower() in ("y", "yes"):
            return suggested, True
    words = ""
    if only_texts:
        words = ". For English texts `pip install 'genius-search[words]'` brings one that needs no download"
    elif has_wordllama() and any(item.text for item in pool.items()):
        words = (
            f". text:{WORDLLAMA}, which needs no download, finds pictures by their captions alone"
        )
    raise NetworkNeeded(
        f"no encoder is named, and {described}, which suits this pool, is not on this "
        "machine. Add --download to fetch it, or give `genius index create` an --encoder: FOLDER (of ONNX "
        "graphs), text:FOLDER or onnx:Xenova/clip-vit-base-patch32 (610 MB, MIT, English), or a --model"
        f"{words}"
    )


def report_added(
    progress: TerminalProgress, added: ChangeSummary, *, as_json: bool, again: bool = False
) -> None:
    """Say what was added and deleted, what was left out and why, and which texts were cut.

    A reason that many files share is said once, and of many rows of a list the first; ``again``, files of
    other kinds are only counted.
    """
    from genius_search.data.folder import OTHER_KIND

    reasons: dict[str, list[str]] = {}
    counts = Counter[str]()
    for one in added.left_out:
        counts[one.file] += 1
        if counts[one.file] <= MANY:
            reasons.setdefault(one.reason, []).append(one.file)
    for reason, files in reasons.items():
        if again and reason.startswith(OTHER_KIND):
            continue
        is_long = len(files) > MANY
        for file in files[:1] if is_long else files:
            more = f" and {plural(len(files) - 1, 'other file')}" if is_long else ""
            progress.say(f"left out: {file}{more}: {reason}".replace("\n", "\\n"))
    for file, count in counts.items():
        if count > MANY:
            progress.say(f"left out: {file}: {count - MANY:,} rows more, which --json lists")
    if cut := added.shortened:
        more = f" and {len(cut) - MANY:,} more" if len(cut) > MANY else ""
        progress.say(
            f"{plural(len(cut), 'text')} longer than the encoder reads, so that what follows is found by its "
            f"words only (--match): {', '.join(cut[:MANY])}{more}"
        )
    kinds = {"replaced": added.replaced, "moved": added.moved, "not encoded again": added.reused}
    parts = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
    unreadable = f", {plural(len(counts), 'file')} left out" if counts else ""
    deleted = f", {added.deleted:,} deleted" if added.deleted else ""
    progress.say(
        f"{'would be: ' if added.changes else ''}{plural(added.added, 'item')} added"
        f"{f' ({parts})' if parts else ''}, {added.unchanged:,} unchanged{deleted}{unreadable}"
    )
    if as_json:
        left = [{"file": one.file, "reason": one.reason} for one in added.left_out]
        changes = [change._asdict() for change in added.changes]
        print_json({**dataclasses.asdict(added), "left_out": left, "changes": changes})
