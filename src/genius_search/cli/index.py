"""``genius index``: create, change and inspect indexes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
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
    OcrOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalFloat,
    OptionalFolder,
    OptionalInt,
    OptionalName,
    WaitOption,
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
from genius_search.errors import BadData, GeniusError, UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.data.features import LeftOut
    from genius_search.index.build import ChangeSummary
    from genius_search.index.index import Index
    from genius_search.index.pool import Pool
    from genius_search.index.writer import Deleted

MAX_LISTED: Final = 5
"""Maximum number of files to list with the same problem; of more, one is named and the others are
counted."""


@command
class Create(DeviceOptions, ItemOptions, OcrOption, WaitOption, JsonOption, IndexArgument):
    """Create an index of a folder of pictures and texts, or of a .jsonl file of candidates.

    With an encoder instead of a trained model, nothing is trained: codebooks are fitted to the
    pool.
    """

    pool: OptionalFolder = None
    """Folder to index, including its subfolders, or a .jsonl file of candidates in M-BEIR's
    layout."""

    model: OptionalFolder = None
    """Folder of a trained model."""

    encoder: OptionalName = None
    """Instead of a model: a pretrained encoder, a folder or a name on the Hugging Face hub: st:NAME
    (also clip:, siglip:, text:), onnx:NAME or onnx-quantized:NAME. text:wordllama (English) and
    text:universal-sentence-encoder need no download. Default: one that suits the pool."""

    embeddings: Embeddings = None
    """Embeddings to store for re-ranking: fused, or raw sums of features (GENIUS^R in the paper).
    Default: none with a model, otherwise fused."""

    embedding_bits: Annotated[Literal[1, 2, 4, 8, 16] | None, optional("{1,2,4,8,16}")] = None
    """Bits per number of a stored embedding; fewer than 8 only for fused ones. Default: 16 with a
    model; otherwise 8, 4 from 16,385 items on, or 2 from a million on."""

    levels: OptionalInt = None
    """Without a model: number of codes in an ID, one byte each. Default: one or two, and fine
    codes."""

    recall: OptionalFloat = None
    """Without a model: share of exact search's first ten to find, such as 0.95. Default: 0.975,
    or 0.9 above 100,000 items."""

    query_vectors: OptionalFile = None
    """Without a model: a .npy file with the encoder's vectors of at least 100 typical queries."""

    part: Annotated[str | None, optional("I/N")] = None
    """Only encode part I of N, such as 2/4. Last, run without it."""

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
            from genius_search.cli.encoders import choose_encoder

            encoder, download = choose_encoder(pool, download=download)
        if self.part is not None:
            self._encode_part(self.part, pool, encoder, download=download)
            return
        with TerminalProgress() as progress:
            settings: dict[str, Any] = {
                "model": self.model,
                "encoder": encoder,
                "embeddings": self.embeddings,
                "embedding_bits": self.embedding_bits,
                "levels": self.levels,
                "recall": self.recall,
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
            query = ["your query"] if self.vectors is None else ["--vector", "query.npy"]
            self.read_pictures(index, progress)
            progress.say_next("genius", "search", self.index, *query)

    def _encode_part(
        self, part: str, pool: Path | Pool, encoder: str | None, *, download: bool
    ) -> None:
        """Encode a part of the pool for a later run."""
        from genius_search.index.build import encode_share
        from genius_search.index.pool import Pool, open_pool

        numbers = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", part)
        if numbers is None or int(numbers[1]) > int(numbers[2]):
            raise UsageError(f"--part is {part!r}; expected I/N with I from 1 to N, such as 2/4")
        if self.vectors is not None:
            raise UsageError("--part shares out the encoding of a pool, and vectors need none")
        if not isinstance(pool, Pool):
            pool = open_pool(pool, **self.reading_options())
        with TerminalProgress() as progress:
            encoded = encode_share(
                self.index,
                pool,
                (int(numbers[1]) - 1, int(numbers[2])),
                model=self.model,
                encoder=encoder,
                device=self.device,
                download=download,
                progress=progress,
            )
            progress.say(
                f"encoded {plural(len(encoded.features), 'item')} of {len(encoded.changes):,}; "
                "when all parts are encoded, run the command without --part"
            )


@command
class Add(ItemOptions, AddressOption, OcrOption, WaitOption, OpenIndexOptions, JsonOption):
    """Add the items of a folder, a file or a list to an index or a cluster, without retraining.

    Only new and changed items are encoded. The index remembers the folder for `genius index sync`.
    The id of an item is its path in the folder; in the second and further folders, ids begin with
    the name of the folder.
    """

    pool: Annotated[Path | None, tyro.conf.Positional, optional("[POOL]")] = None
    """Folder of pictures and texts, a single such file, or a .jsonl file of candidates."""

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
            self.read_pictures(index, progress)

    def _add_vectors(self, index: Index, progress: TerminalProgress) -> ChangeSummary:
        vectors = read_vectors(self.vectors)
        ids = read_ids(self.ids)
        if vectors is None or ids is None:
            raise UsageError("--vectors needs --ids, a file with the id of each row")
        return index.add_vectors(vectors, ids=ids, progress=progress, wait_seconds=self.wait)

    def _add_to_cluster(self, progress: TerminalProgress) -> None:
        from genius_search.cluster.searcher import open_new_pool

        if self.pool is None:
            raise UsageError(f"{self.index} is a cluster; give a POOL to add, without --vectors")
        with open_cluster(self.index, self) as searcher:
            pool = open_new_pool(
                self.index, searcher, self.pool, captions=not self.no_captions, exclude=self.exclude
            )
            report_added(progress, searcher.add(pool), as_json=self.json)


def compact(index: Index) -> None:
    """Free the space of deleted items, unless another process is changing the index."""
    from genius_search.index.writer import HeldByAnother

    with contextlib.suppress(HeldByAnother):
        index.compact()


def suggest_refit(index: Index, progress: TerminalProgress) -> None:
    """Suggest `genius index refit` if the index has outgrown its codebooks."""
    from genius_search.index.fit import has_outgrown
    from genius_search.index.index import current_state

    if has_outgrown(*current_state(index)):
        progress.say(
            "the index has grown by more than half since its codebooks were fitted; "
            f"fit them again with `genius index refit {shlex.quote(str(index.folder))}`"
        )


@command
class Sync(OcrOption, WaitOption, OpenIndexOptions, JsonOption):
    """Bring an index up to date with its folders: add, update, move and delete items.

    Items whose files are gone are deleted, except if their folder or disk cannot be read, or if
    more than half of the folder is gone; the exit status is then 3.
    """

    folder: Annotated[Path | None, tyro.conf.Positional, optional("[FOLDER]")] = None
    """Folder that was added, a subfolder, or the new path of a moved folder. Default: all
    folders."""

    delete_missing: OptionalInt = None
    """Delete all items whose files are missing, provided that there are at most this many."""

    dry_run: bool = False
    """List the changes without making them."""

    watch: bool = False
    """Then wait for changes in the folders, and bring the index up to date after each, until
    Ctrl-C is pressed. Needs the extra watch."""

    def run(self) -> int:
        with TerminalProgress() as progress:
            if self.watch and (self.dry_run or self.delete_missing is not None):
                raise UsageError("--watch makes changes as they come; leave out the other options")
            if self.watch:
                need_packages("--watch needs", "watchfiles")
            if is_cluster(self.index):
                raise UsageError(
                    f"{self.index} is a cluster, which cannot be synchronised; add new and changed "
                    f"items with `genius index add {self.index} FOLDER`, and remove items with "
                    "`genius index delete`"
                )
            progress.say(f"reading {self.folder or 'all folders of the index'}")
            index = self.open_index(with_encoder=False)
            summary = self._synchronise(index, progress)
            for change in () if self.json else summary.changes:
                before = "" if change.before is None else f"{change.before} -> "
                print_text(f"{change.kind} {before}{change.id}")
            report_added(progress, summary, as_json=self.json, again=True)
            if not self.dry_run:
                suggest_refit(index, progress)
                self.read_pictures(index, progress)
            if self.watch:
                self._watch(index, progress, reported={*summary.left_out})
                return 0
        return 3 if summary.missing else 0

    def _synchronise(self, index: Index, progress: TerminalProgress) -> ChangeSummary:
        summary = index.sync(
            self.folder,
            delete_missing=self.delete_missing,
            dry_run=self.dry_run,
            progress=progress,
            wait_seconds=self.wait,
        )
        if not self.dry_run:
            compact(index)
        return summary

    def _watch(self, index: Index, progress: TerminalProgress, reported: set[LeftOut]) -> None:
        """Bring the index up to date after each change, until Ctrl-C is pressed.

        Parameters
        ----------
        reported
            Files that were left out before; they are not listed again.
        """
        from genius_search.cli.watch import watch_folders

        def folders() -> list[Path]:
            roots = [Path(root.folder) for root in index.roots]
            return roots if self.folder is None else [self.folder]

        def synchronise() -> bool:
            try:
                summary = self._synchronise(index, progress)
            except (GeniusError, OSError) as error:
                progress.close()
                progress.say(f"not up to date: {error}; this is tried again")
                return False
            summary.left_out = [entry for entry in summary.left_out if entry not in reported]
            reported.update(summary.left_out)
            if summary.added or summary.deleted or summary.moved or summary.left_out:
                report_added(progress, summary, as_json=self.json, again=True)
            self.read_pictures(index, progress)
            return True

        progress.say("waiting for changes; Ctrl-C ends this")
        try:
            watch_folders(folders, self.index, synchronise)
        except KeyboardInterrupt:
            progress.close()
            progress.say("stopped; the next `genius index sync` continues here")


@command
class Refit(WaitOption, OpenIndexOptions):
    """Fit the codebooks of an index to its current items, after it has grown.

    The index must have been created with an encoder. Items are not encoded again, since the stored
    embeddings are used, unless another encoder is given.
    """

    encoder: OptionalName = None
    """Encode all items with another encoder, as for `genius index create`. Ids, fields, texts and
    choices stay. Default: the encoder of the index."""

    levels: OptionalInt = None
    """Number of codes in an ID, one byte each. Default: unchanged."""

    recall: OptionalFloat = None
    """Share of exact search's first ten to find, such as 0.95. Default: unchanged."""

    query_vectors: OptionalFile = None
    """A .npy file with the encoder's vectors of at least 100 typical queries, as for `genius index
    create`. Default: the previous ones."""

    def run(self) -> None:
        with TerminalProgress() as progress:
            progress.say(f"reading {self.index}")
            index = self.open_index(with_encoder=self.encoder is None)
            query_vectors = read_vectors(self.query_vectors)
            num_lost = index.refit(
                encoder=self.encoder,
                device=self.device,
                download=self.download,
                levels=self.levels,
                recall=self.recall,
                query_vectors=query_vectors,
                progress=progress,
                wait_seconds=self.wait,
            )
            progress.say(f"new IDs for {plural(len(index), 'item')}")
            if num_lost:
                progress.say(
                    f"{plural(num_lost, 'choice')} for pictures or vectors forgotten: the log has "
                    "no pictures to encode again"
                )


@command
class Delete(AddressOption, WaitOption, JsonOption, IndexArgument):
    """Delete items from an index or a cluster by their ids, or from an index by conditions.

    Files are not deleted, and `genius index sync` adds their items again unless a .geniusignore
    file leaves them out. The exit status is 3 if the index has none of the ids.
    """

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, optional("[ID ...]")] = ()
    """Ids of the items, as printed by `genius search`."""

    ids_from: OptionalFile = None
    """File with further ids, one per line; - reads stdin."""

    where: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")
    ] = ()
    """Instead of ids: delete all items that meet all conditions: 'price<10 and brand=acme'."""

    compact: bool = False
    """Free the space of all deleted items now, by rewriting the index; no ids are needed. By
    default, a segment is rewritten when a fifth of its items are deleted."""

    def run(self) -> int:
        ids = [*self.ids, *filter(None, read_ids(self.ids_from) or ())]
        if not (ids or self.where or self.compact):
            raise UsageError(
                "no ids were given; give the ids of the items to delete, a file with --ids-from, "
                "or conditions with --where"
            )
        if ids and self.where:
            raise UsageError("give either ids or --where, not both")
        if is_cluster(self.index):
            if self.compact or self.where:
                raise UsageError(
                    "--compact and --where change a single index; for a cluster, give a folder in "
                    "its shards/"
                )
            with open_cluster(self.index, self) as searcher:
                result = searcher.delete(ids)
        else:
            result = self._delete(ids)
        if self.json:
            print_json(result._asdict())
        else:
            for missing_id in result.missing:
                print_text(f"not in the index: {missing_id}", error=True)
            print(f"{plural(result.deleted, 'item')} deleted", file=sys.stderr)
        return 0 if result.deleted or not ids else 3

    def _delete(self, ids: Sequence[str]) -> Deleted:
        """Delete items from an index, by their ids or by conditions."""
        from genius_search.index.filters import Filter
        from genius_search.index.store import MIN_DELETED_SHARE, read_manifest
        from genius_search.index.writer import Deleted, open_writer

        read_manifest(self.index)  # raises before the lock creates a file in another folder
        with open_writer(self.index, wait_seconds=self.wait) as writer:
            if self.where:
                result = Deleted(writer.delete_where(Filter.parse(self.where)), [])
            else:
                result = writer.delete(ids)
            writer.compact(0 if self.compact else MIN_DELETED_SHARE)
        return result


@command
class Learn(WaitOption, OpenIndexOptions):
    """Learn from choices: items that were chosen for a query rank higher for similar queries.

    The command also lists and deletes learned choices. Searches themselves record nothing.
    """

    log: Annotated[Path | None, tyro.conf.Positional, optional("[LOG]")] = None
    """File of choices, one JSON object per line: {"text": "a red kite", "chosen": "kites/7.jpg"}. A
    query may also have an image, or be a vector."""

    forget: Annotated[str | None, optional("ID")] = None
    """Delete all choices of the item with this id."""

    forget_all: bool = False
    """Delete all learned choices."""

    export: bool = False
    """Print all learned choices, in the format of LOG."""

    def run(self) -> int:
        if sum([self.log is not None, self.forget is not None, self.forget_all, self.export]) != 1:
            raise UsageError("give exactly one of LOG, --forget ID, --forget-all and --export")
        index = self.open_index()
        if self.export:
            for choice in index.choices():
                print(to_json(choice))
        elif self.log is None:
            count = index.forget(chosen=self.forget, wait_seconds=self.wait)
            print(f"{plural(count, 'choice')} forgotten", file=sys.stderr)
        else:
            choices = _read_choices(self.log)
            missing_ids = index.learn_many(choices, wait_seconds=self.wait)
            for missing_id in missing_ids:
                print_text(f"not in the index: {missing_id}", error=True)
            print(f"{plural(len(choices) - len(missing_ids), 'choice')} learned", file=sys.stderr)
            return 0 if len(missing_ids) < len(choices) else 3
        return 0


def _read_choices(log: Path) -> list[dict[str, Any]]:
    """Read the choices of a log; paths of images are relative to the log's folder."""
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
        raise BadData(f"{log} contains no choices")
    return choices


@command
class Info(JsonOption, IndexArgument):
    """Describe an index: its items, IDs, collisions, segments, and the size of each part.

    The index is read without its model.
    """

    check: bool = False
    """Compare all files of an index or a cluster with their checksums instead. The exit status is 4
    if a file is damaged, missing, or of another index."""

    def run(self) -> None:
        from genius_search.index.info import check, describe_index
        from genius_search.index.snapshot import Snapshot

        if not self.check:
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


def report_added(
    progress: TerminalProgress, added: ChangeSummary, *, as_json: bool, again: bool = False
) -> None:
    """Print the numbers of added and deleted items, the files left out and why, and the cut texts.

    Parameters
    ----------
    again
        whether the folders were read before. Files of other types are then counted, but not listed.
    """
    _report_left_out(progress, added, again=again)
    if cut := added.shortened:
        more = f" and {len(cut) - MAX_LISTED:,} more" if len(cut) > MAX_LISTED else ""
        progress.say(
            f"{plural(len(cut), 'text')} longer than the encoder reads; the remaining words are "
            f"found with --match only: {', '.join(cut[:MAX_LISTED])}{more}"
        )
    counts = {"replaced": added.replaced, "moved": added.moved, "not encoded again": added.reused}
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    num_files = len({left_out.file for left_out in added.left_out})
    unreadable = f", {plural(num_files, 'file')} left out" if num_files else ""
    deleted = f", {added.deleted:,} deleted" if added.deleted else ""
    progress.say(
        f"{'would be: ' if added.changes else ''}{plural(added.added, 'item')} added"
        f"{f' ({parts})' if parts else ''}, {added.unchanged:,} unchanged{deleted}{unreadable}"
    )
    if as_json:
        left = [{"file": item.file, "reason": item.reason} for item in added.left_out]
        changes = [change._asdict() for change in added.changes]
        print_json({**dataclasses.asdict(added), "left_out": left, "changes": changes})


def _report_left_out(progress: TerminalProgress, added: ChangeSummary, *, again: bool) -> None:
    """Print the files that were left out, grouped by the reason.

    A reason that more than :data:`MAX_LISTED` files share is printed once, and so are the further
    rows of a list: ``left out: pool.jsonl: 12 more rows; --json lists them``.
    """
    from genius_search.data.documents import UNREAD_ENDING

    reasons: dict[str, list[str]] = {}
    counts = Counter[str]()
    for left_out in added.left_out:
        counts[left_out.file] += 1
        if counts[left_out.file] <= MAX_LISTED:
            reasons.setdefault(left_out.reason, []).append(left_out.file)
    for reason, files in reasons.items():
        if again and reason.startswith(UNREAD_ENDING):
            continue
        is_long = len(files) > MAX_LISTED
        for file in files[:1] if is_long else files:
            more = f" and {plural(len(files) - 1, 'other file')}" if is_long else ""
            progress.say(f"left out: {file}{more}: {reason}".replace("\n", "\\n"))
    for file, count in counts.items():
        if count > MAX_LISTED:
            progress.say(f"left out: {file}: {count - MAX_LISTED:,} more rows; --json lists them")
