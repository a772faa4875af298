"""``genius index``: create, change and inspect indexes."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from genius_search.cli.options import (
    DeviceOptions,
    IndexArgument,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalFolder,
    WaitOption,
    command,
    read_ids,
    read_vectors,
)
from genius_search.cli.terminal import (
    TerminalProgress,
    print_facts,
    print_json,
    print_text,
)
from genius_search.errors import BadData, BadImage, NetworkNeeded, UsageError, need_packages, plural

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from genius_search.index.items import Item
    from genius_search.index.writer import Writer


OptionalLevels = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]


@command
class Create(DeviceOptions, JsonOption, IndexArgument):
    """Create an index of a folder of pictures and texts, or of a .jsonl file of candidates."""

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the new index."""

    pool: OptionalFolder = None
    """A folder, with its subfolders, or a .jsonl file in M-BEIR's layout."""

    vectors: OptionalFile = None
    """Instead of a pool: a .npy file with a vector for each item."""

    ids: OptionalFile = None
    """With --vectors: a text file with the id of each item, a line each. Default: the numbers of the rows."""

    model: OptionalFolder = None
    """Folder of a trained model. Without one nothing is trained: codebooks are fitted to the pool."""

    encoder: str = "auto"
    """Encoder of an index without a trained model: clip:NAME or siglip:NAME for pictures and texts,
    text:NAME for texts, each with a name on the Hugging Face hub or a folder; text:wordllama for English
    texts without a download; auto chooses one."""

    embeddings: Annotated[Literal["none", "fused", "raw"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Store an embedding of every item, for re-ranking: fused ones, or raw sums of the encoder's
    features (the paper's GENIUS^R). Default: none with a model, otherwise fused."""

    embedding_bits: Annotated[Literal[1, 2, 4, 8, 16] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Bits of each number of a stored embedding; fewer than 8 only for fused ones. Default: 16 with a model,
    otherwise 4, and 1 from a million items on."""

    levels: OptionalLevels = None
    """Codes in an ID, without a model: bytes of an item. More rank closer to exact search. Default: 12."""

    no_captions: bool = False
    """Ignore texts beside pictures (.txt, .json, metadata lists)."""

    def run(self) -> None:
        """Create the index."""
        from genius_search.index.create import check_place
        from genius_search.index.index import Index

        if self.model is not None and self.encoder != "auto":
            raise UsageError("--model and --encoder exclude each other: a model has its own encoder")
        encoder, download = None, self.download
        if self.vectors is not None and self.encoder != "auto":
            encoder = self.encoder
        if self.model is None and self.pool is not None:
            encoder = self.encoder
            if encoder == "auto":
                check_place(self.index)
                encoder, download = choose_encoder(
                    self.pool, captions=not self.no_captions, download=download
                )
        with TerminalProgress() as progress:
            _, added = Index.create(
                self.index,
                pool=self.pool,
                vectors=None if self.vectors is None else read_vectors(self.vectors),
                ids=read_ids(self.ids),
                model=self.model,
                encoder=encoder,
                embeddings=self.embeddings,
                embedding_bits=self.embedding_bits,
                levels=self.levels,
                captions=not self.no_captions,
                device=self.device,
                download=download,
                progress=progress,
            )
            report_added(progress, added, as_json=self.json)
            query = ["what you look for"] if self.vectors is None else ["--vector", "query.npy"]
            progress.say_next("genius", "search", self.index, *query)


@command
class Add(WaitOption, OpenIndexOptions, JsonOption):
    """Add items to an index, without retraining; unchanged items are skipped.

    An item with a known id replaces the old one.
    """

    pool: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[POOL]", help_behavior_hint="")
    ] = None
    """A folder of pictures and texts, one such file, or a .jsonl file of candidates."""

    vectors: OptionalFile = None
    """Instead of a pool: a .npy file with a vector of the index's encoder for each item."""

    ids: OptionalFile = None
    """With --vectors: a text file with the id of each item, a line each."""

    no_captions: bool = False
    """Ignore texts beside pictures."""

    def run(self) -> None:
        """Add the items."""
        with TerminalProgress() as progress:
            index = self.open_index()
            added = index.add(
                self.pool,
                vectors=None if self.vectors is None else read_vectors(self.vectors),
                ids=read_ids(self.ids),
                captions=not self.no_captions,
                progress=progress,
                wait_seconds=self.wait,
            )
            report_added(progress, added, as_json=self.json)
            if index.has_outgrown:
                progress.say(
                    "the index has grown by more than a half since its codebooks were fitted; "
                    f"`genius index refit {shlex.quote(str(self.index))}` fits them anew"
                )


@command
class Sync(WaitOption, OpenIndexOptions, JsonOption):
    """Make an index hold what is in a pool: add, replace, and delete what is no longer there."""

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    no_captions: bool = False
    """Ignore texts beside pictures."""

    def run(self) -> None:
        """Add, replace and delete items."""
        with TerminalProgress() as progress:
            added, deleted = self.open_index().sync(
                self.pool, captions=not self.no_captions, progress=progress, wait_seconds=self.wait
            )
            report_added(progress, added, deleted, as_json=self.json)


@command
class Refit(WaitOption, OpenIndexOptions):
    """Fit the codebooks of an index to its items anew, after it has grown.

    Only for an index that was created with an encoder. Nothing is encoded: the stored embeddings are enough.
    """

    levels: OptionalLevels = None
    """Codes in an ID: bytes of an item. Default: as many as now."""

    def run(self) -> None:
        """Refit the index."""
        with TerminalProgress() as progress:
            index = self.open_index()
            index.refit(levels=self.levels, progress=progress, wait_seconds=self.wait)
            progress.say(f"new IDs for {plural(index.snapshot.num_alive, 'item')}")


@command
class Delete(WaitOption, JsonOption, IndexArgument):
    """Delete items from an index by their ids; no model is needed.

    Exit status 3 if the index had none of them.
    """

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ID ...]")] = ()
    """Ids of the items, as `genius search` prints them."""

    ids_from: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with one more id on each line; - is stdin."""

    def run(self) -> int:
        """Delete the items."""
        ids = [*self.ids, *(_read_ids(self.ids_from) if self.ids_from is not None else ())]
        if not ids:
            raise UsageError("no ids: name the items to delete, or give a file of ids with --ids-from")
        with _one_writer(self.index, self.wait) as writer:
            done = writer.delete(ids)
        if self.json:
            print_json({"deleted": done.deleted, "missing": done.missing})
        else:
            for missing in done.missing:
                print_text(f"not in the index: {missing}", error=True)
            print(f"{plural(done.deleted, 'item')} deleted", file=sys.stderr)
        return 0 if done.deleted else 3


@command
class Compact(WaitOption, IndexArgument):
    """Free the space of deleted items and merge all segments into one; no model is needed."""

    def run(self) -> None:
        """Compact the index."""
        from genius_search.index.writer import remove_work

        with _one_writer(self.index, self.wait) as writer:
            before = len(writer.snapshot.segments)
            writer.compact()
            remove_work(self.index)
            after = writer.snapshot
        segments = plural(len(after.segments), "segment")
        print(f"{plural(after.num_alive, 'item')} in {segments}, before in {before}", file=sys.stderr)


def _one_writer(folder: Path, seconds: float) -> AbstractContextManager[Writer]:
    """Lock an index for writing."""
    from genius_search.index.store import read_manifest
    from genius_search.index.writer import one_writer

    read_manifest(folder)
    return one_writer(folder, wait_seconds=seconds)


@command
class Verify(JsonOption, IndexArgument):
    """Verify every file of an index against its checksum; no model is needed.

    Exit status 4, and the file's name, if a file is damaged, foreign or missing.
    """

    def run(self) -> None:
        """Verify the index."""
        from genius_search.index.verify import verify

        print_facts(verify(self.index)._asdict(), as_json=self.json)


@command
class Info(JsonOption, IndexArgument):
    """Describe an index: items, IDs, collisions, bytes of each part, segments; no model is needed."""

    def run(self) -> None:
        """Print the facts."""
        from genius_search.index.snapshot import Snapshot
        from genius_search.index.verify import describe

        facts = dataclasses.asdict(describe(self.index, Snapshot.open(self.index)))
        if not self.json:
            facts["segments"] = len(facts["segments"])
            facts["bytes_per_item"] = {part: round(size) for part, size in facts["bytes_per_item"].items()}
        print_facts(facts, as_json=self.json)


def _read_ids(file: str) -> list[str]:
    """Return the ids in a file, one per line, blanks included; empty lines are skipped."""
    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a list of ids ({error})") from None
    return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line]


def choose_encoder(pool: Path, *, captions: bool, download: bool) -> tuple[str, bool]:
    """Return the spec of an encoder for a pool, and whether it may be downloaded; ask if that was not said.

    Raises
    ------
    NetworkNeeded
        It is not on this machine, and nobody said that it may be downloaded.
    """
    from genius_search.encoders.pretrained import IMAGES_AND_TEXTS, TEXTS_ONLY
    from genius_search.encoders.static import WORDLLAMA, has_wordllama
    from genius_search.index.adding import open_pool
    from genius_search.records import Modality

    items = open_pool(pool, captions=captions).items
    only_texts = all(item.modality is Modality.TEXT for item in items())
    if not any(map(_is_readable, items())):
        raise BadData(f"there is nothing to index in {pool}: none of the pictures can be read")
    suggestion = TEXTS_ONLY if only_texts else IMAGES_AND_TEXTS
    if download or suggestion.is_downloaded():
        print(f"encoder: {suggestion.description}", file=sys.stderr)
        return suggestion.spec, download
    if only_texts and has_wordllama():
        print(
            f"encoder: text:{WORDLLAMA}, for English, already installed. --download fetches "
            f"{suggestion.description}, which finds more",
            file=sys.stderr,
        )
        return f"text:{WORDLLAMA}", False
    need_packages("pretrained encoders need", "transformers")
    if sys.stdin.isatty():
        print(f"no encoder is named; {suggestion.description} suits this pool.", file=sys.stderr)
        if input("Download it from the Hugging Face hub? [y/N] ").strip().lower() in ("y", "yes"):
            return suggestion.spec, True
        raise NetworkNeeded(
            "nothing was downloaded; choose another encoder with `genius index create INDEX --pool FOLDER "
            "--encoder SPEC`"
        )
    raise NetworkNeeded(
        f"no encoder is named, and {suggestion.description}, which suits this pool, is not on this "
        "machine. Add --download to fetch it, or name one: --encoder clip:FOLDER, siglip:FOLDER or "
        "text:FOLDER, or a trained --model"
        + (
            ". For English texts `pip install 'genius-search[words]'` brings one that needs no download"
            if only_texts
            else ""
        )
    )


def _is_readable(item: Item) -> bool:
    """Return whether an item is a text, or a picture that can be read."""
    from genius_search.data.images import open_image

    with contextlib.suppress(BadImage):
        return item.image is None or bool(open_image(Path(item.image)))
    return False


def report_added(
    progress: TerminalProgress, added: Any, deleted: int | None = None, *, as_json: bool
) -> None:
    """Say what was added and deleted, and every file that was left out with its reason."""
    for left_out in added.left_out:
        progress.say(f"left out: {left_out.file}: {left_out.reason}".replace("\n", "\\n"))
    replaced = f" ({added.replaced:,} replaced)" if added.replaced else ""
    left_out = f", {plural(len(added.left_out), 'file')} left out" if added.left_out else ""
    also = "" if deleted is None else f", {deleted:,} deleted"
    progress.say(
        f"{plural(added.added, 'item')} added{replaced}, {added.unchanged:,} unchanged{also}{left_out}"
    )
    if as_json:
        print_json(
            {
                "added": added.added,
                "replaced": added.replaced,
                "unchanged": added.unchanged,
                **({} if deleted is None else {"deleted": deleted}),
                "left_out": [{"file": entry.file, "reason": entry.reason} for entry in added.left_out],
            }
        )
