"""`onnx:`: CLIP and SigLIP as two ONNX graphs, as in the hub's ``onnx-community`` and ``Xenova``.

onnxruntime and tokenizers run them, without PyTorch. Features equal those of transformers with the
same weights, up to rounding.

Memory: onnxruntime copies a file that contains a graph and its weights, but maps weights that are
in another file. So the graph is read here, and passed on with a reference in place of each large
weight, which names the file, offset and length of the weight. The file is in the wire format of
protocol buffers, with the field numbers of `onnx.proto`::

    ModelProto    7 graph        -> GraphProto
    GraphProto    5 initializer  -> TensorProto, repeated
    TensorProto   9 raw_data     the weights, which are replaced by
                 13 external_data  {"location": file, "offset": ..., "length": ...}
                 14 data_location  1, which means "external"
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

_GRAPH: Final = 7
_INITIALIZER: Final = 5
_RAW_DATA: Final = 9
_EXTERNAL_DATA: Final = 13
_IS_EXTERNAL: Final = b"\x70\x01"
"""The field ``data_location`` (14) with the value 1."""
_FOLDER_OF_WEIGHTS: Final = "session.model_external_initializers_file_folder_path"
_MIN_MAPPED_BYTES: Final = 4096
"""Minimum size of weights that become references.

onnxruntime needs the shapes of arrays, which are smaller, in the graph itself."""
GRAPHS: Final = ("text_model", "vision_model")
QUANTIZED: Final = "_quantized"
"""Suffix of the names of graphs in 8 bits."""
_PRECISIONS: Final = ("", "_fp16", QUANTIZED)
"""Suffixes of the graphs' names, in order of preference."""
_SETTINGS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "preprocessor_config.json",
)
_CONTEXT: Final = {"clip": 77, "siglip": 64, "siglip2": 64}
"""Default of the maximum number of tokens, by model type."""
_GRAPH_BATCH: Final = 16
"""Inputs that pass through a graph together."""


class _Tokenizer(NamedTuple):
    """The tokenizer of a model, whose file may be for tokenizers or for sentencepiece."""

    encode: Callable[[list[str]], list[list[int]]]
    """Maps texts to token numbers."""
    end: list[int]
    """The token to append to each text, or nothing."""
    padding: int
    """The token that fills short rows."""


class OnnxEncoder:
    """Image and text features by two ONNX graphs: projected, not normalised.

    Raises
    ------
    ArtifactMissing
        The folder lacks a file.
    ArtifactMismatch
        The folder contains another type of model, or a file is damaged.
    """

    needs_pixels = True

    def __init__(self, spec: str, folder: Path, *, quantized: bool = False) -> None:
        self.spec = spec
        precisions = (QUANTIZED,) if quantized else _PRECISIONS
        self._graphs = dict(zip(GRAPHS, find_graphs(folder, precisions), strict=True))
        self._settings = [folder / name for name in _SETTINGS]
        missing = [file.name for file in self._settings if not file.is_file()]
        if missing:
            raise ArtifactMissing(
                f"{folder} is not a complete ONNX model: it lacks {', '.join(missing)}"
            )
        self._token_settings, config, self._pixel_settings = map(read_json, self._settings[1:])
        self._vocabulary = self._settings[0]
        pieces = folder / "tokenizer.model"
        is_gemma = str(self._token_settings.get("tokenizer_class")).startswith("Gemma")
        if is_gemma and pieces.is_file():
            self._vocabulary = pieces  # SigLIP 2's, which opens in a twentieth of the time
        model_type = config.get("model_type")
        if model_type not in _CONTEXT:
            raise ArtifactMismatch(
                f"{folder} holds a {model_type!r} model; onnx: reads {', '.join(_CONTEXT)}"
            )
        self._is_siglip = model_type != "clip"
        self.max_tokens = int(
            config.get("text_config", {}).get("max_position_embeddings", _CONTEXT[model_type])
        )
        self._sessions: dict[str, tuple[Any, int]] = {}
        """Open graphs, each with the index of the output that holds the features."""
        self._open("text_model")
        session, output = self._sessions["text_model"]
        self.dim = int(session.get_outputs()[output].shape[-1])
        renew_in_children(self)

    def _renew(self) -> None:
        """Forget the open graphs; a forked child opens them again, since their threads are gone."""
        abandon(self._sessions)
        self._sessions = {}

    @cached_property
    def _tokenizer(self) -> _Tokenizer:
        """The tokenizer, which is opened for the first text."""
        file = self._vocabulary
        number_of: Callable[[str], int | None]
        encode: Callable[[list[str]], list[list[int]]]
        if file.suffix == ".json":
            model = read_tokenizer(file)
            number_of = model.token_to_id

            def encode(texts: list[str]) -> list[list[int]]:
                return [encoding.ids for encoding in model.encode_batch(texts)]
        else:
            from sentencepiece import SentencePieceProcessor  # noqa: PLC0415  CLIP does not need it

            try:
                pieces: Any = SentencePieceProcessor(model_file=str(file))
            except RuntimeError as error:
                raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
            number_of = pieces.piece_to_id
            encode = pieces.encode
        end = number_of(self._special_token("eos_token"))
        padding = number_of(self._special_token("pad_token"))
        adds_end = self._token_settings.get("add_eos_token")
        return _Tokenizer(encode, [end] if adds_end and end is not None else [], padding or 0)

    def _special_token(self, name: str) -> str:
        """Return a token from the settings, which may be a text or ``{"content": TEXT}``."""
        token = self._token_settings.get(name)
        return str(token["content"] if isinstance(token, dict) else token)

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the token numbers of whole texts, with an end token if the model needs one."""
        encode, end, _ = self._tokenizer
        return [ids if ids[-1:] == end else ids + end for ids in encode(texts)]

    def _open(self, graph: str) -> None:
        """Open a graph, and find the projected features among its outputs."""
        session = open_graph(self._graphs[graph])
        names = [output.name for output in session.get_outputs()]
        for index, name in enumerate(names):
            if name in ("text_embeds", "image_embeds", "pooler_output"):
                self._sessions[graph] = session, index
                return
        raise ArtifactMismatch(
            f"{self._graphs[graph]} has the outputs {', '.join(names)}, but no features"
        )

    def _run(self, graph: str, **inputs: np.ndarray) -> Float32[np.ndarray, "items dim"]:
        if graph not in self._sessions:
            self._open(graph)
        session, output = self._sessions[graph]
        input_names = [graph_input.name for graph_input in session.get_inputs()]
        outputs = session.run(None, {name: inputs[name] for name in input_names})
        return np.asarray(outputs[output], dtype=np.float32)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and graphs."""
        # Graphs of more than 2 GB have their weights in another file, such as model.onnx_data.
        weights = [Path(f"{file}_data") for file in self._graphs.values()]
        files = [
            self._vocabulary,
            *self._settings[1:],
            *self._graphs.values(),
            *filter(Path.is_file, weights),
        ]
        return fingerprint_of([weights_fingerprint(file) for file in files])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        return min(len(self._tokens([text])[0]), self.max_tokens + 1)

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of texts, which are truncated at the model's maximum length."""
        texts = cut_texts(texts, max_tokens=self.max_tokens)
        if self._is_siglip:  # trained on lower case, which SigLIP 2's tokenizer does not convert to
            texts = [text.lower() for text in texts]
        features = [np.zeros((0, self.dim), dtype=np.float32)]
        for start in range(0, len(texts), _GRAPH_BATCH):
            tokens = self._tokens(texts[start : start + _GRAPH_BATCH])
            length = self.max_tokens
            if not self._is_siglip:  # SigLIP was trained with padding to the full length
                length = min(max(map(len, tokens)), self.max_tokens)
            rows = np.full((len(tokens), length), self._tokenizer.padding, dtype=np.int64)
            for row, ids in zip(rows, tokens, strict=True):
                is_too_long = len(ids) > length
                row[: len(ids)] = [*ids[: length - 1], ids[-1]] if is_too_long else ids
            mask = np.less(np.arange(length), [[len(ids)] for ids in tokens]).astype(np.int64)
            features.append(self._run("text_model", input_ids=rows, attention_mask=mask))
        return np.concatenate(features)

    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the features of images."""
        features = [np.zeros((0, self.dim), dtype=np.float32)]
        for start in range(0, len(images), _GRAPH_BATCH):
            batch = images[start : start + _GRAPH_BATCH]
            pixels = [prepare_pixels(image, self._pixel_settings) for image in batch]
            features.append(self._run("vision_model", pixel_values=np.stack(pixels)))
        return np.concatenate(features)


def find_graphs(folder: Path, precisions: Sequence[str] = _PRECISIONS) -> list[Path]:
    """Return the graphs of texts and of images in a folder, or in its subfolder ``onnx/``.

    Parameters
    ----------
    precisions
        Suffixes of the graphs' names to look for, in order of preference.

    Raises
    ------
    ArtifactMissing
        There is no pair of graphs with the same precision.
    """
    for precision in precisions:
        for parent in (folder / "onnx", folder):
            files = [parent / f"{graph}{precision}.onnx" for graph in GRAPHS]
            if all(file.is_file() for file in files):
                return files
    raise ArtifactMissing(
        f"{folder} holds no ONNX encoder: expected text_model{precisions[0]}.onnx and "
        f"vision_model{precisions[0]}.onnx, there or in a folder onnx/, as in repositories such as "
        "Xenova/clip-vit-base-patch32"
    )


def prepare_pixels(
    image: Image.Image, settings: dict[str, Any]
) -> Float32[np.ndarray, "3 height width"]:
    """Resize, crop and normalise an image as its model's ``preprocessor_config.json`` says."""
    image = image.convert("RGB")
    if settings.get("do_resize", True):
        size = settings["size"]
        shortest_edge = size if isinstance(size, int) else size.get("shortest_edge")
        if shortest_edge is None:
            width, height = size["width"], size["height"]
        else:
            width, height = (int(shortest_edge * side / min(image.size)) for side in image.size)
        image = image.resize((width, height), settings.get("resample", 3))
    if settings.get("do_center_crop"):
        crop = settings["crop_size"]
        width, height = (crop, crop) if isinstance(crop, int) else (crop["width"], crop["height"])
        left = (image.width - width) // 2
        top = (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    scale = np.float32(settings.get("rescale_factor", 1 / 255))
    pixels = np.asarray(image, dtype=np.float32) * scale
    mean = np.array(settings["image_mean"], np.float32)
    deviation = np.array(settings["image_std"], np.float32)
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))


class _Field(NamedTuple):
    """A field of a protocol buffers message, as positions in the file."""

    number: int
    key: int
    """Where the field begins, with its number and wire type."""
    start: int
    """Where the content begins."""
    end: int


def open_graph(file: Path) -> InferenceSession:
    """Open a graph on the CPU.

    Raises
    ------
    ArtifactMismatch
        onnxruntime cannot run the file.
    """
    import onnxruntime  # noqa: PLC0415  takes long to import

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    target = file.resolve()  # files in the hub's cache are links
    try:
        with (
            target.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            graph = replace_weights(data, target.name)
            if len(graph) == len(data):  # all weights are small, or in another file
                return onnxruntime.InferenceSession(
                    file, options, providers=["CPUExecutionProvider"]
                )
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(target.parent))
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common class
        raise ArtifactMismatch(f"{file} cannot be run by onnxruntime: {error}") from None


def replace_weights(data: mmap.mmap, file_name: str) -> bytes:
    """Return a model in which large weights are references to the file that contains them."""

    def replace_raw_data(weights: _Field) -> bytes:
        size = weights.end - weights.start
        if size < _MIN_MAPPED_BYTES:
            return data[weights.key : weights.end]
        reference = {"location": file_name, "offset": str(weights.start), "length": str(size)}
        encoded = [_IS_EXTERNAL]
        for key, value in reference.items():
            pair = _encode_field(1, key.encode()) + _encode_field(2, value.encode())
            encoded.append(_encode_field(_EXTERNAL_DATA, pair))
        return b"".join(encoded)

    def replace_in_tensor(field: _Field) -> bytes:
        tensor = _copy_message(data, field.start, field.end, _RAW_DATA, replace_raw_data)
        return _encode_field(_INITIALIZER, tensor)

    def replace_in_graph(field: _Field) -> bytes:
        graph = _copy_message(data, field.start, field.end, _INITIALIZER, replace_in_tensor)
        return _encode_field(_GRAPH, graph)

    return _copy_message(data, 0, len(data), _GRAPH, replace_in_graph)


def _copy_message(
    data: mmap.mmap, start: int, end: int, number: int, replace: Callable[[_Field], bytes]
) -> bytes:
    """Return the message ``data[start:end]``, in which fields with one number are replaced."""
    parts: list[bytes] = []
    for field in _read_fields(data, start, end):
        is_replaced = field.number == number
        parts.append(replace(field) if is_replaced else data[field.key : field.end])
    return b"".join(parts)


def _read_fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message ``data[start:end]``.

    A field is a key, ``number << 3 | wire type``, and a content, whose size depends on the type:

    ====  =====================================
    type  content
    ====  =====================================
    0     an integer of variable length
    1     8 bytes
    2     an integer n of variable length, n bytes
    5     4 bytes
    ====  =====================================
    """
    while start < end:
        key, content = _read_varint(data, start)
        wire_type = key & 7
        if wire_type == 2:
            size, content = _read_varint(data, content)
        elif wire_type == 0:
            _, after = _read_varint(data, content)
            size = after - content
        else:
            size = 8 if wire_type == 1 else 4
        yield _Field(key >> 3, start, content, content + size)
        start = content + size


def _read_varint(data: mmap.mmap, start: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it.

    Each byte holds 7 bits, the lowest ones first; its highest bit means that more bytes follow.
    """
    value = 0
    for index in range(10):
        byte = data[start + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, start + index + 1
    raise ValueError(f"it is damaged at byte {start}")


def _encode_field(number: int, content: bytes) -> bytes:
    """Return a field of wire type 2."""
    key_and_size = bytearray([number << 3 | 2])
    size = len(content)
    while size > 127:
        key_and_size.append(size & 127 | 128)
        size >>= 7
    return bytes([*key_and_size, size]) + content
