"""Building and searching on a Ray cluster; imported only where that is asked for.

Ray places the functions of a build, and the shards to be searched; it repeats what a lost process or machine
was doing. Every machine needs this package, and must see the cluster's folder and the pool under the same
paths.

Ray listens on all addresses of a machine, so token authentication is on: every machine needs the token (`ray
get-auth-token --generate`, or the environment variable RAY_AUTH_TOKEN). Usage statistics are off.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from genius_search.cluster.build import Work
from genius_search.cluster.folder import Cluster, read_cluster
from genius_search.cluster.routed import RoutedCluster, ShardHealth
from genius_search.cluster.run import MOST_DEATHS
from genius_search.cluster.shard import ShardCopy
from genius_search.errors import DeadlinePassed, UsageError
from genius_search.model import Genius

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads both when it is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")
import ray
from ray.exceptions import (
    AuthenticationError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

LOCAL: Final = "local"
"""Address that starts Ray on this machine, for this build alone."""
CONNECT_SECONDS: Final = 5.0
"""Longest wait for a machine to answer; Ray itself waits for minutes."""
PATIENCE_SECONDS: Final = 6 * 3600.0
"""Longest wait for any of the running functions to end."""
WAITING: Final = 2
"""Functions that wait for each core, so that it need not wait for the driver."""


class Ray:
    """A connection to a Ray cluster, which runs the functions of a build, one for each core.

    Parameters
    ----------
    address
        host and port of a running cluster's head, or :data:`LOCAL`.
    cores
        number of cores that :data:`LOCAL` uses.

    Raises
    ------
    UsageError
        The address cannot be reached, or refuses the token.
    """

    def __init__(self, address: str, *, cores: int = 1) -> None:
        self._address = address
        self._cores = cores

    def __enter__(self) -> Ray:  # noqa: PYI034  beartype cannot check Self
        if self._address == LOCAL:
            ray.init(address=LOCAL, num_cpus=self._cores, include_dashboard=False, log_to_driver=False)
            return self
        _check_address(self._address)
        try:
            ray.init(address=self._address, log_to_driver=False)
        except AuthenticationError as error:
            raise UsageError(
                f"the Ray cluster at {self._address} refuses this machine's token: "
                f"{str(error).splitlines()[0]}"
            ) from None
        except ConnectionError as error:
            raise UsageError(f"there is no Ray cluster at {self._address}: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def __call__(self, work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
        """Run a function for each number; yield the numbers as they are done."""
        remote = ray.remote(num_cpus=1, max_retries=MOST_DEATHS)(work)
        left = list(reversed(numbers))
        running: dict[ray.ObjectRef, int] = {}
        while left or running:
            room = WAITING * max(1, int(ray.cluster_resources().get("CPU", 1))) - len(running)
            while left and room > 0:
                number = left.pop()
                running[remote.remote(folder.resolve(), number)] = number
                room -= 1
            done, _ = ray.wait(list(running), num_returns=1, timeout=PATIENCE_SECONDS)
            if not done:
                raise UsageError(
                    f"nothing has ended for {PATIENCE_SECONDS / 3600:g} hours; look at the machines, and run "
                    "the same command again, which goes on with what is done"
                )
            yield self._result(done[0], running.pop(done[0]))

    def _result(self, done: ray.ObjectRef, number: int) -> int:
        try:
            ray.get(done, timeout=CONNECT_SECONDS)
        except RayTaskError as error:
            raise error.cause from None  # the error of the function itself
        except (WorkerCrashedError, GetTimeoutError) as error:
            raise UsageError(
                f"processes that did number {number} died {MOST_DEATHS + 1} times, perhaps for want of "
                f"memory ({type(error).__name__}); give a smaller --rows. The same command goes "
                "on with what is done"
            ) from None
        return number


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"--address is {address!r}, expected HOST:PORT of a Ray cluster's head, or {LOCAL!r}"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"nothing answers at {address} ({error}); `ray status` there says whether Ray runs"
        ) from None


START_SECONDS: Final = 300.0
"""Longest wait for the copies to open their shards."""
CALL_SECONDS: Final = 10.0
"""Longest wait for an answer of one copy of a shard."""
PATIENCE: Final = 60.0
"""Seconds in which a call is made again, each time to another copy, before the shard counts as gone."""
PAUSE_SECONDS: Final = 0.05
"""Wait after the first failure; it doubles."""
LONGEST_PAUSE: Final = 1.0

log = logging.getLogger(__name__)


class RayShard:
    """A shard with copies; a call that a dying copy does not answer is made again to another one."""

    patience: float = PATIENCE

    def __init__(self, name: str, copies: Sequence[Any]) -> None:
        self.name = name
        self.copies = copies
        self.health = ShardHealth(len(copies))
        self._turn = itertools.count()

    def submit(self, method: str, *arguments: Any) -> RayAnswer:
        """Begin to call a method; the first argument is the generation of the shard."""
        return RayAnswer(self, method, arguments)

    def begin(self, method: str, arguments: tuple[Any, ...]) -> tuple[int, Any]:
        """Begin to call a method of the copy whose turn it is; return its number, and the pending answer."""
        number = next(self._turn) % len(self.copies)
        generation, *rest = arguments
        return number, self.copies[number].call.remote(method, generation, tuple(rest))


class RayAnswer:
    """An answer of a shard that may not be there yet."""

    def __init__(self, shard: RayShard, method: str, arguments: tuple[Any, ...]) -> None:
        self._shard = shard
        self._call = (method, arguments)
        self._copy, self._pending = shard.begin(method, arguments)

    def result(self) -> Any:
        """Wait for the answer, and return it.

        Raises
        ------
        DeadlinePassed
            No copy of the shard answers.
        """
        health = self._shard.health
        began = time.monotonic()
        pause = PAUSE_SECONDS
        while True:
            try:
                answer = ray.get(self._pending, timeout=CALL_SECONDS)
            except RayTaskError as error:
                health.answered(self._copy)
                raise error.cause from None  # the shard's own error
            except (RayActorError, GetTimeoutError) as error:
                health.failed(self._copy)
                log.warning("shard %s: %s, asked again", self._shard.name, type(error).__name__)
                if time.monotonic() - began > self._shard.patience:
                    break
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                self._copy, self._pending = self._shard.begin(*self._call)
            else:
                health.answered(self._copy)
                return answer
        raise DeadlinePassed(
            f"no copy of shard {self._shard.name} answers; `ray status` lists the machines that are left"
        )


def place_shards(folder: Path, model: Genius, *, copies: int) -> RoutedCluster:
    """Place copies of every shard on the Ray cluster that is connected, and return the cluster to search.

    Raises
    ------
    UsageError
        ``copies`` is below 1, or a shard cannot be opened where it was placed.
    """
    if copies < 1:
        raise UsageError(f"--replicas is {copies}, expected 1 or more")
    folder = folder.resolve()
    Cluster.open(folder, model=model)  # what is wrong is said here
    # A copy occupies no core while it waits, so that those of new shards start beside the old ones.
    remote = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy="SPREAD")(ShardCopy)
    place_of_model = model.folder.resolve()

    def place(name: str) -> RayShard:
        placed = [remote.remote(folder, name, place_of_model) for _ in range(copies)]
        return RayShard(name, placed)

    shards = {shard.name: place(shard.name) for shard in read_cluster(folder).shards}
    started = [copy.__ray_ready__.remote() for shard in shards.values() for copy in shard.copies]
    ready, waiting = ray.wait(started, num_returns=len(started), timeout=START_SECONDS)
    if waiting:
        raise UsageError(
            f"only {len(ready)} of {len(started)} copies of shards started within {START_SECONDS:g} seconds; "
            "`ray status` lists the machines"
        )
    return RoutedCluster(folder, model, lambda name: shards.pop(name, None) or place(name))
