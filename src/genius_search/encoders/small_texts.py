"""The small encoder's folder, and its text side in NumPy, which encodes queries without PyTorch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Float32, Int32, Int64
from tokenizers import Tokenizer

from genius_search.artifact import fingerprint_of, read_json
from genius_search.config import SmallEncoderConfig, from_json, to_json
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.texts import cut_texts, read_tokenizer
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.nn.arrays import AnyArray, Linear
from genius_search.nn.stored import read_arrays

if TYPE_CHECKING:
    from genius_search.encoders.small import SmallEncoder

PADDING: Final = 0
"""The token number that fills short rows and counts for nothing."""
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
PICTURES: Final = "pictures"
"""Folder of the pretrained network that reads pictures, if there is one."""
FEW: Final = 16
"""Up to this many texts, NumPy is quicker than PyTorch."""
KNOWN_BYTES: Final = 2
"""Bytes per token of words like those of the training texts; other words fall into single letters."""
SOME_TOKENS: Final = 64
"""Tokens at the beginning of a text by which its words are judged."""
_MULTIPLIERS: Final = (1_000_003, 7_368_787)
_TAIL: Final = np.array([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592], np.float32)

Numbers = TypeVar("Numbers")
"""An array or a tensor of 64-bit integers."""


class SmallFolder(NamedTuple):
    """Settings and tokenizer of a trained small encoder."""

    folder: Path
    config: SmallEncoderConfig
    tokenizer: Tokenizer

    @property
    def weights_file(self) -> Path:
        """File of the weights."""
        return self.folder / WEIGHTS_FILE

    @property
    def pictures(self) -> Path | None:
        """Folder of the pretrained network that reads pictures; None if they are described."""
        folder = self.folder / PICTURES
        return folder if folder.is_dir() else None

    @property
    def spec(self) -> str:
        """``small:FOLDER``."""
        return f"small:{self.folder}"


def open_folder(folder: Path) -> SmallFolder:
    """Read settings and tokenizer of a small encoder.

    Raises
    ------
    ArtifactMissing
        The folder or one of its three files does not exist.
    ArtifactMismatch
        A file is damaged.
    """
    missing = [name for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a trained small encoder: it lacks {', '.join(missing)}. "
            "Train one with `genius train encoder`"
        )
    settings = read_json(folder / CONFIG_FILE)
    try:
        config = from_json(SmallEncoderConfig, settings)
    except (TypeError, ValueError) as error:
        raise ArtifactMismatch(
            f"{folder / CONFIG_FILE} cannot be used ({error}); train the encoder again"
        ) from None
    return SmallFolder(folder, config, read_tokenizer(folder / TOKENIZER_FILE))


def fingerprint(
    config: SmallEncoderConfig,
    tokenizer: Tokenizer,
    weights: Mapping[str, Float32[np.ndarray, ...]],
    pictures: str | None,
) -> str:
    """Return a hash of settings, vocabulary, weights and, if there is one, the network of pictures' hash."""
    hashes = {
        name: hashlib.sha256(np.ascontiguousarray(one).data).hexdigest() for name, one in weights.items()
    }
    return fingerprint_of([to_json(config), tokenizer.to_str(), hashes, *([pictures] if pictures else [])])


def token_rows(
    tokenizer: Tokenizer, texts: Sequence[str], *, max_tokens: int
) -> Int32[np.ndarray, "items tokens"]:
    """Return the token numbers of texts, cut and padded to ``max_tokens``."""
    rows = np.full((len(texts), max_tokens), PADDING, dtype=np.int32)
    beginnings = cut_texts(texts, max_tokens=max_tokens)
    for row, encoding in enumerate(tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)):
        ids = encoding.ids[:max_tokens]
        rows[row, : len(ids)] = ids
    return rows


def knows_words(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text has words like those that a vocabulary was learned from.

    One of its words of three letters or more is a token, or its tokens have several bytes on average.
    """
    words = re.findall(r"\w+|[^\w\s]+", cut_texts([text], max_tokens=SOME_TOKENS)[0])
    if any(len(word) > KNOWN_BYTES and tokenizer.token_to_id(word) is not None for word in words):
        return True
    encoded = (tokenizer.encode(word, add_special_tokens=False) for word in words)
    tokens = [encoding.tokens for encoding in encoded]  # written with a character for each byte
    count, length = sum(map(len, tokens)), sum(map(len, chain.from_iterable(tokens)))
    return length >= KNOWN_BYTES * count or any(len(one) == 1 and len(one[0]) > KNOWN_BYTES for one in tokens)


def pair_rows(tokens: Numbers, *, buckets: int) -> Numbers:
    """Number the pairs of neighbouring tokens: 1 to ``buckets``, or 0 where either is padding."""
    first, second = tokens[:, :-1], tokens[:, 1:]  # type: ignore[index]
    mixed = first * _MULTIPLIERS[0] + second * _MULTIPLIERS[1]
    hashed: Numbers = ((mixed ^ (mixed >> 15)) % buckets + 1) * ((first != PADDING) & (second != PADDING))
    return hashed


class StoredSmall:
    """CLIP-SF or BLIP-SF in small, in a folder: a few texts are encoded in NumPy, all else in PyTorch.

    Raises
    ------
    ArtifactMismatch
        The file of the weights is damaged, or does not fit the settings beside it.
    """

    needs_pixels: bool = True

    def __init__(self, opened: SmallFolder) -> None:
        self._opened = opened
        shapes = _shapes_of_text_weights(opened.config, opened.tokenizer.get_vocab_size())
        self._weights = read_arrays(opened.weights_file, shapes, others=True)
        self.spec = opened.spec
        self.dim = opened.config.dim

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, vocabulary and weights."""
        found = None
        if self._opened.pictures is not None:
            from genius_search.hub import contents_fingerprint  # noqa: PLC0415  most have none

            found = contents_fingerprint(self._opened.pictures)
        return fingerprint(self._opened.config, self._opened.tokenizer, self._weights, found)

    @cached_property
    def trained(self) -> SmallEncoder:
        """The encoder in PyTorch, on the CPU."""
        from genius_search.encoders.small import load_small  # noqa: PLC0415  searching does not need it

        return cast("SmallEncoder", load_small(self._opened.folder))  # joint encoders are opened otherwise

    def image_features(self, images: Sequence[ImageInput]) -> AnyArray:
        """Return the features of images."""
        return self.trained.image_features(images)

    def text_features(self, texts: Sequence[TextInput]) -> AnyArray:
        """Return the features of texts, cut at the maximum length."""
        if len(texts) > FEW:
            return self.trained.text_features(texts)
        config = self._opened.config
        tokens = self.tokens([text.text for text in texts]).astype(np.int64)
        pairs = pair_rows(tokens, buckets=config.pair_buckets)
        return self._tower(_sums(self.words, tokens) + _sums(self.pairs, pairs))

    def tokens(self, texts: Sequence[str]) -> Int32[np.ndarray, "texts places"]:
        """Return the token numbers of texts, cut and padded at the maximum length."""
        return token_rows(self._opened.tokenizer, texts, max_tokens=self._opened.config.max_tokens)

    @property
    def words(self) -> Float32[np.ndarray, "vocabulary width"]:
        """The vector of each token."""
        return self._weights["words.weight"]

    @property
    def pairs(self) -> Float32[np.ndarray, "buckets width"]:
        """The vector of each number of a pair of tokens (:func:`pair_rows`)."""
        return self._weights["pairs.weight"]

    @cached_property
    def tower(self) -> list[Linear]:
        """The three layers of the text tower, with gain and shift of the norm before each folded in.

        The outputs of the first are followed by those of the shortcut, if there is one.
        """
        layers = []
        for number in (0, 3, 6):
            norm, linear = (f"text_tower.{layer}" for layer in (number, number + 1))
            names = [linear, "text_shortcut"] if number == 0 and self._opened.config.shortcuts else [linear]
            weight = np.concatenate([self._weights[f"{name}.weight"] for name in names])
            bias = np.concatenate([self._weights[f"{name}.bias"] for name in names])
            gain, shift = self._weights[f"{norm}.weight"], self._weights[f"{norm}.bias"]
            layers.append(Linear(weight * gain, bias + np.vecdot(weight, shift)))
        return layers

    def knows_words(self, text: str) -> bool:
        """Return whether the training texts had words like those of a text."""
        return knows_words(self._opened.tokenizer, text)

    def _tower(self, hidden: Float32[np.ndarray, "texts width"]) -> Float32[np.ndarray, "texts dim"]:
        """Apply the three layers of the text tower, each to normed rows, with GELU between them.

        The shortcut leads from the first norm to the end.
        """
        first, *others = self.tower
        width = hidden.shape[1]
        hidden, direct = np.split(first.apply(_standardize(hidden)), [width], axis=1)
        for layer in others:
            hidden = layer.apply(_standardize(_gelu(hidden)))
        return hidden + direct if direct.size else hidden


def _sums(
    vectors: Float32[np.ndarray, "numbers width"], rows: Int64[np.ndarray, "texts places"]
) -> Float32[np.ndarray, "texts width"]:
    """Sum the vectors of the numbers in each row; 0 does not count."""
    sums = np.empty((len(rows), vectors.shape[1]), dtype=np.float32)
    for total, own in zip(sums, rows, strict=True):
        np.add.reduce(vectors.take(own[own != PADDING], axis=0), axis=0, out=total)
    return sums


def _standardize(hidden: Float32[np.ndarray, "texts width"]) -> Float32[np.ndarray, "texts width"]:
    """Shift and scale rows to mean 0 and variance 1, as a layer norm without gain."""
    width = np.float32(hidden.shape[1])  # the method mean takes several times as long
    centred = hidden - np.add.reduce(hidden, axis=1, keepdims=True) / width
    variance = np.vecdot(centred, centred)[:, None] / width
    return np.asarray(centred / np.sqrt(variance + np.float32(1e-5)))


def _shapes_of_text_weights(config: SmallEncoderConfig, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that texts need."""
    width = config.text_width
    shapes: dict[str, tuple[int, ...]] = {
        "words.weight": (vocabulary, width),
        "pairs.weight": (config.pair_buckets + 1, width),
    }
    for number, outputs in ((0, width), (3, width), (6, config.dim)):
        norm, linear = (f"text_tower.{layer}" for layer in (number, number + 1))
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
        shapes |= {f"{linear}.weight": (outputs, width), f"{linear}.bias": (outputs,)}
    if config.shortcuts:
        shapes |= {"text_shortcut.weight": (config.dim, width), "text_shortcut.bias": (config.dim,)}
    return shapes


def _gelu(hidden: Float32[np.ndarray, "texts width"]) -> Float32[np.ndarray, "texts width"]:
    """Return x · Φ(x), with Φ to 1e-7.

    Abramowitz and Stegun, "Handbook of mathematical functions", 7.1.26.
    """
    distance = np.abs(hidden)
    power = 1 / (1 + np.float32(0.3275911 * math.sqrt(0.5)) * distance)
    tail = np.zeros_like(power)
    for factor in _TAIL:
        tail += factor
        tail *= power
    tail *= np.exp(np.square(hidden) * np.float32(-0.5))
    return np.asarray(np.maximum(hidden, 0) - distance * (tail * np.float32(0.5)))
