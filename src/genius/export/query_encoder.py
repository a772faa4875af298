"""A query's embedding by ONNX Runtime: an exported model's encoder and fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from genius.artifact import Manifest, fingerprint_of
from genius.data.features import FeatureBatch
from genius.encoders.checkpoint import need_transformers, read_json
from genius.encoders.clip import ClipEncoder, load_tokenizer
from genius.encoders.picture import describe, pixels_of
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.small import CONFIG_FILE, TOKENIZER_FILE
from genius.encoders.small_config import SmallEncoderConfig
from genius.encoders.uniir_clip import ClipScoreFusion
from genius.encoders.words import pair_rows, token_rows
from genius.errors import UsageError
from genius.export.places import FUSION, IMAGE, READER, TEXT
from genius.search.onnx_decoder import Precision, Runner, open_export, open_session

__all__ = ["OnnxFusion", "OnnxQueryEncoder"]


class OnnxFusion:
    """An exported model's fusion: features to unit embeddings."""

    def __init__(self, folder: str | Path, *, precision: Precision = "fp32", threads: int = 1) -> None:
        open_export(folder, precision)
        self._runner = Runner(open_session(Path(folder) / precision / FUSION, threads=threads))

    def embed(self, features: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Fused unit embeddings."""
        return self._runner.one(image=features.image, text=features.text)


class _Reader(Protocol):
    """Makes features of pictures and texts."""

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]: ...

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]: ...


class OnnxQueryEncoder:
    """An exported model's encoder; it can stand wherever an encoder can.

    Raises
    ------
    UsageError
        the model's encoder could not be exported.
    MissingExtra
        ONNX Runtime is not installed; or transformers, and the encoder is CLIP.
    ArtifactMissing, ArtifactMismatch
        the folder is not an exported model, or lacks this precision.

    >>> encoder = OnnxQueryEncoder("model.onnx", precision="int8")  # doctest: +SKIP
    >>> encoder.text_features([TextInput("a red kite", key)]).shape  # doctest: +SKIP
    torch.Size([1, 128])
    """

    def __init__(self, folder: str | Path, *, precision: Precision = "fp32", threads: int = 1) -> None:
        folder = Path(folder)
        manifest = open_export(folder, precision)
        told = manifest.facts["encoder"]
        if told["kind"] is None:
            raise UsageError(f"{folder} holds no encoder: {told['why_not']}")
        self._manifest = manifest
        self._precision = precision
        self._dim = int(manifest.facts["decoder"]["dim"])
        towers = _Towers(
            *(Runner(open_session(folder / precision / name, threads=threads)) for name in (IMAGE, TEXT))
        )
        self._reader = _READERS[told["kind"]](manifest, towers)

    @property
    def spec(self) -> str:
        """``onnx:FOLDER``."""
        return f"onnx:{self._manifest.folder}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self._dim

    @property
    def fingerprint(self) -> str:
        """Changes with the exported files and the precision."""
        return fingerprint_of([self._manifest.fingerprint, self._precision])

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        return self._reader.image_features(images) if images else torch.zeros(0, self.dim)

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts."""
        return self._reader.text_features(texts) if texts else torch.zeros(0, self.dim)


class _Towers(NamedTuple):
    """The two networks of an encoder."""

    image: Runner
    text: Runner


class _SmallReader:
    """Describes pictures and numbers tokens as :class:`genius.encoders.small.SmallEncoder` does."""

    def __init__(self, manifest: Manifest, towers: _Towers) -> None:
        folder = manifest.folder / READER
        self._config = SmallEncoderConfig(**read_json(folder / CONFIG_FILE))
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._towers = towers

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        return self._towers.image.one(descriptors=describe(pixels_of(images)))

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        words = [text.text for text in texts]
        tokens = token_rows(self._tokenizer, words, max_tokens=self._config.max_tokens).long()
        pairs = pair_rows(tokens, buckets=self._config.pair_buckets)
        return self._towers.text.one(tokens=tokens, pairs=pairs)


class _Found(NamedTuple):
    """What transformers' models give."""

    pooler_output: Tensor


class _Network:
    """Stands in a CLIP encoder where transformers' model would."""

    def __init__(self, config: Any, towers: _Towers) -> None:
        self.config = config
        self._towers = towers

    def get_image_features(self, pixel_values: Tensor) -> _Found:
        return _Found(self._towers.image.one(pixel_values=pixel_values))

    def get_text_features(self, **given: Tensor) -> _Found:
        return _Found(self._towers.text.one(**given))


class _ClipReader(ClipEncoder):
    """A CLIP encoder without the weights."""

    def __init__(self, manifest: Manifest, towers: _Towers) -> None:
        need_transformers()
        from transformers import AutoConfig, AutoImageProcessor  # noqa: PLC0415  takes seconds to import

        folder = manifest.folder / READER
        self._name = str(folder)
        self._device = "cpu"
        self._folder = folder
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._kind = str(config.model_type)
        self._model = _Network(config, towers)
        self._pixels = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        self._tokenizer = load_tokenizer(folder)


class _ClipScoreFusionReader(_ClipReader, ClipScoreFusion):
    """UniIR's CLIP-SF, likewise: its own squares of pictures and its own tokens."""


_READERS: dict[str, Callable[[Manifest, _Towers], _Reader]] = {
    "small": _SmallReader,
    "clip": _ClipReader,
    "clip-sf": _ClipScoreFusionReader,
}
