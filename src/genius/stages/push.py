"""``genius push``: models and indexes to the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from genius.errors import ArtifactMissing, UsageError
from genius.hub.listing import DATASETS, Kind, is_name, split_name
from genius.hub.publish import files_of, publish
from genius.hub.reach import need_hub, probe
from genius.search.manifest import CURRENT, DELETED, SEGMENTS
from genius.stages.model_file import MODEL_FILE
from genius.stages.progress import Progress
from genius.stages.save import About, save_model
from genius.stages.save_index import save_index

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
