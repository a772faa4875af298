"""Published checkpoints, opened without running anything in them (specification, section 7).

The authors' files are pickles: loading one the usual way runs whatever code it names. Torch's restricted
reader takes tensors, plain containers and the few classes that an OmegaConf configuration is made of, and
builds inert stand-ins for those, so omegaconf is not needed. Everything else is refused before it is
touched. Tensors stay in the file until they are used: optimizer state, twice the size of the weights, is
never read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zipfile import is_zipfile

import torch
from torch import Tensor

from genius_search.errors import ArtifactMismatch, ArtifactMissing

WEIGHTS: Final = "model"
"""The entry that holds the weights."""
COMPILED: Final = "_orig_mod"
"""A segment that torch.compile puts into names; it means nothing."""
WRAPPERS: Final = ("module.", "model.")
"""What PyTorch's parallel wrappers, and Lightning, put before every name."""
_SHOWN: Final = 8
"""Names listed of each kind of problem; the rest are counted."""


class _Inert:
    """A stand-in for a configuration's classes that discards its contents."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_INERT: Final = {
    "base": ("ContainerMetadata", "Metadata", "UnionNode"),
    "dictconfig": ("DictConfig",),
    "listconfig": ("ListConfig",),
    "nodes": ("AnyNode", "BooleanNode", "BytesNode", "FloatNode", "IntegerNode", "StringNode"),
}
_ALLOWED: Final = [
    (_Inert, "typing.Any"),
    (_Inert, "argparse.Namespace"),
    *((_Inert, f"omegaconf.{module}.{name}") for module, names in _INERT.items() for name in names),
    *(
        (kind, f"{kind.__module__}.{kind.__name__}")
        for kind in (bool, dict, float, int, list, str, tuple, defaultdict)
    ),
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's weights, still in the file."""

    path: Path
    tensors: Mapping[str, Tensor]
    """Weights by name, memory-mapped."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what ``torch.save`` wrote: nothing but weights, or weights under some name, such as ``model``.

    Raises ArtifactMissing: there is no such file. Raises ArtifactMismatch: the file is something else,
    damaged, or asks for code to be run; nothing of it was run.
    """
    if not path.is_file():
        raise ArtifactMissing(f"no checkpoint at {path}; give a file that torch.save wrote (.pth)")
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)):
            body = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # noqa: BLE001  torch's reader fails on a damaged pickle in many ways
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        with path.open("rb") as file:
            begin = file.read(8)
        problem = "is damaged, or not what torch.save writes; fetch it again from its publisher"
        if asked is not None:
            problem = f"holds a {asked[1]} besides weights, which was not executed; save the weights alone"
        elif begin and begin.isascii() and b"\0" not in begin:
            problem = (
                "is a text, such as a web page or the pointer of Git LFS; fetch the file itself"
            )
        raise ArtifactMismatch(f"{path} {problem} ({type(error).__name__})") from None
    if (
        isinstance(body, Mapping)
        and body
        and all(isinstance(value, Tensor) for value in body.values())
    ):
        body = {WEIGHTS: body}
    parts = body if isinstance(body, Mapping) else {}
    found = {name: part for name, part in parts.items() if _is_weights(part)}
    known = [name for name in (WEIGHTS, "state_dict") if name in found] or [*found]
    if not known or (len(known) > 1 and known[0] != WEIGHTS):
        given = ", ".join(map(str, parts)) or f"a {type(body).__name__}"
        raise ArtifactMismatch(
            f"{path} has no dict of plain tensors under {WEIGHTS!r} or 'state_dict', nor a single one under "
            f"another name; it has {given}"
        )
    weights = found[known[0]]
    names = [".".join(part for part in name.split(".") if part != COMPILED) for name in weights]
    while wrapper := next(
        (one for one in WRAPPERS if all(name.startswith(one) for name in names)), None
    ):
        names = [name.removeprefix(wrapper) for name in names]
    tensors = {name: value.detach() for name, value in zip(names, weights.values(), strict=True)}
    return Checkpoint(path, tensors)


def _is_weights(part: object) -> bool:
    return isinstance(part, Mapping) and bool(part) and all(map(_is_plain, part.values()))


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    )


def check_names(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tolerated: Sequence[re.Pattern[str]] = (),
    what: str,
) -> None:
    """Check that no tensor is missing, unknown or of another shape.

    Raises ArtifactMismatch: the message lists what differs.

    Parameters
    ----------
    tolerated
        Patterns of whole names that may be there without being used.
    what
        What the tensors are and where they were read, for the message.
    """
    missing = [name for name in expected if name not in tensors]
    unknown = [
        name for name in tensors if name not in expected and not is_tolerated(name, tolerated)
    ]
    misshapen = [
        f"{name} {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        for kind, names in (
            ("missing", missing),
            ("unknown", unknown),
            ("of another shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ArtifactMismatch(
            f"{what}: of {len(expected)} tensors expected, {'; '.join(problems)}. This is another model, or "
            "another version of it"
        )


def is_tolerated(name: str, tolerated: Sequence[re.Pattern[str]]) -> bool:
    """Return whether a tensor may be there without being used."""
    return any(pattern.fullmatch(name) for pattern in tolerated)


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """Return a tensor's name with each of these parts replaced."""
    for ours, published in parts.items():
        name = name.replace(ours, published)
    return name


def single_precision(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, what: str
) -> dict[str, Tensor]:
    """Return these tensors in single precision; those that are already stay in the file's memory.

    Raises ArtifactMismatch: a tensor holds whole or complex numbers, NaN or infinity, or nothing.
    """
    weights = {}
    for name in names:
        tensor = tensors[name]
        if not tensor.is_floating_point():
            raise ArtifactMismatch(
                f"{what}: {name} holds {str(tensor.dtype).removeprefix('torch.')} numbers, expected "
                "floating-point weights; this is another model, or the file is damaged"
            )
        weights[name] = tensor.float()
        if tensor.numel() == 0 or not all(bound.isfinite() for bound in weights[name].aminmax()):
            problem = "NaN or infinity" if tensor.numel() else "no numbers"
            raise ArtifactMismatch(f"{what}: {name} holds {problem}; the file is damaged")
    return weights
