"""``genius serve``: indexes over HTTP, with a page; ``genius cluster``: indexes in shards."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import tyro

from genius_search.cli.options import (
    DeviceOptions,
    Embeddings,
    JsonOption,
    OptionalFile,
    OptionalFolder,
    Words,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.cluster.searcher import Searcher
    from genius_search.index.index import Index

LOCAL_ADDRESSES: Final = ("127.0.0.1", "localhost", "::1")
"""Addresses that other machines cannot reach."""


@command
class Serve:
    """Answer searches of indexes over HTTP, with a page for browsers.

    Only this machine is answered, unless --keys (`genius keys add`) and another --host are given.
    """

    indexes: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INDEX [INDEX ...]")]
    """Folders of indexes. Each is named like its folder, without .index."""

    model: OptionalFolder = None
    """Where their model is now, if it moved."""

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; any that other machines can reach requires --keys. 0.0.0.0 means all."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    keys: OptionalFile = None
    """API keys; requests without one are refused."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    def run(self) -> None:
        began = time.monotonic()
        if not self.indexes:
            raise UsageError("no index: name the folders of one or more")
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if self.host not in LOCAL_ADDRESSES and self.keys is None:
            raise UsageError(
                f"--host {self.host} can be reached by other machines, which requires API keys: create one "
                "with `genius keys add FILE --name NAME` and give --keys FILE"
            )
        need_packages("serving needs", "fastapi", "granian", "prometheus_fastapi_instrumentator")
        from genius_search.serve.app import create_app
        from genius_search.serve.keys import read_keys
        from genius_search.serve.server import listen, serve
        from genius_search.serve.service import Service

        if self.keys is not None:
            read_keys(self.keys)  # a mistake in them is an error before anything is loaded
        try:
            bound = listen(self.host, self.port)  # before anything is loaded: it may be taken
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot listen on {self.host} port {self.port}: {reason}") from None
        with bound:
            indexes = open_indexes(self.indexes, self.model, device=self.device)
            service = Service(indexes)
            service.warm_up()
            host, port = bound.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            sizes = {name: plural(index.snapshot.num_alive, "item") for name, index in indexes.items()}
            names = ", ".join(f"{name} ({size})" for name, size in sizes.items())
            seconds = time.monotonic() - began
            print(f"{names} at {address} after {seconds:.1f} s; Ctrl-C ends it", file=sys.stderr, flush=True)
            serve(create_app(service, keys=self.keys), bound)


def open_indexes(folders: Sequence[Path], model: Path | None, *, device: str) -> dict[str, Index]:
    """Open indexes by name; those of one model share it."""
    from genius_search.index.index import Index
    from genius_search.index.store import read_manifest
    from genius_search.model import Genius

    indexes: dict[str, Index] = {}
    models: dict[str, Genius] = {}
    for folder in folders:
        name = folder.resolve().name.removesuffix(".index")
        if name in indexes:
            raise UsageError(f"two indexes are named {name}; rename the folder of one")
        fingerprint = read_manifest(folder).model_fingerprint
        indexes[name] = Index.open(folder, model=models.get(fingerprint, model), device=device)
        models[fingerprint] = indexes[name].model
    return indexes


@command
class AddKey:
    """Create an API key for `genius serve --keys`. It is printed once; only its hash is stored.

    To revoke a key delete its line in the file; a running server notices.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File of keys; created if it does not exist."""

    name: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Whose key it is."""

    scope: Literal["read", "write"] = "read"
    """What it permits: searching and looking, or also adding and deleting items."""

    def run(self) -> None:
        from genius_search.serve.keys import add_key

        print(add_key(self.file, name=self.name, scope=self.scope))
        print(f"{self.file} has its hash; the key itself is stored nowhere", file=sys.stderr)


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
            progress.say(
                f"{built.items:,} items in {plural(built.shards, 'shard')}, {built.left_out:,} left out, as "
                f"{self.out / 'left-out.jsonl'} lists"
            )
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
            raise UsageError("--address: the shards are served on a Ray cluster; say where its head is")
        with self.connected():
            from genius_search.cluster.serve import deploy

            deploy(self.cluster, copies=self.copies)
        print(f"{self.cluster} is served; search it with the same --address", file=sys.stderr)
