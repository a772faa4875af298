"""`onnx:`: CLIP and SigLIP as two ONNX graphs, in the layout of the hub's ``onnx-community`` and ``Xenova``.

Run by onnxruntime and tokenizers, without PyTorch. Features are those that transformers computes with
the same weights, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float32

from genius_search.artifact import fingerprint_of, read_json
from genius_search.encoders.base import Keys, cut_texts, read_tokenizer
from genius_search.encoders.graphs import open_graph
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.hub import known_fingerprint

if TYPE_CHECKING:
    from PIL import Image

GRAPHS: Final = ("text_model", "vision_model")
_PRECISIONS: Final = ("", "_fp16", "_quantized")
"""Ends of the graphs' names, in the order in which they are taken."""
_SETTINGS: Final = ("tokenizer.json", "tokenizer_config.json", "config.json", "preprocessor_config.json")
_CONTEXT: Final = {"clip": 77, "siglip": 64, "siglip2": 64}
"""Tokens of a text where the settings do not say, by the type of the model."""
_BATCH: Final = 16


class OnnxEncoder:
    """Image and text features by ONNX graphs: projected, not normalised.

    Raises
    ------
    ArtifactMissing
        The folder lacks files.
    ArtifactMismatch
        The folder holds another kind of model, or a file is damaged.
    """

    needs_pixels = True

    def __init__(self, spec: str, folder: Path) -> None:
        self.spec = spec
        self._graphs = dict(zip(GRAPHS, find_graphs(folder), strict=True))
        self._settings = [folder / name for name in _SETTINGS]
        missing = [file.name for file in self._settings if not file.is_file()]
        if missing:
            raise ArtifactMissing(f"{folder} is not a complete ONNX model: it lacks {', '.join(missing)}")
        self._words, config, self._pixels = map(read_json, self._settings[1:])
        self._vocabulary, pieces = self._settings[0], folder / "tokenizer.model"
        if pieces.is_file() and str(self._words.get("tokenizer_class")).startswith("Gemma"):
            self._vocabulary = pieces  # SigLIP 2's, which opens in a twentieth of the time
        kind = config.get("model_type")
        if kind not in _CONTEXT:
            raise ArtifactMismatch(f"{folder} holds a {kind!r} model; onnx: reads {', '.join(_CONTEXT)}")
        self._is_siglip = kind != "clip"
        self.max_tokens = int(config.get("text_config", {}).get("max_position_embeddings", _CONTEXT[kind]))
        self._sessions: dict[str, tuple[Any, int]] = {}
        self._runs = dict.fromkeys(GRAPHS, 0)
        self._open("text_model")
        session, place = self._sessions["text_model"]
        self.dim = int(session.get_outputs()[place].shape[-1])

    @cached_property
    def _tokenizer(self) -> tuple[Callable[[list[str]], list[list[int]]], list[int], int]:
        """A function from texts to tokens, tokens that end a text, and padding; opened for the first text."""
        file = self._vocabulary
        if file.suffix == ".json":
            model = read_tokenizer(file)
            number, encode = model.token_to_id, lambda texts: [x.ids for x in model.encode_batch(texts)]
        else:
            from sentencepiece import SentencePieceProcessor  # noqa: PLC0415  CLIP does not need it

            try:
                pieces: Any = SentencePieceProcessor(model_file=str(file))
            except RuntimeError as error:
                raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
            number, encode = pieces.piece_to_id, pieces.encode
        names = [self._words.get(name) for name in ("eos_token", "pad_token")]
        end, pad = (number(str(one["content"] if isinstance(one, dict) else one)) for one in names)
        return encode, [end] if self._words.get("add_eos_token") and end is not None else [], pad or 0

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts, also those that are not read."""
        encode, end, _ = self._tokenizer
        return [ids if ids[-1:] == end else ids + end for ids in encode(texts)]

    def _open(self, graph: str, *, packed: bool = False) -> None:
        """Open a graph, and find the projected features among its outputs."""
        session = open_graph(self._graphs[graph], packed=packed)
        names = [output.name for output in session.get_outputs()]
        found = [name for name in names if name in ("text_embeds", "image_embeds", "pooler_output")]
        if not found:
            raise ArtifactMismatch(f"{self._graphs[graph]} gives {', '.join(names)}, but no features")
        self._sessions[graph] = session, names.index(found[0])

    def _run(self, graph: str, **inputs: np.ndarray) -> Float32[np.ndarray, "items dim"]:
        """Return features. Weights are rearranged after the first run, since a search has only one."""
        if graph not in self._sessions or self._runs[graph] == 1:
            self._open(graph, packed=self._runs[graph] == 1)
        self._runs[graph] += 1
        session, place = self._sessions[graph]
        outputs = session.run(None, {one.name: inputs[one.name] for one in session.get_inputs()})
        return np.asarray(outputs[place], dtype=np.float32)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and graphs."""
        beside = [Path(f"{file}_data") for file in self._graphs.values()]
        files = [self._vocabulary, *self._settings[1:], *self._graphs.values(), *filter(Path.is_file, beside)]
        return fingerprint_of([known_fingerprint(file) for file in files])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        return min(len(self._tokens([text])[0]), self.max_tokens + 1)

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of texts, cut at the model's maximum length."""
        words = cut_texts(texts, max_tokens=self.max_tokens)
        if self._is_siglip:  # trained on lower case, which the tokenizers of SigLIP 2 do not make
            words = [text.lower() for text in words]
        parts = [np.zeros((0, self.dim), dtype=np.float32)]
        for start in range(0, len(words), _BATCH):
            tokens = self._tokens(words[start : start + _BATCH])
            # SigLIP was trained on texts padded to its full length, and reads the padding.
            length = self.max_tokens if self._is_siglip else min(max(map(len, tokens)), self.max_tokens)
            rows = np.full((len(tokens), length), self._tokenizer[2], dtype=np.int64)
            for row, ids in zip(rows, tokens, strict=True):
                row[: len(ids)] = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]  # the end
            mask = np.less(np.arange(length), [[len(ids)] for ids in tokens]).astype(np.int64)
            parts.append(self._run("text_model", input_ids=rows, attention_mask=mask))
        return np.concatenate(parts)

    def image_features(self, images: Sequence[Image.Image], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of images."""
        parts = [np.zeros((0, self.dim), dtype=np.float32)]
        for start in range(0, len(images), _BATCH):
            pixels = [prepare_pixels(one, self._pixels) for one in images[start : start + _BATCH]]
            parts.append(self._run("vision_model", pixel_values=np.stack(pixels)))
        return np.concatenate(parts)


def find_graphs(folder: Path) -> list[Path]:
    """Return the graphs of texts and of images in a folder, or in ``onnx/`` inside it.

    Raises
    ------
    ArtifactMissing
        There is no pair of one precision.
    """
    for end in _PRECISIONS:
        for place in (folder / "onnx", folder):
            files = [place / f"{graph}{end}.onnx" for graph in GRAPHS]
            if all(file.is_file() for file in files):
                return files
    raise ArtifactMissing(
        f"{folder} holds no ONNX encoder: expected text_model.onnx and vision_model.onnx, there or in a "
        "folder onnx/, as repositories such as Xenova/clip-vit-base-patch32 have them"
    )


def prepare_pixels(image: Image.Image, settings: dict[str, Any]) -> Float32[np.ndarray, "3 height width"]:
    """Resize, crop and normalise an image as a ``preprocessor_config.json`` says."""
    image = image.convert("RGB")
    if settings.get("do_resize", True):
        size = settings["size"]
        shortest = size if isinstance(size, int) else size.get("shortest_edge")
        if shortest is None:
            width, height = size["width"], size["height"]
        else:
            width, height = (int(shortest * side / min(image.size)) for side in image.size)
        image = image.resize((width, height), settings.get("resample", 3))
    if settings.get("do_center_crop"):
        crop = settings["crop_size"]
        width, height = (crop, crop) if isinstance(crop, int) else (crop["width"], crop["height"])
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, dtype=np.float32) * np.float32(settings.get("rescale_factor", 1 / 255))
    mean, deviation = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))
