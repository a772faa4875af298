"""``genius index``: one's own items, as they come and go."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.terminal import TerminalProgress, print_facts, print_json

if TYPE_CHECKING:
    from genius_search.index.verify import IndexInfo

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

    embedding_type: Literal["float16", "int8"] = "float16"
    """Two bytes a number of an embedding, or one."""

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
        from genius_search.index.index import Index
        from genius_search.model import Genius

        with TerminalProgress() as progress:
            _, added = Index.create(
                self.index,
                model=Genius.open(self.model, device=self.device, download=self.download),
                pool=self.pool,
                embeddings=self.embeddings,
                embedding_type=self.embedding_type,
                captions=not self.no_captions,
                progress=progress,
            )
            _tell(progress, added, as_json=self.json)
            progress.say(f'next: genius search {shlex.quote(str(self.index))} "what you look for"')


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add items to an index, without retraining; what has not changed since is passed over.

    An item whose id is known takes the place of the other.
    """

    index: IndexFolder
    """Folder of the index."""

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    no_captions: bool = False
    """Leave texts that lie beside pictures out of the items."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """How long to wait while another process changes the index."""

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
        from genius_search.index.index import Index

        with TerminalProgress() as progress:
            index = Index.open(self.index, model=self.model, device=self.device, download=self.download)
            added = index.add(
                self.pool, captions=not self.no_captions, progress=progress, wait_seconds=self.wait
            )
            _tell(progress, added, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Delete items from an index by their ids; no model is needed.

    Exit status 3 when none of them was there.
    """

    index: IndexFolder
    """Folder of the index."""

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ID ...]")] = ()
    """Ids of the items, as `genius search` prints them."""

    ids_from: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Read ids from a file too, one a line; - is stdin."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """How long to wait while another process changes the index."""

    json: bool = False
    """Say what was deleted as JSON on stdout."""

    def run(self) -> int:
        """Delete them."""
        from genius_search.errors import UsageError
        from genius_search.index.store import read_manifest
        from genius_search.index.writer import one_writer

        ids = [*self.ids, *(_lines(self.ids_from) if self.ids_from is not None else ())]
        if not ids:
            raise UsageError("no ids: name the items to delete, or give a file of ids with --ids-from")
        read_manifest(self.index)
        with one_writer(self.index, wait_seconds=self.wait) as writer:
            done = writer.delete(ids)
        if self.json:
            print_json({"deleted": done.deleted, "missing": done.missing})
        else:
            for missing in done.missing:
                print(f"not in the index: {missing}", file=sys.stderr)
            print(f"{done.deleted} items deleted", file=sys.stderr)
        return 0 if done.deleted else 3


@dataclass(frozen=True, kw_only=True)
class Compact:
    """Give back the room of deleted items, and make one segment of all; no model is needed."""

    index: IndexFolder
    """Folder of the index."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """How long to wait while another process changes the index."""

    def run(self) -> None:
        """Compact it."""
        from genius_search.index.store import read_manifest
        from genius_search.index.writer import one_writer, remove_work

        read_manifest(self.index)
        with one_writer(self.index, wait_seconds=self.wait) as writer:
            before = writer.snapshot
            writer.compact()
            remove_work(self.index)
            after = writer.snapshot
        print(
            f"{after.num_alive:,} items in {len(after.segments)} segments, before in {len(before.segments)}",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every file of an index and compare it with what was written; no model is needed.

    Exit status 4, and the file's name, when one is damaged, foreign or missing.
    """

    index: IndexFolder
    """Folder of the index."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Verify it."""
        from genius_search.index.verify import verify

        print_facts(verify(self.index)._asdict(), as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What an index holds: items, IDs, collisions, bytes of each part, segments; no model is needed."""

    index: IndexFolder
    """Folder of the index."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Print it."""
        from genius_search.index.snapshot import Snapshot
        from genius_search.index.verify import describe

        info = describe(self.index, Snapshot.open(self.index))
        if self.json:
            print_facts(dataclasses.asdict(info), as_json=True)
        else:
            print_facts(_for_a_person(info), as_json=False)


PARTS = {
    "ids": "IDs",
    "buckets": "lists of items",
    "typicality": "typicality",
    "embeddings": "embeddings",
    "items": "texts and fields",
    "deleted": "deleted",
}
"""What the parts of an index are called in a sentence."""


def _for_a_person(info: IndexInfo) -> dict[str, object]:
    """The facts of an index, rounded and in words."""
    total = sum(info.bytes_per_item.values())
    parts = ", ".join(
        f"{PARTS[part]} {size:,.0f}" for part, size in info.bytes_per_item.items() if size >= 0.5
    )
    facts: dict[str, object] = {
        "index": info.folder,
        "model": f"{info.model}, fingerprint {info.model_fingerprint[:12]}",
        "items": info.items,
        "of them": info.by_modality or "none",
        "distinct IDs": info.distinct_ids,
        "sharing an ID": f"{info.collision_rate:.2%} of the items",
        "on disk": f"{_size(total * info.items)}, {total:,.0f} bytes an item",
        "bytes an item": parts or "none",
        "embeddings": info.embeddings,
        "searched with": _searched_with(info),
        "changes so far": info.generation,
        "segments": "; ".join(
            f"{one.name}: {one.items:,} items, {one.deleted:,} of them deleted or replaced"
            for one in info.segments
        )
        or "none",
    }
    if info.bytes_per_item["deleted"] * info.items >= 1:
        room = _size(info.bytes_per_item["deleted"] * info.items)
        facts["to be given back"] = f"{room}, by `genius index compact`"
    if info.work_bytes:
        facts["interrupted work"] = f"{_size(info.work_bytes)}; the next add goes on from it"
    return facts


def _searched_with(info: IndexInfo) -> str:
    """The settings of a search that names none."""
    if info.tuned is None:
        return "the usual settings; `genius tune` finds better ones"
    tuned, search = info.tuned, info.tuned.search
    decoded = f"{search.candidates:,} candidates" if search.candidates else "all levels"
    mixed = f" + {search.generator_weight:g} × log-probability" if search.generator_weight else ""
    return (
        f"beam {search.beam}, {decoded}, ranked by {search.rerank}{mixed}; tuned for {tuned.wish} on "
        f"{tuned.data} when it had {tuned.items:,} items: {tuned.share:.1%} of what ranking everything "
        f"finds, {tuned.cpu_ms:.2g} CPU-ms a query"
    )


def _size(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def _lines(file: str) -> list[str]:
    """Ids in a file, one a line, blanks and all; empty lines are passed over."""
    from genius_search.errors import BadData

    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a list of ids ({error})") from None
    return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line]


def _tell(progress: TerminalProgress, added, *, as_json: bool) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Say what became of the items; every file that was left out by name, with its reason."""
    for left_out in added.left_out:
        progress.say(f"left out: {left_out.file}: {left_out.reason}")
    progress.say(
        f"{added.added} items added ({added.replaced} of them replaced), {added.unchanged} unchanged, "
        f"{len(added.left_out)} files left out"
    )
    if as_json:
        print_json(
            {
                "added": added.added,
                "replaced": added.replaced,
                "unchanged": added.unchanged,
                "left_out": [{"file": entry.file, "reason": entry.reason} for entry in added.left_out],
            }
        )
