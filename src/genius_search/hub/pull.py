"""``genius pull``: models, indexes and the authors' checkpoints from the hub, and what was pulled before."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

from genius_search.artifact import MANIFEST, fingerprint_of, open_artifact
from genius_search.encoders.pretrained import PATTERNS, check_files
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius_search.hub.files import (
    DATASETS,
    NAME,
    ORIGINALS,
    Kind,
    Listing,
    cached,
    cached_file,
    cached_files,
    fetch,
    files_of,
    free_bytes,
    has_hub,
    is_name,
    is_place,
    list_repository,
    need_hub,
    pick,
    probe,
    pull_to_cache,
    pull_to_folder,
    split_name,
    stays_inside,
)
from genius_search.hub.push import CARD, CONFIG
from genius_search.index.store import (
    CURRENT,
    DELETED,
    SEGMENTS,
    IndexManifest,
    check_segment,
    read_deleted,
    read_manifest,
)
from genius_search.index.verify import verify as read_through
from genius_search.model_file import MODEL_FILE, read_model_file
from genius_search.progress import Progress, Silent

__all__ = [
    "Damaged",
    "What",
    "check_pulled",
    "encoder_folder",
    "is_whole",
    "manifest_files",
    "strangers_index",
]

What = Literal["model", "index", "encoder", "original"]

_INSIDE: Final = ("small", "uniir", "clip", "text")
"""Encoders that a pulled model may carry with it."""
_IMPORTED: Final = "uniir.json"
"""What `genius import` writes into an encoder's folder; its module would import PyTorch."""
_ENTRIES: Final = {
    "format": int,
    "kind": str,
    "fingerprint": str,
    "config": dict,
    "inputs": dict,
    "facts": dict,
}
"""What a manifest holds besides its files."""


class Damaged(ArtifactMismatch):
    """A file is not as it came; pulling again repairs it."""


def check_pulled(folder: Path, what: What, *, verify: bool = True) -> None:
    """Refuse what a stranger's file may not say; with ``verify`` reread everything that was pulled.

    Raises
    ------
    ArtifactMismatch
        a file is damaged, parts do not belong together, or a path leads out of the folder.
    ArtifactMissing
        a file that is named is not there.
    """
    if what in ("encoder", "original"):
        return
    if what == "index":
        _check_index(folder, verify=verify)
    else:
        _check_model(folder, verify=verify)


def is_whole(folder: Path, what: What) -> bool:
    """Whether all files are there, as large as they were; their contents were checked when they came.

    Raises
    ------
    ArtifactMismatch
        it is whole, and says what a stranger's file may not say.
    """
    try:
        check_pulled(folder, what, verify=False)
    except (ArtifactMissing, Damaged):
        return False
    return True


def manifest_files(path: Path) -> tuple[str, ...]:
    """The files that a stranger's manifest names, relative to its folder.

    Raises
    ------
    ArtifactMismatch
        it is no manifest, or names files outside its folder.
    """
    body = _read(path)
    files = body.get("files")
    if not isinstance(files, dict) or not all(stays_inside(name) for name in files):
        raise ArtifactMismatch(f"{path} names files outside its folder; do not use what came from there")
    odd = [name for name, form in _ENTRIES.items() if type(body.get(name)) is not form]
    odd += [name for name, fact in files.items() if not _is_fact(fact)]
    if odd:
        raise ArtifactMismatch(f"{path} is not a manifest as genius writes them ({odd[0]}); do not use it")
    return tuple(files)


def encoder_folder(folder: Path) -> str | None:
    """Where inside a stranger's model its encoder is; None for a name on the hub.

    Raises
    ------
    ArtifactMismatch
        it would be elsewhere on this machine.
    """
    kind, _, place = str(read_model_file(folder)["encoder"]["spec"]).partition(":")
    if place.startswith("./") and stays_inside(place[2:]) and kind in _INSIDE:
        return place[2:]
    if kind == "clip" and NAME.fullmatch(place):
        return None
    raise ArtifactMismatch(
        f"{folder}: its encoder is {kind}:{place}, expected a folder inside the model or "
        "clip:owner/name; a model that points elsewhere on this machine is not opened"
    )


def strangers_index(folder: Path) -> IndexManifest:
    """What a stranger's index consists of; its names are ours, so none leads out of its folder.

    Raises
    ------
    ArtifactMismatch
        its list is damaged, or its model would be a folder on this machine.
    """
    try:
        manifest = read_manifest(folder)
    except ArtifactMismatch as error:
        raise Damaged(str(error)) from None
    model = manifest.model
    if model and not NAME.fullmatch(model):
        raise ArtifactMismatch(
            f"{folder}: {CURRENT} says that its model is {model!r}, expected owner/name or nothing; an "
            "index that points elsewhere on this machine is not opened"
        )
    return manifest


def _check_part(path: Path, *, verify: bool) -> str:
    """The fingerprint of a part."""
    manifest_files(path)
    kind = str(_read(path)["kind"])
    try:
        part = open_artifact(path.parent, kind=kind)
    except ArtifactMismatch as error:
        raise Damaged(str(error)) from None
    return open_artifact(path.parent, kind=kind, verify=True).fingerprint if verify else part.fingerprint


def _check_index(folder: Path, *, verify: bool) -> None:
    for entry in strangers_index(folder).segments:
        place = folder / SEGMENTS / entry.name
        manifest_files(place / MANIFEST)
        try:
            check_segment(place, manifest=entry.manifest, verify=False)
            read_deleted(folder, entry)
        except ArtifactMismatch as error:
            raise Damaged(str(error)) from None
    if verify:
        read_through(folder)


def _check_model(folder: Path, *, verify: bool) -> None:
    fingerprints = {
        path.parent.name: _check_part(path, verify=verify) for path in sorted(folder.glob(f"*/{MANIFEST}"))
    }
    _read(folder / MODEL_FILE)
    body = read_model_file(folder)
    place = encoder_folder(folder)
    if place is not None:
        _check_encoder(folder / place, str(body["encoder"]["spec"]), verify=verify)
    for part in ("quantizer", "generator"):
        if part not in fingerprints:
            raise ArtifactMissing(f"{folder} is not a complete model: it lacks {part}/{MANIFEST}")
        if fingerprints[part] != body[part]["fingerprint"]:
            raise ArtifactMismatch(f"{folder}: its {part} is not the one that it was finished with")
    parts = {part: body[part]["fingerprint"] for part in ("encoder", "quantizer", "generator")}
    if body["fingerprint"] != fingerprint_of(parts):
        raise ArtifactMismatch(f"{folder}: the fingerprint in {MODEL_FILE} is not that of its parts")


def _check_encoder(folder: Path, spec: str, *, verify: bool) -> None:
    """Say here, and not when the model is opened, that its encoder did not come with it."""
    kind = spec.partition(":")[0]
    manifest = folder / MANIFEST
    problem = None
    if kind == "uniir":
        lacking = [name for name in (MANIFEST, _IMPORTED) if not (folder / name).is_file()]
        problem = f"{folder} lacks {', '.join(lacking)}" if lacking else None
    else:
        try:
            check_files(folder, image_processor=kind == "clip")
        except ArtifactMissing as error:
            problem = str(error)
        else:
            if kind != "small" and "model_type" not in _read(folder / "config.json"):
                problem = f"{folder / 'config.json'} names no model_type"
    if problem is not None:
        raise ArtifactMissing(
            f"the model's encoder is {spec}, and it did not come with it: {problem}; ask whoever published it"
        )
    if manifest.is_file():
        _check_part(manifest, verify=verify)


def _is_fact(fact: object) -> bool:
    return isinstance(fact, dict) and type(fact.get("bytes")) is int and isinstance(fact.get("sha256"), str)


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from None
    if not isinstance(body, dict):
        raise ArtifactMismatch(f"{path} is not what it should be")
    return body


__all__ = ["wanted_of"]

SUFFIXES: Final = frozenset(
    {".json", ".jsonl", ".safetensors", ".npy", ".sqlite", ".txt", ".model", ".tsv", ".md", ".gz"}
)
"""What is fetched of what is named. Never pickles, never programs."""
LARGEST_LIST: Final = 16_000_000
"""Bytes of a list of files; ours have a few thousand."""


def wanted_of(listing: Listing, what: What, *, token: str | None) -> Listing:
    """The same repository with the wanted files only.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        a list of files is not there, or names what it may not name.
    """
    if what == "encoder":
        return listing.only(tuple(file for file in listing.files if _is_of_encoder(file.path)))
    with tempfile.TemporaryDirectory() as place:
        lists = _Lists(listing, Path(place), token)
        try:
            named = _of_model(lists) if what == "model" else _of_index(lists)
        except ArtifactError as error:  # by the name that a person knows it by
            raise type(error)(str(error).replace(place, listing.repository)) from None
    return listing.only(
        tuple(
            file
            for file in listing.files
            if file.path in named and PurePosixPath(file.path).suffix in SUFFIXES
        )
    )


class _Lists:
    """The small files of a repository that name the others, as far as they were read."""

    def __init__(self, listing: Listing, folder: Path, token: str | None) -> None:
        self.listing = listing
        self.folder = folder
        self._token = token
        self._files = {file.path: file for file in listing.files}

    def bring(self, path: str) -> None:
        """Have one of them in the folder: out of the cache, or fetched."""
        if path not in self._files:
            raise ArtifactMissing(f"{self.listing.repository} is not complete: it has no {path}")
        file = self._files[path]
        if file.bytes > LARGEST_LIST:
            raise ArtifactMismatch(
                f"{path} of {self.listing.repository} has {file.bytes:,} bytes, and no such list is so large"
            )
        here = cached_file(self.listing, file)
        place = self.folder / path
        if here is None:
            fetch(self.listing, file, place, token=self._token, arrived=_nobody)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here, place)

    def part(self, folder: str) -> set[str]:
        """All that a part's manifest names, and the manifest."""
        manifest = f"{folder}/{MANIFEST}"
        self.bring(manifest)
        return {manifest, *(f"{folder}/{name}" for name in manifest_files(self.folder / manifest))}


def _of_model(lists: _Lists) -> set[str]:
    lists.bring(MODEL_FILE)
    encoder = encoder_folder(lists.folder)
    named = {MODEL_FILE, CONFIG, CARD} | lists.part("quantizer") | lists.part("generator")
    if encoder is None:
        return named
    inside = PurePosixPath(encoder)
    if f"{inside}/{MANIFEST}" in lists.listing.names():
        return named | lists.part(str(inside))
    return named | {
        name
        for name in lists.listing.names()
        if PurePosixPath(name).is_relative_to(inside) and _is_of_encoder(name)
    }


def _of_index(lists: _Lists) -> set[str]:
    lists.bring(CURRENT)
    named = {CURRENT, CARD}
    for entry in strangers_index(lists.folder).segments:
        named |= lists.part(f"{SEGMENTS}/{entry.name}")
        if entry.deleted is not None:
            named.add(f"{DELETED}/{entry.deleted}")
    return named


def _is_of_encoder(path: str) -> bool:
    return any(PurePosixPath(path).match(pattern) for pattern in PATTERNS)


def _nobody(_: int) -> None:
    """Nobody counts what is this small."""


MEGABYTE: Final = 1_000_000
_KEPT: Final[dict[Literal["model", "index"], tuple[Kind, str]]] = {
    "model": ("model", MODEL_FILE),
    "index": ("dataset", CURRENT),
}
"""What is opened by name: what it is to the hub, and the file that tells it."""


class PullPlan(NamedTuple):
    """What a pull would bring."""

    name: str
    what: What
    revision: str | None
    listing: Listing
    """With the wanted files only."""
    here: frozenset[str]
    """Those that are in the cache already."""
    left_out: tuple[str, ...]
    """Files that are not wanted, because of what they are."""

    @property
    def bytes(self) -> int:
        """Of all wanted files."""
        return sum(file.bytes for file in self.listing.files)

    @property
    def bytes_to_come(self) -> int:
        """Of those that are not here yet."""
        return sum(file.bytes for file in self.listing.files if file.path not in self.here)


def plan_pull(name: str, *, revision: str | None = None, token: str | None = None) -> PullPlan:
    """Look at what a name stands for on the hub; only its lists of files are read.

    Raises
    ------
    NetworkNeeded
        the hub may not be asked or does not answer; said within about two seconds.
    ArtifactMissing
        it has no such repository.
    UsageError
        the repository is neither a model nor an index.
    """
    need_hub()
    _repository_of(name)
    copy = "copy its folder from a machine that has it"
    probe(
        f"fetching {name} needs the hub",
        instead=ORIGINALS[name].by_hand if name in ORIGINALS else copy,
    )
    return _plan(name, revision=revision, token=token)


def _repository_of(name: str) -> tuple[str, Kind | None]:
    """What is asked for by a name, which may be a short one."""
    return split_name(ORIGINALS[name].repository if name in ORIGINALS else name)


def _plan(name: str, *, revision: str | None, token: str | None) -> PullPlan:
    """Plan a pull once the hub is known to answer."""
    repository, kind = _repository_of(name)
    listing = _list(repository, kind, revision=revision, token=token)
    if name in ORIGINALS:
        wanted = pick(name, listing)
        return PullPlan(name, "original", revision, wanted, cached_files(wanted), ())
    what = _what(listing)
    wanted = wanted_of(listing, what, token=token)
    left_out = tuple(sorted(listing.names() - wanted.names()))
    return PullPlan(name, what, revision, wanted, cached_files(wanted), left_out)


def pull(
    plan: PullPlan, out: Path | None = None, *, token: str | None = None, progress: Progress | None = None
) -> Path:
    """Bring what was planned, to the hub library's cache or to a plain folder; goes on after a kill.

    Raises
    ------
    NetworkNeeded
        the connection broke; what came is kept.
    ArtifactMismatch
        a file is damaged, or says what a stranger's file may not say.
    """
    needed = plan.bytes if out is not None else plan.bytes_to_come
    free = free_bytes(out)
    if needed > free:
        raise UsageError(
            f"{plan.name} needs {needed:,} bytes, and only {free:,} are free where it would go; make room, "
            "or choose another place with --out"
        )
    told = progress or Silent()
    total = max(1, -(-plan.bytes // MEGABYTE))
    told.begin("pull, MB", total)
    done = 0

    def arrived(size: int) -> None:
        nonlocal done
        done += size
        told.advance(min(total, done // MEGABYTE), {})

    def check(folder: Path) -> None:
        check_pulled(folder, plan.what)

    if out is not None:
        folder = pull_to_folder(plan.listing, out, token=token, arrived=arrived, check=check)
    else:
        folder = pull_to_cache(plan.listing, revision=plan.revision, token=token, arrived=arrived)
        check(folder)
    told.advance(total, {})
    return folder


class Pulled(NamedTuple):
    """What is in the cache since an earlier pull."""

    repository: str
    what: Literal["model", "index"]
    folder: Path

    @property
    def commit(self) -> str:
        """The hub's name of this state."""
        return self.folder.name

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes."""
        return files_of(self.folder)


def pulled_before(name: str, *, revision: str | None = None) -> Pulled | None:
    """What was pulled by this name to the cache, if it is whole; the network is not used."""
    if name in ORIGINALS:
        return None
    repository, said = split_name(name)
    for what, (kind, needs) in _KEPT.items():
        if said in (None, kind):
            found = cached(repository, kind=kind, revision=revision, needs=needs)
            if found is not None and is_whole(found, what):
                return Pulled(repository, what, found)
    return None


def model_folder(place: str | Path) -> Path:
    """The folder itself, or what was pulled by this name; never downloads.

    A place that is neither is given back, for whoever opens it says what is missing there.

    Raises
    ------
    ArtifactMismatch
        what was pulled says what a stranger's file may not say.
    """
    folder = Path(place)
    name = str(place)
    if folder.exists() or not is_name(name) or not has_hub():
        return folder
    kind, needs = _KEPT["model"]
    found = cached(name, kind=kind, revision=None, needs=needs)
    return folder if found is None or not is_whole(found, "model") else found


def find_model(
    name: str | Path,
    *,
    revision: str | None = None,
    download: bool = True,
    token: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of a model: the folder itself, or what was pulled, or else it is pulled now.

    Raises
    ------
    ArtifactMissing
        it can only be a folder, and there is none.
    NetworkNeeded
        it is not whole on this machine, and downloading is not allowed or not possible.
    """
    return _find(str(name), "model", revision, download=download, token=token, progress=progress)


def find_index(
    name: str | Path,
    *,
    revision: str | None = None,
    download: bool = True,
    token: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of an index, found or pulled like a model; its name needs no ``datasets/``."""
    return _find(str(name), "index", revision, download=download, token=token, progress=progress)


def _find(
    given: str,
    what: Literal["model", "index"],
    revision: str | None,
    *,
    download: bool,
    token: str | None,
    progress: Progress | None,
) -> Path:
    if not given:
        raise ArtifactMissing(
            f"the {what} has no name; give its folder, or its name on the hub as owner/name (of an index's "
            "model: with --model, in Python model=)"
        )
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    if is_place(given) or "/" not in given:
        raise ArtifactMissing(f"there is no folder {given}; give one, or a name on the hub as owner/name")
    need_hub()
    kind, needs = _KEPT[what]
    name = given if kind == "model" or given.startswith(DATASETS) else f"{DATASETS}{given}"
    repository, _ = split_name(name)
    found = cached(repository, kind=kind, revision=revision, needs=needs)
    if found is not None and is_whole(found, what):
        return found
    lacks, mends = ("not", "fetches") if found is None else ("damaged or not complete", "repairs")
    if not download:
        raise NetworkNeeded(f"{name} is {lacks} on this machine; `genius pull {name}` {mends} it")
    probe(
        f"{name} is {lacks} on this machine",
        again=f"run `genius pull {name}`",
        instead="give the folder of a copy",
    )
    plan = _plan(name, revision=revision, token=token)
    if plan.what != what:
        raise ArtifactMissing(f"{name} is not a GENIUS {what}: it holds no {needs}")
    return pull(plan, token=token, progress=progress)


def _list(repository: str, kind: Kind | None, *, revision: str | None, token: str | None) -> Listing:
    """A repository of the kind that was said, or else a model, or else a data set."""
    if kind is not None:
        return list_repository(repository, kind=kind, revision=revision, token=token)
    try:
        return list_repository(repository, kind="model", revision=revision, token=token)
    except ArtifactMissing as missing:
        try:
            return list_repository(repository, kind="dataset", revision=revision, token=token)
        except ArtifactError:
            raise missing from None


def _what(listing: Listing) -> What:
    names = listing.names()
    if listing.kind == "model" and MODEL_FILE in names:
        return "model"
    if listing.kind == "dataset" and CURRENT in names:
        return "index"
    if listing.kind == "model" and "config.json" in names:
        return "encoder"
    raise UsageError(
        f"{listing.repository} is neither a GENIUS model, nor an index, nor a pretrained encoder: it has no "
        f"{MODEL_FILE}, {CURRENT} or config.json"
    )
