"""``genius doctor``: examine a model's IDs, on its training candidates or on a pool it has not seen."""

from __future__ import annotations

from pathlib import Path

from genius.config import from_json
from genius.data.mbeir import MBeir
from genius.errors import ArtifactMissing, UsageError
from genius.evaluation.health import Health
from genius.model import Genius
from genius.stages.embed_records import embed_pool
from genius.stages.encode import encode_features, examine_items
from genius.stages.progress import Progress


def doctor(model: Path, data: Path | None, *, split: str, progress: Progress) -> Health:
    """The health found after training, or measured anew on the global pool of a data set's split."""
    opened = Genius.open(model)
    if data is None:
        health = opened.quantizer_manifest.facts["health"]
        if health is None:
            raise ArtifactMissing(
                f"{model} was imported without labelled candidates, so nobody has examined its IDs; "
                "give a data set with --data FOLDER"
            )
        return from_json(Health, health)
    if not model.is_dir():
        raise UsageError(
            f"what is examined is kept beside the model: give the folder of {model}, not its name"
        )
    source = MBeir(data)
    place = model / "doctor" / f"{source.name}-{split}"
    pool = embed_pool(
        source, source.global_pool(split), opened.encoder, place / "features", progress=progress
    )
    arrays = encode_features(opened, pool, place / "codes", embeddings="none", progress=progress)
    return examine_items(opened, [(pool, arrays)])
