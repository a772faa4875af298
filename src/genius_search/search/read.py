"""Texts as queries, read by the compiled library (``native/search.c``, whose structures these are)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float32

from genius_search.nn.arrays import Linear

if TYPE_CHECKING:
    from genius_search.encoders.small_texts import StoredSmall

NO_MEMORY: Final = -2
"""Status of texts that the library had no memory for."""


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "biases")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    )


class _Texts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "pairs")),
        *((name, ctypes.c_int64) for name in ("vocabulary", "buckets")),
        ("tower", _Layer * 3),
        ("fusion", _Layer * 4),
    )


class CompiledReader:
    """Gives in one step what the small encoder and the fusion make of texts without images.

    Parameters
    ----------
    fusion
        :meth:`genius_search.nn.codebooks.Codebooks.text_layers` of as many inputs as the encoder's features.
    """

    def __init__(self, library: ctypes.CDLL, encoder: StoredSmall, fusion: Sequence[Linear]) -> None:
        self._read = library.read_texts
        self._encoder = encoder
        layers = (*encoder.tower, *fusion)
        self._kept = [
            *(np.ascontiguousarray(table) for table in (encoder.words, encoder.pairs)),
            *(np.ascontiguousarray(array) for layer in layers for array in (layer.weight.T, layer.bias)),
        ]
        words, pairs, *weights = (one.ctypes.data for one in self._kept)
        given = [
            _Layer(*at, *reversed(layer.weight.shape))
            for at, layer in zip(zip(weights[::2], weights[1::2], strict=True), layers, strict=True)
        ]
        self._texts = _Texts(
            words, pairs, len(encoder.words), len(encoder.pairs) - 1, tuple(given[:3]), tuple(given[3:])
        )
        self._given = ctypes.addressof(self._texts)

    def read(self, texts: Sequence[str], *, with_features: bool) -> Float32[np.ndarray, "texts 2 dim"]:
        """Return two unit vectors of each text: its embedding, and the same again or its feature."""
        tokens = self._encoder.tokens(texts)
        vectors = np.empty((len(texts), 2, self._encoder.dim), dtype=np.float32)
        status = self._read(self._given, tokens.tobytes(), *tokens.shape, vectors.ctypes.data)
        if status == NO_MEMORY:
            raise MemoryError
        if status < 0:
            raise LookupError("the tokenizer has tokens that the encoder has no vectors for")
        if not with_features:
            vectors[:, 1] = vectors[:, 0]
        return vectors
