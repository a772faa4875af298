"""Models, indexes and encoders from the Hugging Face hub; the library ``huggingface_hub`` does the work."""

from __future__ import annotations

# ruff: noqa: PLC0415  huggingface_hub is slow to import
import fnmatch
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from genius_search.artifact import file_fingerprint, read_json
from genius_search.border import as_path
from genius_search.errors import ArtifactMissing, BadData, GeniusError, NetworkNeeded, UsageError

DATASETS: Final = "datasets/"
"""Prefix of the name of an index, which is a data set on the hub, as in the hub's own addresses."""
ENCODER_FILES: Final = (
    *("*.json", "*.txt", "*.model", "*.safetensors"),
    *(
        "*text_model.onnx*",
        "*vision_model.onnx*",
    ),  # repositories have each graph in several precisions
)
"""Files of a pretrained encoder: settings, tokenizers, weights."""
FILES: Final = (*ENCODER_FILES, "*.jsonl", "*.npy", "*.sqlite", "*.tsv", "*.gz", "README.md")
"""Files that are fetched: never pickles, never programs."""
_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_CONTENT: Final = re.compile(r"\w[\w.=+-]*", re.ASCII)
"""What may stand for the contents of a file: a hash, or another text that is one file's name."""


def is_name(text: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def weights_fingerprint(file: Path) -> str:
    """Return the SHA-256 of a file; in the cache, large files lie under names that are just that."""
    blob = file.resolve()
    return (
        blob.name
        if blob.parent.name == "blobs" and len(blob.name) == 64
        else file_fingerprint(file)
    )


def contents_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's settings, tokenizer and weights."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)}):
        total.update(f"{file.name}\0{weights_fingerprint(file)}\n".encode())
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
        The hub names a commit or a file so that something else would be written to.
    """
    from huggingface_hub import snapshot_download

    out = None if out is None else as_path(out)
    if out is not None and out.exists() and not (out / ".cache").exists() and any(out.iterdir()):
        raise UsageError(
            f"{out} is there already; move it away, or choose another place with --out"
        )
    with translate_errors(name), _checked_answers():
        return Path(
            snapshot_download(
                name.removeprefix(DATASETS),
                repo_type=_type_of(name),
                local_dir=out,
                allow_patterns=list(FILES),
            )
        )


@contextmanager
def _checked_answers() -> Iterator[None]:
    """Refuse answers of the hub that name a commit or contents by anything but a hash.

    huggingface_hub makes paths of these names. A hub that calls a commit ``/folder/index`` would
    have ``/folder/index.json`` written over.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["response"]
    hooks.append(_check_answer)
    try:
        yield
    finally:
        hooks.remove(_check_answer)


def _check_answer(response: Any) -> None:
    """Raise :class:`BadData` if an answer has a name that is none."""
    commits, contents = [response.headers.get("x-repo-commit")], list[object]()
    if response.request.method == "HEAD":
        tags = (response.headers.get(name) for name in ("x-linked-etag", "etag"))
        contents = [tag.removeprefix("W/").strip('"') for tag in tags if tag]
    elif response.request.url.path.startswith("/api/") and response.is_success:
        answer = json.loads(response.read())
        if isinstance(answer, dict):
            commits.append(answer.get("sha"))
        for entry in answer if isinstance(answer, list) else ():
            large = entry.get("lfs") if isinstance(entry, dict) else None
            contents += [one.get("oid") for one in (entry, large) if isinstance(one, dict)]
    for pattern, names in ((_COMMIT, commits), (_CONTENT, contents)):
        for name in names:
            if name is not None and pattern.fullmatch(str(name)) is None:
                raise BadData(
                    f"{response.request.url.host} calls a commit or a file {str(name)[:80]!r}, "
                    "expected a hash; nothing is written there. Check the address of the hub "
                    "(HF_ENDPOINT)"
                )


def find_cached(name: str) -> Path | None:
    """Return the folder of what was pulled to the cache by this name, or None; never uses the network."""
    from huggingface_hub import constants  # importing what downloads takes as long as a search

    repository = name.removeprefix(DATASETS).replace("/", "--")
    cached = Path(constants.HF_HUB_CACHE, f"{_type_of(name)}s--{repository}")
    if not (branch := cached / "refs" / "main").is_file():
        return None
    commit = branch.read_text(encoding="utf-8")
    if _CONTENT.fullmatch(commit) is None:
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
        raise ArtifactMissing(
            f"there is no folder {given!r}; give one, or a name on the hub as owner/name"
        )
    if (cached := find_cached(name)) is not None:
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
        raise UsageError(
            f"{name!r} is not a repository's name; give owner/name ({error})"
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
            f"{name} is not on this machine, and {constants.ENDPOINT}/{name} cannot be used ({reason}). "
            f"Connect and run the same again: what was fetched stays in {constants.HF_HUB_CACHE}. "
            f"Or give the folder of a copy, with its files called {', '.join(ENCODER_FILES)}"
        ) from error
    except ValueError as error:
        if isinstance(error, GeniusError):
            raise
        raise BadData(f"{name} cannot be fetched; the hub's answer is wrong: {error}") from error
