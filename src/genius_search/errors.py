"""Errors for users. A message names what was given, what was expected and what to do.

The command line prints the message as one line and exits with ``exit_code``; a bug is never one of these.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final


def plural(count: int, noun: str) -> str:
    """Return a number with a noun.

    >>> plural(1, "item"), plural(2000, "item")
    ('1 item', '2,000 items')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class GeniusError(Exception):
    """Base class of all errors of this package."""

    exit_code = 1


class UsageError(GeniusError, ValueError):
    """An argument or a combination of arguments that cannot work."""

    exit_code = 2


class DeadlinePassed(GeniusError):
    """There is no answer within the time that was allowed."""


class MissingExtra(GeniusError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    exit_code = 2


EXTRAS: Final = {
    package: extra
    for extra, packages in {
        "evaluate": "ir_measures pytrec_eval",
        "serve": "fastapi granian prometheus_client prometheus_fastapi_instrumentator starlette",
        "mcp": "mcp",
        "train": "torch",
        "models": "ftfy sentence_transformers sentencepiece transformers",
        "photos": "pillow_heif",
        "pdf": "pypdf",
        "words": "model2vec wordllama",
        "cluster": "ray",
    }.items()
    for package in packages.split()
}
"""Package -> the extra of this distribution that installs it."""


def need_packages(purpose: str, *packages: str) -> None:
    """Raise :class:`MissingExtra` where one of the packages is not installed.

    Parameters
    ----------
    purpose
        beginning of the message, such as ``serving needs``.
    packages
        names to import; all are of one extra.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_extra(f"{purpose} {' and '.join(missing)}", EXTRAS[missing[0]])


def missing_extra(need: str, extra: str) -> MissingExtra:
    """Return the error that says what is needed and which extra brings it."""
    return MissingExtra(
        f"{need}: pip install 'genius-search[{extra}]', or in a clone pip install -e '.[{extra}]'"
    )


class ArtifactError(GeniusError):
    """A folder of a model, an index or another artifact cannot be used."""

    exit_code = 4


class ArtifactMissing(ArtifactError, FileNotFoundError):
    """The folder, or a file in it, does not exist or was never finished."""


class ArtifactMismatch(ArtifactError, ValueError):
    """The folder is of another kind or version, is damaged, or was made from other inputs."""


class NetworkNeeded(GeniusError, ConnectionError):
    """Something is not on this machine, and downloading was not allowed or failed."""

    exit_code = 5


class BadData(GeniusError, ValueError):
    """The given data cannot be used."""

    exit_code = 6


class BadRecord(BadData):
    """A line of a data file is wrong; the message names the file and the line, counted from 1."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}")
        self.file = file
        self.line = line
        self.problem = problem
        self.reason = f"line {line}: {problem}"


class BadImage(BadData):
    """An image cannot be read or is refused; the message names the file and the reason."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


class TrainingFailed(GeniusError, RuntimeError):
    """Training failed: a loss is not finite, or codes collapsed."""
