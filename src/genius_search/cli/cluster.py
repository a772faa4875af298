"""``genius cluster``: build and serve indexes in shards, on this machine or on a Ray cluster."""

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
    OptionalName,
    command,
    optional,
)
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.cluster.searcher import Searcher


@command
class AddressOption:
    """A command that may use a Ray cluster."""

    address: Annotated[str | None, optional("ADDRESS")] = None
    """For a cluster: HOST:PORT of the head node of a Ray cluster, or local to start Ray on this
    machine. Default: use this process only, without Ray."""

    def connected(self) -> AbstractContextManager[None]:
        """Connect to the Ray cluster of ``--address``, if any."""
        if self.address is None:
            return nullcontext()
        need_packages("--address needs", "ray")
        from genius_search.cluster.serve import connect

        return connect(self.address)


def is_cluster(folder: Path) -> bool:
    """Return whether a folder contains a cluster, an index in shards."""
    from genius_search.index.store import CLUSTER

    return (folder / CLUSTER).exists()


@contextmanager
def open_cluster(
    folder: Path, ray: AddressOption, *, device: str = "cpu", download: bool = False
) -> Iterator[Searcher]:
    """Open the shards in this process, or connect to the copies on the Ray cluster."""
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

    With --address, each core of the Ray cluster creates one shard at a time. After an interruption,
    run the same command again to continue.
    """

    pool: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts, or a .jsonl file of candidates."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new cluster. All machines must be able to read and write it."""

    shards: int
    """Number of shards, at most 64."""

    model: OptionalFolder = None
    """Folder of a trained model."""

    encoder: OptionalName = None
    """Instead of a model: an encoder, as for `genius index create`. Codebooks are fitted to a
    sample of the pool."""

    embeddings: Embeddings = None
    """Embeddings to store for re-ranking. Default: none with a model, otherwise fused."""

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
            manifest = build_cluster(self.out, settings, run=run, progress=progress)
            summary = f"{manifest.items:,} items in {plural(manifest.shards, 'shard')}"
            if manifest.left_out:
                summary += f", {manifest.left_out:,} left out: {self.out / 'left-out.jsonl'}"
            progress.say(summary)
            progress.say_next("genius", "search", self.out, "your query")
        if self.json:
            print_json(manifest.model_dump())


@command
class ServeCluster(AddressOption):
    """Serve a cluster from a Ray cluster, which keeps copies of each shard running.

    The copies run until `serve shutdown`. All machines must see the folder under the same path.
    """

    cluster: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")]
    """Folder of the cluster."""

    copies: int = 2
    """Number of copies of each shard, each on a different machine."""

    def run(self) -> None:
        if self.address is None:
            raise UsageError(
                "--address is missing; give HOST:PORT of the head of a Ray cluster to serve from"
            )
        with self.connected():
            from genius_search.cluster.serve import deploy

            deploy(self.cluster, copies=self.copies)
        print(
            f"serving {self.cluster}; search it with `genius search --address {self.address}`",
            file=sys.stderr,
        )
