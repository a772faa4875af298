"""Options that several commands share; each group is a dataclass to inherit from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, dataclass_transform, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo

from genius_search.errors import BadData

if TYPE_CHECKING:
    import numpy as np

    from genius_search.index.index import Index

DataArgument = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
OptionalFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Words = Annotated[str | None, tyro.conf.arg(metavar="WORDS", help_behavior_hint="")]
Conditions = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")]
ModalityOption = Annotated[
    Literal["image", "text", "image-text"] | None, tyro.conf.arg(help_behavior_hint="")
]
RouterOption = Annotated[Literal["generator", "geometry"] | None, tyro.conf.arg(help_behavior_hint="")]


def readers() -> ConstructorRegistry:
    """Return how optional flags are read."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def read_optional(given: PrimitiveTypeInfo) -> Any:
        """Read the other type: None, the default, is not a choice."""
        kinds = get_args(given.type)
        if len(kinds) != 2 or kinds[1] is not type(None):
            return None
        spec: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], given.markers))
        return dataclasses.replace(
            spec,
            is_instance=lambda value: value is None or spec.is_instance(value),
            str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        )

    return registry


LISTED_LAST: Final = ("model", "wait", "seed", "device", "download", "dry_run", "json")
"""Optional flags that help lists after a command's own."""

CommandClass = TypeVar("CommandClass")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(kind: type[CommandClass]) -> type[CommandClass]:
    """Make a class a frozen dataclass of flags, those of :data:`LISTED_LAST` at the end."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    fields: dict[str, dataclasses.Field[Any]] = made.__dataclass_fields__  # type: ignore[attr-defined]

    def place(name: str) -> int:
        is_optional = fields[name].default is not dataclasses.MISSING
        return LISTED_LAST.index(name) + 1 if is_optional and name in LISTED_LAST else 0

    made.__dataclass_fields__ = {name: fields[name] for name in sorted(fields, key=place)}  # type: ignore[attr-defined]
    return made


@command
class JsonOption:
    """A command that can print its result as JSON."""

    json: bool = False
    """Print JSON on stdout."""


@command
class DeviceOptions:
    """A command that opens a model."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""


@command
class IndexArgument:
    """A command of one index."""

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""


@command
class OpenIndexOptions(DeviceOptions, IndexArgument):
    """A command that opens an index with its model."""

    model: OptionalFolder = None
    """Folder of the model; needed only if it was moved."""

    def open_index(self) -> Index:
        """Open the index with its model."""
        from genius_search.index.index import Index

        return Index.open(self.index, model=self.model, device=self.device, download=self.download)


@command
class WaitOption:
    """A command that changes an index."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Seconds to wait while another process changes the index."""


@command
class QueryOptions:
    """A query and its conditions."""

    text: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")
    ] = None
    """Text of the query, in quotes."""

    image: OptionalFile = None
    """Image of the query; alone, or together with the text."""

    instruction: Words = None
    """Instruction that says in words what kind of result is wanted."""

    modality: ModalityOption = None
    """Search only items of this modality."""


def split_names(text: str) -> tuple[str, ...]:
    """Split a list of names at its commas.

    >>> split_names("a, b,")
    ('a', 'b')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_vectors(file: Path) -> np.ndarray:
    """Map a .npy file of vectors; raise :class:`BadData` if it is none."""
    import numpy as np

    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read as a .npy file of vectors: {error}") from None


def read_ids(file: Path | None) -> list[str] | None:
    """Read ids, one on each line; None without a file."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise BadData(f"{file} cannot be read as a text file of ids: {error}") from None
