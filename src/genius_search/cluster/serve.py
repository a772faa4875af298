"""Serve the shards of a cluster with Ray Serve, and call them. Only this module imports Ray Serve.

Every machine needs this package, and must see the folder of the cluster under the same path. Ray
listens on all addresses of a machine, so this module turns on token authentication: every machine
needs the token (`ray get-auth-token --generate`, or the environment variable RAY_AUTH_TOKEN). It
also turns off Ray's usage statistics.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from genius_search.cluster.searcher import Searcher, Shard, model_of, read_cluster, shard_folder
from genius_search.errors import DeadlinePassed, UsageError

# Ray reads these variables when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayActorError, RayTaskError

LOCAL: Final = "local"
"""The address that starts Ray on this machine until the process ends."""
MAX_CONNECT_SECONDS: Final = 5.0
"""Maximum wait for the head node to answer. Ray itself would wait for minutes."""
MAX_START_SECONDS: Final = 300.0
"""Maximum wait for copies to open their shards."""
CALL_SECONDS: Final = 3.0
"""Time for one copy to answer a search before another copy is called; it doubles with each call."""
MAX_CHANGE_SECONDS: Final = 3600.0
"""Maximum wait for the result of one of the :data:`SLOW_METHODS`."""
SLOW_METHODS: Final = frozenset({"add_pool", "add", "delete", "check"})
MAX_RETRY_SECONDS: Final = 60.0
"""Time after which a call is not repeated, and the shard counts as unavailable."""
PAUSE_SECONDS: Final = 0.2
"""Pause before a call is repeated, or the status is read again."""

log = logging.getLogger(__name__)


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs.

    Parameters
    ----------
    address
        HOST:PORT of the head node, or :data:`LOCAL`.

    Raises
    ------
    UsageError
        The address cannot be reached, or the cluster refuses the token.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == LOCAL:
        ray.init(address=LOCAL, include_dashboard=False, **quiet)
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(
                f"--address is {address!r}, expected HOST:PORT of Ray's head, or {LOCAL!r}"
            )
        try:
            socket.create_connection((host, int(port)), MAX_CONNECT_SECONDS).close()
            ray.init(address=address, **quiet)
        except (OSError, AuthenticationError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"cannot connect to the Ray cluster at {address}: {reason}") from None
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def deploy(folder: Path, *, copies: int) -> None:
    """Start copies of each shard on the connected Ray cluster; they run until `serve shutdown`.

    The copies of a shard run on different machines.

    Raises
    ------
    UsageError
        ``copies`` is below 1, or a shard has no running copy after :data:`MAX_START_SECONDS`.
    """
    if copies < 1:
        raise UsageError(f"--copies is {copies}, expected 1 or more")
    folder = folder.resolve()
    Searcher.open(folder)  # raises errors of the cluster here rather than on other machines
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(Shard).options(
        num_replicas=copies,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0},  # an idle copy does not reserve a core
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    model = model_of(folder)
    shards = {name: shard_folder(folder, number) for number, name in enumerate(app_names(folder))}
    targets = [
        serve.RunTarget(deployment.bind(shard, model), name=name, route_prefix=None)
        for name, shard in shards.items()
    ]
    serve.run_many(targets, wait_for_applications_running=False)
    deadline = time.monotonic() + MAX_START_SECONDS
    while missing := [name for name in shards if not _running_copies(name)]:
        if time.monotonic() > deadline:
            raise UsageError(
                f"no copy of {missing[0]} has started; `serve status` and `ray status` show why"
            )
        time.sleep(PAUSE_SECONDS)


def app_names(folder: Path) -> list[str]:
    """Return the names under which Ray Serve lists the shards of a cluster."""
    return [f"{folder.name}-{number:06d}" for number in range(read_cluster(folder).shards)]


def _running_copies(name: str) -> int:
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application else ()
    return sum(deployment.replica_states.get("RUNNING", 0) for deployment in deployments)


def connect_searcher(folder: Path) -> Searcher:
    """Return a thread-safe searcher of the deployed shards of a cluster."""
    names = app_names(folder.resolve())
    return Searcher([partial(begin, name, serve.get_app_handle(name)) for name in names])


def begin(
    name: str, handle: Any, method: str, *arguments: Any, **options: Any
) -> Callable[[], Any]:
    """Start a method of a deployed :class:`Shard`, or of its index; the result waits for it."""
    call = partial(handle.call.remote, method, *arguments, **options)
    seconds = MAX_CHANGE_SECONDS if method in SLOW_METHODS else CALL_SECONDS
    return partial(_wait_for_result, name, call, call(), time.monotonic(), seconds)


def _wait_for_result(
    name: str, call: Callable[[], Any], pending: Any, start_time: float, seconds: float
) -> Any:
    """Wait for the result of a call, and repeat the call if a copy hangs or dies.

    Ray Serve itself does not repeat calls.

    Raises
    ------
    DeadlinePassed
        No copy of the shard answers within :data:`MAX_RETRY_SECONDS`.
    """
    deadline = time.monotonic() + MAX_RETRY_SECONDS
    while True:
        try:
            return pending.result(timeout_s=max(0.0, start_time + seconds - time.monotonic()))
        except RayTaskError as error:
            raise error.cause from None  # the error that the method raised
        except (RayActorError, TimeoutError) as error:
            log.warning("shard %s: %s, calling again", name, type(error).__name__)
            if time.monotonic() > deadline:
                raise DeadlinePassed(
                    f"no copy of shard {name} answers; `serve status` lists the copies"
                ) from None
            time.sleep(PAUSE_SECONDS)
            pending = call()
            start_time = time.monotonic()
            seconds *= 2
