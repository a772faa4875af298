"""An exported model in ONNX Runtime: its encoder, fusion and decoder; how well they agree with PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import Manifest, fingerprint_of, open_artifact, read_json
from genius_search.config import SearchConfig, SmallEncoderConfig, from_json
from genius_search.data.features import Features
from genius_search.encoders.base import Encoder, ImageInput, TextInput, need_transformers
from genius_search.encoders.pretrained import (
    ClipEncoder,
    check_settings,
    load_image_processor,
    load_tokenizer,
)
from genius_search.encoders.small import SmallEncoder, SmallNetwork, trim_padding
from genius_search.encoders.small_texts import CONFIG_FILE, TOKENIZER_FILE, pair_rows
from genius_search.encoders.texts import read_tokenizer
from genius_search.encoders.uniir import ClipScoreFusion
from genius_search.errors import ArtifactMissing, UsageError, need_packages
from genius_search.model import Genius
from genius_search.nn.arrays import AnyArray
from genius_search.nn.folded import NUM_SPECIAL
from genius_search.nn.generator import Guide
from genius_search.nn.weights import load_weights
from genius_search.search.beam import search
from genius_search.search.decoder import Decoder, DecoderStep, GuidedDecoder
from genius_search.search.table import IdTable, SearchSegment

if TYPE_CHECKING:
    import onnxruntime

KIND: Final = "onnx"
"""The folder's kind in its manifest."""
IMAGE: Final = "image.onnx"
TEXT: Final = "text.onnx"
FUSION: Final = "fusion.onnx"
START: Final = "start.onnx"
STEP: Final = "step.onnx"
SPECIAL: Final = "special.onnx"
"""Logits of the rows before the codes, which the whole vocabulary includes."""
GUIDE: Final = "guide.safetensors"
"""Weights of a guided generator's guide: a few products, one file for every precision."""
READER: Final = "reader"
"""Folder of the tokenizer and the settings of an encoder."""

Precision = Literal["fp32", "int8"]
"""Which of the exported files: as trained, or with weights and inputs of matrix products in 8 bits."""

BATCH: Final = 8
"""Queries that are searched together while decoders are compared."""
NUM_RANDOM_IDS: Final = 20_000
ENCODED_AT_ONCE: Final = 4096


def level_file(level: int) -> str:
    """Return the file of one level's logits; a file each, since a runtime computes all that a graph gives."""
    return f"level_{level}.onnx"


class DecoderFacts(NamedTuple):
    """Sizes of an exported decoder, as its manifest holds them."""

    dim: int
    """Width of a query's embedding."""
    sizes: tuple[int, ...]
    """Codes at each level."""
    width: int
    layers: int
    heads: int
    head_width: int


def open_export(folder: str | Path, precision: Precision) -> Manifest:
    """Open an exported model's folder.

    Raises
    ------
    ArtifactMissing
        there is no exported model, or it was exported without 8-bit files.
    """
    manifest = open_artifact(Path(folder), kind=KIND)
    if not (manifest.folder / precision).is_dir():
        raise ArtifactMissing(f"{folder} has no {precision} files; export it again with --{precision}")
    return manifest


class Session:
    """One graph on one core of the CPU.

    Raises
    ------
    MissingExtra
        ONNX Runtime is not installed.
    """

    def __init__(self, path: Path) -> None:
        need_packages("an exported model needs", "onnxruntime")
        import onnxruntime  # noqa: PLC0415  optional, as said above

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session: onnxruntime.InferenceSession = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return all outputs in the graph's order."""
        found: list[np.ndarray] = self._session.run(None, inputs)
        return found

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Return the only output."""
        (output,) = self.outputs({name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(output)


class OnnxState(NamedTuple):
    """Half-written IDs; only the decoder looks inside."""

    level: int
    """Tokens read, the start token included."""
    prefixes: tuple[Float32[np.ndarray, "queries heads _ _"], ...]
    """Keys and values of each query's prefixes, block after block."""
    past: Float[Tensor, "sides rows_before heads before head_width"] | None
    """Keys and values of the codes before the last, block after block."""
    last: tuple[Float32[np.ndarray, "rows_before heads 1 head_width"], ...]
    """Those of the last code."""
    rows: Int64[Tensor, " rows"] | None
    """The rows that the beams continue; None means all. They are copied when they are next needed."""

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> OnnxState:
        """Return the state of these queries (None: of all), and for each of them of these of its rows."""
        prefixes = self.prefixes
        if queries is not None:
            prefixes = tuple(side[queries.numpy()] for side in prefixes)
        if not self.last:
            return self._replace(prefixes=prefixes)
        flat = rows.flatten()
        return self._replace(prefixes=prefixes, rows=flat if self.rows is None else self.rows[flat])

    def memory(self) -> Float[Tensor, "sides rows heads tokens head_width"]:
        """Return the keys and values of all codes so far, of the rows that go on."""
        num_rows, heads, _, head_width = self.last[0].shape
        rows = torch.arange(num_rows) if self.rows is None else self.rows
        before = 0 if self.past is None else self.past.shape[3]
        memory = torch.empty(len(self.last), len(rows), heads, before + 1, head_width)
        if self.past is not None:
            torch.index_select(self.past, 1, rows, out=memory[:, :, :, :before])
        for side, last in enumerate(self.last):
            memory[side, :, :, before] = torch.from_numpy(last)[rows, :, 0]
        return memory


class OnnxDecoder:
    """An exported generator; a drop-in for :class:`genius_search.search.decoder.T5Decoder`.

    >>> decoder = OnnxDecoder.open("model.onnx", precision="int8")  # doctest: +SKIP
    >>> search(decoder, parts, queries, SearchConfig())  # doctest: +SKIP
    """

    def __init__(self, folder: Path, facts: DecoderFacts) -> None:
        self.sizes = facts.sizes
        self.device = torch.device("cpu")
        self._facts = facts
        sides = [f"{side}_{layer}" for layer in range(facts.layers) for side in ("keys", "values")]
        self._prefix_names = [f"prefix_{side}" for side in sides]
        self._past_names = [f"past_{side}" for side in sides]
        self._offsets = [NUM_SPECIAL + sum(self.sizes[:level]) for level in range(len(self.sizes))]
        self._start, self._step, self._special, *self._levels = (
            Session(folder / name)
            for name in (START, STEP, SPECIAL, *(level_file(level) for level in range(len(self.sizes))))
        )

    @staticmethod
    def open(folder: str | Path, *, precision: Precision = "fp32") -> Decoder:
        """Open what ``genius export onnx`` wrote, with the generator's guide if it has one.

        Raises
        ------
        MissingExtra
            ONNX Runtime is not installed.
        ArtifactMissing, ArtifactMismatch
            the folder is not an exported model, or lacks this precision.
        """
        manifest = open_export(folder, precision)
        facts = manifest.facts["decoder"]
        facts = DecoderFacts(**{**facts, "sizes": tuple(facts["sizes"])})
        decoder = OnnxDecoder(manifest.folder / precision, facts)
        if not (manifest.folder / GUIDE).exists():
            return decoder
        guide = load_weights(manifest.folder / GUIDE, lambda: Guide(facts.dim, facts.sizes))
        return GuidedDecoder(decoder, guide)

    def start(self, queries: Float[Tensor, "queries dim"]) -> OnnxState:
        """Return the state before any code."""
        prefixes = self._start.outputs({"queries": queries.numpy()})
        return OnnxState(level=0, prefixes=tuple(prefixes), past=None, last=(), rows=None)

    def advance(self, state: OnnxState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes, one after the other; on a fresh state the start token comes before them."""
        num_tokens, first = codes.shape[1], max(state.level - 1, 0)
        if num_tokens > len(self.sizes) - state.level:
            raise UsageError(
                f"{num_tokens} codes after {state.level} tokens; an ID has {len(self.sizes)} levels"
            )
        tokens = [codes[:, place] + self._offsets[first + place] for place in range(num_tokens)]
        if state.level == 0:
            tokens.insert(0, torch.zeros(len(codes), dtype=torch.int64))
        hidden = []
        for column in tokens:
            step, state = self._read(state, column)
            hidden.append(step)
        return DecoderStep(hidden[0][:, None] if len(hidden) == 1 else torch.stack(hidden, dim=1), state)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Return unnormalised scores of one level's codes."""
        return self._levels[level](hidden=hidden)

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return log-probabilities of one level's codes, normalised over the level or the vocabulary."""
        if scores == "level":
            return torch.log_softmax(self.logits(hidden, level), dim=-1)
        logits = [head(hidden=hidden) for head in (*self._levels, self._special)]
        totals = torch.stack([part.logsumexp(dim=-1) for part in logits])
        return logits[level] - totals.logsumexp(dim=0)[:, None]

    def _read(
        self, state: OnnxState, tokens: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], OnnxState]:
        facts = self._facts
        memory = state.memory() if state.last else None
        if memory is None:
            nothing = np.zeros((len(tokens), facts.heads, 0, facts.head_width), dtype=np.float32)
            past = [nothing] * len(state.prefixes)
        else:
            past = list(memory.numpy())
        inputs: dict[str, np.ndarray] = {"tokens": tokens.numpy().reshape(len(state.prefixes[0]), -1)}
        inputs.update(zip(self._prefix_names, state.prefixes, strict=True))
        inputs.update(zip(self._past_names, past, strict=True))
        *last, hidden = self._step.outputs(inputs)
        after = OnnxState(state.level + 1, state.prefixes, memory, tuple(last), None)
        return torch.from_numpy(hidden.reshape(len(tokens), facts.width)), after


class OnnxQueryEncoder:
    """An exported model's encoder; a drop-in for any encoder.

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

    needs_pixels: bool = True

    def __init__(self, folder: str | Path, *, precision: Precision = "fp32") -> None:
        manifest = open_export(folder, precision)
        kind, reason = (manifest.facts["encoder"][name] for name in ("kind", "why_not"))
        if kind is None:
            raise UsageError(f"{folder} holds no encoder: {reason}")
        self.spec = f"onnx:{manifest.folder}"
        self.dim = int(manifest.facts["decoder"]["dim"])
        self.fingerprint = fingerprint_of([manifest.fingerprint, precision])
        towers = _Towers(*(Session(manifest.folder / precision / name) for name in (IMAGE, TEXT)))
        reader = manifest.folder / READER
        self._encoder: Encoder = (
            _open_small(reader, towers) if kind == "small" else _CLIPS[kind](reader, towers)
        )

    def image_features(self, images: Sequence[ImageInput]) -> AnyArray:
        """Return the features of images."""
        return self._encoder.image_features(images) if images else torch.zeros(0, self.dim)

    def text_features(self, texts: Sequence[TextInput]) -> AnyArray:
        """Return the features of texts."""
        return self._encoder.text_features(texts) if texts else torch.zeros(0, self.dim)


class _Towers(NamedTuple):
    """The two networks of an encoder."""

    image: Session
    text: Session


class _SmallTowers(SmallNetwork):
    """Stands in a small encoder where PyTorch's network would."""

    device: torch.device = torch.device("cpu")

    def __init__(self, config: SmallEncoderConfig, graphs: _Towers) -> None:
        nn.Module.__init__(self)
        self.dim, self.pair_buckets, self._graphs = config.dim, config.pair_buckets, graphs

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        features: Tensor = self._graphs.image(descriptors=descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        tokens = trim_padding(tokens)
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        features: Tensor = self._graphs.text(tokens=tokens, pairs=pairs)
        return features


def _open_small(folder: Path, towers: _Towers) -> SmallEncoder:
    config = from_json(SmallEncoderConfig, read_json(folder / CONFIG_FILE))
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
    return SmallEncoder(config, _SmallTowers(config, towers), tokenizer, spec=f"small:{folder}")


class _ClipTowers:
    """Stands in a CLIP encoder where transformers' model would."""

    class Output(NamedTuple):
        pooler_output: Tensor

    def __init__(self, config: Any, towers: _Towers) -> None:
        self.config = config
        self._towers = towers

    def get_image_features(self, **inputs: Tensor) -> Output:
        return self.Output(self._towers.image(**inputs))

    def get_text_features(self, **inputs: Tensor) -> Output:
        return self.Output(self._towers.text(**inputs))


class _Clip(ClipEncoder):
    """A CLIP encoder without weights of its own."""

    def __init__(self, folder: Path, towers: _Towers) -> None:
        need_transformers()
        check_settings(folder)
        from transformers import AutoConfig  # noqa: PLC0415  takes seconds to import

        self._name = str(folder)
        self._device = "cpu"
        self._folder = folder
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._type = str(config.model_type)
        self._model = _ClipTowers(config, towers)
        self._pixels = load_image_processor(folder)
        self._tokenizer = load_tokenizer(folder)
        self.dim = self._width()


class _ClipScoreFusion(_Clip, ClipScoreFusion):
    """UniIR's CLIP-SF, likewise: with its own squares of images and its own tokens."""


_CLIPS: dict[str, type[_Clip]] = {"clip": _Clip, "clip-sf": _ClipScoreFusion}


class Agreement(NamedTuple):
    """IDs that a decoder finds, compared with those of the first decoder."""

    name: str
    top1: float
    """Share of the queries with the same best ID."""
    overlap_10: float
    """Mean share of the first decoder's 10 best IDs among its own 10 best."""
    overlap_50: float
    """Likewise of 50; of the beam, where that is narrower."""
    cpu_ms: float
    """Processor time of a query, of all cores together."""


def compare_decoders(
    decoders: Mapping[str, Decoder],
    queries: Float[Tensor, "queries dim"],
    table: IdTable,
    config: SearchConfig,
) -> list[Agreement]:
    """Search the same queries with all decoders, batch by batch in turns; the first sets the standard.

    Raises
    ------
    UsageError
        there are no queries.
    """
    if not len(queries):
        raise UsageError("there are no queries to compare decoders by")
    parts = [SearchSegment(table)]
    batches = queries.split(BATCH)
    found: dict[str, list[np.ndarray]] = {name: [] for name in decoders}
    seconds = dict.fromkeys(decoders, 0.0)
    for decoder in decoders.values():  # warm up
        search(decoder, parts, batches[0], config)
    for batch in batches:
        for name, decoder in decoders.items():
            start = time.process_time()
            beams = search(decoder, parts, batch, config)
            seconds[name] += time.process_time() - start
            rows = np.full((len(batch), config.beam), -1, dtype=np.int64)
            rows[:, : beams.low.shape[1]] = np.where(beams.filled(), beams.low[:, :, 0], -1)
            found[name].append(rows)
    ids = {name: np.concatenate(batches_found) for name, batches_found in found.items()}
    standard = next(iter(ids.values()))
    return [
        Agreement(
            name,
            top1=_overlap(standard, ids[name], 1),
            overlap_10=_overlap(standard, ids[name], 10),
            overlap_50=_overlap(standard, ids[name], 50),
            cpu_ms=1000 * seconds[name] / len(queries),
        )
        for name in decoders
    ]


def real_trial(
    model: Genius, queries: Features, candidates: Features, *, num_queries: int
) -> tuple[Float[Tensor, "queries dim"], IdTable]:
    """Return some of the queries, evenly spaced, and the IDs of all candidates."""
    chosen = np.unique(np.linspace(0, len(queries) - 1, num_queries).round().astype(np.int64))
    encoded = [
        model.encode(batch, candidates.modality[rows].astype(np.int64), numbers=candidates.ids[rows])
        for rows, batch in candidates.batches(ENCODED_AT_ONCE)
    ]
    codes, cosines = (
        np.concatenate([getattr(one, name).numpy() for one in encoded]) for name in ("codes", "code_cosine")
    )
    return model.embed(queries.gather(chosen)), IdTable.build(codes, cosines.astype(np.float32))


def random_trial(
    sizes: Sequence[int], dim: int, *, num_queries: int
) -> tuple[Float[Tensor, "queries dim"], IdTable]:
    """Return random unit vectors and IDs, which tell what a search costs, not how well real ones agree."""
    random = np.random.default_rng(0)
    codes = np.stack([random.integers(0, size, NUM_RANDOM_IDS) for size in sizes], axis=1)
    vectors = torch.from_numpy(random.standard_normal((num_queries, dim)).astype(np.float32))
    return F.normalize(vectors), IdTable.build(codes, np.zeros(NUM_RANDOM_IDS, dtype=np.float32))


def _overlap(
    standard: Int64[np.ndarray, "queries beams"], own: Int64[np.ndarray, "queries beams"], k: int
) -> float:
    shares = [
        np.isin(expected[expected >= 0], found[found >= 0]).mean()
        for expected, found in zip(standard[:, :k], own[:, :k], strict=True)
    ]
    return float(np.mean(shares))
