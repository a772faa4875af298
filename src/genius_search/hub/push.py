"""Publish a folder on the hub as one commit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from genius_search.errors import UsageError
from genius_search.hub.access import DATASETS, check_reachable, endpoint, split_name, translate_hub_errors

_LICENSE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_license(name: str) -> None:
    """Raise :class:`UsageError` for what cannot be the hub's short name of a licence."""
    if not _LICENSE.fullmatch(name):
        raise UsageError(
            f"the licence is {name!r}, expected its short name on the hub: letters, digits, full stops and "
            "hyphens, such as mit, apache-2.0, cc-by-4.0, or other"
        )


def check_repository(name: str) -> None:
    """Raise :class:`UsageError` unless a name has the form owner/name."""
    if split_name(name)[1] is not None:
        raise UsageError(f"give {name.removeprefix(DATASETS)}: an index becomes a data set anyway")


def push_folder(
    write: Callable[[Path], object],
    repository: str,
    *,
    repo_type: str,
    private: bool = False,
    token: str | None = None,
    obsolete: Sequence[str] = (),
    review: Callable[[Path], None] | None = None,
) -> str:
    """Upload a folder, make the repository if there is none, and return its address.

    Parameters
    ----------
    write
        writes what is to be published to the folder that it is given.
    obsolete
        patterns of files in the repository that are removed unless the folder has them. They stay in the
        repository's history.
    review
        sees the folder before it is uploaded; what it raises stops that.

    Raises
    ------
    NetworkNeeded
        the hub cannot be reached (said before anything is written), or the upload broke off.
    ArtifactMissing
        one may not write there.
    """
    check_repository(repository)
    check_reachable(f"publishing {repository} needs the hub", alternative=None)
    from huggingface_hub import HfApi  # noqa: PLC0415  slow to import

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "folder"
        write(folder)
        if review is not None:
            review(folder)
        api = HfApi(endpoint=endpoint(), token=token)
        with translate_hub_errors(repository):
            created = api.create_repo(repository, repo_type=repo_type, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=created.repo_id,
                folder_path=folder,
                repo_type=repo_type,
                commit_message="Upload with genius",
                delete_patterns=list(obsolete) or None,
            )
    return str(created)


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes in bytes of all files of a folder, in order."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file.stat().st_size) for file in files]
