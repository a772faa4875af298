"""Models, indexes and encoders from the Hugging Face hub; the library ``huggingface_hub`` does the work."""

from __future__ import annotations

# ruff: noqa: PLC0415  huggingface_hub is slow to import
import fnmatch
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from genius_search.artifact import file_fingerprint, read_json
from genius_search.border import as_path
from genius_search.errors import ArtifactMissing, BadData, NetworkNeeded, UsageError
from genius_search.writing import make_folder, write_file

DATASETS: Final = "datasets/"
"""Prefix of the name of an index, which is a data set on the hub, as in the hub's own addresses."""
ENCODER_FILES: Final = (
    *("*.json", "*.txt", "*.model", "*.safetensors"),
    *("*text_model.onnx*", "*vision_model.onnx*"),  # repositories have each graph in several precisions
)
"""Files of a pretrained encoder: settings, tokenizers, weights."""
FILES: Final = (*ENCODER_FILES, "*.jsonl", "*.npy", "*.sqlite", "*.tsv", "*.gz", "README.md")
"""Files that are fetched: never pickles, never programs."""
_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""The name of a commit. Any other, such as /home/x, would lead huggingface_hub to write to /home/x.json."""


def is_name(text: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def known_fingerprint(file: Path) -> str:
    """Return the SHA-256 of a file; in the cache, large files lie under names that are just that."""
    blob = file.resolve()
    return blob.name if blob.parent.name == "blobs" and len(blob.name) == 64 else file_fingerprint(file)


def contents_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's settings, tokenizer and weights."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)}):
        total.update(f"{file.name}\0{known_fingerprint(file)}\n".encode())
    return total.hexdigest()


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Copy a model's settings, tokenizer and weights, also those in folders inside."""
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.rglob(pattern)}):
        copied = target / file.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)


def pull(name: str, *, out: Path | None = None) -> Path:
    """Fetch a repository's files that are not here yet, and return their folder.

    Parameters
    ----------
    name
        ``owner/name``, or ``datasets/owner/name``.
    out
        A plain folder; by default the library's cache, where the name finds it again.

    Raises
    ------
    UsageError
        The name is no repository's, or something else is at ``out``.
    ArtifactMissing
        There is no such repository, or it needs a token.
    NetworkNeeded
        The hub cannot be reached, or the connection broke.
    BadData
        The hub does not name a commit of the repository; nothing is written.
    """
    from huggingface_hub import snapshot_download

    out = None if out is None else as_path(out)
    if out is not None and out.exists() and not (out / ".cache").exists() and any(out.iterdir()):
        raise UsageError(f"{out} is there already; move it away, or choose another place with --out")
    try:
        commit = _newest_commit(name)
    except NetworkNeeded:
        if out is None and (cached := find(name)) is not None:
            return cached
        raise
    with translate_errors(name):
        folder = snapshot_download(
            name.removeprefix(DATASETS),
            repo_type=_type_of(name),
            revision=commit,
            local_dir=out,
            allow_patterns=list(FILES),
        )
    if out is None:
        branch = _cached_branch(name)
        make_folder(branch.parent)
        write_file(branch, commit.encode())
    return Path(folder)


def _newest_commit(name: str) -> str:
    """Return the commit of a repository's main branch; raises like :func:`pull`."""
    from huggingface_hub import HfApi

    with translate_errors(name):
        commit = HfApi().repo_info(name.removeprefix(DATASETS), repo_type=_type_of(name)).sha
    if _COMMIT.fullmatch(str(commit)) is None:
        raise BadData(
            f"the hub names {str(commit)[:80]!r} as the commit of {name}, expected 40 hexadecimal digits; "
            "nothing was written. Check the address of the hub (HF_ENDPOINT)"
        )
    return str(commit)


def _cached_branch(name: str) -> Path:
    """Return the file of the library's cache that names the commit of a repository's main branch."""
    from huggingface_hub import constants  # importing what downloads takes as long as a search

    repository = name.removeprefix(DATASETS).replace("/", "--")
    return Path(constants.HF_HUB_CACHE, f"{_type_of(name)}s--{repository}", "refs", "main")


def find(name: str) -> Path | None:
    """Return the folder of what was pulled to the cache by this name, or None; never uses the network."""
    branch = _cached_branch(name)
    commit, cached = branch.read_text(encoding="utf-8") if branch.is_file() else "", branch.parents[1]
    if _COMMIT.fullmatch(commit) is None:
        return None
    folder, listing = cached / "snapshots" / commit, cached / "trees" / f"{commit}.json"
    names = read_json(listing)["files"] if listing.is_file() else {}
    wanted = {file for pattern in FILES for file in fnmatch.filter(names, pattern)}
    return folder if folder.is_dir() and all((folder / file).exists() for file in wanted) else None


def find_or_pull(name: str | Path, *, download: bool = True) -> Path:
    """Return a folder by its path, or by its name on the hub; it is pulled if it is not in the cache.

    Raises
    ------
    ArtifactMissing
        It can only be a folder, and there is none.
    NetworkNeeded
        It is not on this machine, and downloading is not allowed or not possible.
    """
    name, given = str(name), str(name).removeprefix(DATASETS)
    folder = as_path(name)
    if name and folder.is_dir():
        return folder
    if not is_name(given):
        raise ArtifactMissing(f"there is no folder {given!r}; give one, or a name on the hub as owner/name")
    if (cached := find(name)) is not None:
        return cached
    if not download:
        raise NetworkNeeded(
            f"there is no folder {given}, and {name} was not pulled from the hub; give a folder, or "
            f"fetch it with `genius pull {name}` or `download=True`"
        )
    return pull(name)


def _type_of(name: str) -> str:
    return "dataset" if name.startswith(DATASETS) else "model"


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub about a repository into ours."""
    from huggingface_hub import constants, errors

    refused = ArtifactMissing(
        f"the hub has no repository {name} that you may use: check the spelling; if it is private or has "
        "terms to accept, `hf auth login`, or set HF_TOKEN"
    )
    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(f"{name!r} is not a repository's name; give owner/name ({error})") from None
    except (errors.RepositoryNotFoundError, errors.LocalTokenNotFoundError):
        raise refused from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:  # type: ignore[attr-defined]
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            raise refused from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NetworkNeeded(
            f"{name} is not on this machine, and {constants.ENDPOINT}/{name} cannot be used ({reason}). "
            f"Connect and run the same again: what was fetched stays in {constants.HF_HUB_CACHE}. "
            f"Or give the folder of a copy, with its files called {', '.join(ENCODER_FILES)}"
        ) from error
