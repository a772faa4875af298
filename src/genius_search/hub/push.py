"""``genius push``: models and indexes to the hub."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from genius_search import __version__
from genius_search.artifact import MANIFEST, Manifest, open_artifact, write_json
from genius_search.encoders.pretrained import PATTERNS
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.hub.card import (
    LIBRARY,
    IndexCard,
    ModelCard,
    Numbers,
    Origin,
    alone,
    index_card,
    model_card,
    new_folder,
)
from genius_search.hub.files import (
    DATASETS,
    Kind,
    files_of,
    is_name,
    need_hub,
    probe,
    publish,
    split_name,
    written,
)
from genius_search.index.items import ITEMS_FILE
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    DELETED,
    MOST_ATTEMPTS,
    SEGMENTS,
    Segment,
    read_manifest,
    write_manifest,
)
from genius_search.index.writer import LOCK, one_writer
from genius_search.model_file import MODEL_FILE, encoder_spec, read_model_file
from genius_search.progress import Progress, Silent

__all__ = ["CONFIG", "filling", "may_replace", "put"]

CONFIG: Final = "config.json"
_SAVED: Final = frozenset({MODEL_FILE, CONFIG, "README.md", "encoder", "quantizer", "generator"})
"""All that a saved model's folder may hold."""


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A new folder beside the place, gone if it is not put there."""
    partial = _beside(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def may_replace(folder: Path, source: Path, fingerprint: str) -> None:
    """Refuse a place that holds anything but a saved copy of this very model; recover one first.

    Raises
    ------
    UsageError
        it holds something else, or a folder of another origin has the name that we would need.
    """
    if folder == source.resolve():
        raise UsageError(f"{folder} is the model itself; save it to another folder")
    old = _old_name(folder)
    if not folder.exists() and _saved_fingerprint(old) is not None:
        old.rename(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    found = _saved_fingerprint(folder)
    if found is None:
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _SAVED)
        named = ", ".join(others[:3]) or f"no {CONFIG} of ours"
        raise UsageError(f"{folder} holds something else than a saved model ({named}); choose another place")
    if found != fingerprint:
        raise UsageError(
            f"{folder} holds another model (fingerprint {found[:12]}, not {fingerprint[:12]}); move it away, "
            "or choose another place"
        )
    if old.exists() and _saved_fingerprint(old) != fingerprint:
        raise UsageError(f"{old} is in the way, and is no copy of this model; move it away")


def put(partial: Path, folder: Path) -> None:
    """Put a finished folder in its place; what was there goes last."""
    old = _old_name(folder)
    if folder.exists() and any(folder.iterdir()):
        _discard(old)  # a copy of this model, or may_replace had refused
        folder.rename(old)
        partial.rename(folder)
        _discard(old)
        return
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def _saved_fingerprint(folder: Path) -> str | None:
    """The model that a folder is a saved copy of; None where it is not one, or holds more."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        ours = config["model_type"] == "genius" and config["library_name"] == LIBRARY
        fingerprint = config["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (folder / MODEL_FILE).is_file() and all(entry.name in _SAVED for entry in folder.iterdir())
    return fingerprint if ours and whole and isinstance(fingerprint, str) else None


def _discard(folder: Path) -> None:
    """Remove a folder; killed on the way, what is left has a name that is in nobody's way."""
    if folder.exists():
        going = _beside(folder)
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name.removeprefix('.')}.{uuid.uuid4().hex[:8]}.partial"


def _old_name(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"


__all__ = ["CARD", "About", "check_license", "copy_artifact", "save_model"]

CARD: Final = "README.md"
RESULTS: Final = "evaluation/results.json"
"""Where `genius evaluate` writes beside a model."""

_PARTS: Final = ("quantizer", "generator")
_UNIIR: Final = "uniir"
"""An imported encoder: how its spec begins, and the kind of its folder; its module would import PyTorch."""
_LICENSE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""How the hub's short names of licences look."""


class About(NamedTuple):
    """What only the publisher knows of a model or an index."""

    name: str | None = None
    """Of the repository; left out, the folder's."""
    license: str = "unknown"
    """The hub's short name of the licence of the weights."""
    datasets: tuple[str, ...] = ()
    """Names of the training data; those on the hub as owner/name."""
    results: Path | None = None
    """The results.json that `genius evaluate` writes; left out, that of ``evaluation/`` where it is there."""
    model: str | None = None
    """Of an index: where its model is on the hub."""


def save_model(
    source: Path,
    target: Path,
    about: About,
    *,
    copy_encoder: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a finished model as a folder of its own, complete or not at all.

    Parameters
    ----------
    copy_encoder
        an encoder that is a folder on this machine is copied along; without it the folder is named by its
        place, and the saved model opens only where that is. One that is named by its place on the hub
        stays a name.

    Raises
    ------
    UsageError
        the target holds something else, another model for example; the encoder cannot be saved; the numbers
        that were given are another model's; or the licence cannot be one.
    """
    check_license(about.license)
    body = read_model_file(source)
    parts = {part: open_artifact(source / part, kind=part) for part in _PARTS}
    folder = new_folder(target)
    with written(str(target)), alone(folder), filling(folder) as partial:
        may_replace(folder, source, str(body["fingerprint"]))
        for part in _PARTS:
            copy_artifact(source / part, partial / part)
        place = encoder_spec(source, str(body["encoder"]["spec"]))
        body["encoder"]["spec"] = _save_encoder(place, partial / "encoder", copy=copy_encoder)
        write_json(partial / MODEL_FILE, body)
        config = _config(body, parts)
        write_json(partial / CONFIG, config)
        card = ModelCard(
            name=about.name or folder.name,
            license=about.license,
            datasets=about.datasets,
            config=config,
            training=_training(source, parts),
            health=parts["quantizer"].facts.get("health"),
            numbers=_numbers(source, about.results, str(body["fingerprint"]), progress or Silent()),
            origin=_origin(parts, place),
        )
        (partial / CARD).write_text(model_card(card), encoding="utf-8")
        put(partial, folder)
    return target.expanduser()


def check_license(name: str) -> None:
    """Refuse what cannot be the hub's short name of a licence."""
    if not _LICENSE.fullmatch(name):
        raise UsageError(
            f"the licence is {name!r}, expected its short name on the hub: letters, digits, full stops and "
            "hyphens, such as mit, apache-2.0, cc-by-4.0, or other"
        )


def copy_artifact(source: Path, target: Path) -> None:
    """Copy a stage's folder: the files of its manifest, and no others."""
    names = json.loads((source / MANIFEST).read_text())["files"]
    for name in (*names, MANIFEST):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _save_encoder(spec: str, target: Path, *, copy: bool) -> str:
    """Copy the encoder when it is a folder; how the saved model names it."""
    kind, _, place = spec.partition(":")
    if kind == "precomputed":
        raise UsageError(
            "this model looks its features up in files, so it cannot read anything new and is of no use "
            "elsewhere; train one with an encoder that reads texts and pictures"
        )
    folder = Path(place).expanduser()
    if not folder.is_dir():  # a name on the hub
        return spec
    if not copy:
        return f"{kind}:{folder.resolve()}"
    if (folder / MANIFEST).exists():
        copy_artifact(folder, target)
    else:
        target.mkdir()
        for file in sorted({file for pattern in PATTERNS for file in folder.rglob(pattern)}):
            (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file.relative_to(folder))
    return f"{kind}:./{target.name}"


def _config(body: Mapping[str, Any], parts: Mapping[str, Manifest]) -> dict[str, Any]:
    """``config.json``, as the hub and its libraries look for it; we read ``model.json``."""
    sizes = [int(size) for size in parts["generator"].facts["sizes"]]
    return {
        "model_type": "genius",
        "library_name": LIBRARY,
        "format": body["format"],
        "versions": {"genius": __version__, "torch": version("torch")},
        "fingerprint": body["fingerprint"],
        "dim": int(parts["quantizer"].facts["dim"]),
        "levels": len(sizes),
        "sizes": sizes,
        "encoder": body["encoder"],
        **{part: dict(parts[part].config) for part in _PARTS},
    }


def _origin(parts: Mapping[str, Manifest], encoder: str) -> Origin:
    """Which parts were imported, as the manifests say."""
    kind, _, place = encoder.partition(":")
    imported = tuple(name for name in _PARTS if "published" in parts[name].inputs)
    if kind != _UNIIR:
        return Origin(imported)
    try:
        said = open_artifact(Path(place).expanduser(), kind=_UNIIR).config.get("kind")
    except (ArtifactMissing, ArtifactMismatch):
        said = None
    return Origin(imported, str(said or "encoder"))


def _training(source: Path, parts: Mapping[str, Manifest]) -> dict[str, str]:
    """What the manifests say of the training data, and of the files that parts were imported from."""
    said = {
        f"SHA-256 of the {name}'s published file": str(parts[name].inputs["published"])
        for name in _PARTS
        if "published" in parts[name].inputs
    }
    for name, value in parts["quantizer"].inputs.items():
        if name == "level0" and value != "unknown":
            said["fingerprint of the candidates that level 0 was told from"] = value
        elif name not in ("level0", "published"):
            said[f"fingerprint of the {name}"] = value
    for name in ("queries", "candidates"):
        try:
            features = open_artifact(source / "features" / name, kind="features")
        except (ArtifactMissing, ArtifactMismatch):
            continue
        said[f"rows of {name}"] = f"{features.facts['rows']:,}"
        said[f"fingerprint of the records of {name}"] = str(features.inputs.get("records", "not kept"))
    return said


def _numbers(source: Path, given: Path | None, fingerprint: str, progress: Progress) -> Numbers | None:
    """What was measured with this very model, and no other."""
    path = given or source / RESULTS
    if given is None and not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        numbers = Numbers.read(body)
        model = body.get("model")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not what `genius evaluate` writes ({_problem(error)}); give the results.json of its "
            "folder"
        ) from None
    if model == fingerprint:
        return numbers
    whose = "it does not say which model it is of" if model is None else f"it is of another model ({model})"
    if given is not None:
        raise UsageError(
            f"{path} cannot go into this model's card: {whose}, expected {fingerprint}; run `genius "
            "evaluate` with this model, and give the results.json that it writes"
        )
    progress.say(f"{path} is left out of the card: {whose}, expected {fingerprint}")
    return None


def _problem(error: Exception) -> str:
    """Why a file of results cannot be read, in words."""
    match error:
        case OSError():
            return error.strerror or "it cannot be read"
        case ValueError():
            return "it is not JSON"
        case _:
            return "it is JSON of another form"


__all__ = ["save_index"]


def save_index(source: Path, target: Path, about: About) -> Path:
    """Write an index as a folder of its own, without the place of its model on this machine.

    It is one state of the index, also while somebody changes that. Deleted items stay behind.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        there is no whole index in the folder.
    UsageError
        something is in the target's place, or the licence cannot be one.
    """
    check_license(about.license)
    read_manifest(source)
    folder = new_folder(target)
    with written(str(target)), alone(folder), filling(folder) as partial:
        if folder.exists():
            raise UsageError(f"{target} is there already; choose another place")
        state = _without_deleted(partial, _copy(source, partial, model=about.model or ""))
        card = IndexCard(
            name=about.name or folder.name,
            license=about.license,
            model=about.model,
            model_fingerprint=state.manifest.model_fingerprint,
            by_modality={kind.value: count for kind, count in state.count_by_modality().items()},
            has_texts=_any_has(state.segments, "text"),
            has_images=_any_has(state.segments, "image"),
            has_embeddings=state.manifest.embeddings != "none",
            has_fields=_any_has(state.segments, "source"),
        )
        (partial / CARD).write_text(index_card(card), encoding="utf-8")
        partial.rename(folder)
    return target.expanduser()


def _copy(source: Path, target: Path, *, model: str) -> Snapshot:
    """Copy the current state of an index; anew when a writer took a file of it away meanwhile."""
    for _ in range(MOST_ATTEMPTS):
        state = Snapshot.open(source)
        try:
            for entry in state.manifest.segments:
                copy_artifact(source / SEGMENTS / entry.name, target / SEGMENTS / entry.name)
                if entry.deleted is not None:
                    (target / DELETED).mkdir(exist_ok=True)
                    shutil.copyfile(source / DELETED / entry.deleted, target / DELETED / entry.deleted)
            write_manifest(target, state.manifest.replace(model=model))
            return Snapshot.open(target)
        except (ArtifactError, OSError, sqlite3.Error):
            if read_manifest(source) == state.manifest:  # it was no writer: something is wrong
                raise
            for name in (SEGMENTS, DELETED):
                shutil.rmtree(target / name, ignore_errors=True)
    raise UsageError(
        f"{source} changed {MOST_ATTEMPTS} times while it was copied; try again when it is quieter"
    )


def _without_deleted(folder: Path, state: Snapshot) -> Snapshot:
    """Compact a copy that lists deleted items, for their texts are still in it."""
    if any(len(segment.dead) for segment in state.segments):
        with one_writer(folder) as writer:
            writer.compact()
        (folder / LOCK).unlink(missing_ok=True)
        shutil.rmtree(folder / DELETED, ignore_errors=True)
    return Snapshot.open(folder)


def _any_has(segments: tuple[Segment, ...], column: Literal["text", "image", "source"]) -> bool:
    """Whether something is told of any item in this column."""
    for segment in segments:
        uri = f"{(segment.folder / ITEMS_FILE).resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as items:
            query = f"SELECT EXISTS (SELECT 1 FROM items WHERE {column} <> '')"  # noqa: S608  ours
            if items.execute(query).fetchone()[0]:
                return True
    return False


_OF_INDEXES: Final = (f"{SEGMENTS}/*", f"{DELETED}/*")
"""What an index that is published again does not need any more."""


class Staged(NamedTuple):
    """A folder as it would be published."""

    folder: Path
    kind: Kind
    files: tuple[tuple[str, int], ...]
    """Names and bytes."""


@contextmanager
def staged(
    folder: Path, repository: str, about: About, *, progress: Progress | None = None
) -> Iterator[Staged]:
    """What pushing a model or an index would publish, in a folder that is removed again.

    Raises
    ------
    ArtifactMissing
        the folder is neither.
    UsageError
        what is said of it does not fit what it is.
    """
    kind = _publishable(folder, repository, about)
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "staged"
        named = about._replace(name=repository)
        if kind == "dataset":
            save_index(folder, target, named)
        else:
            save_model(folder, target, named, progress=progress)
        yield Staged(target, kind, files_of(target))


def _publishable(folder: Path, repository: str, about: About) -> Kind:
    """What a folder becomes on the hub, when what is said of it fits; nothing is copied."""
    if split_name(repository)[1] is not None:
        raise UsageError(f"give {repository.removeprefix(DATASETS)}: an index becomes a data set anyway")
    if (folder / CURRENT).exists():
        if about.datasets or about.results is not None:
            raise UsageError(
                f"{folder} is an index, and --dataset and --results are for a model's card; leave them out, "
                "or give the model's folder"
            )
        if about.model is not None and not is_name(about.model):
            raise UsageError(
                f"--model is {about.model!r}, expected the model's name on the hub, as owner/name: whoever "
                "pulls the index has no folder of yours"
            )
        return "dataset"
    if (folder / MODEL_FILE).exists():
        if about.model is not None:
            raise UsageError(
                f"{folder} is a model, and --model says of an index where its model is; leave it out, or "
                "give the index's folder"
            )
        return "model"
    raise ArtifactMissing(f"{folder} is neither a finished model nor an index")


def push(
    folder: Path,
    repository: str,
    about: About,
    *,
    private: bool = False,
    token: str | None = None,
    review: Callable[[Staged], None] | None = None,
    progress: Progress | None = None,
) -> str:
    """Publish a model, or an index as a data set; its address.

    An index goes with the texts and fields of its items and the paths of their pictures; deleted items stay
    behind.

    Parameters
    ----------
    review
        is shown what would go out, before it does; what it raises stops that.

    Raises
    ------
    NetworkNeeded
        the hub cannot be reached; said before anything is copied.
    """
    _publishable(folder, repository, about)
    need_hub()
    probe(f"publishing {repository} needs the hub", instead=None)
    with staged(folder, repository, about, progress=progress) as ready:
        if review is not None:
            review(ready)
        return publish(
            ready.folder,
            repository,
            kind=ready.kind,
            private=private,
            token=token,
            replaces=_OF_INDEXES if ready.kind == "dataset" else (),
        )
