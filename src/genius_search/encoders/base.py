"""Open an encoder by what a person calls it; only the chosen kind is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius_search.errors import UsageError


class ItemKey(NamedTuple):
    """Whose content it is. Encoders that look features up need it; the others ignore it."""

    role: Literal["query", "candidate"]
    id: str
    split: str | None = None
    """Which split a query is of, if that is known: numbers of queries start anew in each."""


class TextInput(NamedTuple):
    """A text as the encoder shall read it, instruction included."""

    text: str
    key: ItemKey


class ImageInput(NamedTuple):
    """A decoded picture (RGB, upright), or None where only the key matters."""

    image: Image.Image | None
    key: ItemKey


@runtime_checkable
class Encoder(Protocol):
    """Turns images and texts into features, unnormalised, one row each; a batch of one is a batch."""

    @property
    def spec(self) -> str:
        """How a person names it, for example ``clip:openai/clip-vit-base-patch32``."""
        ...

    @property
    def dim(self) -> int:
        """Width of its features."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the features it gives would."""
        ...

    @property
    def needs_pixels(self) -> bool:
        """False when it looks features up by id, so that images need not be decoded."""
        ...

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of images."""
        ...

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts."""
        ...


class JointInput(NamedTuple):
    """The image and the text of one query or candidate, to be read together."""

    image: Image.Image | None
    """A decoded picture (RGB, upright); None where there is none, or where only the key matters."""
    text: str
    """As the encoder shall read it, instruction included; empty where there is none."""
    key: ItemKey
    has_image: bool
    """Whether it has an image, decoded or not."""


@runtime_checkable
class JointEncoder(Encoder, Protocol):
    """An encoder that reads image and text together and gives one vector for both.

    UniIR's CLIP-FF and BLIP-FF do, and so do UniIR's stored embeddings. That vector stands in the text slot
    of a row of features, and the image slot is absent.
    """

    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """One vector for image and text together, unnormalised."""
        ...


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
            from genius_search.encoders.small import load_small  # noqa: PLC0415  lazily, as said above

            return load_small(Path(where).expanduser(), device=device)
        case "clip":
            from genius_search.encoders.pretrained import ClipEncoder  # noqa: PLC0415

            return ClipEncoder(where, download=download, device=device)
        case "precomputed":
            from genius_search.encoders.precomputed import open_precomputed  # noqa: PLC0415

            return open_precomputed(Path(where).expanduser())
        case "text":
            from genius_search.encoders.sentence import SentenceEncoder  # noqa: PLC0415

            return SentenceEncoder(Path(where).expanduser(), device=device)
        case "uniir":
            from genius_search.encoders.uniir import load_uniir  # noqa: PLC0415

            return load_uniir(Path(where).expanduser(), device=device)
        case _:
            raise UsageError(
                f"encoder {spec!r} is not known; give small:FOLDER, clip:NAME-or-folder, precomputed:PATH, "
                "text:FOLDER or uniir:FOLDER"
            )
