"""Open a published checkpoint without running anything in it (specification, section 7).

The authors' files are pickles: loading one the usual way runs whatever code it names. Here torch's restricted
reader takes tensors, plain containers and the few classes that an OmegaConf configuration is made of, and of
those it builds inert stand-ins, so omegaconf is not needed. Everything else is refused before it is touched.
Tensors stay in the file until they are used: optimizer state, twice the size of the weights, is never read.
"""

from __future__ import annotations

import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor

from genius_search.errors import ArtifactMismatch, ArtifactMissing

WEIGHTS: Final = "model"
"""The entry that holds the weights."""
COMPILED: Final = "_orig_mod"
"""A segment that torch.compile puts into names; it means nothing."""
ZIP_START: Final = b"PK\x03\x04"


class _Inert:
    """Stands for a configuration's classes: swallows what the file says of them."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_STANDS_FOR_NOTHING: Final = (
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.base.UnionNode",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
    "omegaconf.nodes.BooleanNode",
    "omegaconf.nodes.BytesNode",
    "omegaconf.nodes.FloatNode",
    "omegaconf.nodes.IntegerNode",
    "omegaconf.nodes.StringNode",
    "typing.Any",
)
_PLAIN: Final = (bool, dict, float, int, list, str, tuple, defaultdict)
_ALLOWED: Final = [
    *((_Inert, name) for name in _STANDS_FOR_NOTHING),
    *((kind, f"{kind.__module__}.{kind.__name__}") for kind in _PLAIN),
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a checkpoint beside its weights."""

    name: str
    what: str
    """In words: the kind of value, and how many tensors are in it."""
    bytes: int
    """Of its tensors."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds, in numbers."""

    file: str
    bytes: int
    tensors: int
    parameters: int
    parameter_bytes: int
    others: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's weights, still in the file, and what else the file holds."""

    path: Path
    tensors: Mapping[str, Tensor]
    """Weights by name; memory-mapped, so only what is used is read."""
    others: tuple[Entry, ...]
    """Optimizer, scheduler, configuration and so on: never read, only named."""
    bytes: int
    """Of the file."""

    @property
    def contents(self) -> Contents:
        """What is in it, for a look before an import."""
        return Contents(
            file=str(self.path),
            bytes=self.bytes,
            tensors=len(self.tensors),
            parameters=sum(tensor.numel() for tensor in self.tensors.values()),
            parameter_bytes=sum(tensor.nbytes for tensor in self.tensors.values()),
            others=self.others,
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file that ``torch.save`` wrote: weights under ``model``, or nothing but weights.

    Raises
    ------
    ArtifactMissing
        there is no such file.
    ArtifactMismatch
        it is no such file, is damaged, or asks for code to be run; nothing of it was run.
    """
    if not path.is_file():
        raise ArtifactMissing(f"no checkpoint at {path}; give a file that torch.save wrote (.pth)")
    body = read_container(path)
    if not isinstance(body, Mapping):
        raise ArtifactMismatch(f"{path} holds a {type(body).__name__}, expected a checkpoint: a dict")
    if WEIGHTS in body:
        weights = body[WEIGHTS]
        if not isinstance(weights, Mapping):
            raise ArtifactMismatch(
                f"{path}: {WEIGHTS!r} is a {type(weights).__name__}, expected a dict of tensors"
            )
        others = tuple(_entry(str(name), value) for name, value in body.items() if name != WEIGHTS)
    else:
        if not body or not all(isinstance(value, Tensor) for value in body.values()):
            names = ", ".join(map(repr, list(body)[:8])) or "nothing"
            raise ArtifactMismatch(
                f"{path} has no {WEIGHTS!r} entry, expected the weights there; it holds {names}"
            )
        weights, others = body, ()
    return Checkpoint(path, _weights(path, weights), others, path.stat().st_size)


def read_container(path: Path) -> Any:
    """What ``torch.save`` put into a file: tensors, which stay in the file, numbers, texts and containers.

    Raises
    ------
    ArtifactMismatch
        it is no such file, is damaged, or asks for code to be run; nothing of it was run.
    """
    _check_container(path)
    return _read(path)


def _check_container(path: Path) -> None:
    """A whole, uncompressed zip archive: the only kind whose tensors can stay in the file."""
    with path.open("rb") as file:
        start = file.read(64)
    if b"git-lfs" in start:
        raise ArtifactMismatch(
            f"{path} is a Git LFS pointer, not the file itself; fetch the file (git lfs pull)"
        )
    if start[:1] == b"\x80":
        raise ArtifactMismatch(
            f"{path} is a bare pickle or was written by a torch before 1.6, expected torch's zip container; "
            "save it anew with torch.save(torch.load(FILE, weights_only=True), NEW)"
        )
    if not start.startswith(ZIP_START):
        raise ArtifactMismatch(f"{path} was not written by torch.save: it is not a zip archive")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ArtifactMismatch(
            f"{path} is damaged or was not downloaded to its end ({error}); fetch it again"
        ) from None
    if not any(member.filename.endswith("data.pkl") for member in members):
        raise ArtifactMismatch(f"{path} is a zip archive, but torch.save did not write it: no data.pkl in it")
    packed = next((member for member in members if member.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ArtifactMismatch(
            f"{path} was packed again with compression ({packed.filename}), so tensors cannot stay in it; "
            "use the original file"
        )


def _read(path: Path) -> Any:
    with torch.serialization.safe_globals(list(_ALLOWED)):
        try:
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
            body = None if refused else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ArtifactMismatch(
                f"{path} holds what weights-only loading refuses; the file was not executed ({reason})"
            ) from None
        except Exception as error:  # noqa: BLE001  torch's reader fails on a damaged pickle in many ways
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ArtifactMismatch(f"{path} is damaged; fetch it again ({reason})") from None
    if refused:
        raise ArtifactMismatch(
            f"{path} asks for {', '.join(refused)}, which tensors do not need and which could run code; the "
            "file was not executed. Fetch it again from its publisher, or a file with nothing but tensors"
        )
    return body


def _weights(path: Path, found: Mapping[Any, Any]) -> dict[str, Tensor]:
    wrong = [str(name) for name, value in found.items() if not (isinstance(name, str) and _is_plain(value))]
    if wrong or not found:
        raise ArtifactMismatch(
            f"{path}: its weights are not all plain tensors: {', '.join(wrong[:8]) or 'there are none'}"
        )
    cleaned = [".".join(part for part in name.split(".") if part != COMPILED) for name in found]
    twice = [name for name, count in Counter(cleaned).items() if count > 1]
    if twice:
        raise ArtifactMismatch(f"{path}: without {COMPILED!r} these names come twice: {', '.join(twice[:8])}")
    return dict(zip(cleaned, (value.detach() for value in found.values()), strict=True))


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _entry(name: str, value: object) -> Entry:
    tensors = list(_tensors(value))
    if isinstance(value, _Inert):
        what = "settings"
    elif isinstance(value, str | int | float | None):
        what = str(value)[:40]
    else:
        what = type(value).__name__
    if tensors and not isinstance(value, Tensor):
        what += f" with {len(tensors)} tensors"
    return Entry(name, what, sum(tensor.nbytes for tensor in tensors))


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor somewhere inside."""
    waiting = [value]
    seen: set[int] = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, Mapping):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple):
            waiting.extend(thing)
