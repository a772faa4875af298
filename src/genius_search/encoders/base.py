"""The protocols that encoders follow, and functions that several encoders share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
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

from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.nn.codebooks import AnyArray

if TYPE_CHECKING:
    from PIL import Image
    from tokenizers import Tokenizer


CHARACTERS_PER_TOKEN: Final = 64
"""Number of characters that are tokenized for each token an encoder can read.

Words have about five."""


class ItemKey(NamedTuple):
    """The identity of a query or candidate; only encoders that look up stored features need it."""

    role: Literal["query", "candidate"]
    id: str


Keys: TypeAlias = Sequence[ItemKey]


@runtime_checkable
class Encoder(Protocol):
    """An encoder of images and texts into unnormalised features, one row per input.

    Features are NumPy arrays or PyTorch tensors of shape (inputs, dim). Images are decoded: RGB and
    upright. Texts start with their instruction. ``keys``, if passed, name the inputs and have all
    the same role.
    """

    @property
    def spec(self) -> str:
        """The spec that opens this encoder, such as ``clip:openai/clip-vit-base-patch32``."""

    @property
    def dim(self) -> int:
        """The width of the features."""

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the features would change."""

    @property
    def needs_pixels(self) -> bool:
        """Whether the encoder reads decoded images: False if it reads texts or stored features."""

    def image_features(self, images: Sequence[Image.Image], keys: Keys = (), /) -> AnyArray:
        """Return the features of images."""

    def text_features(self, texts: Sequence[str], keys: Keys = (), /) -> AnyArray:
        """Return the features of texts."""


class LateEncoder:
    """An encoder that is opened when it first encodes, since opening may take seconds."""

    def __init__(self, opener: Callable[[], Encoder]) -> None:
        self._open = cache(opener)

    def image_features(self, images: Sequence[Image.Image], keys: Keys = ()) -> AnyArray:
        """Return the features of images."""
        return self._open().image_features(images, keys)

    def text_features(self, texts: Sequence[str], keys: Keys = ()) -> AnyArray:
        """Return the features of texts."""
        return self._open().text_features(texts, keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)


def reads_images(encoder: Encoder) -> bool:
    """Return whether an encoder reads images; text-only encoders have ``reads_images = False``."""
    return bool(getattr(encoder, "reads_images", True))


@runtime_checkable
class JointEncoder(Encoder, Protocol):
    """An encoder that reads an image and a text together and returns one vector for both.

    The vector is stored as the text feature; the image feature is absent.
    """

    def joint_features(
        self, images: Sequence[Image.Image | None], texts: Sequence[str], keys: Keys = (), /
    ) -> AnyArray:
        """Return one unnormalised vector per pair; the image may be None, or the text empty."""


def cut_texts(texts: Sequence[str], *, max_tokens: int) -> list[str]:
    """Cut long texts to a length that still holds ``max_tokens`` tokens, after leading white space.

    Tokenizers use about 200 bytes of memory per character, even for text that is truncated later.
    """
    max_characters = max_tokens * CHARACTERS_PER_TOKEN
    return [
        text if len(text) <= max_characters else text.lstrip()[:max_characters] for text in texts
    ]


def is_cut(encoder: Encoder, text: str) -> bool:
    """Return whether an encoder truncates a text; False for encoders without a known limit.

    An encoder with a limit has an attribute ``max_tokens`` and a method ``num_tokens(text)``, which
    may stop counting after ``max_tokens``.
    """
    max_tokens: int | None = getattr(encoder, "max_tokens", None)
    if max_tokens is None or len(text) <= max_tokens:  # a token has at least one character
        return False
    [beginning] = cut_texts([text], max_tokens=max_tokens)
    num_tokens: int = encoder.num_tokens(beginning)  # type: ignore[attr-defined]
    return num_tokens > max_tokens


def read_tokenizer(file: Path) -> Tokenizer:
    """Open a ``tokenizer.json`` and disable the truncation and padding that it may configure.

    Raises
    ------
    ArtifactMismatch
        The file is damaged.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  not needed by every encoder

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exceptions
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def refuse_images(keys: Keys) -> NoReturn:
    """Raise :class:`UsageError` because a text-only encoder was asked to encode images."""
    item = " ".join(filter(None, keys[0])) if keys else "an input"
    raise UsageError(
        f"this encoder reads only texts, and {item} has an image; for pictures, take "
        "an encoder that reads images, such as onnx:NAME or st:NAME (genius index refit "
        "INDEX --encoder NAME)"
    )


class VectorEncoder:
    """The placeholder for an encoder that only the user has, and whose vectors the user passes in.

    Parameters
    ----------
    width
        Dimension of the vectors as a text: ``512`` in the spec ``vectors:512``.
    """

    needs_pixels = False

    def __init__(self, width: str) -> None:
        if not width.isdecimal() or not int(width):
            raise UsageError(
                f"'vectors:{width}' is not an encoder; expected the dimension of your vectors, "
                "such as vectors:512"
            )
        self.dim = int(width)
        self.spec = f"vectors:{self.dim}"
        self.fingerprint = hashlib.sha256(self.spec.encode()).hexdigest()

    def image_features(self, images: Sequence[Image.Image], _: Keys = ()) -> NoReturn:
        """Raise :class:`UsageError`."""
        self._refuse(f"{len(images)} pictures")

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> NoReturn:
        """Raise :class:`UsageError`."""
        self._refuse(f"the text {texts[0][:40]!r}")

    def _refuse(self, description: str) -> NoReturn:
        raise UsageError(
            "this index was created from vectors and does not have their encoder, so it cannot "
            f"encode {description}; search with vector= and add items with vectors=, each of "
            f"{self.dim} numbers"
        )
