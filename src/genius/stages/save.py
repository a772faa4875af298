"""Make a folder that others can use: a model with its encoder and card.

Only what a reader needs is copied: the files of the manifests. Training features, checkpoints and
evaluation runs stay where they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius import __version__
from genius.artifact import MANIFEST, Manifest, open_artifact, write_json
from genius.encoders.checkpoint import PATTERNS
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.hub.card import LIBRARY, ModelCard, Numbers, model_card
from genius.hub.credit import Origin
from genius.hub.listing import written
from genius.hub.place import alone, new_folder
from genius.stages.model_file import MODEL_FILE, encoder_spec, read_model_file
from genius.stages.progress import Progress, Silent
from genius.stages.replace import CONFIG, filling, may_replace, put

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
