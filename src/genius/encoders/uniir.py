"""`uniir:FOLDER`: UniIR's encoders, as `genius import` wrote them; CLIP-SF is the one GENIUS was trained on.

Texts arrive formatted and with their instruction (:mod:`genius.data.records`). A folder is in Hugging Face's
layout, and ``uniir.json`` says which of the four models it holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

from genius.artifact import MANIFEST, open_artifact
from genius.encoders.checkpoint import need_transformers, read_json
from genius.encoders.protocol import Encoder
from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.published.encoder_kind import EncoderKind

__all__ = ["ARTIFACT", "DESCRIPTION", "FORMAT", "load_uniir", "stored_kind"]

ARTIFACT: Final = "uniir"
"""Kind of the folder, in its manifest."""
DESCRIPTION: Final = "uniir.json"
FORMAT: Final = 1
"""Version of the folder's layout; a newer one is refused."""
ACTIVATION: Final = "quick_gelu"
"""What OpenAI's CLIP computes with."""


def load_uniir(folder: Path, *, device: str = "cpu") -> Encoder:
    """Open an imported encoder; CLIP-FF and BLIP-FF are joint encoders.

    Raises
    ------
    MissingExtra
        transformers or ftfy is not installed.
    ArtifactMissing
        there is no such folder, or it was never finished.
    ArtifactMismatch
        it is of another kind or version, damaged, or computes with another activation.
    """
    kind = stored_kind(folder)
    need_transformers()
    if kind in ("clip-sf", "clip-ff"):
        _check_activation(folder)
    manifest = open_artifact(folder, kind=ARTIFACT)
    match kind:
        case "clip-sf":
            from genius.encoders.uniir_clip import ClipScoreFusion  # noqa: PLC0415  only the chosen one

            return ClipScoreFusion(manifest, device=device)
        case "clip-ff":
            from genius.encoders.uniir_clip import clip_feature_fusion  # noqa: PLC0415

            return clip_feature_fusion(manifest, device=device)
        case "blip-sf":
            from genius.encoders.uniir_blip import BlipScoreFusion  # noqa: PLC0415

            return BlipScoreFusion(manifest, device=device)
        case "blip-ff":
            from genius.encoders.uniir_blip import blip_feature_fusion  # noqa: PLC0415

            return blip_feature_fusion(manifest, device=device)


def stored_kind(folder: Path) -> EncoderKind:
    """Which of UniIR's models a folder holds. Raises as :func:`load_uniir` does."""
    if not folder.is_dir():
        raise ArtifactMissing(
            f"uniir:{folder}: there is no such folder; make it with `genius import clip-sf`"
        )
    lacking = [name for name in (DESCRIPTION, MANIFEST) if not (folder / name).is_file()]
    if lacking:
        raise ArtifactMissing(
            f"{folder} is not an imported encoder: it lacks {' and '.join(lacking)}; make it with "
            "`genius import clip-sf`"
        )
    told = read_json(folder / DESCRIPTION)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        given = told.get("format") if isinstance(told, dict) else None
        raise ArtifactMismatch(
            f"{folder / DESCRIPTION} has format {given!r}, this version reads {FORMAT}: upgrade genius, or "
            "import the encoder again"
        )
    kinds: tuple[EncoderKind, ...] = get_args(EncoderKind)
    for kind in kinds:
        if told.get("kind") == kind:
            return kind
    raise ArtifactMismatch(
        f"{folder / DESCRIPTION} tells of kind {told.get('kind')!r}; uniir: knows {', '.join(kinds)}"
    )


def _check_activation(folder: Path) -> None:
    """Refuse settings with plain GELU: it loads without a complaint, and every feature is slightly wrong."""
    settings = read_json(folder / "config.json")
    for tower in ("text_config", "vision_config"):
        found = settings.get(tower, {}).get("hidden_act")
        if found != ACTIVATION:
            raise ArtifactMismatch(
                f"{folder / 'config.json'} says hidden_act {found!r} in {tower}, and UniIR's CLIP computes "
                f"with {ACTIVATION!r}: features would be wrong. Import the checkpoint again"
            )
