"""Open an encoder by what a person calls it; only the chosen kind is imported."""

from __future__ import annotations

from pathlib import Path

from genius.encoders.protocol import Encoder
from genius.errors import UsageError

__all__ = ["load_encoder"]


def load_encoder(spec: str, *, download: bool = False, device: str = "cpu") -> Encoder:
    """Open ``small:``, ``text:`` or ``uniir:FOLDER``, ``clip:NAME-or-folder`` or ``precomputed:PATH``.

    Raises
    ------
    UsageError
        the spec has another form.
    ArtifactMissing, ArtifactMismatch, MissingExtra, NetworkNeeded, BadData
        as the encoder itself says; nothing is downloaded unless ``download``.
    """
    kind, _, where = spec.partition(":")
    if not where:
        kind = ""
    match kind:
        case "small":
            from genius.encoders.small import load_small  # noqa: PLC0415  lazily, as said above

            return load_small(Path(where).expanduser(), device=device)
        case "clip":
            from genius.encoders.clip import ClipEncoder  # noqa: PLC0415

            return ClipEncoder(where, download=download, device=device)
        case "precomputed":
            from genius.encoders.precomputed import open_precomputed  # noqa: PLC0415

            return open_precomputed(Path(where).expanduser())
        case "text":
            from genius.encoders.sentences import SentenceEncoder  # noqa: PLC0415

            return SentenceEncoder(Path(where).expanduser(), device=device)
        case "uniir":
            from genius.encoders.uniir import load_uniir  # noqa: PLC0415

            return load_uniir(Path(where).expanduser(), device=device)
        case _:
            raise UsageError(
                f"encoder {spec!r} is not known; give small:FOLDER, clip:NAME-or-folder, precomputed:PATH, "
                "text:FOLDER or uniir:FOLDER"
            )
