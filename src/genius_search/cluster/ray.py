"""Running the functions of a build on a Ray cluster; imported only where that is asked for.

Ray places them, and repeats what a lost process or machine was doing. Every machine needs this package, and
must see the cluster's folder and the pool under the same paths.

Ray listens on all addresses of a machine, so token authentication is on: every machine needs the token (`ray
get-auth-token --generate`, or the environment variable RAY_AUTH_TOKEN). Usage statistics are off.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from genius_search.cluster.build import Work
from genius_search.cluster.run import MOST_DEATHS
from genius_search.errors import UsageError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads both when it is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")
import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayTaskError, WorkerCrashedError

LOCAL: Final = "local"
"""Address that starts Ray on this machine, for this build alone."""
CONNECT_SECONDS: Final = 5.0
"""Longest wait for a machine to answer; Ray itself waits for minutes."""
PATIENCE_SECONDS: Final = 6 * 3600.0
"""Longest wait for any of the running functions to end."""
WAITING: Final = 2
"""Functions that wait for each core, so that it need not wait for the driver."""


class RayTasks:
    """Runs the functions of a build on a Ray cluster, one for each core.

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

    def __enter__(self) -> RayTasks:  # noqa: PYI034  beartype cannot check Self
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
