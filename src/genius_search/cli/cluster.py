"""``genius cluster``: indexes in shards, on this machine or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.options import (
    DeviceOptions,
    Embeddings,
    JsonOption,
    OptionalFolder,
    Words,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.cluster.searcher import Searcher


@command
class AddressOption:
    """A command that may use a Ray cluster."""

    address: Words = None
    """For a cluster: HOST:PORT of the head of a Ray cluster; local starts Ray on this machine. Default: this
    process alone."""

    def connected(self) -> AbstractContextManager[None]:
        """Connect to the Ray cluster, if one was given."""
        if self.address is None:
            return nullcontext()
        need_packages("--address needs", "ray")
        from genius_search.cluster.serve import connect

        return connect(self.address)


def is_cluster(folder: Path) -> bool:
    """Return whether a folder holds an index in shards."""
    from genius_search.index.store import CLUSTER

    return (folder / CLUSTER).exists()


@contextmanager
def open_cluster(
    folder: Path, ray: AddressOption, *, device: str = "cpu", download: bool = False
) -> Iterator[Searcher]:
    """Open the shards here, or those that `genius cluster serve` placed on the Ray cluster."""
    with ray.connected():
        if ray.address is None:
            from genius_search.cluster.searcher import Searcher

            yield Searcher.open(folder, device=device, download=download)
        else:
            from genius_search.cluster.serve import connect_searcher

            yield connect_searcher(folder)


@command
class BuildCluster(AddressOption, DeviceOptions, JsonOption):
    """Build an index in shards, for pools that are too large for one index.

    With --address, each core of the Ray cluster creates a shard at a time. Run the same command again after
    an interruption: only what is missing is done.
    """

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new cluster; with several machines, one that all of them see."""

    shards: int
    """Number of shards, at most 64."""

    model: OptionalFolder = None
    """Folder of a trained model."""

    encoder: Words = None
    """Instead of a model: encoder as of `genius index create`; codebooks are fitted to a sample."""

    embeddings: Embeddings = None
    """Store an embedding of every item, for re-ranking. Default: none with a model, otherwise fused."""

    def run(self) -> None:
        from genius_search.cluster.build import Settings, build_cluster, run_here, run_on_ray

        settings = Settings(
            pool=str(self.pool.resolve()),
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
            left_out = (
                f", {built.left_out:,} left out: {self.out / 'left-out.jsonl'}"
                if built.left_out
                else ""
            )
            progress.say(f"{built.items:,} items in {plural(built.shards, 'shard')}{left_out}")
            progress.say_next("genius", "search", self.out, "what you look for")
        if self.json:
            print_json(built.model_dump())


@command
class ServeCluster(AddressOption):
    """Keep copies of a cluster's shards open on a Ray cluster, which starts them again if they die.

    They stay until `serve shutdown`. Every machine sees the folder under the same path.
    """

    cluster: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")]
    """Folder of the cluster."""

    copies: int = 2
    """Copies of each shard, no two of them on the same machine."""

    def run(self) -> None:
        if self.address is None:
            raise UsageError(
                "--address: the shards are served on a Ray cluster; say where its head is"
            )
        with self.connected():
            from genius_search.cluster.serve import deploy

            deploy(self.cluster, copies=self.copies)
        print(f"{self.cluster} is served; search it with the same --address", file=sys.stderr)
