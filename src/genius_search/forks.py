"""Forks: what a child of the process makes new instead of taking it over.

A forked child has a single thread, so a lock that another thread of the parent held would never be
released in it: locks are made free again. Locks inside libraries cannot be. So a fork waits until
no thread is in SQLite, and a child opens databases and other things of libraries for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

WAIT_SECONDS: Final = 2.0
"""Longest time that a fork waits for threads in a library. A child may hang if one is still there then."""

LockT = TypeVar("LockT")
ThingT = TypeVar("ThingT")


class Renewable(Protocol):
    """An object that opens something anew in a forked child."""

    def renew(self) -> None:
        """Put aside what belongs to the parent (:func:`abandon`)."""


# By their numbers, since a list of a dictionary's values can be made while other threads add to it.
_locks: Final = weakref.WeakValueDictionary[int, Any]()
_library_locks: Final = weakref.WeakValueDictionary[int, Any]()
_objects: Final = weakref.WeakValueDictionary[int, Renewable]()
_forking: Final = threading.Lock()
_held: Final[list[Any]] = []
"""Locks of libraries that the thread that forks has acquired."""


def free_in_children(lock: LockT, *, of_library: bool = False) -> LockT:
    """Return a lock that is free in every forked child.

    Parameters
    ----------
    of_library
        A fork waits until it is free, since who holds it is in a library with locks of its own.
    """
    (_library_locks if of_library else _locks)[id(lock)] = lock
    return lock


def renew_in_children(renewable: Renewable) -> None:
    """Have ``renew()`` called in every forked child, as long as the object exists."""
    _objects[id(renewable)] = renewable


def yield_to_fork(lock: threading.RLock) -> None:
    """Let a thread fork that waits for a library's lock, whose holder is outside of the library."""
    if _forking.locked():
        lock.release()
        with _forking:
            pass
        lock.acquire()


def iterate_unlocked(lock: threading.RLock, things: Iterable[ThingT]) -> Iterator[ThingT]:
    """Yield things to a library from outside of it: they may need a lock that a fork holds by then."""
    iterator = iter(things)
    with contextlib.suppress(StopIteration):
        while True:
            lock.release()
            try:
                thing = next(iterator)
            finally:
                lock.acquire()
            yield thing


def abandon(thing: object) -> None:
    """Keep a parent's object for good: closing it would use its locks, or wait for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _before() -> None:
    _forking.acquire()
    until = time.monotonic() + WAIT_SECONDS
    for reference in _library_locks.valuerefs():
        lock = reference()
        if lock is not None and lock.acquire(timeout=max(0.0, until - time.monotonic())):
            _held.append(lock)
    while _is_importing() and time.monotonic() < until:
        time.sleep(0.001)


def _is_importing() -> bool:
    """Return whether a thread imports a module of this package, whose lock it holds meanwhile."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == __package__
    )


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()
    with contextlib.suppress(RuntimeError):  # waiting was interrupted
        _forking.release()


def _after_in_child() -> None:
    _held.clear()
    for lock in (_forking, *_locks.values(), *_library_locks.values(), *_property_locks()):
        lock._at_fork_reinit()  # noqa: SLF001  as the standard library does
    for renewable in list(_objects.values()):
        renewable.renew()


def _property_locks() -> list[Any]:
    """Return the locks of this package's cached properties, which Python has until 3.11."""
    return [
        member.lock
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == __package__
        for kind in list(vars(module).values())
        if isinstance(kind, type)
        for member in vars(kind).values()
        if isinstance(member, cached_property) and hasattr(member, "lock")
    ]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
