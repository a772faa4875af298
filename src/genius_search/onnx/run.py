"""A query's embedding by ONNX Runtime: an exported model's encoder and fusion."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from genius_search.artifact import Manifest, fingerprint_of, open_artifact
from genius_search.config import SmallEncoderConfig
from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import ImageInput, TextInput, decoded_images
from genius_search.encoders.descriptors import describe
from genius_search.encoders.pretrained import ClipEncoder, load_tokenizer, need_transformers, read_json
from genius_search.encoders.small import CONFIG_FILE, TOKENIZER_FILE, pair_rows, token_rows
from genius_search.encoders.uniir import ClipScoreFusion
from genius_search.errors import ArtifactMissing, MissingExtra, UsageError
from genius_search.nn.generator import NUM_SPECIAL, Guide
from genius_search.search.decoder import Decoding, GuidedDecoder

IMAGE: Final = "image.onnx"
TEXT: Final = "text.onnx"
FUSION: Final = "fusion.onnx"
READER: Final = "reader"
"""Folder of what turns texts and pictures into the numbers that the towers read: tokenizer, settings."""


if TYPE_CHECKING:
    import onnxruntime

KIND: Final = "onnx"
"""Of the folder, in its manifest."""
START: Final = "start.onnx"
STEP: Final = "step.onnx"
GUIDE: Final = "guide.safetensors"
"""What a guided generator adds (``models/guide.py``); one file for every precision, a few products."""
SPECIAL: Final = "special.onnx"
"""Logits of the rows before the codes, which the whole vocabulary includes."""


def head_file(level: int) -> str:
    """Logits of one level's codes; a file each, since a runtime computes all that a graph gives."""
    return f"level_{level}.onnx"


Precision = Literal["fp32", "int8"]
"""Which of the exported files: as trained, or with weights and inputs of matrix products in 8 bits."""


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What a reader must know of an exported decoder."""

    dim: int
    """Width of a query's embedding."""
    sizes: tuple[int, ...]
    """Codes at each level."""
    width: int
    layers: int
    heads: int
    head_width: int

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {**asdict(self), "sizes": list(self.sizes)}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> DecoderFacts:
        """What :meth:`to_json` gave."""
        return DecoderFacts(**{**facts, "sizes": tuple(facts["sizes"])})


def open_export(folder: str | Path, precision: Precision) -> Manifest:
    """Open an exported model's folder, and see that it has this precision.

    Raises
    ------
    ArtifactMissing
        there is no exported model, or it was exported without 8-bit files.
    """
    folder = Path(folder)
    manifest = open_artifact(folder, kind=KIND)
    if not (folder / precision).is_dir():
        raise ArtifactMissing(f"{folder} has no {precision} files; export it again with --{precision}")
    return manifest


def open_session(path: Path, *, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU.

    Raises
    ------
    MissingExtra
        ONNX Runtime is not installed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingExtra(
            "this needs onnxruntime, which is not installed: pip install genius-retrieval[onnx]"
        )
    import onnxruntime  # noqa: PLC0415  optional, as said above

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxState(NamedTuple):
    """Half-written IDs. Nobody looks inside but the decoder."""

    level: int
    """Codes read so far, the start token included."""
    prefixes: tuple[Float32[np.ndarray, "queries heads _ _"], ...]
    """Keys and values of each query's prefixes, block after block."""
    past: Float[Tensor, "sides rows_before heads before head_width"] | None
    """Keys and values of the codes before the last, block after block."""
    fresh: tuple[Float32[np.ndarray, "rows_before heads 1 head_width"], ...]
    """Those of the last."""
    rows: Int64[Tensor, " rows"] | None
    """Which of those rows the beams continue; None: all. They are copied when next needed."""

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> OnnxState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""
        prefixes = self.prefixes
        if queries is not None:
            kept = queries.numpy()
            prefixes = tuple(side[kept] for side in prefixes)
        if not self.fresh:
            return self._replace(prefixes=prefixes)
        flat = rows.flatten()
        return self._replace(prefixes=prefixes, rows=flat if self.rows is None else self.rows[flat])

    def memory(self) -> Float[Tensor, "sides rows heads tokens head_width"]:
        """Keys and values of all codes so far, of the rows that go on."""
        num_rows, heads, _, head_width = self.fresh[0].shape
        rows = torch.arange(num_rows) if self.rows is None else self.rows
        before = 0 if self.past is None else self.past.shape[3]
        memory = torch.empty(len(self.fresh), len(rows), heads, before + 1, head_width)
        if self.past is not None:
            torch.index_select(self.past, 1, rows, out=memory[:, :, :, :before])
        last, places = memory[:, :, :, before].numpy(), rows.numpy()
        for side, fresh in enumerate(self.fresh):
            last[side] = fresh[places, :, 0]
        return memory


class OnnxStep(NamedTuple):
    """What the decoder says after each code it was given, and the state after the last."""

    hidden: Float[Tensor, "rows tokens width"]
    state: OnnxState


class OnnxDecoder:
    """An exported generator, ready to search; gives what :class:`genius_search.search.decoder.Decoder` gives.

    >>> decoder = OnnxDecoder.open("model.onnx", precision="int8")  # doctest: +SKIP
    >>> search(decoder, parts, queries, SearchConfig())  # doctest: +SKIP
    """

    def __init__(self, folder: Path, facts: DecoderFacts, *, threads: int = 1) -> None:
        self.sizes = facts.sizes
        self.device = torch.device("cpu")
        self._facts = facts
        sides = [f"{side}_{layer}" for layer in range(facts.layers) for side in ("keys", "values")]
        self._prefix_names = [f"prefix_{side}" for side in sides]
        self._past_names = [f"past_{side}" for side in sides]
        self._offsets = [NUM_SPECIAL + sum(self.sizes[:level]) for level in range(len(self.sizes))]
        self._start, self._step, self._special = (
            Runner(open_session(folder / name, threads=threads)) for name in (START, STEP, SPECIAL)
        )
        self._heads = [
            Runner(open_session(folder / head_file(level), threads=threads))
            for level in range(len(self.sizes))
        ]

    @staticmethod
    def open(folder: str | Path, *, precision: Precision = "fp32", threads: int = 1) -> Decoding:
        """Open what ``genius export onnx`` wrote, with the generator's guide if it has one.

        Raises
        ------
        MissingExtra
            ONNX Runtime is not installed.
        ArtifactMissing, ArtifactMismatch
            the folder is not an exported model, or lacks this precision.
        """
        manifest = open_export(folder, precision)
        facts = DecoderFacts.from_json(manifest.facts["decoder"])
        decoder = OnnxDecoder(Path(folder) / precision, facts, threads=threads)
        weights = Path(folder) / GUIDE
        if not weights.exists():
            return decoder
        guide = Guide(facts.dim, facts.sizes)
        guide.load_state_dict(load_file(weights))
        return GuidedDecoder(decoder, guide)

    def start(self, queries: Float[Tensor, "queries dim"]) -> OnnxState:
        """The state before anything is read."""
        prefixes = self._start({"queries": queries.numpy()})
        return OnnxState(level=0, prefixes=tuple(prefixes), past=None, fresh=(), rows=None)

    def advance(self, state: OnnxState, codes: Int64[Tensor, "rows tokens"]) -> OnnxStep:
        """Read codes, one after the other; on a fresh state the start token comes before them."""
        num_tokens = codes.shape[1]
        first = max(state.level - 1, 0)
        if num_tokens > len(self.sizes) - state.level:
            raise UsageError(
                f"{num_tokens} codes after {state.level} tokens; an ID has {len(self.sizes)} levels"
            )
        said: list[Tensor] = []
        if state.level == 0:
            hidden, state = self._read(state, torch.zeros(len(codes), dtype=torch.int64))
            said.append(hidden)
        for place in range(num_tokens):
            hidden, state = self._read(state, codes[:, place] + self._offsets[first + place])
            said.append(hidden)
        return OnnxStep(said[0][:, None] if len(said) == 1 else torch.stack(said, dim=1), state)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Unnormalised scores of one level's codes."""
        return self._heads[level].one(hidden=hidden)

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Log-probabilities of one level's codes, normalised over the level or the whole vocabulary."""
        if scores == "level":
            return torch.log_softmax(self.logits(hidden, level), dim=-1)
        logits = [head.one(hidden=hidden) for head in (*self._heads, self._special)]
        totals = torch.stack([part.logsumexp(dim=-1) for part in logits])
        return logits[level] - totals.logsumexp(dim=0)[:, None]

    def _read(
        self, state: OnnxState, tokens: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], OnnxState]:
        facts = self._facts
        memory = state.memory() if state.fresh else None
        nothing = np.zeros((len(tokens), facts.heads, 0, facts.head_width), dtype=np.float32)
        past: list[np.ndarray] = [nothing] * len(state.prefixes) if memory is None else list(memory.numpy())
        given: dict[str, np.ndarray] = {"tokens": tokens.numpy().reshape(len(state.prefixes[0]), -1)}
        given.update(zip(self._prefix_names, state.prefixes, strict=True))
        given.update(zip(self._past_names, past, strict=True))
        *fresh, hidden = self._step(given)
        after = OnnxState(state.level + 1, state.prefixes, memory, tuple(fresh), None)
        return torch.from_numpy(hidden.reshape(len(tokens), facts.width)), after


class Runner:
    """Runs one graph."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """What the graph gives for these inputs, in its order."""
        found: list[np.ndarray] = self._session.run(None, inputs)
        return found

    def one(self, **inputs: Tensor) -> Tensor:
        """The only thing that a graph gives."""
        return torch.from_numpy(self({name: value.numpy() for name, value in inputs.items()})[0])


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
    """Describes pictures and numbers tokens as :class:`genius_search.encoders.small.SmallEncoder` does."""

    def __init__(self, manifest: Manifest, towers: _Towers) -> None:
        folder = manifest.folder / READER
        self._config = SmallEncoderConfig(**read_json(folder / CONFIG_FILE))
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._towers = towers

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        return self._towers.image.one(descriptors=describe(decoded_images(images)))

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
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._kind = str(config.model_type)
        self._model = _Network(config, towers)
        self._pixels = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        self._tokenizer = load_tokenizer(folder)


class _ClipScoreFusionReader(_ClipReader, ClipScoreFusion):
    """UniIR's CLIP-SF, likewise: its own squares of pictures and its own tokens."""


_READERS: dict[str, Callable[[Manifest, _Towers], _Reader]] = {
    "small": _SmallReader,
    "clip": _ClipReader,
    "clip-sf": _ClipScoreFusionReader,
}
