"""Where what is pulled goes: the hub library's own cache, where every program finds it, or a plain folder."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from genius.errors import ArtifactMismatch, NetworkNeeded, UsageError
from genius.hub.fetch import Told, fetch, is_right
from genius.hub.listing import Kind, Listing, RemoteFile, told, written
from genius.hub.place import alone, new_folder
from genius.hub.reach import endpoint

__all__ = ["cached", "cached_file", "cached_files", "free_bytes", "pull_to_cache", "pull_to_folder"]

_MARK: Final = ".genius-pull"
"""In a folder that a pull is filling, so that it never takes another one for its own."""


def cached(repository: str, *, kind: Kind, revision: str | None, needs: str) -> Path | None:
    """The folder of a repository in the cache, if the file it ``needs`` is there. No network is used.

    Reads the cache's layout itself: the hub's library takes half a second to import.
    """
    home = _home(repository, kind)
    wanted = revision or "main"
    reference = home / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    folder = home / "snapshots" / commit
    return folder if (folder / needs).is_file() else None


def _home(repository: str, kind: Kind) -> Path:
    """Where the cache keeps a repository."""
    from huggingface_hub import constants  # noqa: PLC0415  optional

    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"


def pull_to_cache(listing: Listing, *, revision: str | None, token: str | None, arrived: Told) -> Path:
    """Bring a repository's files to the cache; the folder of this commit.

    Large files are put where the hub's library would put them, so it finds them done and does the rest.
    Whoever else wants one of them waits until it is there: the locks are that library's own.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow, and only needed here

    home = _home(listing.repository, listing.kind)
    for file in listing.files:
        if file.sha256 is not None:
            with _one_at_a_time(home, file.sha256):
                fetch(listing, file, home / "blobs" / file.sha256, token=token, arrived=arrived)
        else:
            _drop_if_wrong(home / "snapshots" / listing.commit / file.path, file)
    with told(listing.repository):
        folder = Path(
            snapshot_download(
                listing.repository,
                repo_type=listing.kind,
                revision=revision,
                token=token,
                endpoint=endpoint(),
                allow_patterns=[glob.escape(file.path) for file in listing.files],
                tqdm_class=_silent(),
            )
        )
    if folder.name != listing.commit:
        raise NetworkNeeded(f"{listing.repository} was changed while it was fetched; run the same again")
    for file in listing.files:
        if file.sha256 is None:
            if _drop_if_wrong(folder / file.path, file):
                raise ArtifactMismatch(
                    f"{file.path} of {listing.repository} is damaged: its hash is not the one that the hub "
                    "gives. It was removed; run the same again"
                )
            arrived(file.bytes)
    return folder


def pull_to_folder(
    listing: Listing, out: Path, *, token: str | None, arrived: Told, check: Callable[[Path], None]
) -> Path:
    """Bring a repository's files to a plain folder, which appears when all of them are there and right.

    Raises
    ------
    UsageError
        something is there already, another process fetches to it, or it cannot be written.
    """
    folder = new_folder(out)
    partial = folder.parent / f".{folder.name}.partial"
    with written(listing.repository), alone(folder):
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{out} is there already; move it away, or choose another place with --out")
        if partial.is_dir() and any(partial.iterdir()) and not (partial / _MARK).exists():
            raise UsageError(
                f"{partial} is in the way, and `genius pull` did not make it; move it away, or choose "
                "another place with --out"
            )
        partial.mkdir(parents=True, exist_ok=True)
        (partial / _MARK).touch()
        for file in listing.files:
            fetch(listing, file, partial / file.path, token=token, arrived=arrived)
        _drop_others(partial, [_MARK, *(file.path for file in listing.files)])
        check(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        (folder / _MARK).unlink()
    return out.expanduser()


def cached_files(listing: Listing) -> frozenset[str]:
    """Which of a repository's files are in the cache already, as large as they should be."""
    folder = _home(listing.repository, listing.kind) / "snapshots" / listing.commit
    return frozenset(
        file.path
        for file in listing.files
        if (folder / file.path).is_file() and (folder / file.path).stat().st_size == file.bytes
    )


def cached_file(listing: Listing, file: RemoteFile) -> Path | None:
    """One file's place in the cache, if it is there and right."""
    place = _home(listing.repository, listing.kind) / "snapshots" / listing.commit / file.path
    return place if place.is_file() and is_right(place, file) else None


def free_bytes(out: Path | None) -> int:
    """Room where a pull would go: beside a plain folder, or in the cache."""
    from huggingface_hub import constants  # noqa: PLC0415  optional

    place = Path(constants.HF_HUB_CACHE) if out is None else out.absolute().parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextmanager
def _one_at_a_time(home: Path, blob: str) -> Iterator[None]:
    """Wait for whoever fetches this file, with the lock that the hub's library would take."""
    lock = home.parent / ".locks" / home.name / f"{blob}.lock"
    with written(home.name):
        lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


def _drop_if_wrong(place: Path, file: RemoteFile) -> bool:
    """Remove a file of the cache that is not what the hub says it is, so that it is fetched again."""
    if not place.is_file() or is_right(place, file):
        return False
    blob = place.resolve()
    place.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)
    return True


def _drop_others(folder: Path, wanted: Sequence[str]) -> None:
    """Remove what an earlier, killed pull of another revision left."""
    keep = {folder / path for path in wanted}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in keep:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _silent() -> type:
    """A progress bar of the hub's library that shows nothing: ours counts the bytes."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415  slow, and only needed here

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

    return Silent
