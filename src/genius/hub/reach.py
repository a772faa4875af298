"""Whether the hub may be asked, and whether it answers: decided in two seconds, before anything is imported.

Left alone, the hub's own library tries for minutes on a network that swallows packets.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import urllib.error
import urllib.request
from typing import Final

from genius.errors import MissingExtra, NetworkNeeded

__all__ = ["HubNotAsked", "endpoint", "forbidden", "has_hub", "need_hub", "probe"]

PROBE_SECONDS: Final = 1.5

_SWITCHES: Final = ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_YES: Final = ("1", "on", "yes", "true")


class HubNotAsked(NetworkNeeded):
    """The hub may not be asked, or does not answer."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Why, as the end of a sentence: ``GENIUS_OFFLINE=1 forbids it``."""


def forbidden() -> str | None:
    """The setting that forbids any use of the network, such as ``GENIUS_OFFLINE=1``; None when none does."""
    for switch in _SWITCHES:
        value = os.environ.get(switch, "")
        if value.lower() in _YES:
            return f"{switch}={value}"
    return None


def endpoint() -> str:
    """Address of the hub: ``HF_ENDPOINT``, or the public one."""
    from huggingface_hub import constants  # noqa: PLC0415  optional

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def has_hub() -> bool:
    """Whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def need_hub() -> None:
    """Raise :class:`MissingExtra` where huggingface_hub is not installed."""
    if not has_hub():
        raise MissingExtra(
            "models are pulled and pushed by huggingface_hub, which is not installed: "
            "pip install genius-retrieval[hf]"
        )


def probe(
    need: str,
    *,
    again: str = "run the same again",
    instead: str | None = "copy its folder here and give the path",
) -> None:
    """Give up after two seconds where the hub does not answer.

    Parameters
    ----------
    need
        why it is asked, as the beginning of a sentence: ``owner/name is not on this machine``.
    again
        what to do once it can be asked.
    instead
        what would do without it.

    Raises
    ------
    HubNotAsked
        the network may not be used, or the hub does not answer.
    """
    way = again if instead is None else f"{again}, or {instead}"
    switch = forbidden()
    if switch is not None:
        raise HubNotAsked(
            f"{need}, and {switch} forbids asking the hub. Unset {switch.partition('=')[0]} and {way}",
            reason=f"{switch} forbids it",
        )
    address = endpoint()
    answered = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")  # noqa: S310  the hub's own address
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError as refusal:
            refusal.close()
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because resolving the hub's name knows no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    if not answered.is_set():
        reason = f"{address} cannot be reached from this machine"
        raise HubNotAsked(f"{need}, and {reason}. Connect and {way}", reason=reason)
