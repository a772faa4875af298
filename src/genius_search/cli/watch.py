"""`genius index sync --watch`: the folders of an index are watched for changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from genius_search.errors import UsageError

QUIET_MILLISECONDS: Final = 1_000
"""Time without a change after which changes are read, since files are written in pieces."""
MAX_WAIT_MILLISECONDS: Final = 10_000
"""Time after which changes are read although there are more."""
RECHECK_SECONDS: Final = 30
"""Time after which missing folders are looked for again, and failed work is tried again."""


def watch_folders(
    folders: Callable[[], Sequence[Path]], index: Path, synchronise: Callable[[], bool]
) -> None:
    """Synchronise after each change in folders, until Ctrl-C raises ``KeyboardInterrupt``.

    A folder that is missing, for example because its disk is not mounted, is watched from its
    return.

    Parameters
    ----------
    folders
        Function that returns the folders and single files to watch.
    index
        Folder of the index; changes in it do not count.
    synchronise
        Function that is called for changes, and returns whether it succeeded.

    Raises
    ------
    UsageError
        The system cannot watch this many folders.
    """
    from watchfiles import watch

    index_folder = str(index.resolve())

    def is_outside(_: object, path: str) -> bool:
        return not Path(path).is_relative_to(index_folder)

    while True:
        present = _existing(folders())
        if not present:
            time.sleep(RECHECK_SECONDS)
            continue
        # Files may have changed after the last time that they were read, and before the watch.
        is_due = True
        try:
            for changes in watch(
                *present,
                watch_filter=is_outside,
                step=QUIET_MILLISECONDS,
                debounce=MAX_WAIT_MILLISECONDS,
                rust_timeout=int(RECHECK_SECONDS * 1000),
                yield_on_timeout=True,
                ignore_permission_denied=True,
            ):
                if changes or is_due:
                    is_due = not synchronise()
                if _existing(folders()) != present:
                    break
        except FileNotFoundError:  # a folder was removed at this moment
            time.sleep(1)
        except OSError as error:
            raise UsageError(
                f"the folders cannot be watched: {error}; on Linux, raise the limit with `sysctl "
                "fs.inotify.max_user_watches=1000000`, or run `genius index sync` by a timer"
            ) from None


def _existing(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if folder.exists()]
