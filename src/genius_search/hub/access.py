"""Access to the Hugging Face hub: offline switches, reachability, names, and errors in our own words."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from genius_search.artifact import file_fingerprint
from genius_search.errors import ArtifactMismatch, ArtifactMissing, GeniusError, NetworkNeeded, UsageError

PROBE_SECONDS: Final = 1.5
DATASETS: Final = "datasets/"
"""Prefix of a data set's name, as in the hub's own addresses."""
ENCODER_FILES: Final = ("*.json", "*.txt", "*.model", "*.safetensors")
"""Files of a pretrained encoder: settings, tokenizers, weights. Never pickles."""

_OFFLINE_SWITCHES: Final = ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""Form of a commit's name, which becomes the name of a folder."""
_ETAG: Final = re.compile(r"(W/)?\"?[\w.+=-]{1,128}\"?", re.ASCII)
"""Form of a header that becomes the name of a file."""
_DISK_ERRORS: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR, errno.EMFILE}
    | {errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


def contents_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's settings, tokenizer and weights."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)}):
        total.update(f"{file.name}\0{file_fingerprint(file)}\n".encode())
    return total.hexdigest()


def offline_switch() -> str | None:
    """Return the setting that forbids any use of the network, such as ``GENIUS_OFFLINE=1``, or None."""
    for switch in _OFFLINE_SWITCHES:
        value = os.environ.get(switch, "")
        if value.lower() in ("1", "on", "yes", "true"):
            return f"{switch}={value}"
    return None


def endpoint() -> str:
    """Return the address of the hub: ``HF_ENDPOINT``, or the public one."""
    from huggingface_hub import constants  # noqa: PLC0415  slow to import

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def check_reachable(
    need: str,
    *,
    retry: str = "run the same again",
    alternative: str | None = "copy its folder here and give the path",
) -> None:
    """Raise :class:`NetworkNeeded` within two seconds if the hub may not be used or does not answer.

    Parameters
    ----------
    need
        why the hub is needed, as the beginning of a sentence: ``owner/name is not on this machine``.
    retry
        what to do once the hub can be reached.
    alternative
        what to do without it.
    """
    remedy = retry if alternative is None else f"{retry}, or {alternative}"
    switch = offline_switch()
    if switch is not None:
        raise NetworkNeeded(
            f"{need}, and {switch} forbids the network. Unset {switch.partition('=')[0]} and {remedy}"
        )
    address = endpoint()
    answered = threading.Event()

    def probe() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")  # noqa: S310  the hub's own address
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because resolving a host name knows no time-out.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not answered.is_set():
        raise NetworkNeeded(f"{need}, and {address} cannot be reached. Connect and {remedy}")


def is_repository_name(text: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def is_path(name: str) -> bool:
    """Return whether a name can only mean a folder, not a repository."""
    return not name or name.startswith((".", "/", "~")) or name.removeprefix(DATASETS).count("/") > 1


def split_name(name: str) -> tuple[str, str | None]:
    """Return a repository's name as owner/name, and its type if the name has it (``datasets/owner/name``)."""
    repository = name.removeprefix(DATASETS)
    if not is_repository_name(repository):
        raise UsageError(f"{name!r} is not a repository's name; give owner/name, or datasets/owner/name")
    return repository, None if repository == name else "dataset"


def stays_inside(path: str) -> bool:
    """Return whether a relative path cannot leave the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and not set(path) & set("\\:\0")


@contextmanager
def translate_hub_errors(name: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours.

    Raises
    ------
    UsageError
        the name cannot be a repository's, or this machine cannot write the files.
    ArtifactMissing
        there is no such repository or revision, or it needs a token.
    ArtifactMismatch
        the hub answers what no hub would.
    NetworkNeeded
        anything else went wrong on the way.
    """
    from huggingface_hub import errors  # noqa: PLC0415  slow to import

    _check_all_headers()
    login = "`hf auth login`, or set HF_TOKEN"
    try:
        with translate_os_errors(name):
            yield
    except GeniusError:
        raise
    except errors.HFValidationError as error:
        raise UsageError(
            f"{name!r} is neither a folder nor a repository's name, which is owner/name: {error}"
        ) from None
    except errors.GatedRepoError:
        raise ArtifactMissing(
            f"{name} is only for people who accepted its terms: accept them on its page, then {login}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ArtifactMissing(
            f"the hub has no repository {name}, or it is private: check the spelling; for a private one "
            f"{login}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ArtifactMissing(f"{name} has no such revision; give a branch, a tag or a commit") from None
    except (errors.LocalTokenNotFoundError, errors.BadRequestError) as error:
        raise UsageError(f"the hub refused {name}: {error}") from None
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            raise ArtifactMissing(
                f"the hub does not permit this with {name}: {login}, with a token that has the right"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NetworkNeeded(
            f"the request to the hub for {name} failed ({reason}). Check the connection and run the same "
            "again: finished files are not fetched twice"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactMismatch(
            f"{endpoint()} gives an answer about {name} that no hub gives ({type(error).__name__}: {error}); "
            "use another one"
        ) from error


def _check_all_headers() -> None:
    """Let huggingface_hub's requests pass :func:`_check_headers`."""
    from huggingface_hub import get_session  # noqa: PLC0415  as above

    checks = get_session().event_hooks["response"]
    if _check_headers not in checks:
        checks.append(_check_headers)


def _check_headers(response: Any) -> None:
    """Refuse names of files and folders that lead elsewhere, which huggingface_hub takes from headers."""
    if response.request.method != "HEAD":
        return
    commit = response.headers.get("X-Repo-Commit")
    etag = response.headers.get("X-Linked-Etag") or response.headers.get("ETag")
    for value, form in ((commit, COMMIT), (etag, _ETAG)):
        if value and (not form.fullmatch(value) or ".." in value):
            raise ArtifactMismatch(
                f"{response.request.url} gives {value[:80]!r} for a file's name; nothing was written, use "
                "another hub"
            )


@contextmanager
def translate_os_errors(name: str) -> Iterator[None]:
    """Turn a disk's errors (no room, no permission, read-only) into :class:`UsageError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f" at {error.filename}" if error.filename else ""
        raise UsageError(
            f"{name} cannot be written{place}: {os.strerror(error.errno or 0)}. Make room, or choose a place "
            "that you may write to"
        ) from error
