"""Short names of the checkpoints that the authors of GENIUS and UniIR published."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final, NamedTuple


class Checkpoint(NamedTuple):
    """Files of one repository, and the command that imports them."""

    repository: str
    files: tuple[str, ...]
    sha256: tuple[str | None, ...]
    """Checksum of each file, where it is known; the hub's own checksums are compared in any case."""
    next_command: str
    """With the files' places as ``{0}``, ``{1}``."""

    @property
    def manual(self) -> str:
        """Instructions for fetching the files without this program, as the end of a sentence."""
        command = self.next_command.format(*(PurePosixPath(path).name for path in self.files))
        return (
            f"fetch {' and '.join(self.files)} from the repository {self.repository} with a browser, and "
            f"then `{command}`"
        )


CHECKPOINTS: Final[dict[str, Checkpoint]] = {
    "clip-sf": Checkpoint(  # CLIP-SF large with its training state: 5.13 GB; 1.71 GB once imported
        "TIGER-Lab/UniIR",
        ("checkpoint/CLIP_SF/clip_sf_large.pth",),
        ("5e459b96e1ca6f3060372a136c91c8c3369eee3c77ede3fad6c35599ce701c4d",),
        "genius import clip-sf {0} --out clip-sf",
    ),
    "genius": Checkpoint(  # the quantizer and the generator; their encoder is clip-sf
        "Sungyeon/GENIUS",
        ("checkpoint/rq_clip_large.pth", "checkpoint/GENIUS_t5small.pth"),
        (None, None),
        "genius import genius --quantizer {0} --generator {1} --encoder uniir:clip-sf --out genius-model",
    ),
}
