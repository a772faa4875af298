"""Fork safety: locks and open resources that a forked child must replace.

A forked child has only the thread that called ``fork``. If another thread of the parent held a
lock at that moment, nobody would ever release it in the child. Three measures prevent this:

- Our locks are reset to free in the child (:func:`free_in_children`).
- Locks inside libraries, such as SQLite's, cannot be reset. A fork therefore waits until no thread
  is inside such a library (``free_in_children(..., of_library=True)``).
- The child opens databases and other library resources again (:func:`renew_in_children`), and
  never closes those of the parent (:func:`abandon`).
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

MAX_FORK_WAIT_SECONDS: Final = 2.0
"""Maximum time that a fork waits for threads to leave a library. If a thread stays longer, the
child may hang."""

LockT = TypeVar("LockT")
ItemT = TypeVar("ItemT")


class Renewable(Protocol):
    """An object with resources that a forked child must not share with its parent."""

    def _renew(self) -> None:
        """Abandon the parent's resources (:func:`abandon`), so that they are opened again."""


# Keyed by id(object): dictionaries can be copied while other threads add to them, sets cannot.
_locks: Final = weakref.WeakValueDictionary[int, Any]()
_library_locks: Final = weakref.WeakValueDictionary[int, Any]()
_objects: Final = weakref.WeakValueDictionary[int, Renewable]()
_forking: Final = threading.Lock()
_held: Final[list[Any]] = []
"""The library locks that the forking thread has acquired."""


def free_in_children(lock: LockT, *, of_library: bool = False) -> LockT:
    """Register a lock to be free in every forked child, and return it.

    Parameters
    ----------
    of_library
        whether the holder of the lock is inside a library that has further locks. A fork waits
        until such a lock is free.
    """
    (_library_locks if of_library else _locks)[id(lock)] = lock
    return lock


def renew_in_children(renewable: Renewable) -> None:
    """Register an object whose ``_renew()`` is called in every forked child while it exists."""
    _objects[id(renewable)] = renewable


def yield_to_fork(lock: threading.RLock) -> None:
    """Release a library lock while another thread waits to fork, and acquire it again.

    The caller holds the lock but must be outside the library at this moment.
    """
    if _forking.locked():
        lock.release()
        with _forking:
            pass
        lock.acquire()


def iterate_unlocked(lock: threading.RLock, items: Iterable[ItemT]) -> Iterator[ItemT]:
    """Yield items to a library, without its lock while the next item is computed.

    The computation may need another lock, which a forking thread may hold.
    """
    iterator = iter(items)
    with contextlib.suppress(StopIteration):
        while True:
            lock.release()
            try:
                item = next(iterator)
            finally:
                lock.acquire()
            yield item


def abandon(resource: object) -> None:
    """Keep the parent's object alive for ever in the child.

    Closing it would use the parent's locks, or wait for threads that the child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))


def _before_fork() -> None:
    """Wait until the library locks are free, and until no thread imports a module."""
    _forking.acquire()
    deadline = time.monotonic() + MAX_FORK_WAIT_SECONDS
    for reference in _library_locks.valuerefs():
        lock = reference()
        if lock is not None and lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _held.append(lock)
    while _is_importing() and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_importing() -> bool:
    """Return whether a thread is importing a module of this package, which holds a lock."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == __package__
    )


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()
    with contextlib.suppress(RuntimeError):  # not locked: _before_fork was interrupted
        _forking.release()


def _after_in_child() -> None:
    _held.clear()
    for lock in (_forking, *_locks.values(), *_library_locks.values(), *_property_locks()):
        lock._at_fork_reinit()  # noqa: SLF001  as the standard library does
    for renewable in list(_objects.values()):
        renewable._renew()  # noqa: SLF001  not for users of the object


def _property_locks() -> list[Any]:
    """Return the locks of this package's cached properties. Python has them up to version 3.11."""
    members: list[object] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != __package__:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type):
                members.extend(vars(value).values())
    properties = [member for member in members if isinstance(member, cached_property)]
    return [member.lock for member in properties if hasattr(member, "lock")]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
