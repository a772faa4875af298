"""``genius export onnx``: a model's encoder, fusion and decoder as ONNX files in one folder."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from genius_search.artifact import Manifest
from genius_search.encoders.base import Encoder
from genius_search.encoders.pretrained import ClipEncoder
from genius_search.encoders.small import SmallEncoder, SmallNetwork
from genius_search.encoders.small_texts import CONFIG_FILE, PADDING, TOKENIZER_FILE, StoredSmall
from genius_search.encoders.uniir import ClipScoreFusion
from genius_search.errors import UsageError, need_packages
from genius_search.lab.onnx.run import (
    FUSION,
    GUIDE,
    IMAGE,
    KIND,
    READER,
    SPECIAL,
    START,
    STEP,
    TEXT,
    DecoderFacts,
    level_file,
)
from genius_search.model import Genius
from genius_search.nn.folded import NUM_SPECIAL
from genius_search.nn.fusion import Fusion
from genius_search.nn.generator import Block, Generator, RMSNorm
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter, write_json

OPSET: Final = 20
IR_VERSION: Final = 10
"""Read by every ONNX Runtime since 1.18 (2024)."""
MAX_BYTES: Final = 2**31 - 2**20
"""One file holds at most 2 GiB, its structure included."""
SETTINGS_FILES: Final = ("*.json", "*.txt", "*.model")
"""Files of a folder in Hugging Face's layout, without the weights."""
NUM_TRACED_TOKENS: Final = 9
"""Length of the text that is traced; any other does as well."""


def export_onnx(model: Genius, folder: Path, *, int8: bool = False, progress: Progress) -> Manifest:
    """Write a model's encoder where that is possible, its fusion and its decoder; keep a finished folder.

    Parameters
    ----------
    int8
        write versions of all graphs with 8-bit matrix products too.

    Raises
    ------
    MissingExtra
        the extra ``onnx`` is not installed.
    UsageError
        the folder holds something else, or the generator is of a kind that cannot be exported.
    """
    need_packages("exporting needs", "onnx", "onnxruntime")
    generator = model.trained_generator
    writer = ArtifactWriter(folder, kind=KIND, config={"int8": int8}, inputs={"model": model.fingerprint})
    finished = writer.finished()
    if finished is not None:
        return finished
    for part in writer.path.iterdir():  # of a killed run; writing it again takes no longer than checking it
        if part.is_dir():
            shutil.rmtree(part)
    plain = writer.path / "fp32"
    plain.mkdir()
    progress.say("writing the decoder and the fusion")
    decoder = write_decoder(generator, plain)
    write_fusion(model.quantizer.fusion, model.dim, plain)
    if generator.guide is not None:
        write_weights(writer.path / GUIDE, generator.guide.state_dict())
    encoder = _write_encoder(model.encoder, writer.path, progress)
    if int8:
        (writer.path / "int8").mkdir()
        paths = sorted(plain.iterdir())
        progress.begin("8 bits", len(paths))
        for done, path in enumerate(paths, start=1):
            quantize(path, writer.path / "int8" / path.name)
            progress.advance(done, {})
    return writer.finish(facts={"decoder": decoder._asdict(), "encoder": encoder})


def _write_encoder(encoder: Encoder, folder: Path, progress: Progress) -> dict[str, str | None]:
    """Write an encoder's towers and its reader; return its kind, or why it cannot be exported."""
    match encoder.trained if isinstance(encoder, StoredSmall) else encoder:
        case SmallEncoder(pictures=None) as small:
            write_small(small.network, small.dim, folder / "fp32")
            (folder / READER).mkdir()
            (folder / READER / TOKENIZER_FILE).write_text(small.tokenizer.to_str())
            write_json(folder / READER / CONFIG_FILE, asdict(small.config))
            return {"kind": "small", "why_not": None}
        case ClipEncoder() as clip:
            progress.say(f"tracing {clip.spec}, which takes a minute or more")
            write_towers(clip, folder / "fp32")
            copy_reader(clip, folder / READER)
            kind = "clip-sf" if isinstance(clip, ClipScoreFusion) else "clip"
            return {"kind": kind, "why_not": None}
        case _ if encoder.spec.startswith("precomputed:"):
            reason = f"{encoder.spec} looks features up, and has no network"
        case _:
            reason = (
                f"{encoder.spec} is of a kind that cannot be exported; small (but clip-ff, blip-ff and those "
                "with a pretrained network of pictures), clip and uniir's CLIP-SF can"
            )
    progress.say(f"the encoder is not exported: {reason}")
    return {"kind": None, "why_not": reason}


class Graph:
    """Collects nodes and weights, and writes them as one file. A value is the name of what a node gives.

    >>> graph = Graph("double")
    >>> number = graph.input("number", ["rows"])
    >>> graph.output("doubled", graph.op("Add", number, number), ["rows"])
    >>> graph.save(Path("double.onnx"))  # doctest: +SKIP
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[int, ...], str] = {}

    def input(self, name: str, shape: Sequence[str | int], *, dtype: int = TensorProto.FLOAT) -> str:
        """Add an input; sizes that vary have a name instead of a number."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, value: str, shape: Sequence[str | int]) -> None:
        """Add an output."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def weight(self, tensor: Tensor | float) -> str:
        """Add numbers of the network, in single precision."""
        array = torch.as_tensor(tensor).detach().to("cpu", torch.float32).contiguous().numpy()
        return self._add_weight(array)

    def constant(self, *integers: int) -> str:
        """Add integers: a shape, axes, places."""
        if integers not in self._constants:
            self._constants[integers] = self._add_weight(np.array(integers, dtype=np.int64))
        return self._constants[integers]

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its value."""
        return self._add_node(kind, inputs, 1, attributes)[0]

    def split(self, value: str, pieces: int) -> list[str]:
        """Return equal pieces along the last axis."""
        return self._add_node("Split", (value,), pieces, {"axis": -1, "num_outputs": pieces})

    def save(self, path: Path) -> None:
        """Check the graph and write the file; raise :class:`UsageError` if the weights do not fit in one."""
        size = sum(len(weight.raw_data) for weight in self._weights)
        if size > MAX_BYTES:
            raise UsageError(
                f"the {self._name} has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2.1 GB"
            )
        model = helper.make_model(
            helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._weights),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="genius",
        )
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)

    def _add_weight(self, array: np.ndarray) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def _add_node(
        self, kind: str, inputs: Sequence[str], num_outputs: int, attributes: dict[str, Any]
    ) -> list[str]:
        names = [f"{kind.lower()}_{len(self._nodes)}_{place}" for place in range(num_outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names


def product(graph: Graph, value: str, *layers: nn.Linear | Tensor) -> str:
    """Multiply by the weights of linear layers, side by side in one product; without biases."""
    weights = [layer.weight if isinstance(layer, nn.Linear) else layer for layer in layers]
    return graph.op("MatMul", value, graph.weight(torch.cat(weights).T))


def apply_layers(graph: Graph, value: str, layers: Iterable[nn.Module]) -> str:
    """Apply layers one after the other."""
    activations = {nn.GELU: "Gelu", nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid"}
    for layer in layers:
        match layer:
            case nn.Linear():
                value = graph.op("Add", product(graph, value, layer), graph.weight(layer.bias))
            case nn.LayerNorm():
                weights = graph.weight(layer.weight), graph.weight(layer.bias)
                value = graph.op("LayerNormalization", value, *weights, epsilon=layer.eps)
            case nn.GELU() | nn.ReLU() | nn.Sigmoid():
                value = graph.op(activations[type(layer)], value)
            case nn.Identity():
                pass
            case _:
                raise TypeError(type(layer))
    return value


def apply_tower(graph: Graph, value: str, tower: nn.Sequential, shortcut: nn.Linear | None) -> str:
    """Apply the layers of a small encoder's tower, and the shortcut around all but the first."""
    first, *layers = tower
    normed = apply_layers(graph, value, [first])
    features = apply_layers(graph, normed, layers)
    return (
        features if shortcut is None else graph.op("Add", features, apply_layers(graph, normed, [shortcut]))
    )


def rms_norm(graph: Graph, value: str, norm: RMSNorm) -> str:
    """Apply T5's norm, in the form that ONNX Runtime recognises and computes in one go."""
    square = graph.op("Pow", value, graph.weight(2.0))
    mean = graph.op("ReduceMean", square, graph.constant(-1), keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.weight(1e-6)))
    return graph.op("Mul", graph.op("Div", value, root), graph.weight(norm.weight))


def normalize(graph: Graph, value: str) -> str:
    """Scale rows to length 1."""
    length = graph.op("ReduceL2", value, graph.constant(-1), keepdims=1)
    return graph.op("Div", value, graph.op("Max", length, graph.weight(1e-12)))


def write_decoder(generator: Generator, folder: Path) -> DecoderFacts:
    """Write the graphs of a generator into a folder that exists.

    Raises
    ------
    UsageError
        the generator computes in another way than ours, or its levels share an alphabet.
    """
    config, sizes = generator.config, generator.sizes
    offsets = tuple(accumulate(sizes, initial=NUM_SPECIAL))[:-1]
    if generator.offsets != offsets or hasattr(generator, "decoding"):
        raise UsageError(f"a generator of the kind {type(generator).__name__} cannot be exported")
    _start(generator).save(folder / START)
    _step(generator).save(folder / STEP)
    tied = generator.embedding.weight * config.width**-0.5
    output = tied if generator.head is None else generator.head.weight
    special, *levels = output.split([NUM_SPECIAL, *sizes])
    for name, weights in ((SPECIAL, special), *((level_file(i), level) for i, level in enumerate(levels))):
        graph = Graph("head of the decoder")
        hidden = graph.input("hidden", ["rows", config.width])
        graph.output("logits", product(graph, hidden, weights), ["rows", len(weights)])
        graph.save(folder / name)
    dim = generator.prefix_projection.in_features
    return DecoderFacts(dim, sizes, config.width, config.layers, config.heads, config.head_width)


def _start(generator: Generator) -> Graph:
    """Build the graph from queries to the keys and values of their prefixes."""
    config = generator.config
    graph = Graph("start of the decoder")
    queries = graph.input("queries", ["queries", generator.prefix_projection.in_features])
    flat = apply_layers(graph, queries, [generator.prefix_projection])
    prefixes = graph.op("Reshape", flat, graph.constant(0, config.prefixes, config.width))
    prefixes = rms_norm(graph, prefixes, generator.prefix_norm)
    split = graph.constant(0, 0, config.heads, config.head_width)
    for layer, block in enumerate(_blocks(generator)):
        both = product(graph, prefixes, block.cross_attention.k, block.cross_attention.v)
        keys, values = (graph.op("Reshape", piece, split) for piece in graph.split(both, 2))
        for side, value, axes in (("keys", keys, [0, 2, 3, 1]), ("values", values, [0, 2, 1, 3])):
            turned = graph.op("Transpose", value, perm=axes)
            graph.output(f"prefix_{side}_{layer}", turned, _prefix_shape(generator, side))
    return graph


def _step(generator: Generator) -> Graph:
    """Build the graph that reads one token of each beam."""
    config, num_levels = generator.config, len(generator.sizes)
    graph = Graph("step of the decoder")
    tokens = graph.input("tokens", ["queries", "beams"], dtype=TensorProto.INT64)
    past_shape: list[str | int] = ["rows", config.heads, "past", config.head_width]
    prefixes, past = [], []
    for layer in range(config.layers):
        names = f"keys_{layer}", f"values_{layer}"
        prefixes.append(
            _Memory(*(graph.input(f"prefix_{name}", _prefix_shape(generator, name)) for name in names))
        )
        past.append(_Memory(*(graph.input(f"past_{name}", past_shape) for name in names)))
    # What a token adds to the scores of those before it depends on the distance only: the farthest stand
    # first, and the last columns are those of the tokens that are there.
    farthest_first = graph.weight(generator.position_biases(num_levels)[0, :, -1])
    num_past = graph.op("Shape", past[0].keys, start=2, end=3)
    first = graph.op("Sub", graph.constant(num_levels - 1), num_past)
    bias = graph.op("Slice", farthest_first, first, graph.constant(num_levels), graph.constant(1))
    bias = graph.op("Unsqueeze", bias, graph.constant(1))
    inner_width = graph.constant(config.heads * config.head_width)
    joined = graph.op("Concat", graph.op("Shape", tokens), inner_width, axis=0)
    hidden = graph.op("Gather", graph.weight(generator.embedding.weight), tokens)
    for layer, block in enumerate(_blocks(generator)):
        attention = block.self_attention
        normed = rms_norm(graph, hidden, block.self_norm)
        by_row = graph.constant(-1, config.heads, 1, config.head_width)
        queries, keys, values = (
            graph.op("Reshape", piece, by_row)
            for piece in graph.split(product(graph, normed, attention.q, attention.k, attention.v), 3)
        )
        attended = _attend_to_past(graph, queries, _Memory(keys, values), past[layer], bias)
        attended = graph.op("Reshape", attended, joined)
        hidden = graph.op("Add", hidden, product(graph, attended, attention.o))
        normed = rms_norm(graph, hidden, block.cross_norm)
        attended = _attend_to_prefixes(
            graph, product(graph, normed, block.cross_attention.q), prefixes[layer], generator
        )
        hidden = graph.op("Add", hidden, product(graph, attended, block.cross_attention.o))
        normed = rms_norm(graph, hidden, block.feedforward_norm)
        inner = graph.op("Relu", product(graph, normed, block.wi))
        hidden = graph.op("Add", hidden, product(graph, inner, block.wo))
        for side, value in (("keys", keys), ("values", values)):
            graph.output(f"{side}_{layer}", value, ["rows", config.heads, 1, config.head_width])
    hidden = rms_norm(graph, hidden, generator.final_norm)
    graph.output("hidden", hidden, ["queries", "beams", config.width])
    return graph


class _Memory(NamedTuple):
    """Values in a graph that attention looks at."""

    keys: str
    values: str


def _attend_to_past(graph: Graph, queries: str, own: _Memory, past: _Memory, bias: str) -> str:
    """Attend from one token of each beam to the tokens before it and to itself, which are never joined."""
    before = graph.op("MatMul", queries, graph.op("Transpose", past.keys, perm=[0, 1, 3, 2]))
    itself = graph.op("ReduceSum", graph.op("Mul", queries, own.keys), graph.constant(-1), keepdims=1)
    scores = graph.op("Add", graph.op("Concat", before, itself, axis=-1), bias)
    shares = graph.op("Softmax", scores, axis=-1)
    last, axis = graph.constant(-1), graph.constant(3)
    past_shares = graph.op("Slice", shares, graph.constant(0), last, axis)
    own_share = graph.op("Slice", shares, last, graph.constant(2**62), axis)
    mixed = graph.op("MatMul", past_shares, past.values)
    return graph.op("Add", mixed, graph.op("Mul", own_share, own.values))


def _attend_to_prefixes(graph: Graph, projected: str, prefixes: _Memory, generator: Generator) -> str:
    """Attend from all beams of a query to its prefixes, which they share."""
    heads, width = generator.config.heads, generator.config.head_width
    queries = graph.op("Reshape", projected, graph.constant(0, 0, heads, width))
    queries = graph.op("Transpose", queries, perm=[0, 2, 1, 3])
    shares = graph.op("Softmax", graph.op("MatMul", queries, prefixes.keys), axis=-1)
    mixed = graph.op("Transpose", graph.op("MatMul", shares, prefixes.values), perm=[0, 2, 1, 3])
    return graph.op("Reshape", mixed, graph.constant(0, 0, heads * width))


def _prefix_shape(generator: Generator, side: str) -> list[str | int]:
    """Return the shape of a query's prefix keys, which lie ready for a product, or values."""
    config = generator.config
    sizes = [config.prefixes, config.head_width]
    return ["queries", config.heads, *(reversed(sizes) if side.startswith("keys") else sizes)]


def _blocks(generator: Generator) -> list[Block]:
    return [block for block in generator.blocks if isinstance(block, Block)]


def write_fusion(fusion: nn.Module, dim: int, folder: Path) -> None:
    """Write the graph from an image's and a text's features to one unit embedding."""
    graph = Graph("fusion")
    image, text = (graph.input(name, ["items", dim]) for name in ("image", "text"))
    if isinstance(fusion, Fusion):
        sides = [
            apply_layers(graph, value, [layer, nn.ReLU()])
            for value, layer in ((text, fusion.text_projection_layer), (image, fusion.image_projection_layer))
        ]
        joint = graph.op("Concat", *sides, axis=-1)
        mixed = apply_layers(graph, joint, [fusion.combiner_layer, nn.ReLU(), fusion.output_layer])
        share = apply_layers(graph, joint, fusion.dynamic_scalar)
        # λ·text + (1−λ)·image = image + λ·(text − image)
        both = graph.op("Add", image, graph.op("Mul", share, graph.op("Sub", text, image)))
        fused = graph.op("Add", mixed, both)
    else:  # SumFusion
        fused = graph.op("Add", normalize(graph, image), normalize(graph, text))
    graph.output("embedding", normalize(graph, fused), ["items", dim])
    graph.save(folder / FUSION)


def write_small(network: SmallNetwork, dim: int, folder: Path) -> None:
    """Write both towers of a small encoder; tokenizing and describing images stay outside."""
    graph = Graph("image tower")
    descriptors = graph.input("descriptors", ["items", network.num_descriptors])
    features = apply_tower(graph, descriptors, network.image_tower, network.image_shortcut)
    graph.output("features", features, ["items", dim])
    graph.save(folder / IMAGE)

    graph = Graph("text tower")
    sums = []
    for name, table in (("tokens", network.words), ("pairs", network.pairs)):
        weights = table.weight.detach().clone()
        weights[PADDING] = 0
        numbers = graph.input(name, ["items", name], dtype=TensorProto.INT64)
        vectors = graph.op("Gather", graph.weight(weights), numbers)
        sums.append(graph.op("ReduceSum", vectors, graph.constant(1), keepdims=0))
    features = apply_tower(graph, graph.op("Add", *sums), network.text_tower, network.text_shortcut)
    graph.output("features", features, ["items", dim])
    graph.save(folder / TEXT)


def write_towers(encoder: ClipEncoder, folder: Path) -> None:
    """Write the image and the text tower of a CLIP or SigLIP, traced by PyTorch.

    Raises
    ------
    MissingExtra
        onnxscript is not installed.
    UsageError
        a tower is too large for one file.
    """
    need_packages(f"exporting {encoder.spec} needs", "onnxscript")
    model = encoder._model.eval()  # noqa: SLF001
    config = model.config
    side = config.vision_config.image_size
    _trace(_ImageTower(model), {"pixel_values": torch.zeros(2, 3, side, side)}, (0,), folder / IMAGE)
    is_padded = config.model_type == "siglip"
    length = config.text_config.max_position_embeddings if is_padded else NUM_TRACED_TOKENS
    tokens = torch.full((2, length), config.text_config.eos_token_id)
    inputs = {"input_ids": tokens}
    if not is_padded and not isinstance(encoder, ClipScoreFusion):
        inputs["attention_mask"] = torch.ones_like(tokens)
    axes = (0,) if is_padded else (0, 1)
    _trace(_TextTower(model), inputs, axes, folder / TEXT)


def copy_reader(encoder: ClipEncoder, folder: Path) -> None:
    """Copy the tokenizer's and the image processor's files into an empty folder."""
    folder.mkdir(exist_ok=True)
    for pattern in SETTINGS_FILES:
        for path in encoder._folder.glob(pattern):  # noqa: SLF001
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder / path.name)


class _ImageTower(nn.Module):
    """Pixels to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the features of images."""
        features: Tensor = self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return features


class _TextTower(nn.Module):
    """Token numbers to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the features of texts."""
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        features: Tensor = self.model.get_text_features(input_ids=input_ids, **mask).pooler_output
        return features


def _trace(tower: nn.Module, inputs: dict[str, Tensor], axes: tuple[int, ...], path: Path) -> None:
    """Write a network with PyTorch's exporter; ``axes`` of every input vary."""
    size = sum(weight.nbytes for weight in tower.parameters())
    if size > MAX_BYTES:
        raise UsageError(f"{path.stem} tower: {size / 1e9:.1f} GB of weights, and an ONNX file holds 2.1 GB")
    with _quiet():
        torch.onnx.export(
            tower.eval(),
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=["features"],
            dynamic_shapes=(dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) * len(inputs),
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    onnx.checker.check_model(path, full_check=True)


def quantize(source: Path, target: Path) -> None:
    """Write the 8-bit version of a graph's file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415  slow to import

    with _quiet():
        quantize_dynamic(
            source, target, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the exporters: deprecations inside PyTorch, advice to simplify simple graphs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
