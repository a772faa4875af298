"""Published checkpoints, opened without executing code in them (specification, section 7).

The authors' files are pickles: ordinary loading executes any code that they name. Torch's
restricted reader accepts tensors, plain containers and the few classes of an OmegaConf
configuration, which are replaced by inert classes, so that omegaconf is not needed. Everything else
is refused before it is loaded. Tensors stay in the file until they are used: optimizer state, twice
the size of the weights, is never read.
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
"""The entry that contains the weights."""
COMPILED: Final = "_orig_mod"
"""A meaningless part that torch.compile adds to names."""
WRAPPERS: Final = ("module.", "model.")
"""Prefixes that PyTorch's parallel wrappers and Lightning add to every name."""
_MAX_LISTED_NAMES: Final = 8
"""Number of names that a message lists for each type of problem."""


class _Inert:
    """A replacement for a configuration's classes that discards its contents."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_OMEGACONF_CLASSES: Final = {
    "base": ("ContainerMetadata", "Metadata", "UnionNode"),
    "dictconfig": ("DictConfig",),
    "listconfig": ("ListConfig",),
    "nodes": ("AnyNode", "BooleanNode", "BytesNode", "FloatNode", "IntegerNode", "StringNode"),
}
_ALLOWED: Final = [
    (_Inert, "typing.Any"),
    (_Inert, "argparse.Namespace"),
    *(
        (_Inert, f"omegaconf.{module}.{name}")
        for module, names in _OMEGACONF_CLASSES.items()
        for name in names
    ),
    *(
        (plain_type, f"{plain_type.__module__}.{plain_type.__name__}")
        for plain_type in (bool, dict, float, int, list, str, tuple, defaultdict)
    ),
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's weights, memory-mapped."""

    path: Path
    tensors: Mapping[str, Tensor]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file of ``torch.save``: only weights, or weights under a name such as ``model``.

    Raises
    ------
    ArtifactMissing
        The file does not exist.
    ArtifactMismatch
        The file is not a checkpoint, is damaged, or names code, which was not executed.
    """
    if not path.is_file():
        raise ArtifactMissing(f"no checkpoint at {path}; give a file that torch.save wrote (.pth)")
    weights = _find_weights(_load(path), path)
    names = _shorten_names(list(weights))
    tensors = {name: value.detach() for name, value in zip(names, weights.values(), strict=True)}
    return Checkpoint(path, tensors)


def _load(path: Path) -> object:
    """Return the contents of a file of ``torch.save``, with inert configurations."""
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)):
            body: object = torch.load(
                path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
            )
    except Exception as error:  # noqa: BLE001  a damaged pickle fails in many ways
        named_code = re.search(r"GLOBAL ([\w.]+)", str(error))
        with path.open("rb") as file:
            start = file.read(8)
        problem = "is damaged or was not written by torch.save; fetch it again from its publisher"
        if named_code is not None:
            problem = (
                f"contains a {named_code[1]} besides weights, which was not executed; save the "
                "weights alone"
            )
        elif start and start.isascii() and b"\0" not in start:
            problem = (
                "is a text, such as a web page or the pointer of Git LFS; fetch the file itself"
            )
        raise ArtifactMismatch(f"{path} {problem} ({type(error).__name__})") from None
    return body


def _find_weights(body: object, path: Path) -> Mapping[str, Tensor]:
    """Return a checkpoint's entry of weights, or the checkpoint if it consists of weights."""
    parts = body if isinstance(body, Mapping) else {}
    if parts and all(isinstance(value, Tensor) for value in parts.values()):
        parts = {WEIGHTS: parts}
    weights = {name: part for name, part in parts.items() if _is_weights(part)}
    names = [name for name in (WEIGHTS, "state_dict") if name in weights] or [*weights]
    if not names or (len(names) > 1 and names[0] != WEIGHTS):
        contents = ", ".join(map(str, parts)) or f"a {type(body).__name__}"
        raise ArtifactMismatch(
            f"{path} has no dict of plain tensors under {WEIGHTS!r} or 'state_dict', nor a single "
            f"dict under another name; it has {contents}"
        )
    chosen: Mapping[str, Tensor] = weights[names[0]]
    return chosen


def _is_weights(part: object) -> bool:
    return isinstance(part, Mapping) and bool(part) and all(map(_is_plain, part.values()))


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    )


def _shorten_names(names: Sequence[str]) -> list[str]:
    """Return names of tensors without the parts that compilers and wrappers add."""
    names = [_remove_compiled(name) for name in names]
    while wrapper := _common_prefix(names):
        names = [name.removeprefix(wrapper) for name in names]
    return list(names)


def _remove_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _common_prefix(names: Sequence[str]) -> str | None:
    """Return the wrapper's prefix that all names have; None if there is none."""
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in names):
            return wrapper
    return None


def check_names(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tolerated: Sequence[re.Pattern[str]] = (),
    source: str,
) -> None:
    """Check that no tensor is missing, unknown or of another shape.

    Parameters
    ----------
    tolerated
        Patterns of the whole names of tensors that may exist and are not used.
    source
        File and expected model, for the message.

    Raises
    ------
    ArtifactMismatch
        Tensors differ; the message lists them.
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
        f"{len(names)} {problem}: {', '.join(names[:_MAX_LISTED_NAMES])}"
        f"{', …' if len(names) > _MAX_LISTED_NAMES else ''}"
        for problem, names in (
            ("missing", missing),
            ("unknown", unknown),
            ("of another shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ArtifactMismatch(
            f"{source}: of {len(expected)} expected tensors, {'; '.join(problems)}. This is "
            "another model, or another version of it"
        )


def is_tolerated(name: str, tolerated: Sequence[re.Pattern[str]]) -> bool:
    """Return whether a tensor may exist although it is not used."""
    return any(pattern.fullmatch(name) for pattern in tolerated)


def replace_parts(name: str, replacements: Mapping[str, str]) -> str:
    """Return a tensor's name with parts of our names replaced by published ones."""
    for ours, published in replacements.items():
        name = name.replace(ours, published)
    return name


def single_precision(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, source: str
) -> dict[str, Tensor]:
    """Return the named tensors in single precision; tensors that already are remain in the file.

    Raises
    ------
    ArtifactMismatch
        A tensor contains integers, complex numbers, NaN or infinity, or is empty.
    """
    weights = {}
    for name in names:
        tensor = tensors[name]
        if not tensor.is_floating_point():
            raise ArtifactMismatch(
                f"{source}: {name} contains {str(tensor.dtype).removeprefix('torch.')} numbers, "
                "expected floating-point weights; this is another model, or the file is damaged"
            )
        weights[name] = tensor.float()
        if tensor.numel() == 0 or not all(bound.isfinite() for bound in weights[name].aminmax()):
            problem = "NaN or infinity" if tensor.numel() else "no numbers"
            raise ArtifactMismatch(f"{source}: {name} contains {problem}; the file is damaged")
    return weights
