"""``model.json``, which ties an encoder, a quantizer and a generator together as one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, StrictInt, ValidationError

from genius_search.artifact import fingerprint_of, first_problem, read_json, recover
from genius_search.errors import ArtifactMismatch, ArtifactMissing

MODEL_FILE: Final = "model.json"
FORMAT: Final = 4
"""Version of the file; others are refused."""
PARTS: Final = ("encoder", "quantizer", "generator")


@dataclass(frozen=True, slots=True)
class KnownInstruction:
    """An instruction the model was trained with, and when it applies."""

    query: str
    """Modality of the query, in M-BEIR's spelling or ours."""
    candidate: str
    """Modality of the result, likewise."""
    text: str


class ModelPart(BaseModel, frozen=True):
    """The fingerprint of a part's folder."""

    fingerprint: str


class EncoderPart(ModelPart, frozen=True):
    """The encoder's fingerprint and spec; a path with ``./`` is relative to the model's folder."""

    spec: str
    fingerprint: str

    def in_folder(self, folder: Path) -> str:
        """Return the spec with an absolute path."""
        kind, _, place = self.spec.partition(":")
        return f"{kind}:{folder / place}" if place.startswith("./") else self.spec


class ModelFile(BaseModel, frozen=True):
    """Contents of ``model.json``."""

    format: StrictInt
    encoder: EncoderPart
    quantizer: ModelPart
    generator: ModelPart | None = None
    """None if the model is searched by the geometry of its code vectors alone."""
    instructions: list[KnownInstruction]
    fingerprint: str

    @property
    def parts(self) -> dict[str, ModelPart]:
        """The parts by the names of their folders."""
        parts = {part: getattr(self, part) for part in PARTS}
        return {name: part for name, part in parts.items() if part is not None}

    def fingerprint_of_parts(self) -> str:
        """Compute the fingerprint from those of the parts; the encoder's path does not matter."""
        return fingerprint_of({name: part.fingerprint for name, part in self.parts.items()})

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        from genius_search.writing import write_json  # noqa: PLC0415  opening a model writes nothing

        write_json(folder / MODEL_FILE, self.model_dump(exclude_none=True))


def read_model_file(folder: Path) -> ModelFile:
    """Read the ``model.json`` of a folder.

    Raises
    ------
    ArtifactMissing
        The folder contains no finished model.
    ArtifactMismatch
        The file is damaged, or was written by a newer version.
    """
    recover(folder)
    path = folder / MODEL_FILE
    if (folder / "index.json").exists():
        raise ArtifactMissing(f"{folder} is an index, not a model; give the model's folder")
    if not path.exists():
        from genius_search.hub import is_name  # noqa: PLC0415  for the message only

        pull = (
            f"; or, if this is a name on the hub, `genius pull {folder}` first"
            if is_name(str(folder)) and not folder.exists()
            else ""
        )
        raise ArtifactMissing(
            f"no finished model at {folder}: it has no {MODEL_FILE}. `genius fit` makes one, and goes on "
            f"where it stopped when run again{pull}"
        )
    try:
        content = read_json(path)
        found = content.get("format") if isinstance(content, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise ArtifactMismatch(
                f"{folder} has format {found}, this version reads {FORMAT}; train the model again or install "
                "the version that made it"
            )
        return ModelFile.model_validate(content)
    except ValidationError as error:
        reason = first_problem(error)
        raise ArtifactMismatch(
            f"{path} is damaged ({reason}); run `genius fit` again, or `genius pull` if it was pulled"
        ) from None
