"""``genius serve``: indexes over HTTP, with a page; and the keys to it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from genius_search.index.index import Index
    from genius_search.serve.keys import Keys

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Addresses that nobody else reaches."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer searches of indexes over HTTP, with a page to open in a browser.

    Only this machine is answered, unless there are API keys (`genius keys add`) and another address is given.
    """

    indexes: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INDEX [INDEX ...]")]
    """Folders of indexes. Each is called what its folder is called, without .index."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where their model is now, if it moved."""

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen at; any other than this machine's own needs --keys. 0.0.0.0 is all of them."""

    port: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 8000
    """Port to listen at; 0 takes a free one."""

    keys: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """API keys, without one of which nobody is answered."""

    threads: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 1
    """Threads for the model; more than one pays where cores have nothing else to do."""

    max_batch: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 32
    """Searches that are answered together; 1 answers one after the other."""

    queue: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 256
    """Searches that may wait; beyond that clients are told when to come back."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    def run(self) -> int:
        """Serve until interrupted."""
        from genius_search.errors import UsageError

        began = time.monotonic()
        if not self.indexes:
            raise UsageError("no index: name the folders of one or more")
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if min(self.threads, self.max_batch, self.queue) < 1:
            raise UsageError("--threads, --max-batch and --queue are at least 1")
        if self.host not in LOCAL and self.keys is None:
            raise UsageError(
                f"--host {self.host} can be reached from elsewhere, and that needs API keys: make one with "
                "`genius keys add FILE --name NAME` and give --keys FILE"
            )
        _check_installed()
        keys = _keys(self.keys)
        listening = _listen(self.host, self.port)
        with listening:
            return _serve(self, _open(self), keys, listening, began)


@dataclass(frozen=True, kw_only=True)
class AddKey:
    """Make an API key for `genius serve --keys`; it is printed once, and only its hash is kept.

    To revoke a key delete its line in the file; a server notices.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File of keys, made if it is not there."""

    name: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Whose key it is."""

    scope: Literal["read", "write"] = "read"
    """What it may do: search and look, or also add and delete items."""

    def run(self) -> None:
        """Make it and print it."""
        from genius_search.serve.keys import add_key

        print(add_key(self.file, name=self.name, scope=self.scope))
        print(f"{self.file} has its hash; the key itself is nowhere but above", file=sys.stderr)


def _keys(file: Path | None) -> Keys | None:
    from genius_search.serve.keys import Keys

    return None if file is None else Keys(file)


def _check_installed() -> None:
    """Say what is missing before a model is opened."""
    from genius_search.errors import MissingExtra

    missing = [
        name
        for name in ("fastapi", "prometheus_client", "python_multipart", "uvicorn")
        if not find_spec(name)
    ]
    if missing:
        raise MissingExtra(
            f"serving needs {', '.join(missing)}, which is not installed: "
            "pip install 'genius-retrieval[serve]', or pip install -e '.[serve]' in a clone"
        )


def _listen(host: str, port: int) -> socket.socket:
    """The address to listen at, before anything is loaded: it may be taken."""
    from genius_search.errors import UsageError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise UsageError(f"{host} port {port} cannot be listened at: {error.strerror or error}") from None
    return listening


def _open(asked: Serve) -> dict[str, Index]:
    """The indexes by name; those of one model share it."""
    from genius_search.errors import UsageError
    from genius_search.index.index import Index
    from genius_search.index.store import read_manifest
    from genius_search.model import Genius

    opened: dict[str, Index] = {}
    models: dict[str, Genius] = {}
    for folder in asked.indexes:
        name = re.sub(r"\.index$", "", folder.resolve().name)
        if name in opened:
            raise UsageError(f"two indexes are called {name}; rename the folder of one")
        fingerprint = read_manifest(folder).model_fingerprint
        known = models.get(fingerprint, asked.model)
        opened[name] = Index.open(folder, model=known, device=asked.device, download=asked.download)
        models[fingerprint] = opened[name].model
    return opened


def _serve(
    asked: Serve, indexes: dict[str, Index], keys: Keys | None, listening: socket.socket, began: float
) -> int:
    import uvicorn

    from genius_search.serve.app import create_app
    from genius_search.serve.engine import Engine, EngineSettings

    settings = EngineSettings(torch_threads=asked.threads, max_batch=asked.max_batch, max_queue=asked.queue)
    app = create_app(Engine(indexes, settings), keys=keys)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )

    class Server(uvicorn.Server):
        """Says when it answers, and ends well when it is told to end."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Unlike uvicorn's own, do not die of the signal once everything has been answered."""
            kinds = (signal.SIGINT, signal.SIGTERM)
            before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
            try:
                yield
            finally:
                for kind, handler in before.items():
                    signal.signal(kind, handler)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = listening.getsockname()[:2]
                place = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                seconds = time.monotonic() - began
                named = ", ".join(f"{name} ({len_of(index):,} items)" for name, index in indexes.items())
                print(
                    f"{named} at {place} after {seconds:.1f} s; Ctrl-C ends it", file=sys.stderr, flush=True
                )

    server = Server(config)
    server.run(sockets=[listening])
    return 0 if server.started else 1


def len_of(index: Index) -> int:
    """How many items an index has."""
    return index.snapshot.num_alive
