"""Publishing: a copy of a model that needs no other folder of this machine."""

from __future__ import annotations

from pathlib import Path

from genius_search import hub
from genius_search.artifact import MANIFEST, open_artifact
from genius_search.errors import UsageError
from genius_search.model.file import read_model_file
from genius_search.writing import copy_artifact, new_folder, write_json

_USE = """A GENIUS model: generative multimodal search. Given a text, an image or both, it finds what matches.

```python
from genius_search import Genius, Index

model = Genius.from_pretrained("{name}")
index, _ = Index.create("photos.index", model=model, pool="photos/")
for hit in index.search("a red leather bag", k=5):
    print(hit.id, hit.score)
```"""
_IMPORTED = """

Its parts were imported from published checkpoints of GENIUS (Kim et al., CVPR 2025) and UniIR (Wei et al.,
ECCV 2024), and not trained by the publisher. The terms of their authors apply; please cite them."""


def save_model(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    license: str = "unknown",  # noqa: A002  the word of every model card
) -> Path:
    """Save a finished model as a self-contained folder with a model card.

    An encoder that is a folder on this machine is copied; one from the hub is saved by name.

    Parameters
    ----------
    name
        Name on the hub, ``owner/name``, for the card; by default the folder's name.
    license
        Short name of the weights' licence, for the card.

    Raises
    ------
    UsageError
        The target holds something, the encoder only looks features up, or the licence is invalid.
    """
    model = read_model_file(source)
    target = target.expanduser()
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is there already; choose another place")
    kind, _, place = model.encoder.in_folder(source).partition(":")
    if kind in ("precomputed", "published"):
        raise UsageError(
            "this model looks its features up in files, so it cannot encode anything new and cannot be "
            "published; train one with an encoder that reads texts and pictures"
        )
    parts = {part: open_artifact(source / part, kind=part) for part in model.parts if part != "encoder"}
    encoder = Path(place).expanduser()
    spec = f"{kind}:./encoder" if encoder.is_dir() else f"{kind}:{place}"
    shown = name or target.name
    text = _USE.format(name=shown)
    if any("published" in manifest.inputs for manifest in parts.values()):
        text += _IMPORTED
    card = hub.card(
        shown,
        text,
        head={"library_name": "genius-search", "pipeline_tag": "feature-extraction"},
        facts={"encoder": spec, "fingerprint": model.fingerprint},
        license=license,
    )
    with new_folder(target) as folder:
        for part in parts:
            copy_artifact(source / part, folder / part)
        if (encoder / MANIFEST).exists():
            copy_artifact(encoder, folder / "encoder")
        elif encoder.is_dir():
            hub.copy_checkpoint(encoder, folder / "encoder")
        model.model_copy(update={"encoder": model.encoder.model_copy(update={"spec": spec})}).write(folder)
        config = {part: dict(manifest.config) for part, manifest in parts.items()}
        about = {"model_type": "genius", "fingerprint": model.fingerprint, "encoder": spec}
        write_json(folder / "config.json", about | config)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target
