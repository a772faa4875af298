"""A pretrained model's folder in Hugging Face's layout: found on disk, checked, downloaded only if asked.

Everything that can fail is tried before transformers is imported, which takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from genius.artifact import file_fingerprint
from genius.errors import ArtifactMismatch, ArtifactMissing, MissingExtra, NetworkNeeded, UsageError
from genius.hub.listing import is_place, told
from genius.hub.reach import probe

__all__ = [
    "check_files",
    "contents_fingerprint",
    "find_checkpoint",
    "need_transformers",
    "quietly",
    "read_json",
]

PATTERNS: Final = ("*.json", "*.txt", "*.model", "*.safetensors")
"""What is downloaded of a model: settings, tokenizers, weights. Never pickles."""

_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


def need_transformers() -> None:
    """Raise :class:`MissingExtra` where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra(
            "this encoder needs transformers, which is not installed: pip install genius-retrieval[hf]"
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Load weights without transformers' own progress bar, which would stand among ours."""
    from transformers.utils import logging  # noqa: PLC0415  takes seconds to import

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def find_checkpoint(name: str, *, download: bool) -> Path:
    """Find a folder, or a model by its name in the local cache; fetch it only with ``download``.

    Raises
    ------
    ArtifactMissing
        the name can only be a folder, and there is none.
    NetworkNeeded
        it is not on this machine, and downloading was not asked for or is not possible.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if is_place(name):
        raise ArtifactMissing(
            f"there is no folder {name!r}; give a model's folder, or its name as owner/model"
        )
    return _in_cache(name, download=download)


def _in_cache(name: str, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow, and only needed here
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    patterns = list(PATTERNS)
    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns))
        if not _lacking(cached) or not download:
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a folder nor a model's name: {error}") from None
    if not download:
        raise NetworkNeeded(
            f"{name} is not on this machine, and nothing is downloaded unless you ask. "
            f"Run again with --download, or `genius pull {name}`, or give the folder of a copy"
        )
    probe(f"{name} is not on this machine")
    with told(name):
        return Path(snapshot_download(name, allow_patterns=patterns))


def check_files(folder: Path, *, image_processor: bool) -> None:
    """Raise :class:`ArtifactMissing` naming the files that a model's folder lacks."""
    lacking = _lacking(folder)
    if image_processor and not _any(folder, ("preprocessor_config.json", "processor_config.json")):
        lacking.append("preprocessor_config.json")
    if lacking:
        raise ArtifactMissing(f"{folder} is not a complete model: it lacks {', '.join(lacking)}")


def _lacking(folder: Path) -> list[str]:
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    if not _any(folder, _WEIGHTS):
        lacking.append("model.safetensors")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: Iterable[str] = set(read_json(index).get("weight_map", {}).values())
        lacking += [name for name in sorted(shards) if not (folder / name).is_file()]
    if not _any(folder, _TOKENIZERS):
        lacking.append("tokenizer.json")
    return lacking


def _any(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def read_json(file: Path) -> Any:
    """Read a settings file."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ArtifactMismatch(f"{file} is not valid JSON: {error}") from None


def contents_fingerprint(folder: Path) -> str:
    """SHA-256 over the names and contents of a model's settings, tokenizer and weights."""
    files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file_fingerprint(file)}\n".encode())
    return total.hexdigest()
