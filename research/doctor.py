"""``python -m research.doctor``: examine the IDs that a model gives."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_facts, print_json, print_table, print_text
from genius_search.config import from_json
from genius_search.data.mbeir import MBeir
from genius_search.embed_mbeir import embed_pool
from genius_search.errors import ArtifactMissing
from genius_search.model import Genius
from genius_search.nn.health import Health
from genius_search.progress import Progress
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
class Doctor(JsonOption):
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
        """Examine the IDs and print the report."""
        with TerminalProgress() as progress:
            health = doctor(self.model, self.data, split=self.split, progress=progress)
        status = 1 if health.problems else 0
        if self.json:
            print_json({**dataclasses.asdict(health), "verdict": health.verdict})
            return status
        facts: dict[str, object] = {
            "candidates": health.candidates,
            "distinct IDs": health.distinct_ids,
            "collisions": f"{health.collision_rate:.2%} (largest bucket {health.largest_bucket})",
        }
        if health.purity is not None:
            meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(health.level0_modality))
            facts["level-0 purity"] = f"{health.purity:.2%} ({meaning})"
        facts["reconstruction"] = f"mean cosine {health.reconstruction:.3f}"
        print_facts(facts)
        rows = [
            (
                f"{one.level}",
                f"{one.size}",
                f"{one.used}",
                f"{one.perplexity:.0f}",
                f"{one.largest_share:.1%}",
            )
            for one in health.levels
        ]
        print_table(("level", "codes", "used", "perplexity", "largest share"), rows)
        print_text(f"verdict: {health.verdict}")
        return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine IDs as the command line says."""
    return run(Doctor, "doctor", arguments)


if __name__ == "__main__":
    sys.exit(main())
