"""Put a folder on the hub as one commit."""

from __future__ import annotations

from pathlib import Path

from genius.hub.listing import Kind, told
from genius.hub.reach import endpoint

__all__ = ["publish"]


def publish(
    folder: Path,
    repository: str,
    *,
    kind: Kind,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload with genius",
    replaces: tuple[str, ...] = (),
) -> str:
    """Make the repository where there is none, and upload the folder; the repository's address.

    Parameters
    ----------
    replaces
        patterns of files in the repository that go unless the folder has them. The hub keeps them in the
        repository's history.

    Raises
    ------
    NetworkNeeded
        the upload broke off.
    ArtifactMissing
        one may not write there.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415  slow, and only needed here

    api = HfApi(endpoint=endpoint(), token=token)
    with told(repository):
        created = api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            repo_type=kind,
            commit_message=message,
            delete_patterns=list(replaces) or None,
        )
    return str(created)


def files_of(folder: Path) -> tuple[tuple[str, int], ...]:
    """Names and bytes of all files of a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return tuple((file.relative_to(folder).as_posix(), file.stat().st_size) for file in files)
