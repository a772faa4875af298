"""Make a folder that others can use: a model with its encoder and card, or an index with its card.

Only what a reader needs is copied: the files of the manifests. Training features, checkpoints and
evaluation runs stay where they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius import __version__
from genius.artifact import MANIFEST, Manifest, open_artifact, write_json
from genius.data.records import Modality
from genius.encoders.checkpoint import PATTERNS
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.hub.card import LIBRARY, IndexCard, ModelCard, index_card, model_card
from genius.stages.model_file import MODEL_FILE, encoder_spec, read_model_file

__all__ = ["INDEX_FILE", "About", "save_index", "save_model"]

CONFIG: Final = "config.json"
CARD: Final = "README.md"
INDEX_FILE: Final = "index.json"
RESULTS: Final = "evaluation/results.json"
"""Where a model's folder keeps what `genius evaluate --json` printed."""

_PARTS: Final = ("quantizer", "generator")
_SAVED: Final = {MODEL_FILE, CONFIG, CARD, "encoder", *_PARTS}
"""All that a saved model's folder may hold."""


class About(NamedTuple):
    """What only the publisher knows of a model or an index."""

    name: str | None = None
    """Of the repository; left out, the folder's."""
    license: str = "unknown"
    """The hub's short name of the licence of the weights."""
    datasets: tuple[str, ...] = ()
    """Names of the training data; those on the hub as owner/name."""
    results: Path | None = None
    """What `genius evaluate --json` printed; left out, ``evaluation/results.json`` where it is there."""
    model: str | None = None
    """Of an index: where its model is on the hub."""


def save_model(source: Path, target: Path, about: About, *, copy_encoder: bool = True) -> Path:
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
        the target holds something else, or the encoder cannot be saved.
    """
    body = read_model_file(source)
    parts = {part: open_artifact(source / part, kind=part) for part in _PARTS}
    _may_replace(target, source)
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for part in _PARTS:
        _copy_artifact(source / part, partial / part)
    place = encoder_spec(source, str(body["encoder"]["spec"]))
    body["encoder"]["spec"] = _save_encoder(place, partial / "encoder", copy=copy_encoder)
    write_json(partial / MODEL_FILE, body)
    config = _config(body, parts)
    write_json(partial / CONFIG, config)
    card = ModelCard(
        name=about.name or target.name,
        license=about.license,
        datasets=about.datasets,
        config=config,
        training=_training(source, parts["quantizer"]),
        health=parts["quantizer"].facts.get("health"),
        results=_results(source, about.results),
    )
    (partial / CARD).write_text(model_card(card), encoding="utf-8")
    _put(partial, target)
    return target


def save_index(source: Path, target: Path, about: About) -> Path:
    """Write an index as a folder of its own, without the place of its model on this machine.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        there is no whole index in the folder.
    """
    try:
        body = json.loads((source / INDEX_FILE).read_text())
        snapshot, fingerprint = str(body["snapshot"]), str(body["model_fingerprint"])
    except FileNotFoundError:
        raise ArtifactMissing(f"no index at {source}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactMismatch(f"{source / INDEX_FILE} is damaged ({error!r})") from None
    open_artifact(source / snapshot, kind="snapshot")
    if target.exists():
        raise UsageError(f"{target} is there already; choose another place")
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_artifact(source / snapshot, partial / snapshot)
    write_json(partial / INDEX_FILE, {**body, "model": about.model or ""})
    holds = _holds(partial / snapshot)
    card = IndexCard(
        name=about.name or target.name,
        license=about.license,
        model=about.model,
        model_fingerprint=fingerprint,
        by_modality=holds.by_modality,
        has_texts=holds.texts,
        has_images=holds.images,
        has_embeddings=(partial / snapshot / "embeddings.npy").exists(),
    )
    (partial / CARD).write_text(index_card(card), encoding="utf-8")
    partial.rename(target)
    return target


def _may_replace(target: Path, source: Path) -> None:
    if target.resolve() == source.resolve():
        raise UsageError(f"{target} is the model itself; save it to another folder")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; a model needs a folder")
    if target.is_dir():
        others = sorted(entry.name for entry in target.iterdir() if entry.name not in _SAVED)
        if others or (any(target.iterdir()) and not (target / MODEL_FILE).exists()):
            found = ", ".join(others[:3]) or f"no {MODEL_FILE}"
            raise UsageError(
                f"{target} holds something else than a saved model ({found}); choose another place"
            )


def _put(partial: Path, target: Path) -> None:
    """Put a finished folder in its place; what was there goes last."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _copy_artifact(source: Path, target: Path) -> None:
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
        _copy_artifact(folder, target)
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


def _training(source: Path, quantizer: Manifest) -> dict[str, str]:
    """What the manifests say of the training data."""
    said = {f"fingerprint of the {name}": value for name, value in quantizer.inputs.items()}
    for name in ("queries", "candidates"):
        try:
            features = open_artifact(source / "features" / name, kind="features")
        except (ArtifactMissing, ArtifactMismatch):
            continue
        said[f"rows of {name}"] = f"{features.facts['rows']:,}"
        said[f"fingerprint of the records of {name}"] = str(features.inputs.get("records", "not kept"))
    return said


def _results(source: Path, given: Path | None) -> Sequence[Mapping[str, Any]]:
    path = given or source / RESULTS
    if given is None and not path.exists():
        return ()
    try:
        rows: list[Mapping[str, Any]] = json.loads(path.read_text())["rows"]
        _ = [row["method"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not what `genius evaluate --json` prints ({error!r}); write that into the file"
        ) from None
    return rows


class _Holds(NamedTuple):
    by_modality: dict[str, int]
    texts: bool
    images: bool


def _holds(snapshot: Path) -> _Holds:
    """What the items of a snapshot give away."""
    import sqlite3  # noqa: PLC0415  only an index needs it

    with closing(
        sqlite3.connect(f"{(snapshot / 'items.sqlite').resolve().as_uri()}?mode=ro", uri=True)
    ) as items:
        counts = items.execute("SELECT modality, COUNT(*) FROM items GROUP BY modality").fetchall()
        texts, images = items.execute("SELECT COUNT(text), COUNT(image) FROM items").fetchone()
    return _Holds({Modality.parse(name).label: count for name, count in counts}, bool(texts), bool(images))
