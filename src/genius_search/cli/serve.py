"""``genius serve``: indexes over HTTP, with a page; and ``genius keys add``."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.index.index import Index
    from genius_search.serve.keys import Keys

LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")
"""Addresses that other machines cannot reach."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer searches of indexes over HTTP, with a page for browsers.

    Only this machine is answered, unless --keys (`genius keys add`) and another --host are given.
    """

    indexes: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INDEX [INDEX ...]")]
    """Folders of indexes. Each is named like its folder, without .index."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where their model is now, if it moved."""

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; any that other machines can reach requires --keys. 0.0.0.0 means all."""

    port: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 8000
    """Port to listen on; 0 picks a free one."""

    keys: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """API keys; requests without one are refused."""

    threads: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 1
    """Threads for the model; more than one pays if cores are idle."""

    max_batch: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 32
    """Searches that run together; 1 runs them one by one."""

    queue: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 256
    """Searches that may wait; beyond that clients are told when to come back."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> int:
        """Serve until interrupted."""
        began = time.monotonic()
        if not self.indexes:
            raise UsageError("no index: name the folders of one or more")
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if min(self.threads, self.max_batch, self.queue) < 1:
            raise UsageError("--threads, --max-batch and --queue are at least 1")
        if self.host not in LOCAL_ADDRESSES and self.keys is None:
            raise UsageError(
                f"--host {self.host} can be reached by other machines, which requires API keys: create one "
                "with `genius keys add FILE --name NAME` and give --keys FILE"
            )
        need_packages("serving needs", "fastapi", "prometheus_client", "uvicorn")
        from genius_search.serve.keys import Keys

        keys = None if self.keys is None else Keys(self.keys)
        with _bind(self.host, self.port) as bound:
            return _serve(self, _open_indexes(self), keys, bound, began)


@dataclass(frozen=True, kw_only=True)
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
        """Create the key and print it."""
        from genius_search.serve.keys import add_key

        print(add_key(self.file, name=self.name, scope=self.scope))
        print(f"{self.file} has its hash; the key itself is stored nowhere", file=sys.stderr)


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded: it may be taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Otherwise a response's body waits for the client's receipt of its head: 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return bound


def _open_indexes(command: Serve) -> dict[str, Index]:
    """Open the indexes by name; those of one model share it."""
    from genius_search.index.index import Index
    from genius_search.index.store import read_manifest
    from genius_search.model import Genius

    indexes: dict[str, Index] = {}
    models: dict[str, Genius] = {}
    for folder in command.indexes:
        name = folder.resolve().name.removesuffix(".index")
        if name in indexes:
            raise UsageError(f"two indexes are named {name}; rename the folder of one")
        fingerprint = read_manifest(folder).model_fingerprint
        model = models.get(fingerprint, command.model)
        index = Index.open(folder, model=model, device=command.device, download=command.download)
        indexes[name] = index
        models[fingerprint] = index.model
    return indexes


def _serve(
    command: Serve, indexes: dict[str, Index], keys: Keys | None, bound: socket.socket, began: float
) -> int:
    from genius_search.serve.app import create_app
    from genius_search.serve.engine import Engine, EngineSettings
    from genius_search.serve.server import Server, return_freed_memory, server_config

    class AnnouncingServer(Server):
        """Announces when it is ready, and exits normally when it is interrupted."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handle signals; unlike uvicorn's own, do not raise them again once everything is answered."""
            with super().capture_signals():
                yield
                self._captured_signals.clear()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = bound.getsockname()[:2]
                address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                names = ", ".join(
                    f"{name} ({plural(i.snapshot.num_alive, 'item')})" for name, i in indexes.items()
                )
                seconds = time.monotonic() - began
                print(
                    f"{names} at {address} after {seconds:.1f} s; Ctrl-C ends it", file=sys.stderr, flush=True
                )

    return_freed_memory()
    settings = EngineSettings(
        torch_threads=command.threads, max_batch=command.max_batch, max_queue=command.queue
    )
    server = AnnouncingServer(server_config(create_app(Engine(indexes, settings), keys=keys)))
    server.run(sockets=[bound])
    return 0 if server.started else 1
