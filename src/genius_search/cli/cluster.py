"""``genius cluster``: indexes in shards."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.index import report_added
from genius_search.cli.options import (
    Conditions,
    DeviceOptions,
    JsonOption,
    ModalityOption,
    OptionalFolder,
    Words,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_json, print_table, print_text
from genius_search.errors import plural

if TYPE_CHECKING:
    from genius_search.cluster.searcher import Searcher


@command
class AddressOption:
    """A command that may use a Ray cluster."""

    address: Words = None
    """HOST:PORT of a Ray cluster's head; local starts Ray on this machine. Default: this process alone."""

    def connected(self) -> AbstractContextManager[None]:
        """Connect to the Ray cluster, if one was given."""
        if self.address is None:
            return nullcontext()
        from genius_search.errors import need_packages

        need_packages("--address needs", "ray")
        from genius_search.cluster.serve import connect

        return connect(self.address)


@command
class OpenCluster(AddressOption, DeviceOptions):
    """A command that searches or changes a cluster."""

    cluster: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")]
    """Folder of the cluster."""

    def open(self) -> Searcher:
        """Open the shards here, or those that `genius cluster serve` placed on the Ray cluster."""
        if self.address is None:
            from genius_search.cluster.searcher import Searcher

            return Searcher.open(self.cluster, device=self.device, download=self.download)
        from genius_search.cluster.serve import connect_searcher

        return connect_searcher(self.cluster)


@command
class Build(AddressOption, DeviceOptions, JsonOption):
    """Build an index in shards, for pools that are too large for one index.

    With --address, each core of the Ray cluster creates a shard at a time. Run the same command again after
    an interruption: only what is missing is done.
    """

    pool: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new cluster; with several machines, one that all of them see."""

    shards: int
    """Number of shards, at most 64."""

    model: OptionalFolder = None
    """Folder of a trained model."""

    encoder: Words = None
    """Instead of a model: encoder as of `genius index create`; codebooks are fitted to a sample."""

    embeddings: Literal["none", "fused", "raw"] | None = None
    """Store an embedding of every item, for re-ranking. Default: none with a model, otherwise fused."""

    def run(self) -> None:
        """Build the cluster."""
        from genius_search.cluster.build import Settings, build_cluster, run_here, run_on_ray

        settings = Settings(
            pool=str(Path(self.pool).resolve()),
            model=None if self.model is None else str(self.model),
            encoder=self.encoder,
            shards=self.shards,
            embeddings=self.embeddings,
            device=self.device,
            download=self.download,
        )
        run = run_here if self.address is None else run_on_ray
        with self.connected(), TerminalProgress() as progress:
            built = build_cluster(self.out, settings, run=run, progress=progress)
            progress.say(
                f"{built.items:,} items in {plural(built.shards, 'shard')}, {built.left_out:,} left out, as "
                f"{self.out / 'left-out.jsonl'} lists"
            )
            progress.say(f'next: genius cluster search {shlex.quote(str(self.out))} "what you look for"')
        if self.json:
            print_json(built.model_dump())


@command
class Serve(OpenCluster):
    """Keep copies of a cluster's shards open on a Ray cluster, which starts them again if they die.

    They stay until `serve shutdown`. Every machine sees the folder under the same path.
    """

    copies: int = 2
    """Copies of each shard, no two of them on the same machine."""

    def run(self) -> None:
        """Place the shards."""
        from genius_search.errors import UsageError

        if self.address is None:
            raise UsageError("--address: the shards are served on a Ray cluster; say where its head is")
        with self.connected():
            from genius_search.cluster.serve import deploy

            deploy(self.cluster, copies=self.copies)
        print(f"{self.cluster} is served; search it with the same --address", file=sys.stderr)


@command
class Search(OpenCluster, JsonOption):
    """Search a cluster with a text, an image, or both. Exit status 3 if nothing is found."""

    text: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")
    ] = None
    """Text of the query, in quotes."""

    image: OptionalFolder = None
    """Image of the query; alone, or together with the text."""

    modality: ModalityOption = None
    """Search only items of this modality."""

    where: Conditions = ()
    """Search only items whose fields meet a condition; as in `genius search`."""

    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Number of hits."""

    def run(self) -> int:
        """Search and print the hits."""
        with self.connected():
            hits = self.open().search(
                self.text, image=self.image, modality=self.modality, where=self.where, k=self.k
            )
        if self.json:
            print_json({"hits": [dataclasses.asdict(hit) for hit in hits]})
        else:
            rows = [
                [str(hit.rank), f"{hit.score:.4f}", hit.id, " ".join((hit.text or hit.image or "").split())]
                for hit in hits
            ]
            print_table(["rank", "score", "item", "text or picture"], rows, left=("item",), fill=True)
        return 0 if hits else 3


@command
class Add(OpenCluster, JsonOption):
    """Add items to a cluster, each to the shard of its id; unchanged items are skipped."""

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, one such file, or a .jsonl file of candidates."""

    def run(self) -> None:
        """Add the items."""
        from genius_search.index.adding import open_pool

        with self.connected(), TerminalProgress() as progress:
            added = self.open().add(open_pool(self.pool, captions=True))
            report_added(progress, added, as_json=self.json)


@command
class Delete(OpenCluster, JsonOption):
    """Delete items from a cluster by their ids. Exit status 3 if it had none of them."""

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ID [ID ...]")]
    """Ids of the items, as searches print them."""

    def run(self) -> int:
        """Delete the items."""
        with self.connected():
            done = self.open().delete(self.ids)
        if self.json:
            print_json(done._asdict())
        else:
            for missing in done.missing:
                print_text(f"not in the cluster: {missing}", error=True)
            print(f"{plural(done.deleted, 'item')} deleted", file=sys.stderr)
        return 0 if done.deleted else 3
