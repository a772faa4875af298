"""``genius serve`` and ``genius mcp``: offer indexes over HTTP, with a web page, and to agents."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import tyro

from genius_search.cli.options import DeviceOptions, OptionalFile, OptionalFolder, command, optional
from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from fastapi import FastAPI

    from genius_search.index.index import Index
    from genius_search.serve.service import Service
    from genius_search.serve.workers import Worker

MAX_WORKERS: Final = 64
LOCAL_ADDRESSES: Final = ("127.0.0.1", "localhost", "::1")
"""Host addresses that other machines cannot reach."""


@command
class IndexesOptions(DeviceOptions):
    """A command that serves indexes."""

    indexes: Annotated[tuple[Path, ...], tyro.conf.Positional, optional("INDEX [INDEX ...]")]
    """Folders of indexes, or folders of pictures and texts, which are indexed as by `genius
    search`. The name of an index is that of its folder, without .index."""

    model: OptionalFolder = None
    """Folder of the model; needed only if the model was moved."""

    def open_indexes(self) -> dict[str, Index]:
        """Open the indexes by name. Indexes of the same model share it in memory."""
        from genius_search.cli.search import is_plain_folder, open_folder
        from genius_search.index.index import Index
        from genius_search.index.store import read_manifest
        from genius_search.model import Genius

        if not self.indexes:
            raise UsageError("no index was given; give the folders of one or more indexes")
        indexes: dict[str, Index] = {}
        models: dict[str, Genius] = {}
        for folder in self.indexes:
            name = Path(os.path.realpath(folder)).name.removesuffix(".index")
            if name in indexes:
                raise UsageError(f"two indexes are named {name}; rename the folder of one of them")
            if is_plain_folder(folder):
                index = open_folder(folder, device=self.device, download=self.download)
            else:
                model = models.get(read_manifest(folder).model_fingerprint, self.model)
                index = Index.open(folder, model=model, device=self.device, download=self.download)
            indexes[name] = index
            models[index.model.fingerprint] = index.model
        return indexes


@command
class Serve(IndexesOptions):
    """Serve indexes over HTTP, with a web page and an API.

    By default, only this machine can connect. For other machines, give --host and --keys.
    """

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all. An address that other machines can reach requires
    --keys."""

    port: int = 8000
    """Port to listen on; 0 chooses a free port."""

    workers: int = 1
    """Number of processes that answer requests on the port. The first one makes all changes. Each
    opens its encoder; the files of indexes are in memory once."""

    prefix: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Path of the service at a proxy, such as /search. The proxy may remove it from requests,
    or not."""

    keys: OptionalFile = None
    """Text file of API keys, one per line: NAME read KEY, or NAME write KEY. Requests without a key
    are refused. Create a KEY with `openssl rand -hex 32`."""

    roots: Annotated[tuple[Path, ...], optional("FOLDER [FOLDER ...]")] = ()
    """Folders from which any picture of an item may be sent. Other pictures outside of an index are
    sent only if their contents have the hash that the index recorded, which an index from someone
    else cannot know of your private files."""

    def run(self) -> None:
        start_time = time.monotonic()
        self._check_flags()
        from genius_search.serve.keys import read_keys
        from genius_search.serve.server import listen, reserve, serve
        from genius_search.serve.workers import start_workers

        # Read the keys and bind the port before the indexes are opened, which can take a while.
        if self.keys is not None and not read_keys(self.keys):
            raise UsageError(
                f"{self.keys} contains no key, so no request would be accepted; add a line "
                "NAME read KEY"
            )
        if self.workers == 1:
            with contextlib.closing(self._bind(listen, self.port)) as bound:
                service = self._open_service()
                self._print_address(service, bound, start_time)
                serve(self._create_app(service), bound)
        reserved = self._bind(reserve, self.port)
        worker = start_workers(self.workers)
        service = self._open_service()
        # Only now, so that no connection waits for this worker if others are ready.
        bound = self._bind(partial(listen, shared=True), reserved.getsockname()[1])
        if not worker.number:
            self._print_address(service, bound, start_time)
        serve(self._create_app(service, worker), bound)

    def _bind(self, bind: Callable[[str, int], socket], port: int) -> socket:
        """Return a socket on a port; raise an error that names the port."""
        try:
            return bind(self.host, port)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot listen on {self.host} port {self.port}: {reason}") from None

    def _open_service(self) -> Service:
        """Open the indexes, and search each once."""
        from genius_search.serve.service import Service

        service = Service(self.open_indexes(), roots=self.roots)
        service.warm_up()
        return service

    def _create_app(self, service: Service, worker: Worker | None = None) -> FastAPI:
        # Imported in each worker, since its metrics depend on a variable that start_workers() sets.
        from genius_search.serve.app import create_app

        return create_app(service, keys=self.keys, worker=worker, prefix=self.prefix)

    def _print_address(self, service: Service, bound: socket, start_time: float) -> None:
        """Print the indexes and the address of the service."""
        host, port = bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        names = ", ".join(
            f"{name} ({plural(len(index), 'item')})" for name, index in service.indexes.items()
        )
        seconds = time.monotonic() - start_time
        print(
            f"{names} at {url} after {seconds:.1f} s; press Ctrl-C to stop",
            file=sys.stderr,
            flush=True,
        )

    def _check_flags(self) -> None:
        """Raise an error for an invalid port, an unprotected host, or a missing package."""
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if self.prefix and not re.fullmatch(r"(/[\w.~-]+)+", self.prefix):
            raise UsageError(
                f"--prefix is {self.prefix!r}, expected a path such as /search, without a slash at "
                "its end"
            )
        if not 1 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"--workers is {self.workers}, expected 1 to {MAX_WORKERS}")
        if self.host not in LOCAL_ADDRESSES and self.keys is None:
            raise UsageError(
                f"--host {self.host} can be reached by other machines, which requires API keys: "
                "write a line NAME read KEY to a FILE, with a KEY from `openssl rand -hex 32`, and "
                "give --keys FILE"
            )
        need_packages("serving needs", "fastapi", "granian", "prometheus_client")


@command
class Mcp(IndexesOptions):
    """Offer indexes to agents as tools of the Model Context Protocol: they search, count, read.

    An agent starts this command, and communicates with it over standard input and output.
    """

    allow_add: bool = False
    """Offer further tools, which add and update items."""

    http: bool = False
    """Use streamable HTTP instead, at http://127.0.0.1:PORT/mcp. Only this machine can connect."""

    port: int = 8000
    """With --http: port to listen on."""

    def run(self) -> None:
        need_packages("agents need", "mcp")
        from genius_search.serve.mcp import make_server

        server = make_server(self.open_indexes(), allow_add=self.allow_add)
        if self.http:
            print(
                f"http://127.0.0.1:{self.port}/mcp; press Ctrl-C to stop",
                file=sys.stderr,
                flush=True,
            )
            server.run("streamable-http", port=self.port)
        else:
            server.run()
