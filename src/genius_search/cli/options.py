"""Options that several commands share, each group a dataclass to inherit from; and reading their files."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, dataclass_transform

import tyro

from genius_search.errors import BadData, UsageError

if TYPE_CHECKING:
    import numpy as np

    from genius_search.config import SearchConfig
    from genius_search.index.index import Index
    from genius_search.recipe import FitConfig


def optional(metavar: str) -> Any:
    """Return what makes an option without a default readable in help: ``--name METAVAR``, and no ``None``."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


DataArgument = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
OptionalFolder = Annotated[Path | None, optional("FOLDER")]
OptionalFile = Annotated[Path | None, optional("FILE")]
OptionalInt = Annotated[int | None, optional("INT")]
Words = Annotated[str | None, optional("WORDS")]
Embeddings = Annotated[Literal["none", "fused", "raw"] | None, optional("{none,fused,raw}")]

LISTED_LAST: Final = ("address", "model", "wait", "seed", "device", "download", "json")
"""Optional flags that help lists after a command's own."""

CommandClass = TypeVar("CommandClass")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(kind: type[CommandClass]) -> type[CommandClass]:
    """Make a class a frozen dataclass of flags, those of :data:`LISTED_LAST` at the end."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)

    def place(field: dataclasses.Field[Any]) -> int:
        is_late = field.name in LISTED_LAST and field.default is not dataclasses.MISSING
        return LISTED_LAST.index(field.name) + 1 if is_late else 0

    made.__dataclass_fields__ = {
        field.name: field for field in sorted(dataclasses.fields(made), key=place)
    }
    return kind


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

    def open_index(self, *, with_encoder: bool = True) -> Index:
        """Open the index with its model."""
        from genius_search.index.index import Index

        return Index.open(
            self.index,
            model=self.model,
            device=self.device,
            download=self.download,
            with_encoder=with_encoder,
        )


@command
class ItemOptions:
    """A command that adds items to an index; its field ``pool`` says which."""

    pool: Path | None

    vectors: OptionalFile = None
    """Instead of a pool: a .npy file with a vector of the encoder, or of your own, for each item."""

    ids: OptionalFile = None
    """With --vectors: a text file with the id of each item, a line each. A new index needs none: ids are the
    numbers of the rows."""

    no_captions: bool = False
    """Ignore texts beside pictures (.txt, .json, .xmp, lists) and inside them, in a folder that is new."""

    exclude: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")
    ] = ()
    """Leave out files and folders that a pattern as in .gitignore fits: 'drafts/', '*.png'. A file
    .geniusignore in a folder may hold such patterns, too."""

    def require_source(self) -> None:
        """Refuse a pool together with vectors, and neither of them."""
        if (self.pool is None) is (self.vectors is None):
            raise UsageError("give either a pool, or --vectors")

    def reading_options(self) -> dict[str, Any]:
        """Return how to read a pool, as arguments of :meth:`Index.create` and :meth:`Index.add`."""
        return {"captions": not self.no_captions, "exclude": self.exclude}


@command
class WaitOption:
    """A command that changes an index."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Seconds to wait while another process changes the index."""


def read_vectors(file: Path | None) -> np.ndarray | None:
    """Map a .npy file of vectors, if there is one; raise :class:`BadData` if it is none."""
    if file is None:
        return None
    import numpy as np

    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read as a .npy file of vectors: {error}") from None
    if not isinstance(vectors, np.ndarray):
        vectors.close()
        raise BadData(f"{file} holds several arrays; save the one of the vectors with numpy.save")
    return np.asarray(vectors)


def read_ids(file: Path | None) -> list[str] | None:
    """Read ids, one on each line, if there is a file; ``-`` is stdin."""
    if file is None:
        return None
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise BadData(f"{file} cannot be read as a text file of ids: {error}") from None
    return text.removesuffix("\n").split("\n")


def read_toml(file: Path | None, *, preset_name: str | None = None) -> FitConfig:
    """Read settings of ``genius fit``: those of a preset, and what a TOML file says instead.

    The file has the names of the fields, one table a part, and may name its preset (``preset = "small"``,
    the default), which ``preset_name`` overrides. Raises :class:`UsageError`.
    """
    from genius_search.config import from_json
    from genius_search.recipe import FitConfig, preset

    given = {} if file is None else _read_toml(file)
    usual = preset(preset_name or str(given.pop("preset", "small")))
    try:
        return from_json(FitConfig, _merge(dataclasses.asdict(usual), given))
    except UsageError as error:
        raise UsageError(
            f"{file}: {error}; `genius fit --print-config` shows all settings"
        ) from None


def read_search_toml(file: Path) -> SearchConfig:
    """Read the options of a search from a TOML file; or :class:`UsageError`."""
    from genius_search.config import SearchConfig, from_json

    try:
        return from_json(SearchConfig, _read_toml(file))
    except UsageError as error:
        raise UsageError(f"{file} cannot be read as settings of a search: {error}") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UsageError(f"{file} cannot be read as TOML: {error}") from None


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of ``changes`` in their place, table by table."""
    merged = {**settings, **changes}
    for name, value in settings.items():
        changed = changes.get(name)
        if isinstance(value, Mapping) and isinstance(changed, Mapping):
            merged[name] = _merge(value, changed)
    return merged


def to_toml(config: FitConfig) -> str:
    """Return all settings as a text that :func:`read_toml` reads."""
    return "\n".join(_toml_lines("", dataclasses.asdict(config))).lstrip() + "\n"


def _toml_lines(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{name} = {json.dumps(value)}"  # of these types, JSON is TOML
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{path}{name}]"
            yield from _toml_lines(f"{path}{name}.", value)
