"""The encoder protocols; `load_encoder` opens an encoder by its spec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

from genius_search.border import as_path
from genius_search.errors import ArtifactMismatch, UsageError, need_packages
from genius_search.nn.codebooks import AnyArray

if TYPE_CHECKING:
    from PIL import Image
    from tokenizers import Tokenizer


PLUGINS: Final = "genius_search.encoders"
"""The group of entry points by which other packages bring encoders."""
CHARACTERS_PER_TOKEN: Final = 64
"""Characters that are read of a text for each token that an encoder takes; words have about five."""
_IN_PYTORCH: Final = ("small", "uniir")
_KNOWN: Final = (
    "FOLDER or onnx:NAME; st:, clip:, siglip: or text: and a name or folder; small:, adapters: or uniir: and "
    "a folder; precomputed:PATH"
)


class ItemKey(NamedTuple):
    """The identity of a query or candidate; only encoders that look features up read it."""

    role: Literal["query", "candidate"]
    id: str


Keys: TypeAlias = Sequence[ItemKey]


@runtime_checkable
class Encoder(Protocol):
    """An encoder of images and texts into unnormalised features, one row per input.

    Features are NumPy arrays or PyTorch tensors, of shape (inputs, dim). Images are decoded (RGB, upright);
    texts have their instruction. With them may come their keys, all of one role.
    """

    @property
    def spec(self) -> str:
        """The spec that opens this encoder, for example ``clip:openai/clip-vit-base-patch32``."""

    @property
    def dim(self) -> int:
        """The width of the features."""

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the features would."""

    @property
    def needs_pixels(self) -> bool:
        """Whether images must be decoded; False when features are looked up or only texts are read."""

    def image_features(self, images: Sequence[Image.Image], keys: Keys = (), /) -> AnyArray:
        """Return the features of images."""

    def text_features(self, texts: Sequence[str], keys: Keys = (), /) -> AnyArray:
        """Return the features of texts."""


class LateEncoder:
    """An encoder that is opened when something is encoded: opening one may take longer than a change does."""

    def __init__(self, opened: Callable[[], Encoder]) -> None:
        self._open = cache(opened)

    def image_features(self, images: Sequence[Image.Image], keys: Keys = ()) -> AnyArray:
        """Return the features of images."""
        return self._open().image_features(images, keys)

    def text_features(self, texts: Sequence[str], keys: Keys = ()) -> AnyArray:
        """Return the features of texts."""
        return self._open().text_features(texts, keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)


def reads_images(encoder: Encoder) -> bool:
    """Return whether an encoder gives features of images; one of texts only has ``reads_images = False``."""
    return bool(getattr(encoder, "reads_images", True))


@runtime_checkable
class JointEncoder(Encoder, Protocol):
    """An encoder that reads image and text together and returns one vector for both.

    The vector is stored as the text feature, and the image feature is absent.
    """

    def joint_features(
        self, images: Sequence[Image.Image | None], texts: Sequence[str], keys: Keys = (), /
    ) -> AnyArray:
        """Return one unnormalised vector for each image and text together; one may be None, or empty."""


def load_encoder(spec: str, *, download: bool = False, device: str = "cpu") -> Encoder:  # noqa: C901, PLR0911  a kind each
    """Open an encoder by its spec, importing only the kind that is named.

    Parameters
    ----------
    spec
        a folder with ONNX graphs, or ``onnx:NAME-or-folder``; ``st:NAME-or-folder`` of a model of
        sentence-transformers, for which ``clip:``, ``siglip:`` and ``text:`` are other names;
        ``text:wordllama``, ``small:FOLDER``, ``precomputed:PATH``, ``adapters:FOLDER``, ``uniir:FOLDER``,
        ``vectors:DIM``, or the name of an entry point of the group :data:`PLUGINS`: a function of another
        package that is called with what follows the colon, ``download=`` and ``device=``.
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
    if ":" not in spec and as_path(spec).is_dir():
        spec = f"onnx:{spec}"
    kind, _, place = spec.partition(":")
    folder = as_path(place)
    if kind in _IN_PYTORCH:
        need_packages(f"the encoder {spec} needs", "torch")
    match kind if place else "":
        case "onnx":
            from genius_search.encoders.onnx import OnnxEncoder  # noqa: PLC0415
            from genius_search.hub import find_or_pull  # noqa: PLC0415

            return OnnxEncoder(spec, find_or_pull(place, download=download))
        case "small":
            from genius_search.encoders.small import load_small  # noqa: PLC0415

            return load_small(folder, device=device)
        case "st" | "clip" | "siglip" | "text":
            return _load_pretrained(kind, place, download=download, device=device)
        case "precomputed":
            from genius_search.encoders.precomputed import PrecomputedEncoder  # noqa: PLC0415

            return PrecomputedEncoder(folder)
        case "adapters":
            from genius_search.encoders.adapters import AdapterEncoder  # noqa: PLC0415

            return AdapterEncoder(folder, download=download, device=device)
        case "uniir":
            from genius_search.encoders.pretrained import ClipScoreFusion  # noqa: PLC0415

            return ClipScoreFusion(folder, device=device)
        case "vectors":
            return VectorEncoder(place)
    points = entry_points(group=PLUGINS)
    if not place or kind not in points.names:
        known = "; ".join([_KNOWN, *(f"{name}:PLACE" for name in sorted(points.names))])
        raise UsageError(f"there is no encoder {spec!r}; give {known}")
    try:
        opener = points[kind].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{kind!r} ({points[kind].value}) cannot be imported: {error}") from error
    opened: Encoder = opener(place, download=download, device=device)
    return opened


def absolute_spec(spec: str) -> str:
    """Return an encoder's spec such that it can be opened from any working directory."""
    kind, colon, place = spec.partition(":")
    if not colon and as_path(spec).is_dir():
        kind, place = "onnx", spec
    path = as_path(place)
    return f"{kind}:{path.resolve()}" if place and path.exists() else spec


def _load_pretrained(kind: str, name: str, *, download: bool, device: str) -> Encoder:
    from genius_search.encoders.static import WORDLLAMA, StaticEncoder, is_static  # noqa: PLC0415

    if kind == "text" and name == WORDLLAMA:
        return StaticEncoder(name)
    folder = as_path(name)
    if not folder.is_dir():
        from genius_search.hub import find_or_pull  # noqa: PLC0415  searching by a folder needs none of it

        folder = find_or_pull(name, download=download)
    if kind in ("st", "text") and is_static(folder):
        return StaticEncoder(name, folder)
    need_packages(f"the encoder {kind}:{name} needs", "sentence_transformers")
    from genius_search.encoders.pretrained import open_pretrained  # noqa: PLC0415

    return open_pretrained(f"{kind}:{name}", folder, device=device)


def cut_texts(texts: Sequence[str], *, max_tokens: int) -> list[str]:
    """Return the beginnings of texts, long enough for ``max_tokens`` tokens, without white space before them.

    A tokenizer takes about 200 bytes of memory for each character, and drops most of a long text afterwards.
    """
    most = max_tokens * CHARACTERS_PER_TOKEN
    return [text if len(text) <= most else text.lstrip()[:most] for text in texts]


def is_cut(encoder: Encoder, text: str) -> bool:
    """Return whether an encoder reads only the beginning of a text; False for one that does not tell.

    It tells by ``max_tokens`` and ``num_tokens(text)``, which may stop counting behind ``max_tokens``.
    """
    most = getattr(encoder, "max_tokens", len(text))
    return len(text) > most and encoder.num_tokens(*cut_texts([text], max_tokens=most)) > most  # type: ignore[attr-defined]


def read_tokenizer(file: Path) -> Tokenizer:
    """Open a ``tokenizer.json``, without the truncation and padding that it may ask for.

    Raises
    ------
    ArtifactMismatch
        It is damaged.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  not every encoder needs it

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception for a damaged file
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def refuse_images(keys: Keys) -> NoReturn:
    """Raise :class:`UsageError` for images that an encoder of texts only was given."""
    which = " ".join(filter(None, keys[0])) if keys else "something"
    raise UsageError(
        f"this encoder reads texts only, and {which} has an image; for pictures, create the index with "
        "onnx:NAME or st:NAME of a model that reads them"
    )


class VectorEncoder:
    """Stands for the encoder that a user's vectors come from, and that only the user has.

    Parameters
    ----------
    width
        numbers of a vector, as a text: what follows the colon of ``vectors:512``.
    """

    needs_pixels = False

    def __init__(self, width: str) -> None:
        if not width.isdecimal() or not int(width):
            raise UsageError(
                f"encoder 'vectors:{width}' is not known; give the numbers of a vector: vectors:512"
            )
        self.dim = int(width)
        self.spec = f"vectors:{self.dim}"
        self.fingerprint = hashlib.sha256(self.spec.encode()).hexdigest()

    def image_features(self, images: Sequence[Image.Image], _: Keys = ()) -> NoReturn:
        """Refuse to encode."""
        self._refuse(f"{len(images)} pictures")

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> NoReturn:
        """Refuse to encode."""
        self._refuse(f"the text {texts[0][:40]!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            "this index was made of vectors, and does not know the encoder that they come from, so it cannot "
            f"read {what}; search with vector= and add items with vectors=, each of {self.dim} numbers"
        )
