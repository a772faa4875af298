"""``python -m research.doctor``: examine the IDs that a model gives."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.config import from_json
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMissing
from genius_search.model import Genius
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.training.features import embed_pool
from research.codes import encode_features, examine_items
from research.command import run


def doctor(model: Path, data: Path | None, *, split: str, progress: Progress) -> Health:
    """Return the health found after training, or measure it anew on the global pool of a data set's split."""
    opened = Genius.open(model)
    if data is None:
        health = opened.quantizer_manifest.facts["health"]
        if health is None:
            raise ArtifactMissing(
                f"{model} was imported without labelled candidates, so its IDs were never examined; "
                "give a data set with --data FOLDER"
            )
        return from_json(Health, health)
    source = MBeir(data)
    place = model / "doctor" / f"{source.name}-{split}"
    features = embed_pool(
        source, source.global_pool(split), opened.encoder, place / "features", progress=progress
    )
    arrays = encode_features(opened, features, place / "codes", embeddings="none", progress=progress)
    return examine_items(opened, [(features, arrays)])


@command
class Doctor:
    """Examine a model's IDs: use of the codes, collisions, purity of the modality level, reconstruction.

    Exit status 1 if there is a problem.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model."""

    data: OptionalFolder = None
    """Examine the global test pool of this data set; default: the report written after training."""

    split: str = "test"
    """Split of the data set."""

    def run(self) -> int:
        """Examine the IDs and print the report as JSON."""
        with TerminalProgress() as progress:
            health = doctor(self.model, self.data, split=self.split, progress=progress)
        print_json({**dataclasses.asdict(health), "verdict": health.verdict})
        return 1 if health.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine IDs as the command line says."""
    return run(Doctor, "doctor", arguments)


if __name__ == "__main__":
    sys.exit(main())
