"""`onnx:`: CLIP and SigLIP as two ONNX graphs, in the layout of the hub's ``onnx-community`` and ``Xenova``.

Run by onnxruntime and tokenizers, without PyTorch. Features are those that transformers computes with
the same weights, up to rounding.

onnxruntime copies a file that holds graph and weights. So it gets the graph alone, in which large weights are
named by their places in the file; those it maps into memory. ONNX has such references for weights in other
files. Numbers of fields are those of `onnx.proto`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius_search.artifact import fingerprint_of, read_json
from genius_search.encoders.base import Keys, cut_texts, read_tokenizer
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.forks import abandon, renew_in_children
from genius_search.hub import weights_fingerprint

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from PIL import Image

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA = 7, 5, 9, 13
_IS_EXTERNAL: Final = b"\x70\x01"
"""The field ``data_location``."""
_FOLDER_OF_WEIGHTS: Final = "session.model_external_initializers_file_folder_path"
_LARGE: Final = 4096
"""Bytes of weights that stay in the file. Shapes are smaller; onnxruntime reads them from the graph."""
GRAPHS: Final = ("text_model", "vision_model")
_PRECISIONS: Final = ("", "_fp16", "_quantized")
"""Ends of the graphs' names, in the order in which they are taken."""
_SETTINGS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "preprocessor_config.json",
)
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
            raise ArtifactMissing(
                f"{folder} is not a complete ONNX model: it lacks {', '.join(missing)}"
            )
        self._words, config, self._pixels = map(read_json, self._settings[1:])
        self._vocabulary, pieces = self._settings[0], folder / "tokenizer.model"
        if pieces.is_file() and str(self._words.get("tokenizer_class")).startswith("Gemma"):
            self._vocabulary = pieces  # SigLIP 2's, which opens in a twentieth of the time
        kind = config.get("model_type")
        if kind not in _CONTEXT:
            raise ArtifactMismatch(
                f"{folder} holds a {kind!r} model; onnx: reads {', '.join(_CONTEXT)}"
            )
        self._is_siglip = kind != "clip"
        self.max_tokens = int(
            config.get("text_config", {}).get("max_position_embeddings", _CONTEXT[kind])
        )
        self._sessions: dict[str, tuple[Any, int]] = {}
        self._open("text_model")
        session, place = self._sessions["text_model"]
        self.dim = int(session.get_outputs()[place].shape[-1])
        renew_in_children(self)

    def _renew(self) -> None:
        """Have the graphs opened again, in a forked child, which has none of their threads."""
        abandon(self._sessions)
        self._sessions = {}

    @cached_property
    def _tokenizer(self) -> tuple[Callable[[list[str]], list[list[int]]], list[int], int]:
        """A function from texts to tokens, tokens that end a text, and padding; opened for the first text."""
        file = self._vocabulary
        if file.suffix == ".json":
            model = read_tokenizer(file)
            number, encode = (
                model.token_to_id,
                lambda texts: [x.ids for x in model.encode_batch(texts)],
            )
        else:
            from sentencepiece import SentencePieceProcessor  # noqa: PLC0415  CLIP does not need it

            try:
                pieces: Any = SentencePieceProcessor(model_file=str(file))
            except RuntimeError as error:
                raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
            number, encode = pieces.piece_to_id, pieces.encode
        names = [self._words.get(name) for name in ("eos_token", "pad_token")]
        end, pad = (number(str(one["content"] if isinstance(one, dict) else one)) for one in names)
        return (
            encode,
            [end] if self._words.get("add_eos_token") and end is not None else [],
            pad or 0,
        )

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of texts, also those that are not read."""
        encode, end, _ = self._tokenizer
        return [ids if ids[-1:] == end else ids + end for ids in encode(texts)]

    def _open(self, graph: str) -> None:
        """Open a graph, and find the projected features among its outputs."""
        session = open_graph(self._graphs[graph])
        names = [output.name for output in session.get_outputs()]
        found = [name for name in names if name in ("text_embeds", "image_embeds", "pooler_output")]
        if not found:
            raise ArtifactMismatch(
                f"{self._graphs[graph]} gives {', '.join(names)}, but no features"
            )
        self._sessions[graph] = session, names.index(found[0])

    def _run(self, graph: str, **inputs: np.ndarray) -> Float32[np.ndarray, "items dim"]:
        if graph not in self._sessions:
            self._open(graph)
        session, place = self._sessions[graph]
        outputs = session.run(None, {one.name: inputs[one.name] for one in session.get_inputs()})
        return np.asarray(outputs[place], dtype=np.float32)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and graphs."""
        beside = [Path(f"{file}_data") for file in self._graphs.values()]
        files = [
            self._vocabulary,
            *self._settings[1:],
            *self._graphs.values(),
            *filter(Path.is_file, beside),
        ]
        return fingerprint_of([weights_fingerprint(file) for file in files])

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
            length = (
                self.max_tokens if self._is_siglip else min(max(map(len, tokens)), self.max_tokens)
            )
            rows = np.full((len(tokens), length), self._tokenizer[2], dtype=np.int64)
            for row, ids in zip(rows, tokens, strict=True):
                row[: len(ids)] = (
                    ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
                )  # the end
            mask = np.less(np.arange(length), [[len(ids)] for ids in tokens]).astype(np.int64)
            parts.append(self._run("text_model", input_ids=rows, attention_mask=mask))
        return np.concatenate(parts)

    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
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


def prepare_pixels(
    image: Image.Image, settings: dict[str, Any]
) -> Float32[np.ndarray, "3 height width"]:
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
    pixels = np.asarray(image, dtype=np.float32) * np.float32(
        settings.get("rescale_factor", 1 / 255)
    )
    mean, deviation = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))


class _Field(NamedTuple):
    number: int
    key: int
    start: int
    end: int
    """Where in the file the key begins, the content begins and it ends."""


def open_graph(file: Path) -> InferenceSession:
    """Open a graph on the CPU.

    Raises
    ------
    ArtifactMismatch
        It is no graph that onnxruntime can run.
    """
    import onnxruntime  # noqa: PLC0415  takes a while

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    whole = file.resolve()  # in the cache, a link
    try:
        with (
            whole.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            graph = without_weights(data, whole.name)
            if len(graph) == len(data):  # its weights are small or in another file
                return onnxruntime.InferenceSession(
                    file, options, providers=["CPUExecutionProvider"]
                )
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(whole.parent))
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common class
        raise ArtifactMismatch(f"{file} cannot be run by onnxruntime: {error}") from None


def without_weights(data: mmap.mmap, name: str) -> bytes:
    """Return a model in which the large weights of the file ``name`` are references to their places."""

    def refer(weights: _Field) -> bytes:
        size = weights.end - weights.start
        if size < _LARGE:
            return data[weights.key : weights.end]
        place = {"location": name, "offset": str(weights.start), "length": str(size)}
        pairs = (
            _message(1, key.encode()) + _message(2, value.encode()) for key, value in place.items()
        )
        return _IS_EXTERNAL + b"".join(_message(_EXTERNAL_DATA, pair) for pair in pairs)

    def tensor(field: _Field) -> bytes:
        return _message(_INITIALIZER, _copy(data, field.start, field.end, _RAW_DATA, refer))

    def graph(field: _Field) -> bytes:
        return _message(_GRAPH, _copy(data, field.start, field.end, _INITIALIZER, tensor))

    return _copy(data, 0, len(data), _GRAPH, graph)


def _copy(
    data: mmap.mmap, start: int, end: int, number: int, change: Callable[[_Field], bytes]
) -> bytes:
    """Return the message between two places, with its fields of one number changed."""
    fields = _fields(data, start, end)
    return b"".join(
        change(one) if one.number == number else data[one.key : one.end] for one in fields
    )


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Read a message in the wire format of protocol buffers."""
    while start < end:
        key, content = _number(data, start)
        kind, size = key & 7, 0
        if kind == 2:
            size, content = _number(data, content)
        elif kind == 0:
            _, after = _number(data, content)
            size = after - content
        else:
            size = 8 if kind == 1 else 4
        yield _Field(key >> 3, start, content, content + size)
        start = content + size


def _number(data: mmap.mmap, start: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place behind it."""
    value = 0
    for place in range(10):
        value |= (data[start + place] & 127) << 7 * place
        if data[start + place] < 128:
            return value, start + place + 1
    raise ValueError(f"it is damaged at byte {start}")


def _message(number: int, content: bytes) -> bytes:
    """Return a field that holds bytes."""
    size, digits = len(content), bytearray([number << 3 | 2])
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([*digits, size]) + content
