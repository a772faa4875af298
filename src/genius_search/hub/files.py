"""Put a folder on the hub as one commit."""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib.util
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

from filelock import FileLock

from genius_search.artifact import file_fingerprint
from genius_search.errors import ArtifactMismatch, ArtifactMissing, MissingExtra, NetworkNeeded, UsageError
from genius_search.hub.card import alone, new_folder

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


__all__ = ["ORIGINALS", "Original", "pick"]


class Original(NamedTuple):
    """What a short name stands for."""

    repository: str
    files: tuple[str, ...]
    sha256: tuple[str | None, ...]
    """Of each file, where it was noted; the hub's own word is checked in any case."""
    next: str
    """The command to run then, with the files' places as ``{0}``, ``{1}``."""
    summary: str

    @property
    def by_hand(self) -> str:
        """How to come by the files without this program, as the end of a sentence."""
        command = self.next.format(*(PurePosixPath(path).name for path in self.files))
        return (
            f"fetch {' and '.join(self.files)} from the repository {self.repository} with a browser, and "
            f"then `{command}`"
        )


ORIGINALS: Final[dict[str, Original]] = {
    "clip-sf": Original(
        "TIGER-Lab/UniIR",
        ("checkpoint/CLIP_SF/clip_sf_large.pth",),
        ("5e459b96e1ca6f3060372a136c91c8c3369eee3c77ede3fad6c35599ce701c4d",),
        "genius import clip-sf {0} --out clip-sf",
        "UniIR's encoder CLIP-SF, large, with its training state (5.13 GB; 1.71 GB once imported)",
    ),
    "genius": Original(
        "Sungyeon/GENIUS",
        ("checkpoint/rq_clip_large.pth", "checkpoint/GENIUS_t5small.pth"),
        (None, None),
        "genius import genius --quantizer {0} --generator {1} --encoder uniir:clip-sf --out genius-model",
        "GENIUS's quantizer and generator; its encoder is clip-sf, which is pulled and imported first",
    ),
}


def pick(name: str, listing: Listing) -> Listing:
    """Of a repository only the files that a short name stands for.

    Raises
    ------
    ArtifactMissing
        the authors have moved or removed a file.
    ArtifactMismatch
        a file is not the one that was published.
    """
    original = ORIGINALS[name]
    listed = {file.path: file for file in listing.files}
    for path, known in zip(original.files, original.sha256, strict=True):
        if path not in listed:
            raise ArtifactMissing(f"{original.repository} has no {path} any more; look for it on its page")
        if known is not None and listed[path].sha256 != known:
            raise ArtifactMismatch(
                f"{path} of {original.repository} is not the file that was published: its SHA-256 is "
                f"{listed[path].sha256}, expected {known}"
            )
    return listing.only(tuple(listed[path] for path in original.files))


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
