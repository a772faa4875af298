"""``genius serve``: indexes over HTTP, with a page; ``genius mcp``: for agents."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import tyro

from genius_search.cli.options import DeviceOptions, OptionalFile, OptionalFolder, command, optional
from genius_search.errors import UsageError, need_packages, plural

if TYPE_CHECKING:
    from genius_search.index.index import Index

LOCAL_ADDRESSES: Final = ("127.0.0.1", "localhost", "::1")
"""Addresses that other machines cannot reach."""


@command
class IndexesOptions(DeviceOptions):
    """A command that serves indexes."""

    indexes: Annotated[tuple[Path, ...], tyro.conf.Positional, optional("INDEX [INDEX ...]")]
    """Folders of indexes, or of pictures and texts, which are indexed as by `genius search`. Each is named
    like its folder, without .index."""

    model: OptionalFolder = None
    """Where their model is now, if it moved."""

    def open_indexes(self) -> dict[str, Index]:
        """Open the indexes by name; those of one model share it."""
        from genius_search.cli.search import is_folder_of_files, open_folder
        from genius_search.index.index import Index
        from genius_search.index.store import read_manifest
        from genius_search.model import Genius

        if not self.indexes:
            raise UsageError("no index: name the folders of one or more")
        indexes: dict[str, Index] = {}
        models: dict[str, Genius] = {}
        for folder in self.indexes:
            name = folder.resolve().name.removesuffix(".index")
            if name in indexes:
                raise UsageError(f"two indexes are named {name}; rename the folder of one")
            if is_folder_of_files(folder):
                index = open_folder(folder, device=self.device, download=self.download)
            else:
                model = models.get(read_manifest(folder).model_fingerprint, self.model)
                index = Index.open(folder, model=model, device=self.device, download=self.download)
            indexes[name] = index
            models[index.model.fingerprint] = index.model
        return indexes


@command
class Serve(IndexesOptions):
    """Answer searches of indexes over HTTP, with a page for browsers.

    Only this machine is answered, unless --keys and another --host are given.
    """

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; any that other machines can reach requires --keys. 0.0.0.0 means all."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    keys: OptionalFile = None
    """Text file of API keys, each a line NAME read KEY or NAME write KEY; requests without one are refused.
    `openssl rand -hex 32` makes a KEY."""

    roots: Annotated[tuple[Path, ...], optional("FOLDER [FOLDER ...]")] = ()
    """Folders whose pictures may be handed out. Others, outside of an index, are only if their contents are
    those that it was made of, whose hash somebody else's index cannot have of your files."""

    def run(self) -> None:
        began = time.monotonic()
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if self.host not in LOCAL_ADDRESSES and self.keys is None:
            raise UsageError(
                f"--host {self.host} can be reached by other machines, which requires API keys: write "
                "NAME read KEY into a FILE, with a KEY of `openssl rand -hex 32`, and give --keys FILE"
            )
        need_packages("serving needs", "fastapi", "granian", "prometheus_fastapi_instrumentator")
        from genius_search.serve.app import create_app
        from genius_search.serve.keys import read_keys
        from genius_search.serve.server import listen, serve
        from genius_search.serve.service import Service

        # A mistake in the keys is an error before anything is loaded.
        if self.keys is not None and not read_keys(self.keys):
            raise UsageError(
                f"{self.keys} has no key, so nobody could ask; add a line, NAME read KEY"
            )
        try:
            bound = listen(self.host, self.port)  # before anything is loaded: it may be taken
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot listen on {self.host} port {self.port}: {reason}") from None
        with bound:
            indexes = self.open_indexes()
            service = Service(indexes, roots=self.roots)
            service.warm_up()
            app = create_app(service, keys=self.keys)
            host, port = bound.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            sizes = {name: plural(len(index), "item") for name, index in indexes.items()}
            names = ", ".join(f"{name} ({size})" for name, size in sizes.items())
            seconds = time.monotonic() - began
            print(
                f"{names} at {address} after {seconds:.1f} s; Ctrl-C ends it",
                file=sys.stderr,
                flush=True,
            )
            serve(app, bound)


@command
class Mcp(IndexesOptions):
    """Offer indexes to agents as tools, by the Model Context Protocol: search, similar, read_item.

    An agent starts this command and talks to it over its standard input and output.
    """

    allow_add: bool = False
    """Offer a tool that adds items."""

    http: bool = False
    """Answer over streamable HTTP instead, at http://127.0.0.1:PORT/mcp; only this machine is answered."""

    port: int = 8000
    """With --http: the port to listen on."""

    def run(self) -> None:
        need_packages("agents need", "mcp")
        from genius_search.serve.mcp import make_server

        server = make_server(self.open_indexes(), allow_add=self.allow_add)
        if self.http:
            print(f"http://127.0.0.1:{self.port}/mcp; Ctrl-C ends it", file=sys.stderr, flush=True)
            server.run("streamable-http", port=self.port)
        else:
            server.run()
