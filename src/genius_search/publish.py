"""Copies of models and indexes for others: complete, without paths of this machine, with a card."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

WAIT_SECONDS: Final = 60.0
"""Longest wait for another process that changes the index which is published."""
OBSOLETE: Final = f"{SEGMENTS}/*"
"""Files of a repository that are obsolete when an index is published again."""
_MODEL: Final = """A GENIUS model: generative multimodal search.
Given a text, an image or both, it finds what matches.

```python
from genius_search import Genius, Index

model = Genius.open("{name}", download=True)
index, _ = Index.create("photos.index", model=model, pool="photos/")
for hit in index.search("a red leather bag", k=5):
    print(hit.id, hit.score)
```"""
_IMPORTED: Final = """

Its parts were imported from published checkpoints of GENIUS and UniIR (Wei et al., ECCV 2024), and not
trained by the publisher. The terms of their authors apply."""
_INDEX: Final = """A search index of GENIUS: the IDs of a pool's items, tied to the model that made them.

```console
$ pip install 'genius-search[models]'
{pull}$ genius pull datasets/{name} --out photos.index
$ genius search photos.index "a red bag"{flag}
```"""
_CITATION: Final = """The method is [GENIUS](https://arxiv.org/abs/2503.19868) (Kim et al., "GENIUS: A
Generative Framework for Universal Multimodal Search", CVPR 2025); please cite it."""


def save(
    source: Path,
    target: Path,
    *,
    name: str,
    license: str = "unknown",  # noqa: A002  the word of every card
    model: str | None = None,
) -> Path:
    """Save a finished model or an index as a self-contained new folder with a card.

    Of a model, an encoder that is a folder on this machine is copied; one from the hub is saved by name. An
    index cannot be changed meanwhile; deleted items, and paths of pictures, stay behind.

    Parameters
    ----------
    name
        Name on the hub, ``owner/name``, for the card.
    license
        Short name of the licence on the hub, for the card.
    model
        Of an index: name of its model on the hub; by default none, or the model inside the index.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The source is no finished model or complete index.
    UsageError
        The licence is invalid, an encoder is only on this machine, or the model's name is not of the form
        owner/name.
    """
    if model is not None and not hub.is_name(model):
        raise UsageError(f"the model is {model!r}, expected its name on the hub, as owner/name")
    source, target = as_path(source), as_path(target)
    target.mkdir()
    if (source / CURRENT).exists():
        state = _copy_index(source, target, model)
        pull, flag = (
            ("", "")
            if model is None
            else (f"$ genius pull {model} --out model\n", " --model model")
        )
        text = _INDEX.format(name=name, pull=pull, flag=flag)
        head: dict[str, Any] = {"viewer": False}
        facts = {"model": state.manifest.model_fingerprint}
        facts |= {f"items: {kind.value}": str(n) for kind, n in state.count_by_modality().items()}
    else:
        is_imported, facts = _copy_model(source, target)
        text = _MODEL.format(name=name) + (_IMPORTED if is_imported else "")
        head = {"library_name": "genius-search", "pipeline_tag": "feature-extraction"}
    card = _write_card(name, text, head=head, facts=facts, license=license)
    (target / "README.md").write_text(card, encoding="utf-8")
    return target


def _copy_index(source: Path, folder: Path, model: str | None) -> Snapshot:
    """Copy an index, and the model inside it unless another is named; return its state."""
    check(source)  # before a lock makes the folder, and a new checksum of what is damaged

    def without_path(entry: Entry) -> Entry:
        if not isinstance(entry, Item):
            return entry
        is_stored = entry.image is not None and PICTURE_NAME.fullmatch(entry.image)
        return entry._replace(image=entry.image if is_stored else None, root=None)

    with open_writer(source, wait_seconds=WAIT_SECONDS) as writer:
        state = writer.snapshot
        if model is None and state.manifest.has_own_model:
            _copy_model(source / state.manifest.model, folder / OWN_MODEL)
            model = OWN_MODEL
        manifest = state.manifest.replace(model=model or "", roots=(), generation=0, segments=())
        draft = Writer(folder)
        draft.begin(manifest)
        batches = alive_batches(state.segments)
        draft.add(([*map(without_path, entries)], arrays) for entries, arrays in batches)
        return state


def _copy_model(source: Path, folder: Path) -> tuple[bool, dict[str, str]]:
    """Copy a model; return whether its parts are published checkpoints, and facts for the card."""
    model = read_model_file(source)
    kind, _, place = model.encoder.spec_in(source).partition(":")
    if kind in ("precomputed", "published"):
        raise UsageError(
            "this model looks its features up in files, so it cannot encode anything new and cannot be "
            "published; train one with an encoder that reads texts and pictures"
        )
    inside = read_json(Path(place) / "config.json").values() if kind == "adapters" else ()
    local = [spec for spec in inside if Path(str(spec).partition(":")[2]).exists()]
    if local:
        raise UsageError(
            f"this model reads with {local[0]}, which is on this machine only; publish that encoder, and "
            "train with its name on the hub"
        )
    parts = {
        part: open_artifact(source / part, kind=part) for part in model.parts if part != "encoder"
    }
    for part in parts:
        copy_artifact(source / part, folder / part)
    encoder = as_path(place)
    if (encoder / MANIFEST).exists():
        copy_artifact(encoder, folder / "encoder")
    elif encoder.is_dir():
        hub.copy_checkpoint(encoder, folder / "encoder")
    spec = f"{kind}:./encoder" if encoder.is_dir() else f"{kind}:{place}"
    model.model_copy(update={"encoder": model.encoder.model_copy(update={"spec": spec})}).write(
        folder
    )
    is_imported = any("published" in manifest.inputs for manifest in parts.values())
    return is_imported, {"encoder": spec, "fingerprint": model.fingerprint}


def _write_card(
    name: str,
    text: str,
    *,
    head: Mapping[str, Any],
    facts: Mapping[str, str],
    license: str,  # noqa: A002  the hub's word
) -> str:
    """Return the README.md of what is published: metadata, text in Markdown, and a table of facts."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", license):
        raise UsageError(
            f"the licence is {license!r}, expected its short name on the hub, such as mit"
        )
    tags = ["genius", "generative-retrieval", "multimodal-search"]
    data = CardData(**{"license": license, "tags": tags, **head})
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    said = "The publisher did not say." if license == "unknown" else f"`{license}`."
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{text}\n\n| | |\n|---|---|\n{rows}\n\n"
        f"## Licence\n\n{said}\n\n{_CITATION}\n"
    )
