"""Prepare models and indexes for publication: complete copies without local paths, with a card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from huggingface_hub import CardData

from genius_search import hub
from genius_search.artifact import MANIFEST, open_artifact, read_json
from genius_search.border import as_path
from genius_search.errors import UsageError
from genius_search.index.info import check
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import CURRENT, OWN_MODEL, PICTURE_NAME, SEGMENTS
from genius_search.index.writer import Entry, Writer, alive_batches, open_writer
from genius_search.model import read_model_file
from genius_search.writing import copy_artifact

MAX_WRITER_WAIT_SECONDS: Final = 60.0
"""Maximum wait for another process that changes the index."""
OBSOLETE_FILES: Final = f"{SEGMENTS}/*"
"""Pattern of the files to delete from a repository when an index is published again."""
_MODEL_CARD: Final = """A GENIUS model: generative multimodal search.
Given a text, an image or both, it finds matching items.

```python
from genius_search import Genius, Index

model = Genius.open("{name}", download=True)
index = Index.create("photos.index", "photos/", model=model)
for hit in index.search("a red leather bag", k=5):
    print(hit.id, hit.score)
```"""
_IMPORTED_NOTE: Final = """

Its parts were imported from published checkpoints of GENIUS and UniIR (Wei et al., ECCV 2024). They
were not trained by the publisher. The terms of their authors apply."""
_INDEX_CARD: Final = """A search index of GENIUS: the IDs of a pool's items, for use with the model
that computed them.

```console
$ pip install 'genius-search[models]'
{pull}$ genius pull datasets/{name} --out photos.index
$ genius search photos.index "a red bag"{flag}
```"""
_CITATION: Final = """The method is [GENIUS](https://arxiv.org/abs/2503.19868) (Kim et al.,
"GENIUS: A Generative Framework for Universal Multimodal Search", CVPR 2025). Please cite it."""


def save(
    source: Path,
    target: Path,
    *,
    name: str,
    license: str = "unknown",  # noqa: A002  the key of the card
    model: str | None = None,
) -> Path:
    """Save a finished model or an index as a self-contained new folder with a card.

    If a model's encoder is a folder on this machine, the encoder is copied; an encoder from the
    hub is saved by its name. An index is locked while it is copied. Its copy contains neither
    deleted items nor the paths of pictures.

    Parameters
    ----------
    name
        the name on the hub, ``owner/name``, for the card.
    license
        the hub's short name of the licence, for the card.
    model
        for an index: the name of its model on the hub. By default, none is named, or the model
        inside the index is copied.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The source is neither a finished model nor a complete index.
    UsageError
        The licence is invalid, an encoder is on this machine only, or the model's name does not
        have the form owner/name.
    """
    if model is not None and not hub.is_name(model):
        raise UsageError(f"the model is {model!r}, expected its name on the hub, as owner/name")
    source = as_path(source)
    target = as_path(target)
    target.mkdir()
    if (source / CURRENT).exists():
        snapshot = _copy_index(source, target, model)
        pull_command = "" if model is None else f"$ genius pull {model} --out model\n"
        model_flag = "" if model is None else " --model model"
        text = _INDEX_CARD.format(name=name, pull=pull_command, flag=model_flag)
        metadata: dict[str, Any] = {"viewer": False}
        facts = {"model": snapshot.manifest.model_fingerprint}
        for modality, count in snapshot.count_by_modality().items():
            facts[f"items: {modality.value}"] = str(count)
    else:
        is_imported, facts = _copy_model(source, target)
        text = _MODEL_CARD.format(name=name) + (_IMPORTED_NOTE if is_imported else "")
        metadata = {"library_name": "genius-search", "pipeline_tag": "feature-extraction"}
    card = _format_card(name, text, metadata=metadata, facts=facts, license=license)
    (target / "README.md").write_text(card, encoding="utf-8")
    return target


def _copy_index(source: Path, folder: Path, model: str | None) -> Snapshot:
    """Copy an index, and the model inside it unless a model is named; return the index's state."""
    # Before anything is written: taking the lock would create a missing folder, and copying would
    # give damaged data a valid checksum.
    check(source)

    def without_path(entry: Entry) -> Entry:
        if not isinstance(entry, Item):
            return entry
        is_stored = entry.image is not None and PICTURE_NAME.fullmatch(entry.image)
        return entry._replace(image=entry.image if is_stored else None, root=None)

    with open_writer(source, wait_seconds=MAX_WRITER_WAIT_SECONDS) as writer:
        snapshot = writer.snapshot
        if model is None and snapshot.manifest.has_own_model:
            _copy_model(source / snapshot.manifest.model, folder / OWN_MODEL)
            model = OWN_MODEL
        manifest = snapshot.manifest.replace(model=model or "", roots=(), generation=0, segments=())
        copy = Writer(folder)
        copy.begin(manifest)
        batches = alive_batches(snapshot.segments)
        copy.add(([*map(without_path, entries)], arrays) for entries, arrays in batches)
        return snapshot


def _copy_model(source: Path, folder: Path) -> tuple[bool, dict[str, str]]:
    """Copy a model; return whether it was imported from published checkpoints, and card facts."""
    model = read_model_file(source)
    encoder_type, _, encoder_name = model.encoder.spec_in(source).partition(":")
    if encoder_type in ("precomputed", "published"):
        raise UsageError(
            "this model looks up its features in files, so it cannot encode new items and cannot "
            "be published; train a model with an encoder that reads texts and pictures"
        )
    adapter_specs: Iterable[Any] = ()
    if encoder_type == "adapters":
        adapter_specs = read_json(Path(encoder_name) / "config.json").values()
    for spec in adapter_specs:
        if Path(str(spec).partition(":")[2]).exists():
            raise UsageError(
                f"this model encodes with {spec}, which is on this machine only; publish that "
                "encoder, and train with its name on the hub"
            )
    parts = {
        part: open_artifact(source / part, kind=part) for part in model.parts if part != "encoder"
    }
    for part in parts:
        copy_artifact(source / part, folder / part)
    encoder = as_path(encoder_name)
    if (encoder / MANIFEST).exists():
        copy_artifact(encoder, folder / "encoder")
    elif encoder.is_dir():
        hub.copy_checkpoint(encoder, folder / "encoder")
    spec = f"{encoder_type}:{'./encoder' if encoder.is_dir() else encoder_name}"
    model.model_copy(update={"encoder": model.encoder.model_copy(update={"spec": spec})}).write(
        folder
    )
    is_imported = any("published" in manifest.inputs for manifest in parts.values())
    return is_imported, {"encoder": spec, "fingerprint": model.fingerprint}


def _format_card(
    name: str,
    text: str,
    *,
    metadata: Mapping[str, Any],
    facts: Mapping[str, str],
    license: str,  # noqa: A002  the key of the card
) -> str:
    """Return a README.md for the hub: metadata, a text in Markdown, and a table of facts."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", license):
        raise UsageError(
            f"the licence is {license!r}, expected its short name on the hub, such as mit"
        )
    tags = ["genius", "generative-retrieval", "multimodal-search"]
    header = CardData(**{"license": license, "tags": tags, **metadata})
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    licence_text = "Not specified." if license == "unknown" else f"`{license}`."
    return (
        f"---\n{header.to_yaml()}\n---\n\n# {name}\n\n{text}\n\n| | |\n|---|---|\n{rows}\n\n"
        f"## Licence\n\n{licence_text}\n\n{_CITATION}\n"
    )
