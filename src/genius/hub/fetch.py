"""One file from the hub: goes on where a killed run stopped, and is named only when its hash is right.

The hub's own library takes up a connection that broke, but throws away what a killed process had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from genius.artifact import file_fingerprint
from genius.errors import ArtifactMismatch
from genius.hub.listing import Listing, RemoteFile, told, written
from genius.hub.reach import endpoint

Told = Callable[[int], None]
"""Is told how many bytes came."""
CHUNK: Final = 1 << 20


def fetch(listing: Listing, file: RemoteFile, place: Path, *, token: str | None, arrived: Told) -> None:
    """Bring one file to ``place``; what is there already, whole and right, is left alone.

    Raises
    ------
    ArtifactMismatch
        what came is not what the hub says it is; nothing of it is kept.
    NetworkNeeded
        the connection broke for good; what came is kept for the next run.
    UsageError
        it cannot be written here.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415  slow, and only needed here
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    if place.is_file() and is_right(place, file):
        arrived(file.bytes)
        return
    with written(listing.repository):
        place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f"{place.name}.{file.blob[:12]}.partial")
    address = hf_hub_url(
        listing.repository,
        file.path,
        repo_type=listing.kind,
        revision=listing.commit,
        endpoint=endpoint(),
    )
    headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}
    with told(listing.repository), partial.open("ab") as target:
        if target.tell() > file.bytes:
            target.truncate(0)
        have = target.tell()
        arrived(have)
        http_get(
            address,
            target,
            resume_size=have,
            headers=headers,
            expected_size=file.bytes,
            tqdm_class=_bar(arrived),
        )
    if not is_right(partial, file):
        partial.unlink()
        raise ArtifactMismatch(
            f"{file.path} of {listing.repository} came damaged: its hash is not the one that the hub gives. "
            "It was removed; run the same again"
        )
    with written(listing.repository):
        partial.replace(place)


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether a file's contents are those that the hub lists."""
    if path.stat().st_size != file.bytes:
        return False
    if file.sha256 is not None:
        return file_fingerprint(path) == file.sha256
    return _git_blob(path) == file.blob


def _git_blob(path: Path) -> str:
    """The SHA-1 that git gives a file's contents."""
    total = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _bar(arrived: Told) -> type:
    """What the hub's library takes for a progress bar."""

    class Bar:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Bar:  # noqa: PYI034  beartype cannot check Self
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, size: int) -> None:
            arrived(size)

    return Bar
