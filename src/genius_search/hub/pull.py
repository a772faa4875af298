"""Pull models, indexes and encoders from the hub, and find what was pulled before."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius_search.hub.access import (
    COMMIT,
    DATASETS,
    ENCODER_FILES,
    check_reachable,
    endpoint,
    is_path,
    is_repository_name,
    split_name,
    stays_inside,
    translate_hub_errors,
)
from genius_search.hub.checkpoints import CHECKPOINTS, Checkpoint
from genius_search.hub.folder import claim_folder
from genius_search.writing import put_in_place, sync_tree

Kind = Literal["model", "index", "encoder", "original"]


class Layout(NamedTuple):
    """Layout of a published folder of one kind."""

    repo_type: str
    marker: str
    """The file that identifies the kind."""
    patterns: tuple[str, ...]
    """Patterns of the files that belong to it; ``*`` matches slashes too."""


LAYOUTS: Final[dict[Kind, Layout]] = {
    "model": Layout(
        "model",
        "model.json",
        ("model.json", "config.json", "README.md", "encoder/*", "quantizer/*", "generator/*", "ids/*"),
    ),
    "index": Layout("dataset", "index.json", ("index.json", "README.md", "segments/*", "deleted/*")),
    "encoder": Layout("model", "config.json", ENCODER_FILES),
}
SUFFIXES: Final = frozenset(
    {".json", ".jsonl", ".safetensors", ".npy", ".sqlite", ".txt", ".model", ".tsv", ".md", ".gz"}
)
"""Suffixes of files that are fetched: never pickles, never programs."""
MAX_FILES: Final = 100_000
"""Files of a repository that are looked at; an index of a billion items has fewer."""


class RemoteFile(NamedTuple):
    """A file of a repository."""

    path: str
    """Relative, with slashes."""
    bytes: int
    sha256: str | None
    """Checksum of a large file; the hub knows small ones by ``blob`` only."""
    blob: str
    """The SHA-1 that git gives a small file's contents."""

    @property
    def is_valid(self) -> bool:
        """Whether it can be a file inside a folder; a hostile hub may list anything."""
        return (
            isinstance(self.path, str)
            and stays_inside(self.path)
            and type(self.bytes) is int
            and self.bytes >= 0
            and re.fullmatch("[0-9a-f]{40}", str(self.blob)) is not None
            and (self.sha256 is None or re.fullmatch("[0-9a-f]{64}", str(self.sha256)) is not None)
        )

    def equals(self, path: Path) -> bool:
        """Return whether a file on this machine has the contents that the hub lists."""
        if path.stat().st_size != self.bytes:
            return False
        if self.sha256 is None:
            content = path.read_bytes()
            header = b"blob %d\0" % len(content)
            return hashlib.sha1(header + content, usedforsecurity=False).hexdigest() == self.blob
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


class PullPlan(NamedTuple):
    """The files that a pull fetches."""

    name: str
    kind: Kind
    repository: str
    repo_type: str
    revision: str | None
    commit: str
    files: tuple[RemoteFile, ...]
    skipped: tuple[str, ...]
    """Files of the repository that do not belong to a folder of this kind."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def bytes_to_fetch(self) -> int:
        """Size of the files that are not in the cache."""
        folder = _cache_of(self.repository, self.repo_type) / "snapshots" / self.commit
        return sum(
            file.bytes
            for file in self.files
            if not (folder / file.path).is_file() or (folder / file.path).stat().st_size != file.bytes
        )


def plan_pull(name: str, *, revision: str | None = None) -> PullPlan:
    """Look up what a pull would fetch; only the repository's list of files is read.

    Parameters
    ----------
    name
        owner/name, datasets/owner/name, or the short name of a published checkpoint.

    Raises
    ------
    NetworkNeeded
        the hub cannot be used; said within about two seconds.
    ArtifactMissing
        it has no such repository.
    ArtifactMismatch
        a file has a name that leads out of the repository, or is not the published checkpoint.
    UsageError
        the repository is neither a model nor an index nor an encoder.
    """
    checkpoint = CHECKPOINTS.get(name)
    split_name(checkpoint.repository if checkpoint else name)
    check_reachable(
        f"fetching {name} needs the hub",
        alternative=checkpoint.manual if checkpoint else "copy its folder from a machine that has it",
    )
    return _plan(name, revision, None)


def _plan(name: str, revision: str | None, token: str | None) -> PullPlan:
    checkpoint = CHECKPOINTS.get(name)
    repository, repo_type = split_name(checkpoint.repository if checkpoint else name)
    try:
        commit, files = _list_files(repository, repo_type or "model", revision, token)
    except ArtifactMissing as missing:
        if repo_type is not None:
            raise
        try:
            commit, files = _list_files(repository, "dataset", revision, token)
        except ArtifactError:
            raise missing from None
        repo_type = "dataset"
    repo_type = repo_type or "model"
    if checkpoint:
        chosen = _checkpoint_files(checkpoint, files)
        return PullPlan(name, "original", repository, repo_type, revision, commit, chosen, ())
    paths = {file.path for file in files}
    for kind, layout in LAYOUTS.items():
        if layout.repo_type == repo_type and layout.marker in paths:
            chosen = tuple(
                file
                for file in files
                if PurePosixPath(file.path).suffix in SUFFIXES
                and any(fnmatch(file.path, pattern) for pattern in layout.patterns)
            )
            skipped = tuple(sorted(paths - {file.path for file in chosen}))
            return PullPlan(name, kind, repository, repo_type, revision, commit, chosen, skipped)
    markers = ", ".join(layout.marker for layout in LAYOUTS.values())
    raise UsageError(f"{name} is neither a model, nor an index, nor an encoder: it has none of {markers}")


def pull(
    plan: PullPlan,
    out: Path | None = None,
    *,
    check: Callable[[Path], None] = lambda _: None,
    token: str | None = None,
) -> Path:
    """Fetch what was planned to the hub library's cache or to a plain folder, and return the folder.

    Finished files are not fetched again after an interruption. Contents are compared with the hub's hashes.

    Parameters
    ----------
    out
        a plain folder, which appears when everything is there and right.
    check
        raises what is wrong with a folder's contents, before it can be found by its name.

    Raises
    ------
    NetworkNeeded
        the connection broke.
    ArtifactMismatch
        a file is damaged.
    UsageError
        there is no room, or something else is at ``out``.
    """
    place = _cache_of(plan.repository, plan.repo_type) if out is None else out.expanduser().absolute()
    needed = plan.bytes_to_fetch if out is None else plan.bytes
    free = free_bytes(place)
    if needed > free:
        raise UsageError(
            f"{plan.name} needs {needed:,} bytes, and only {free:,} are free where it would go; make room, "
            "or choose another place with --out"
        )
    if out is None:
        folder = _download(plan, None, token)
        check(folder)
        reference = place / "refs" / (plan.revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(plan.commit)
        return folder
    with claim_folder(out) as folder:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{out} is there already; move it away, or choose another place with --out")
        partial = folder.parent / f".{folder.name}.partial"
        library_files = partial / ".cache"  # huggingface_hub's own; it tells that a pull made the folder
        if partial.is_dir() and any(partial.iterdir()) and not library_files.exists():
            raise UsageError(
                f"{partial} is in the way, and no pull made it; move it away, or choose another place"
            )
        library_files.mkdir(parents=True, exist_ok=True)
        _download(plan, partial, token)
        _remove_others(partial, {partial / file.path for file in plan.files})
        check(partial)
        sync_tree(partial)
        put_in_place(partial, folder)
        shutil.rmtree(folder / ".cache")
    return out.expanduser()


def find_cached(repository: str, kind: Kind, *, revision: str | None = None) -> Path | None:
    """Return the folder of a repository that was pulled to the cache, or None; never uses the network."""
    layout = LAYOUTS[kind]
    # Not with huggingface_hub, which takes half a second to import.
    cache = _cache_of(repository, layout.repo_type)
    reference = cache / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = cache / "snapshots" / (commit or "none")
    return folder if (folder / layout.marker).is_file() else None


def find_local(place: str | Path, kind: Kind) -> Path:
    """Return the folder itself, or what was pulled to the cache by this name; never uses the network.

    A place that is neither is returned as it is: whoever opens it says what is missing.
    """
    folder = Path(place)
    if folder.exists() or not is_repository_name(str(place)):
        return folder
    return find_cached(str(place), kind) or folder


def find_or_pull(
    name: str | Path,
    kind: Literal["model", "index"],
    *,
    check: Callable[[Path, bool], None],
    revision: str | None = None,
    download: bool = True,
    token: str | None = None,
) -> Path:
    """Return a folder by its path or by its name on the hub, which is pulled if it is not in the cache.

    Parameters
    ----------
    check
        ``check(folder, verify)`` raises what is wrong with a folder; with ``verify`` it reads every file.

    Raises
    ------
    ArtifactMissing
        it can only be a folder, and there is none; or there is no such repository.
    ArtifactMismatch
        what was pulled is damaged, or refers to something outside its folder.
    NetworkNeeded
        it is not on this machine, and downloading is not allowed or not possible.
    """
    given = str(name)
    if not given:
        raise ArtifactMissing(
            f"the {kind} has no name; give its folder, or its name on the hub as owner/name (of an index's "
            "model: with --model, in Python model=)"
        )
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    if is_path(given) or "/" not in given:
        raise ArtifactMissing(f"there is no folder {given}; give one, or a name on the hub as owner/name")
    repository, _ = split_name(given)
    layout = LAYOUTS[kind]
    full_name = repository if layout.repo_type == "model" else f"{DATASETS}{repository}"
    problem = f"{full_name} is not on this machine"
    cached = find_cached(repository, kind, revision=revision)
    if cached is not None:
        try:
            check(cached, False)
        except ArtifactError as error:
            problem = f"{full_name} is damaged or not complete on this machine ({error})"
            if not download:
                raise type(error)(f"{problem}; `genius pull {full_name}` repairs it") from None
        else:
            return cached
    if not download:
        raise NetworkNeeded(f"{problem}; `genius pull {full_name}` fetches it")
    check_reachable(problem, retry=f"run `genius pull {full_name}`", alternative="give the folder of a copy")
    plan = _plan(full_name, revision, token)
    if plan.kind != kind:
        raise ArtifactMissing(f"{full_name} is not a GENIUS {kind}: it holds no {layout.marker}")
    return pull(plan, check=lambda pulled: check(pulled, True), token=token)


def free_bytes(place: Path) -> int:
    """Return the room on the disk where a folder is to be written."""
    return shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.exists())).free


def _cache_of(repository: str, repo_type: str) -> Path:
    """Return where huggingface_hub's cache keeps a repository."""
    from huggingface_hub import constants  # noqa: PLC0415  only needed for names on the hub

    return Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repository.replace('/', '--')}"


def _list_files(
    repository: str, repo_type: str, revision: str | None, token: str | None
) -> tuple[str, tuple[RemoteFile, ...]]:
    """Return a revision's commit and its files."""
    from huggingface_hub import HfApi  # noqa: PLC0415  slow to import
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

    api = HfApi(endpoint=endpoint(), token=token)
    with translate_hub_errors(repository):
        commit = str(api.repo_info(repository, repo_type=repo_type, revision=revision).sha)
        if not COMMIT.fullmatch(commit):
            raise ArtifactMismatch(f"{endpoint()} gives {commit[:80]!r} for the commit of {repository}")
        tree = api.list_repo_tree(repository, repo_type=repo_type, revision=commit, recursive=True)
        entries = [entry for entry in islice(tree, MAX_FILES + 1) if isinstance(entry, RepoFile)]
    if len(entries) > MAX_FILES:
        raise ArtifactMismatch(f"{repository} lists more than {MAX_FILES:,} files, too many for this")
    files = []
    for entry in entries:
        size, sha256 = (entry.lfs.size, entry.lfs.sha256) if entry.lfs else (entry.size, None)
        file = RemoteFile(entry.path, size, sha256, entry.blob_id)
        if not file.is_valid:
            raise ArtifactMismatch(
                f"{repository} lists a file {entry.path!r} of {size!r} bytes with the hash "
                f"{(sha256 or entry.blob_id)!r}, which leads out of its folder or is no file's"
            )
        files.append(file)
    return commit, tuple(files)


def _checkpoint_files(checkpoint: Checkpoint, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
    by_path = {file.path: file for file in files}
    for path, sha256 in zip(checkpoint.files, checkpoint.sha256, strict=True):
        if path not in by_path:
            raise ArtifactMissing(f"{checkpoint.repository} has no {path} any more; look for it on its page")
        if sha256 is not None and by_path[path].sha256 != sha256:
            raise ArtifactMismatch(
                f"{path} of {checkpoint.repository} is not the file that was published: its SHA-256 is "
                f"{by_path[path].sha256}, expected {sha256}"
            )
    return tuple(by_path[path] for path in checkpoint.files)


def _download(plan: PullPlan, out: Path | None, token: str | None) -> Path:
    """Fetch the files, and once more those that are not what the hub lists."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415  slow to import

    api = HfApi(endpoint=endpoint(), token=token)
    if endpoint() != constants._HF_DEFAULT_ENDPOINT:  # noqa: SLF001  it has no other name
        constants.HF_HUB_DISABLE_XET = True  # compiled code, which nothing stops when a mirror sends too much
    damaged: list[str] = []
    for _ in range(2):
        with translate_hub_errors(plan.repository):
            folder = Path(
                api.snapshot_download(
                    plan.repository,
                    repo_type=plan.repo_type,
                    revision=plan.commit,
                    local_dir=out,
                    allow_patterns=[escape(file.path) for file in plan.files],
                    tqdm_class=_progress_bar(plan),
                )
            )
        damaged = [file.path for file in plan.files if not file.equals(folder / file.path)]
        if not damaged:
            return folder
        for path in damaged:
            contents = (folder / path).resolve()  # in the cache a file is a link to its contents
            (folder / path).unlink()
            contents.unlink(missing_ok=True)
    raise ArtifactMismatch(
        f"{damaged[0]} of {plan.repository} is damaged: its hash is not the one that the hub gives. It was "
        "removed; run the same again"
    )


def _progress_bar(plan: PullPlan) -> type:
    """Return a progress bar that ends a download when more bytes arrive than the hub lists."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # noqa: PLC0415  slow to import

    class LimitedProgress(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._most = plan.bytes if options.get("unit") == "B" else MAX_FILES
            self._done = 0
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def update(self, n: Any = 1) -> Any:
            self._done += int(n or 0)
            if self._done > self._most:
                raise ArtifactMismatch(
                    f"{endpoint()} sends more than the {plan.bytes:,} bytes that it lists for "
                    f"{plan.repository}; the download was stopped, use another hub"
                )
            return super().update(n)

    return LimitedProgress


def _remove_others(folder: Path, keep: set[Path]) -> None:
    """Remove what an interrupted pull of another revision left."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if ".cache" in path.relative_to(folder).parts[:1]:
            continue
        if path.is_file() and path not in keep:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
