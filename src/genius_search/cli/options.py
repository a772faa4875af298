"""Options that commands share, and readers of the files that they name."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, dataclass_transform

import tyro

from genius_search.cli.terminal import TerminalProgress
from genius_search.errors import BadData, UsageError, plural

if TYPE_CHECKING:
    import numpy as np

    from genius_search.config import SearchConfig
    from genius_search.index.index import Index
    from genius_search.recipe import FitConfig


def optional(metavar: str) -> Any:
    """Show an optional flag in help as ``--name METAVAR``, without a default of ``None``."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


DataArgument = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
OptionalFolder = Annotated[Path | None, optional("FOLDER")]
OptionalFile = Annotated[Path | None, optional("FILE")]
OptionalInt = Annotated[int | None, optional("INT")]
OptionalFloat = Annotated[float | None, optional("FLOAT")]
Words = Annotated[str | None, optional("WORDS")]
OptionalName = Annotated[str | None, optional("NAME")]
Embeddings = Annotated[Literal["none", "fused", "raw"] | None, optional("{none,fused,raw}")]

MAX_OCR_WAIT_SECONDS: Final = 10.0
"""Maximum wait for another process before texts of pictures are written."""
LISTED_LAST: Final = ("address", "model", "wait", "seed", "device", "download", "json")
"""Shared flags, which help lists after the flags of the command."""

CommandClass = TypeVar("CommandClass")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(flags: type[CommandClass]) -> type[CommandClass]:
    """Turn a class into a frozen dataclass of flags, with the flags of :data:`LISTED_LAST` last."""
    dataclass: Any = dataclasses.dataclass(frozen=True, kw_only=True)(flags)

    def position(field: dataclasses.Field[Any]) -> int:
        is_last = field.name in LISTED_LAST and field.default is not dataclasses.MISSING
        return LISTED_LAST.index(field.name) + 1 if is_last else 0

    dataclass.__dataclass_fields__ = {
        field.name: field for field in sorted(dataclasses.fields(dataclass), key=position)
    }
    return flags


@command
class JsonOption:
    """A command that can print its result as JSON."""

    json: bool = False
    """Print the result as JSON."""


@command
class DeviceOptions:
    """A command that opens a model."""

    device: str = "cpu"
    """Device to run the model on: cpu or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""


@command
class IndexArgument:
    """A command on one index."""

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""


@command
class OpenIndexOptions(DeviceOptions, IndexArgument):
    """A command that opens an index with its model."""

    model: OptionalFolder = None
    """Folder of the model; needed only if the model was moved."""

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
    """A command that adds the items of ``pool`` to an index."""

    pool: Path | None

    vectors: OptionalFile = None
    """Instead of a pool: a .npy file with one vector for each item, from the index's encoder."""

    ids: OptionalFile = None
    """With --vectors: a text file with the id of one item per line. Default for a new index: row
    numbers."""

    no_captions: bool = False
    """For a new folder: do not use captions, neither those in photos nor those in files next to
    them (.txt, .json, .xmp, lists)."""

    exclude: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")
    ] = ()
    """Leave out files and folders that match a pattern in the syntax of .gitignore: 'drafts/',
    '*.png'. A file named .geniusignore in a folder may contain further patterns."""

    def require_source(self) -> None:
        """Raise :class:`UsageError` unless exactly one of a pool and vectors was given."""
        if (self.pool is None) is (self.vectors is None):
            raise UsageError("give exactly one of a pool and --vectors")

    def reading_options(self) -> dict[str, Any]:
        """Return the arguments of :meth:`Index.create` and :meth:`Index.add` for reading a pool."""
        return {"captions": not self.no_captions, "exclude": self.exclude}


@command
class OcrOption:
    """A command that reads text in pictures at its end, with the extra ``ocr``."""

    no_ocr: bool = False
    """Do not read text in pictures."""

    def read_pictures(self, index: Index, progress: TerminalProgress) -> None:
        """Read text in pictures, or say how many have not been read."""
        from genius_search.data.picture_text import has_rapidocr
        from genius_search.index.index import current_state
        from genius_search.index.picture_text import unread_pictures
        from genius_search.index.writer import HeldByAnother

        count = 0 if self.no_ocr else sum(1 for _ in unread_pictures(current_state(index).snapshot))
        if not count:
            return
        if not has_rapidocr():
            progress.say(
                f"text in {plural(count, 'picture')} is not read; "
                "pip install 'genius-search[ocr]' installs what reads it"
            )
            return
        progress.say(
            f"the index can be searched; reading text in {plural(count, 'picture')} (Ctrl-C stops, "
            f"and `genius index sync {index.folder}` continues)"
        )
        try:
            index.read_pictures(progress=progress, wait_seconds=MAX_OCR_WAIT_SECONDS)
            index.compact(wait_seconds=MAX_OCR_WAIT_SECONDS)
            left = sum(1 for _ in unread_pictures(current_state(index).snapshot))
            missing = f"; {plural(left, 'picture')} could not be read in time" if left else ""
            progress.say(f"searches find text in pictures from now on{missing}")
        except HeldByAnother:
            progress.say("another process is changing the index; text in pictures is read later")


@command
class WaitOption:
    """A command that changes an index."""

    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Maximum time to wait for another process that changes the index."""


def read_vectors(file: Path | None) -> np.ndarray | None:
    """Memory-map a .npy file of vectors; return None for None.

    Raises
    ------
    BadData
        The file is not a .npy file of one array.
    """
    if file is None:
        return None
    import numpy as np

    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadData(f"{file} cannot be read as a .npy file of vectors: {error}") from None
    if not isinstance(vectors, np.ndarray):
        vectors.close()
        raise BadData(f"{file} contains several arrays; save only the vectors, with numpy.save")
    return np.asarray(vectors)


def read_ids(file: Path | None) -> list[str] | None:
    """Read a file with one id per line, or stdin for ``-``; return None for None."""
    if file is None:
        return None
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise BadData(f"{file} cannot be read as a text file of ids: {error}") from None
    return text.removesuffix("\n").split("\n")


def read_toml(file: Path | None, *, preset_name: str | None = None) -> FitConfig:
    """Read the settings of ``genius fit``: a preset, with changes from a TOML file.

    The names in the file are those of the fields, with one table for each part. The file may name
    its preset (``preset = "small"``, the default)::

        preset = "small"
        [generator.training]
        max_steps = 2000

    Parameters
    ----------
    preset_name
        the preset to use instead of the one that the file names.

    Raises
    ------
    UsageError
        The file cannot be read, or a setting is invalid.
    """
    from genius_search.config import from_json
    from genius_search.recipe import FitConfig, preset

    changes = {} if file is None else _read_toml(file)
    defaults = preset(preset_name or str(changes.pop("preset", "small")))
    try:
        return from_json(FitConfig, _merge(dataclasses.asdict(defaults), changes))
    except UsageError as error:
        raise UsageError(
            f"{file}: {error}; `genius fit --print-config` shows all settings"
        ) from None


def read_search_toml(file: Path) -> SearchConfig:
    """Read search settings from a TOML file; raise :class:`UsageError` if they are invalid."""
    from genius_search.config import SearchConfig, from_json

    try:
        return from_json(SearchConfig, _read_toml(file))
    except UsageError as error:
        raise UsageError(f"{file} cannot be read as search settings: {error}") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UsageError(f"{file} cannot be read as TOML: {error}") from None


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings updated with changes, recursively for tables."""
    merged = {**settings, **changes}
    for name, value in settings.items():
        changed = changes.get(name)
        if isinstance(value, Mapping) and isinstance(changed, Mapping):
            merged[name] = _merge(value, changed)
    return merged


def to_toml(config: FitConfig) -> str:
    """Return all settings as TOML, for :func:`read_toml`."""
    return "\n".join(_toml_lines("", dataclasses.asdict(config))).lstrip() + "\n"


def _toml_lines(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{name} = {json.dumps(value)}"  # JSON numbers, texts and lists are valid TOML
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{path}{name}]"
            yield from _toml_lines(f"{path}{name}.", value)
