"""Where what is pulled goes: the hub library's own cache, where every program finds it, or a plain folder."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from genius.errors import ArtifactMismatch, NetworkNeeded, UsageError
from genius.hub.fetch import Told, fetch, is_right
from genius.hub.listing import Kind, Listing, told
from genius.hub.reach import endpoint

__all__ = ["cached", "cached_files", "free_bytes", "pull_to_cache", "pull_to_folder"]


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
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow, and only needed here

    home = _home(listing.repository, listing.kind)
    for file in listing.files:
        if file.sha256 is not None:
            fetch(listing, file, home / "blobs" / file.sha256, token=token, arrived=arrived)
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
        place = folder / file.path
        if file.sha256 is None:
            if not is_right(place, file):
                blob = place.resolve()
                place.unlink()
                blob.unlink(missing_ok=True)
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
        something is there already.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UsageError(f"{out} is there already; move it away, or choose another place with --out")
    partial = out.parent / f".{out.name}.partial"
    for file in listing.files:
        fetch(listing, file, partial / file.path, token=token, arrived=arrived)
    _drop_others(partial, [file.path for file in listing.files])
    check(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return out


def cached_files(listing: Listing) -> frozenset[str]:
    """Which of a repository's files are in the cache already."""
    folder = _home(listing.repository, listing.kind) / "snapshots" / listing.commit
    return frozenset(file.path for file in listing.files if (folder / file.path).is_file())


def free_bytes(out: Path | None) -> int:
    """Room where a pull would go: beside a plain folder, or in the cache."""
    from huggingface_hub import constants  # noqa: PLC0415  optional

    place = Path(constants.HF_HUB_CACHE) if out is None else out.absolute().parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


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
