"""The encoder protocols and `load_encoder`, which opens an encoder by its spec."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

from genius_search.errors import UsageError, need_packages
from genius_search.nn.codebooks import AnyArray

if TYPE_CHECKING:
    from PIL import Image


PLUGINS: Final = "genius_search.encoders"
"""The group of entry points by which other packages bring encoders."""


class ItemKey(NamedTuple):
    """The identity of a query or candidate; only encoders that look features up read it."""

    role: Literal["query", "candidate"]
    id: str


class TextInput(NamedTuple):
    """A text as the encoder reads it, instruction included."""

    text: str
    key: ItemKey


class ImageInput(NamedTuple):
    """A decoded image (RGB, upright), or None where only the key matters."""

    image: Image.Image | None
    key: ItemKey


class JointInput(NamedTuple):
    """The image and the text of one query or candidate, encoded together."""

    image: Image.Image | None
    """A decoded image (RGB, upright); None where there is none or where only the key matters."""
    text: str
    """The text as the encoder reads it, instruction included; empty where there is none."""
    key: ItemKey
    has_image: bool
    """Whether the item has an image, decoded or not."""


@runtime_checkable
class Encoder(Protocol):
    """An encoder of images and texts into unnormalised features, one row per input.

    Features are NumPy arrays or PyTorch tensors, of shape (inputs, dim).
    """

    @property
    def spec(self) -> str:
        """The spec that opens this encoder, for example ``clip:openai/clip-vit-base-patch32``."""
        ...

    @property
    def dim(self) -> int:
        """The width of the features."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the features would."""
        ...

    @property
    def needs_pixels(self) -> bool:
        """Whether images must be decoded; False when features are looked up or only texts are read."""
        ...

    def image_features(self, images: Sequence[ImageInput]) -> AnyArray:
        """Return the features of images."""
        ...

    def text_features(self, texts: Sequence[TextInput]) -> AnyArray:
        """Return the features of texts."""
        ...


def reads_images(encoder: Encoder) -> bool:
    """Return whether an encoder gives features of images; one of texts only has ``reads_images = False``."""
    return bool(getattr(encoder, "reads_images", True))


@runtime_checkable
class JointEncoder(Encoder, Protocol):
    """An encoder that reads image and text together and returns one vector for both.

    UniIR's CLIP-FF and BLIP-FF do. The vector is stored as the text feature, and the image feature is absent.
    """

    def joint_features(self, items: Sequence[JointInput]) -> AnyArray:
        """Return one unnormalised vector for each image and text together."""
        ...


def is_joint(encoder: Encoder) -> TypeGuard[JointEncoder]:
    """Return whether an encoder gives one joint vector for image and text.

    Unlike ``isinstance``, this does not access the encoder's fingerprint, which is slow to compute.
    """
    return hasattr(encoder, "joint_features")


def load_encoder(  # noqa: PLR0911  one for each kind
    spec: str, *, download: bool = False, device: str = "cpu"
) -> Encoder:
    """Open an encoder by its spec, importing only the kind that is named.

    Parameters
    ----------
    spec
        ``small:FOLDER``, ``clip:`` or ``siglip:NAME-or-folder``, ``precomputed:PATH``,
        ``text:NAME-or-folder``, ``text:wordllama``, ``uniir:FOLDER``, ``vectors:DIM``, or the name of an
        entry point of the group :data:`PLUGINS`: a function of another package that is called with what
        follows the colon, ``download=`` and ``device=``.
    download
        Allow downloading a model by its name; otherwise nothing touches the network.
    device
        The torch device of the weights.

    Raises
    ------
    UsageError
        The spec names no known kind, or nothing follows the kind.
    ArtifactMissing, ArtifactMismatch, MissingExtra, NetworkNeeded, BadData
        The encoder cannot be opened.
    """
    kind, _, place = spec.partition(":")
    if not place:
        raise UsageError(
            f"encoder {spec!r} is not known; give small:FOLDER, clip:NAME-or-folder, "
            "siglip:NAME-or-folder, text:NAME-or-folder, precomputed:PATH, uniir:FOLDER or another KIND:PLACE"
        )
    match kind:
        case "small":
            from genius_search.encoders.small import load_small  # noqa: PLC0415

            return load_small(Path(place).expanduser(), device=device)
        case "clip" | "siglip":
            from genius_search.encoders.pretrained import ClipEncoder  # noqa: PLC0415

            return ClipEncoder(place, download=download, device=device)
        case "precomputed":
            from genius_search.encoders.precomputed import open_precomputed  # noqa: PLC0415

            return open_precomputed(Path(place).expanduser())
        case "text":
            return _load_text(place, download=download, device=device)
        case "uniir":
            from genius_search.encoders.uniir import load_uniir  # noqa: PLC0415

            return load_uniir(Path(place).expanduser(), device=device)
        case "vectors":
            from genius_search.encoders.vectors import VectorEncoder  # noqa: PLC0415

            return VectorEncoder(place)
        case _:
            return _load_plugin(kind, place, download=download, device=device)


def _load_plugin(kind: str, place: str, *, download: bool, device: str) -> Encoder:
    points = entry_points(group=PLUGINS)
    if kind not in points.names:
        known = ", ".join(["small, clip, siglip, text, precomputed, uniir", *sorted(points.names)])
        raise UsageError(f"there is no encoder {kind!r}; known are {known}")
    try:
        opener = points[kind].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{kind!r} ({points[kind].value}) cannot be imported: {error}") from error
    opened: Encoder = opener(place, download=download, device=device)
    return opened


def _load_text(name: str, *, download: bool, device: str) -> Encoder:
    from genius_search.encoders.static import WORDLLAMA, StaticEncoder, is_static  # noqa: PLC0415

    if name == WORDLLAMA or is_static(Path(name).expanduser()):
        return StaticEncoder(name)
    from genius_search.encoders.pretrained import open_text_encoder  # noqa: PLC0415

    return open_text_encoder(name, download=download, device=device)


def need_transformers() -> None:
    """Raise :class:`MissingExtra` where transformers is not installed."""
    need_packages("pretrained encoders need", "transformers")


def refuse_images(images: Sequence[ImageInput]) -> None:
    """Raise :class:`UsageError` if there is an image, for encoders of texts only."""
    if images:
        key = images[0].key
        which = f"{key.role} {key.id}" if key.id else f"the {key.role}"
        raise UsageError(
            f"this encoder reads texts only, and {which} has an image; for pictures, create the index with a "
            "clip: or siglip: encoder"
        )
