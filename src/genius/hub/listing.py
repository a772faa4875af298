"""What a repository on the hub holds: files, sizes, hashes. Nothing is downloaded."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Final, Literal, NamedTuple

from genius.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius.hub.reach import endpoint

Kind = Literal["model", "dataset"]
DATASETS: Final = "datasets/"
"""A name that begins so is a data set's, as in the hub's own addresses."""


NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""How a repository is named: owner/name."""

_OF_THIS_MACHINE: Final = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
        errno.EISDIR,
        errno.EMFILE,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""What a disk refuses with, and never a network."""


class RemoteFile(NamedTuple):
    """One file of a repository."""

    path: str
    """Relative, with slashes."""
    bytes: int
    sha256: str | None
    """Of large files; the hub knows small ones by ``blob`` only."""
    blob: str
    """The SHA-1 that git gives the contents (of large files: of a pointer to them)."""


class Listing(NamedTuple):
    """A repository at one commit."""

    repository: str
    kind: Kind
    commit: str
    files: tuple[RemoteFile, ...]

    def names(self) -> set[str]:
        """Paths of all files."""
        return {file.path for file in self.files}

    def only(self, files: tuple[RemoteFile, ...]) -> Listing:
        """The same repository, as if it held just these files."""
        return self._replace(files=files)


@contextmanager
def told(name: str) -> Iterator[None]:
    """The hub's refusals in our words.

    Raises
    ------
    UsageError
        it cannot be a repository's name, or this machine cannot write what comes: a full disk, say.
    ArtifactMissing
        there is no such repository or revision, or one may not see it.
    NetworkNeeded
        anything else went wrong between here and the hub.
    """
    from huggingface_hub import errors  # noqa: PLC0415  slow, and only needed here

    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(
            f"{name!r} is neither a folder nor a repository's name, which is owner/name: {error}"
        ) from None
    except errors.GatedRepoError:
        raise ArtifactMissing(
            f"{name} is open only to people who accepted its terms: accept them on its page, "
            "then `hf auth login`, or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ArtifactMissing(
            f"the hub has no repository {name}, or it is private: check the spelling; for a private one "
            "`hf auth login`, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ArtifactMissing(
            f"{name} has no such revision; give a branch, a tag or a commit that it has"
        ) from None
    except (errors.LocalTokenNotFoundError, errors.BadRequestError) as error:
        raise UsageError(f"the hub refused {name}: {error}") from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ArtifactMissing(
                f"the hub does not let you do this with {name}: `hf auth login`, or set HF_TOKEN, with a "
                "token that may"
            ) from None
        raise _failed(name, error) from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
            raise _unwritable(name, error) from error
        raise _failed(name, error) from error


@contextmanager
def written(name: str) -> Iterator[None]:
    """What a disk refuses, in our words; for steps that use no network.

    Raises
    ------
    UsageError
        no room, no permission, a disk that is read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _OF_THIS_MACHINE:
            raise _unwritable(name, error) from error
        raise


def _unwritable(name: str, error: OSError) -> UsageError:
    reason = os.strerror(error.errno or 0)
    where = f" at {error.filename}" if error.filename else ""
    return UsageError(
        f"{name} cannot be written here{where}: {reason}. Make room, or choose a place that you may write to"
    )


def _failed(name: str, error: Exception) -> NetworkNeeded:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return NetworkNeeded(
        f"asking the hub for {name} failed ({reason}). Check the connection and run the same again: "
        "what is here already is not fetched twice"
    )


def is_name(text: str) -> bool:
    """Whether a text can be a repository's name, owner/name."""
    return NAME.fullmatch(text) is not None and ".." not in text


def split_name(name: str) -> tuple[str, Kind | None]:
    """A repository's name, and its kind where the name tells: ``datasets/owner/name``."""
    kind: Kind | None = "dataset" if name.startswith(DATASETS) else None
    repository = name.removeprefix(DATASETS)
    if not is_name(repository):
        raise UsageError(f"{name!r} is not a repository's name; give owner/name, or datasets/owner/name")
    return repository, kind


def list_repository(
    name: str, *, kind: Kind, revision: str | None = None, token: str | None = None
) -> Listing:
    """List a repository.

    Raises
    ------
    ArtifactMismatch
        a file's name leads out of the repository.
    UsageError, ArtifactMissing, NetworkNeeded
        as :func:`told` says.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415  slow, and only needed here
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

    api = HfApi(endpoint=endpoint(), token=token)
    with told(name):
        commit = api.repo_info(name, repo_type=kind, revision=revision).sha
        tree = list(api.list_repo_tree(name, repo_type=kind, revision=commit, recursive=True))
    files = tuple(
        RemoteFile(
            entry.path,
            entry.size if entry.lfs is None else entry.lfs.size,
            None if entry.lfs is None else entry.lfs.sha256,
            entry.blob_id,
        )
        for entry in tree
        if isinstance(entry, RepoFile)
    )
    for file in files:
        if not stays_inside(file.path):
            raise ArtifactMismatch(f"{name} holds a file named {file.path!r}, which leads out of its folder")
    return Listing(name, kind, str(commit), files)


def is_place(name: str) -> bool:
    """Whether a name can only be a folder, and no repository."""
    return not name or name.startswith((".", "/", "~")) or name.removeprefix(DATASETS).count("/") > 1


def stays_inside(path: str) -> bool:
    """Whether a relative path cannot leave the folder it is relative to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and not set(path) & set("\\:\0")
