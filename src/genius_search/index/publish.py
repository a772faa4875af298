"""Publishing: a copy of an index without deleted items and without paths of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from genius_search import hub
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import DELETED, OWN_MODEL, PICTURES, SEGMENTS, read_manifest
from genius_search.index.writer import one_writer
from genius_search.model import save_model
from genius_search.writing import new_folder

OBSOLETE: Final = (f"{SEGMENTS}/*", f"{DELETED}/*")
"""Files of a repository that are obsolete when an index is published again."""
_STORED: Final = re.compile(rf"{PICTURES}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")


def save_index(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    license: str = "unknown",  # noqa: A002  the hub's word
    model: str | None = None,
) -> Path:
    """Save an index as a self-contained folder with a card; it cannot be changed meanwhile.

    Parameters
    ----------
    name
        Name of the repository, for the card; by default the folder's name.
    model
        Name of the model on the hub; by default none, or the model inside the index.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The source holds no complete index.
    UsageError
        The target holds something, the licence is invalid, or the model's name is not of the form owner/name.
    """
    if model is not None and not hub.is_name(model):
        raise UsageError(f"the model is {model!r}, expected its name on the hub, as owner/name")
    target = target.expanduser()
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is there already; choose another place")
    read_manifest(source)  # a lock would make the folder
    with new_folder(target) as folder, one_writer(source) as writer:
        state = writer.snapshot
        if model is None and state.manifest.has_own_model:
            save_model(source / state.manifest.model, folder / OWN_MODEL)
            model = OWN_MODEL
        writer.copy_to(folder, state.manifest.replace(model=model or "", roots=()), _without_path)
        facts: dict[str, object] = {"model": state.manifest.model_fingerprint}
        facts |= {f"items: {kind.value}": count for kind, count in state.count_by_modality().items()}
        use = "" if model in (None, OWN_MODEL) else f"$ genius pull {model} --out model\n"
        shown = name or target.name
        text = (
            "A search index of GENIUS: the IDs of a pool's items, tied to the model that made them.\n\n"
            f"```console\n$ pip install 'genius-search[models]'\n{use}$ genius pull datasets/{shown} --out "
            f'photos.index\n$ genius search photos.index "a red bag"{" --model model" if use else ""}\n```'
        )
        card = hub.card(shown, text, head={"viewer": False}, facts=facts, license=license)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target


def check_images(folder: Path) -> None:
    """Refuse an index of somebody else whose items' images are files of this machine, which would be shown.

    Raises
    ------
    ArtifactMismatch
        An image is not stored in the index.
    """
    for segment in Snapshot.open(folder).segments:
        for item in segment.items.all():
            if item.image is not None and not _STORED.fullmatch(item.image):
                raise ArtifactMismatch(
                    f"{folder}: the picture of an item is {item.image!r} on the machine that published it, "
                    "expected none; have it published again"
                )


def _without_path(item: Item) -> Item:
    stored = item.image is not None and _STORED.fullmatch(item.image)
    return item._replace(image=item.image if stored else None, root=None)
