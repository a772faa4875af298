"""The checkpoints that the authors of UniIR and GENIUS published, by short names.

Each is a training state that `genius import` turns into a model; none is opened here.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final, NamedTuple

from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.hub.listing import Listing

__all__ = ["ORIGINALS", "Original", "pick"]


class Original(NamedTuple):
    """What a short name stands for."""

    repository: str
    files: tuple[str, ...]
    sha256: tuple[str | None, ...]
    """Of each file, where it was noted; the hub's own word is checked in any case."""
    next: str
    """The command to run then, with the files' places as ``{0}``, ``{1}``."""
    summary: str

    @property
    def by_hand(self) -> str:
        """How to come by the files without this program, as the end of a sentence."""
        command = self.next.format(*(PurePosixPath(path).name for path in self.files))
        return (
            f"fetch {' and '.join(self.files)} from the repository {self.repository} with a browser, and "
            f"then `{command}`"
        )


ORIGINALS: Final[dict[str, Original]] = {
    "clip-sf": Original(
        "TIGER-Lab/UniIR",
        ("checkpoint/CLIP_SF/clip_sf_large.pth",),
        ("5e459b96e1ca6f3060372a136c91c8c3369eee3c77ede3fad6c35599ce701c4d",),
        "genius import clip-sf {0} --out clip-sf",
        "UniIR's encoder CLIP-SF, large, with its training state (5.13 GB; 1.71 GB once imported)",
    ),
    "genius": Original(
        "Sungyeon/GENIUS",
        ("checkpoint/rq_clip_large.pth", "checkpoint/GENIUS_t5small.pth"),
        (None, None),
        "genius import genius --quantizer {0} --generator {1} --encoder uniir:clip-sf --out genius-model",
        "GENIUS's quantizer and generator; its encoder is clip-sf, which is pulled and imported first",
    ),
}


def pick(name: str, listing: Listing) -> Listing:
    """Of a repository only the files that a short name stands for.

    Raises
    ------
    ArtifactMissing
        the authors have moved or removed a file.
    ArtifactMismatch
        a file is not the one that was published.
    """
    original = ORIGINALS[name]
    listed = {file.path: file for file in listing.files}
    for path, known in zip(original.files, original.sha256, strict=True):
        if path not in listed:
            raise ArtifactMissing(f"{original.repository} has no {path} any more; look for it on its page")
        if known is not None and listed[path].sha256 != known:
            raise ArtifactMismatch(
                f"{path} of {original.repository} is not the file that was published: its SHA-256 is "
                f"{listed[path].sha256}, expected {known}"
            )
    return listing.only(tuple(listed[path] for path in original.files))
