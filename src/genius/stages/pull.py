"""``genius pull``: models, indexes and the authors' checkpoints from the hub, and what was pulled before."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.errors import ArtifactError, ArtifactMissing, NetworkNeeded, UsageError
from genius.hub.listing import DATASETS, Kind, Listing, is_name, is_place, list_repository, split_name
from genius.hub.originals import ORIGINALS, pick
from genius.hub.publish import files_of
from genius.hub.reach import has_hub, need_hub, probe
from genius.hub.store import cached, cached_files, free_bytes, pull_to_cache, pull_to_folder
from genius.search.manifest import CURRENT
from genius.stages.model_file import MODEL_FILE
from genius.stages.progress import Progress, Silent
from genius.stages.pulled import What, check_pulled, is_whole
from genius.stages.wanted import wanted_of

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
