"""Publishing: saving a model as a self-contained folder with a card, and checking models of others."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from genius_search import __version__
from genius_search.artifact import MANIFEST, Manifest, open_artifact, read_json
from genius_search.config import QuantizerConfig, from_json
from genius_search.encoders.pretrained import check_files, copy_checkpoint
from genius_search.encoders.static import WORDLLAMA, is_static
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.hub.access import is_repository_name, stays_inside
from genius_search.hub.card import LIBRARY, model_card, read_results
from genius_search.hub.folder import write_folder
from genius_search.hub.push import check_license
from genius_search.model.file import FORMAT, MODEL_FILE, PARTS, read_model_file
from genius_search.records import NUM_MODALITIES
from genius_search.writing import copy_artifact, write_json

CONFIG_FILE: Final = "config.json"
"""For the hub and other libraries; this package reads ``model.json``."""

_SAVED: Final = frozenset({MODEL_FILE, CONFIG_FILE, "README.md", *PARTS})
_PORTABLE_ENCODERS: Final = ("small", "uniir", "clip", "text")
"""Kinds of encoders that may be folders inside a pulled model."""


def check_model(folder: Path, verify: bool = False) -> None:  # noqa: FBT001, FBT002  a callback of hub.pull
    """Check that a downloaded model is complete and stays inside its folder; ``verify`` reads every file.

    Raises
    ------
    ArtifactMissing
        A part or a file is missing.
    ArtifactMismatch
        A file is damaged, parts do not belong together, or a path leads out of the folder.
    """
    model = read_model_file(folder)
    for part in model.parts.keys() - {"encoder"}:
        manifest = open_artifact(folder / part, kind=part, verify=verify)
        if manifest.fingerprint != model.parts[part].fingerprint:
            raise ArtifactMismatch(f"{folder}: its {part} is not the one that it was finished with")
    if model.fingerprint != model.fingerprint_of_parts():
        raise ArtifactMismatch(f"{folder}: the fingerprint in {MODEL_FILE} is not that of its parts")
    kind, _, place = model.encoder.spec.partition(":")
    if (kind in ("clip", "text") and is_repository_name(place)) or model.encoder.spec == f"text:{WORDLLAMA}":
        return
    if not (place.startswith("./") and stays_inside(place[2:]) and kind in _PORTABLE_ENCODERS):
        raise ArtifactMismatch(
            f"{folder}: its encoder is {kind}:{place}, expected a folder inside the model or "
            "clip:owner/name; a model that points elsewhere on this machine is not opened"
        )
    try:
        _check_encoder(folder / place, kind, verify=verify)
    except ArtifactMissing as error:
        raise ArtifactMissing(
            f"the model's encoder is {kind}:{place}, and it did not come with it: {error}; ask whoever "
            "published it"
        ) from None


def _check_encoder(folder: Path, kind: str, *, verify: bool) -> None:
    if kind == "uniir":
        missing = [name for name in (MANIFEST, "uniir.json") if not (folder / name).is_file()]
        if missing:
            raise ArtifactMissing(f"{folder} lacks {', '.join(missing)}")
    else:
        check_files(folder, image_processor=kind == "clip")
        if (
            kind != "small"
            and not is_static(folder)
            and "model_type" not in read_json(folder / "config.json")
        ):
            raise ArtifactMissing(f"{folder / 'config.json'} names no model_type")
    if (folder / MANIFEST).is_file():
        open_artifact(folder, kind=str(read_json(folder / MANIFEST).get("kind")), verify=verify)


def save_model(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    license: str = "unknown",  # noqa: A002  the word of every model card
    datasets: tuple[str, ...] = (),
    results: Path | None = None,
    copy_encoder: bool = True,
) -> Path:
    """Save a finished model as a self-contained folder with a model card, atomically.

    Parameters
    ----------
    name
        name on the hub, ``owner/name``, for the card.
    license, datasets
        short name of the weights' licence, and names of the training data, for the card.
    results
        the ``results.json`` of an evaluation of this model; by default the one in its ``evaluation`` folder,
        if it belongs to this model.
    copy_encoder
        copy an encoder that is a folder on this machine. One from the hub is saved by name.

    Raises
    ------
    UsageError
        The target contains something other than a saved copy of this model, the encoder only looks features
        up, ``results`` are those of another model, or the licence is invalid.
    """
    check_license(license)
    model = read_model_file(source)
    parts = {part: open_artifact(source / part, kind=part) for part in model.parts if part != "encoder"}
    encoder = model.encoder.in_folder(source)

    def check_replaceable(folder: Path) -> None:
        if folder == source.resolve():
            raise UsageError(f"{folder} is the model itself; save it to another folder")
        _check_is_copy(folder, model.fingerprint)

    with write_folder(target, check_replaceable=check_replaceable) as folder:
        for part in parts:
            copy_artifact(source / part, folder / part)
        spec = _save_encoder(encoder, folder / "encoder", copy=copy_encoder)
        saved = model.model_copy(update={"encoder": model.encoder.model_copy(update={"spec": spec})})
        saved.write(folder)
        sizes = _sizes(parts)
        config = {
            "model_type": "genius",
            "library_name": LIBRARY,
            "format": FORMAT,
            "versions": {"genius": __version__, "torch": version("torch")},
            "fingerprint": model.fingerprint,
            "dim": int(parts["quantizer"].facts["dim"]),
            "levels": len(sizes),
            "sizes": sizes,
            "encoder": saved.encoder.model_dump(),
            **{part: dict(manifest.config) for part, manifest in parts.items()},
        }
        write_json(folder / CONFIG_FILE, config)
        given = results or source / "evaluation" / "results.json"
        measured = read_results(given) if results or given.exists() else None
        if measured is not None and measured.model != model.fingerprint:
            whose = "no model" if measured.model is None else f"another model ({measured.model})"
            problem = f"{given} names {whose}, expected {model.fingerprint}"
            if results is not None:
                raise UsageError(
                    f"{problem}; run `genius evaluate` with this model, and give its results.json"
                )
            logging.getLogger(__name__).warning("%s; it is left out of the card", problem)
            measured = None
        card = model_card(
            name or target.expanduser().resolve().name,
            config,
            license=license,
            datasets=datasets,
            training=_training_facts(source, parts),
            health=parts["quantizer"].facts.get("health"),
            results=measured,
            imported=tuple(part for part, manifest in parts.items() if "published" in manifest.inputs),
            uniir=_uniir_kind(encoder),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target.expanduser()


def _sizes(parts: Mapping[str, Manifest]) -> list[int]:
    """Return the number of codes at each level."""
    if "generator" in parts:
        return [int(size) for size in parts["generator"].facts["sizes"]]
    config = from_json(QuantizerConfig, parts["quantizer"].config)
    semantic = [config.codebook_size] * config.levels
    return semantic if config.level0 == "none" else [NUM_MODALITIES, *semantic]


def _check_is_copy(folder: Path, fingerprint: str) -> None:
    """Raise :class:`UsageError` unless a folder contains a saved copy of a model, and nothing else."""
    others = sorted({entry.name for entry in folder.iterdir()} - _SAVED)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        found = str(config["fingerprint"]) if config["model_type"] == "genius" else None
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found is None or others or not (folder / MODEL_FILE).is_file():
        names = ", ".join(others[:3]) or f"no {CONFIG_FILE} of ours"
        raise UsageError(f"{folder} holds something else than a saved model ({names}); choose another place")
    if found != fingerprint:
        raise UsageError(
            f"{folder} holds another model (fingerprint {found[:12]}, not {fingerprint[:12]}); move it away, "
            "or choose another place"
        )


def _save_encoder(spec: str, target: Path, *, copy: bool) -> str:
    """Copy the encoder if it is a folder; return its spec in the saved model."""
    kind, _, place = spec.partition(":")
    if kind in ("precomputed", "published"):
        raise UsageError(
            "this model looks its features up in files, so it cannot encode anything new and cannot be "
            "published; train one with an encoder that reads texts and pictures"
        )
    folder = Path(place).expanduser()
    if not folder.is_dir():  # a name on the hub
        return spec
    if not copy:
        return f"{kind}:{folder.resolve()}"
    if (folder / MANIFEST).exists():
        open_artifact(folder, kind=str(read_json(folder / MANIFEST).get("kind")))
        copy_artifact(folder, target)
    else:
        copy_checkpoint(folder, target)
    return f"{kind}:./{target.name}"


def _uniir_kind(encoder: str) -> str | None:
    """Return the name of an encoder that is one of UniIR's, such as ``clip-sf``; otherwise None."""
    kind, _, place = encoder.partition(":")
    if kind != "uniir":
        return None
    try:
        return str(open_artifact(Path(place).expanduser(), kind="uniir").config.get("kind") or "encoder")
    except (ArtifactMissing, ArtifactMismatch):
        return "encoder"


def _training_facts(source: Path, parts: dict[str, Manifest]) -> dict[str, str]:
    """Return fingerprints and sizes of the training data, and of the files that parts were imported from."""
    facts = {
        f"SHA-256 of the {part}'s published file": str(manifest.inputs["published"])
        for part, manifest in parts.items()
        if "published" in manifest.inputs
    }
    for name, value in parts["quantizer"].inputs.items():
        if name == "level0" and value != "unknown":
            facts["fingerprint of the candidates that level 0 was learned from"] = value
        elif name not in ("level0", "published"):
            facts[f"fingerprint of the {name}"] = value
    for name in ("queries", "candidates"):
        try:
            features = open_artifact(source / "features" / name, kind="features")
        except (ArtifactMissing, ArtifactMismatch):
            continue
        facts[f"rows of {name}"] = f"{features.facts['rows']:,}"
        facts[f"fingerprint of the records of {name}"] = str(features.inputs.get("records", "not kept"))
    return facts
