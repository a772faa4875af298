"""Download models, indexes and encoders from the Hugging Face hub, with ``huggingface_hub``."""

from __future__ import annotations

# ruff: noqa: PLC0415  huggingface_hub is slow to import
import fnmatch
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from genius_search.artifact import file_fingerprint, read_json
from genius_search.border import as_path
from genius_search.errors import ArtifactMissing, BadData, GeniusError, NetworkNeeded, UsageError

DATASETS: Final = "datasets/"
"""Prefix of an index's name. An index is a data set on the hub; the hub's URLs have this prefix."""
ENCODER_FILES: Final = (
    *("*.json", "*.txt", "*.model", "*.safetensors"),
    # Full precision only: repositories also have each graph in 16, 8 and 4 bits.
    *("*text_model.onnx*", "*vision_model.onnx*"),
)
"""Patterns of the files of a pretrained encoder: settings, tokenizers, weights."""
FILES: Final = (*ENCODER_FILES, "*.jsonl", "*.npy", "*.sqlite", "*.tsv", "*.gz", "README.md")
"""Patterns of the files to download. Pickles and programs are never downloaded."""
QUANTIZED_FILES: Final = tuple(
    pattern.replace("_model.onnx*", "_model_quantized.onnx") for pattern in FILES
)
"""Patterns of the files to download of an encoder whose graphs are in 8 bits."""
_REPOSITORY_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_CONTENT_TAG: Final = re.compile(r"\w[\w.=+-]*", re.ASCII)
"""An identifier of a file's contents: a hash, or another text that is safe as a file name."""


def is_name(text: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _REPOSITORY_NAME.fullmatch(text) is not None and ".." not in text


def weights_fingerprint(file: Path) -> str:
    """Return the SHA-256 of a file, from its name if it is in the hub's cache.

    The cache stores large files as ``blobs/SHA256`` and links to them, so that they need not be
    read.
    """
    blob = file.resolve()
    if blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    return file_fingerprint(file)


def contents_fingerprint(folder: Path) -> str:
    """Return a SHA-256 over the names and contents of a model's settings, tokenizer and weights."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)}):
        total.update(f"{file.name}\0{weights_fingerprint(file)}\n".encode())
    return total.hexdigest()


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Copy a model's settings, tokenizer and weights, including files in subfolders."""
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.rglob(pattern)}):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def pull(name: str, *, out: Path | None = None, files: Sequence[str] = FILES) -> Path:
    """Download the missing files of a repository, and return their folder.

    Parameters
    ----------
    name
        ``owner/name``, or ``datasets/owner/name`` for an index.
    out
        the folder to download to; by default the cache of ``huggingface_hub``, in which
        :func:`find_cached` looks the name up.
    files
        patterns of the files to download.

    Raises
    ------
    UsageError
        The name is not the name of a repository, or ``out`` contains other files.
    ArtifactMissing
        The repository does not exist, or needs a token.
    NetworkNeeded
        The hub cannot be reached, or the connection failed.
    BadData
        The hub names a commit or a file in a way that would write outside of the folder.
    """
    from huggingface_hub import snapshot_download

    out = None if out is None else as_path(out)
    if out is not None and out.exists() and not (out / ".cache").exists() and any(out.iterdir()):
        raise UsageError(f"{out} already exists; move it away, or choose another folder with --out")
    with translate_errors(name), _checked_answers():
        return Path(
            snapshot_download(
                name.removeprefix(DATASETS),
                repo_type=_type_of(name),
                local_dir=out,
                allow_patterns=list(files),
            )
        )


@contextmanager
def _checked_answers() -> Iterator[None]:
    """Refuse responses of the hub that identify a commit or a file by anything but a hash.

    huggingface_hub uses these identifiers as paths. A hostile hub that calls a commit
    ``/folder/index`` could otherwise overwrite ``/folder/index.json``.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["response"]
    hooks.append(_check_answer)
    try:
        yield
    finally:
        hooks.remove(_check_answer)


def _check_answer(response: Any) -> None:
    """Raise :class:`BadData` if a response contains an identifier that is not a hash.

    Identifiers of commits are in the header ``X-Repo-Commit`` and in ``{"sha": ...}``; identifiers
    of files are in the ETag headers and in ``[{"oid": ..., "lfs": {"oid": ...}}, ...]``.
    """
    commits: list[object] = [response.headers.get("x-repo-commit")]
    content_tags: list[object] = []
    if response.request.method == "HEAD":
        etags = (response.headers.get(header) for header in ("x-linked-etag", "etag"))
        content_tags += [etag.removeprefix("W/").strip('"') for etag in etags if etag]
    elif response.request.url.path.startswith("/api/") and response.is_success:
        body = json.loads(response.read())
        if isinstance(body, dict):
            commits.append(body.get("sha"))
        for entry in body if isinstance(body, list) else ():
            lfs = entry.get("lfs") if isinstance(entry, dict) else None
            content_tags += [part.get("oid") for part in (entry, lfs) if isinstance(part, dict)]
    for pattern, identifiers in ((_COMMIT, commits), (_CONTENT_TAG, content_tags)):
        for identifier in identifiers:
            if identifier is not None and pattern.fullmatch(str(identifier)) is None:
                raise BadData(
                    f"{response.request.url.host} identifies a commit or a file by "
                    f"{str(identifier)[:80]!r}, expected a hash; nothing was written. Check the "
                    "address of the hub (HF_ENDPOINT)"
                )


def find_cached(name: str, *, files: Sequence[str] = FILES) -> Path | None:
    """Return the cached folder of a repository, or None; the network is never used.

    Parameters
    ----------
    files
        patterns of the files that must be in it.
    """
    from huggingface_hub import constants  # only this: the rest takes as long to import as a search

    repository = name.removeprefix(DATASETS).replace("/", "--")
    cached = Path(constants.HF_HUB_CACHE, f"{_type_of(name)}s--{repository}")
    if not (branch := cached / "refs" / "main").is_file():
        return None
    commit = branch.read_text(encoding="utf-8")
    if _CONTENT_TAG.fullmatch(commit) is None:
        return None
    folder = cached / "snapshots" / commit
    listing = cached / "trees" / f"{commit}.json"
    names = read_json(listing)["files"] if listing.is_file() else {}
    # An interrupted download has only some of the files that the listing names.
    expected = {file for pattern in files for file in fnmatch.filter(names, pattern)}
    is_complete = folder.is_dir() and all((folder / file).exists() for file in expected)
    return folder if is_complete else None


def find_or_pull(name: str | Path, *, download: bool = True, files: Sequence[str] = FILES) -> Path:
    """Return the folder with a path, or the cached or downloaded folder with a name on the hub.

    Raises
    ------
    ArtifactMissing
        The name is not a name on the hub, and there is no such folder.
    NetworkNeeded
        The repository is not in the cache, and downloading is not allowed or failed.
    """
    name = str(name)
    repository = name.removeprefix(DATASETS)
    folder = as_path(name)
    if name and folder.is_dir():
        return folder
    if not is_name(repository):
        raise ArtifactMissing(
            f"there is no folder {repository!r}; give a folder, or a name on the hub as owner/name"
        )
    if (cached := find_cached(name, files=files)) is not None:
        return cached
    if not download:
        raise NetworkNeeded(
            f"there is no folder {repository}, and {name} was not downloaded from the hub; give a "
            f"folder, or download it with `genius pull {name}` or `download=True`"
        )
    return pull(name, files=files)


def _type_of(name: str) -> str:
    return "dataset" if name.startswith(DATASETS) else "model"


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub about a repository into errors of this package."""
    from huggingface_hub import constants, errors

    refused = ArtifactMissing(
        f"the hub has no repository {name} that you may use; check the spelling, and if it is "
        "private or has terms to accept, run `hf auth login` or set HF_TOKEN"
    )
    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(
            f"{name!r} is not the name of a repository; give owner/name ({error})"
        ) from None
    except (errors.RepositoryNotFoundError, errors.LocalTokenNotFoundError):
        raise refused from None
    except (
        errors.HTTPError,  # type: ignore[attr-defined]
        errors.LocalEntryNotFoundError,
        ConnectionError,
        TimeoutError,
    ) as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            raise refused from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NetworkNeeded(
            f"{name} is not on this machine, and {constants.ENDPOINT}/{name} cannot be used "
            f"({reason}). Connect to the network and run the same command again; finished files "
            f"are kept in {constants.HF_HUB_CACHE}. Or give the folder of a copy, with files named "
            f"{', '.join(ENCODER_FILES)}"
        ) from error
    except ValueError as error:
        if isinstance(error, GeniusError):
            raise
        raise BadData(
            f"{name} cannot be downloaded; the response of the hub is invalid: {error}"
        ) from error
