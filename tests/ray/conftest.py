"""Three nodes of a Ray cluster on loopback addresses, each with processes that can be killed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAD = "127.0.0.2"
WORKERS = ("127.0.0.3", "127.0.0.4")
START_SECONDS = 240.0


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)


def free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def descendants_of(process: int) -> list[int]:
    """Return all descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    descendants, unvisited = [], [process]
    while unvisited:
        new = children.get(unvisited.pop(), [])
        descendants += new
        unvisited += new
    return descendants


def command_of(process: int) -> str:
    try:
        return (Path("/proc") / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Node:
    """A node of a Ray cluster; its processes are descendants of a process that blocks."""

    def __init__(self, cluster: RayCluster, address: str) -> None:
        words = [
            "start",
            "--block",
            "--disable-usage-stats",
            "--object-store-memory=100000000",
            "--num-cpus=1",
            f"--node-ip-address={address}",
        ]
        if address == HEAD:
            words += [
                *("--head", f"--port={cluster.port}", "--include-dashboard=false"),
                f"--temp-dir={cluster.folder / 'ray'}",
            ]
        else:
            words += [f"--address={HEAD}:{cluster.port}"]
        self._log = cluster.folder / f"{address}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(  # noqa: S603
                [Path(sys.executable).with_name("ray"), *words],
                env=cluster.environment,
                stdout=log,
                stderr=log,
            )

    @property
    def has_started(self) -> bool:
        return "Ray runtime started" in self._log.read_text()

    def processes(self, name: str) -> list[int]:
        """Return the processes of the node whose command line contains a name."""
        return [child for child in descendants_of(self.process.pid) if name in command_of(child)]

    def kill(self) -> None:
        """Kill all processes of the node at once."""
        for process in [self.process.pid, *descendants_of(self.process.pid)]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


class RayCluster:
    """A Ray cluster with a head and workers; the token is not in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port(HEAD)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.nodes: dict[str, Node] = {}

    def start(self) -> None:
        """Start all nodes."""
        for address in (HEAD, *WORKERS):
            self.nodes[address] = Node(self, address)
            self._wait()

    @property
    def address(self) -> str:
        return f"{HEAD}:{self.port}"

    def restart(self, address: str) -> None:
        """Start another node at the address of a node that was killed."""
        self.nodes[address] = Node(self, address)
        self._wait()

    def genius(self, *words: object) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "genius_search", *map(str, words)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def _wait(self) -> None:
        """Wait until all nodes have started.

        Workers that gave up, because the machine is busy, are started again.
        """
        deadline = time.monotonic() + START_SECONDS
        while not all(node.has_started for node in self.nodes.values()):
            ended = [
                address for address, node in self.nodes.items() if node.process.poll() is not None
            ]
            for address in set(ended) - {HEAD}:
                self.nodes[address].kill()
                self.nodes[address] = Node(self, address)
            if HEAD in ended or time.monotonic() > deadline:
                logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                pytest.fail(f"the nodes did not start:\n{logs}")
            time.sleep(0.5)


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayCluster]:
    """Three nodes; a test that kills one starts it again."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'genius-search[cluster]'")
    folder = Path(tempfile.mkdtemp(prefix="genius-"))  # Ray's sockets need short paths
    cluster = RayCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
