"""Serving the shards of a cluster by Ray Serve, and asking them; imported only where Ray is asked for.

Every machine needs this package, and must see the cluster's folder under the same path. Ray listens on all
addresses of a machine, so token authentication is on: every machine needs the token (`ray get-auth-token
--generate`, or the environment variable RAY_AUTH_TOKEN). Usage statistics are off.
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

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads both when it is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")
import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayActorError, RayTaskError

LOCAL: Final = "local"
"""Address that starts Ray on this machine, until the process ends."""
CONNECT_SECONDS: Final = 5.0
"""Longest wait for a machine to answer; Ray itself waits for minutes."""
START_SECONDS: Final = 300.0
"""Longest wait for copies to open their shards."""
CALL_SECONDS: Final = 3.0
"""How long one copy may take for a search before it is asked again, of another; then twice as long."""
CHANGE_SECONDS: Final = 3600.0
"""Longest wait for an answer to a change."""
CHANGES: Final = frozenset({"add_pool", "add", "delete", "check"})
"""Methods whose answer may take so long."""
PATIENCE_SECONDS: Final = 60.0
"""How long a call is made again, before the shard counts as gone."""
PAUSE_SECONDS: Final = 0.2

log = logging.getLogger(__name__)


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to a Ray cluster.

    Raises
    ------
    UsageError
        The address, of its head or :data:`LOCAL`, cannot be reached, or refuses the token.
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
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            ray.init(address=address, **quiet)
        except (OSError, AuthenticationError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"the Ray cluster at {address} does not let this machine in: {reason}"
            ) from None
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def deploy(folder: Path, *, copies: int) -> None:
    """Keep copies of each shard, no two on one machine, on the connected Ray cluster until `serve shutdown`.

    Raises
    ------
    UsageError
        ``copies`` is below 1, or no copy of some shard has started in :data:`START_SECONDS`.
    """
    if copies < 1:
        raise UsageError(f"--copies is {copies}, expected 1 or more")
    folder = folder.resolve()
    Searcher.open(folder)  # what is wrong is said here
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(Shard).options(
        num_replicas=copies,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0},  # a copy that waits occupies no core
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    model = model_of(folder)
    shards = {name: shard_folder(folder, number) for number, name in enumerate(app_names(folder))}
    targets = [
        serve.RunTarget(deployment.bind(place, model), name=name, route_prefix=None)
        for name, place in shards.items()
    ]
    serve.run_many(targets, wait_for_applications_running=False)
    until = time.monotonic() + START_SECONDS
    while missing := [name for name in shards if not _running_copies(name)]:
        if time.monotonic() > until:
            raise UsageError(
                f"no copy of {missing[0]} has started; `serve status` and `ray status` say why"
            )
        time.sleep(PAUSE_SECONDS)


def app_names(folder: Path) -> list[str]:
    """Return the names under which Ray Serve lists the shards of a cluster."""
    return [f"{folder.name}-{number:06d}" for number in range(read_cluster(folder).shards)]


def _running_copies(name: str) -> int:
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application else ()
    return sum(one.replica_states.get("RUNNING", 0) for one in deployments)


def connect_searcher(folder: Path) -> Searcher:
    """Return a searcher that asks the deployed shards of a cluster; it may be used by several threads."""
    names = app_names(folder.resolve())
    return Searcher([partial(begin, name, serve.get_app_handle(name)) for name in names])


def begin(
    name: str, handle: Any, method: str, *arguments: Any, **options: Any
) -> Callable[[], Any]:
    """Begin to call a method of a deployed :class:`Shard`, or of its index."""
    call = partial(handle.call.remote, method, *arguments, **options)
    seconds = CHANGE_SECONDS if method in CHANGES else CALL_SECONDS
    return partial(_collect, name, call, call(), time.monotonic(), seconds)


def _collect(name: str, call: Callable[[], Any], pending: Any, began: float, seconds: float) -> Any:
    """Wait for an answer, and ask again if a copy hangs, or died before it gave one; Ray Serve does not.

    Raises
    ------
    DeadlinePassed
        No copy of the shard answers.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return pending.result(timeout_s=max(0.0, began + seconds - time.monotonic()))
        except RayTaskError as error:
            raise error.cause from None  # the shard's own error
        except (RayActorError, TimeoutError) as error:
            log.warning("shard %s: %s, asked again", name, type(error).__name__)
            if time.monotonic() > until:
                raise DeadlinePassed(
                    f"no copy of shard {name} answers; `serve status` lists them"
                ) from None
            time.sleep(PAUSE_SECONDS)
            pending, began, seconds = call(), time.monotonic(), 2 * seconds
