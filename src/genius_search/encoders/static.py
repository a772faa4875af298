"""`text:` for static embeddings (model2vec): a text's vector is the mean of its tokens' vectors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from unicodedata import normalize

import numpy as np
from jaxtyping import Float32
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import Keys, cut_texts, refuse_images
from genius_search.errors import ArtifactMismatch, missing_extra, need_packages

if TYPE_CHECKING:
    from model2vec import StaticModel

WORDLLAMA: Final = "wordllama"
"""Name of the vectors in the package wordllama (English, 256 dimensions, MIT licence)."""
_MAX_TOKENS: Final = 512
"""Number of tokens after which model2vec truncates a text."""
_MAX_SHORT: Final = 500
"""Number of characters of texts that model2vec cannot truncate, since it reads 512 tokens."""
_FILES: Final = ("model.safetensors", "tokenizer.json", "config.json")
_WORDLLAMA_FILES: Final = (
    "weights/l2_supercat_256.safetensors",
    "tokenizers/l2_supercat_tokenizer_config.json",
)


def is_static(folder: Path) -> bool:
    """Return whether a folder holds static embeddings, in the layout that model2vec saves."""
    try:
        first_module = json.loads((folder / "modules.json").read_text())[0]
        is_static_module = str(first_module["type"]).endswith(".StaticEmbedding")
        return is_static_module and first_module["path"] in ("", ".")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def has_wordllama() -> bool:
    """Return whether ``text:wordllama`` can be opened: model2vec and wordllama are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("model2vec", WORDLLAMA))


def _open_wordllama(weights: Path, tokenizer: Path) -> StaticModel:
    """Open the vectors of the package wordllama, which takes half a second."""
    from model2vec import StaticModel  # noqa: PLC0415  optional

    vectors = load_file(weights)["embedding.weight"].astype(np.float32)
    return StaticModel(vectors, Tokenizer.from_file(str(tokenizer)), normalize=True)


class StaticEncoder:
    """Static embeddings: the normalised mean of token vectors, in a few microseconds per text.

    Parameters
    ----------
    name
        The source in the spec.
    folder
        A model in model2vec's layout. Default: the embeddings in the package wordllama.

    Raises
    ------
    MissingExtra
        model2vec or wordllama is not installed.
    ArtifactMismatch
        The files do not hold static embeddings.
    """

    needs_pixels = False
    reads_images = False

    def __init__(self, name: str, folder: Path | None = None) -> None:
        need_packages("static embeddings need", "model2vec")
        from model2vec import StaticModel  # noqa: PLC0415  optional

        self.spec = f"text:{name}"
        if folder is None:
            # The package is not imported, because its loader looks for its tokenizer on the hub.
            package = importlib.util.find_spec(WORDLLAMA)
            if package is None or not package.submodule_search_locations:
                raise missing_extra(f"text:{WORDLLAMA} needs {WORDLLAMA}", "words")
            package_folder = Path(package.submodule_search_locations[0])
            self._files = tuple(package_folder / file for file in _WORDLLAMA_FILES)
        else:
            self._files = tuple(folder / file for file in _FILES)
        try:
            if folder is None:
                self._model = _open_wordllama(*self._files)
            else:
                self._model = StaticModel.from_pretrained(
                    folder, normalize=True, force_download=False
                )
        except Exception as error:  # noqa: BLE001  tokenizers raises nothing more specific
            raise ArtifactMismatch(
                f"{self.spec} cannot be opened as static embeddings: {error}"
            ) from None
        self.dim = int(self._model.dim)
        self.max_tokens = _MAX_TOKENS

    @cached_property
    def fingerprint(self) -> str:
        """A hash of weights, tokenizer and settings."""
        return fingerprint_of(["small letters", *map(file_fingerprint, self._files)])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a whole text, also after the maximum length."""
        tokens = self._model.tokenizer.encode(text, add_special_tokens=False)
        return sum(len(part.ids) for part in (tokens, *tokens.overflowing))

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the vectors of texts, which are truncated at the maximum length."""
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        # wordllama's tokenizer splits capitals, ligatures and wide letters into meaningless pieces.
        words = [normalize("NFKC", text).lower() for text in texts]
        if sum(map(len, words)) <= _MAX_SHORT:
            return self._encode_short(words)
        beginnings = cut_texts(words, max_tokens=_MAX_TOKENS)
        return np.asarray(
            self._model.encode(beginnings, use_multiprocessing=False), dtype=np.float32
        )

    def _encode_short(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        """Return the vectors that model2vec computes.

        Its method for it takes three times as long for a text, since it sets up a progress bar.
        """
        model = self._model
        means = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, ids in enumerate(model.tokenize(texts)):
            if not ids:
                continue
            tokens = np.array([ids])
            rows = tokens if model.token_mapping is None else model.token_mapping[tokens]
            vectors = model.embedding[rows]
            if model.weights is not None:
                vectors = vectors * model.weights[tokens][..., None]
            means[row] = vectors.mean(axis=1)[0]
        lengths = np.linalg.norm(means, axis=1, keepdims=True) + 1e-32
        return np.asarray(means / lengths, dtype=np.float32)

    def image_features(self, _: Sequence[Any], keys: Keys = ()) -> NoReturn:
        """Raise :class:`UsageError`."""
        refuse_images(keys)
