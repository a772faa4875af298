"""``genius export onnx``: a model's query side and its decoder as ONNX files in one folder."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NewType

import numpy as np
import onnx
import torch
from jaxtyping import Float
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from genius_search.artifact import ArtifactWriter, Manifest, write_json
from genius_search.encoders.base import Encoder
from genius_search.encoders.descriptors import DESCRIPTOR_SIZE
from genius_search.encoders.pretrained import ClipEncoder
from genius_search.encoders.small import CONFIG_FILE, PADDING, TOKENIZER_FILE, SmallEncoder, SmallNetwork
from genius_search.encoders.uniir import ClipScoreFusion
from genius_search.errors import MissingExtra, UsageError
from genius_search.model import Genius
from genius_search.nn.fusion import Fusion
from genius_search.nn.generator import NUM_SPECIAL, Attention, Block, Generator, RMSNorm
from genius_search.nn.weights import write_weights
from genius_search.onnx.run import (
    FUSION,
    GUIDE,
    IMAGE,
    KIND,
    SPECIAL,
    START,
    STEP,
    TEXT,
    DecoderFacts,
    head_file,
)
from genius_search.progress import Progress

OPSET: Final = 20
IR_VERSION: Final = 10
"""Read by every ONNX Runtime since 1.18 (2024)."""
MOST_BYTES: Final = 2**31 - 2**20
"""One file holds at most 2 GiB, its structure included."""

Value = NewType("Value", str)
"""What a node gave, by its name."""

_KINDS: Final = {"float": TensorProto.FLOAT, "integer": TensorProto.INT64}


class Graph:
    """Collects nodes and weights, and writes them as one file.

    >>> graph = Graph("double")
    >>> number = graph.input("number", ["rows"])
    >>> graph.output("doubled", graph.op("Add", number, number), ["rows"])
    >>> graph.model().graph.node[0].op_type
    'Add'
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[int, ...], Value] = {}

    def input(
        self, name: str, shape: Sequence[str | int], *, kind: Literal["float", "integer"] = "float"
    ) -> Value:
        """What the graph is given; sizes that vary have a name instead of a number."""
        self._inputs.append(helper.make_tensor_value_info(name, _KINDS[kind], list(shape)))
        return Value(name)

    def output(self, name: str, value: Value, shape: Sequence[str | int]) -> None:
        """What the graph gives."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def weight(self, tensor: torch.Tensor) -> Value:
        """Numbers that belong to the network, in full precision."""
        name = f"weight_{len(self._weights)}"
        array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        self._weights.append(numpy_helper.from_array(array, name))
        return Value(name)

    def numbers(self, *whole: int) -> Value:
        """Whole numbers: a shape, axes, places."""
        if whole not in self._constants:
            name = f"numbers_{len(self._constants)}"
            self._weights.append(numpy_helper.from_array(np.array(whole, dtype=np.int64), name))
            self._constants[whole] = Value(name)
        return self._constants[whole]

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> Value:
        """Add a node; the value it gives."""
        return self._add(kind, inputs, 1, attributes)[0]

    def split(self, value: Value, pieces: int) -> list[Value]:
        """Equal pieces along the last axis."""
        return self._add("Split", (value,), pieces, {"axis": -1, "num_outputs": pieces})

    def model(self) -> onnx.ModelProto:
        """The graph as it stands, checked.

        Raises
        ------
        UsageError
            its weights are too many for one file.
        """
        size = sum(len(weight.raw_data) for weight in self._weights)
        if size > MOST_BYTES:
            raise UsageError(
                f"the {self._name} has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2.1 GB"
            )
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._weights)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="genius",
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def save(self, path: Path) -> None:
        """Write the file. Raises as :meth:`model` does."""
        onnx.save(self.model(), path)

    def _add(
        self, kind: str, inputs: Sequence[Value], num_outputs: int, attributes: dict[str, Any]
    ) -> list[Value]:
        names = [Value(f"{kind.lower()}_{len(self._nodes)}_{place}") for place in range(num_outputs)]
        self._nodes.append(helper.make_node(kind, list(inputs), list(names), **attributes))
        return names


__all__ = ["layers", "linear", "product", "root_mean_square_norm", "unit"]


def product(graph: Graph, value: Value, weights: Sequence[Tensor]) -> Value:
    """One matrix product with the weights of linear layers, side by side."""
    return graph.op("MatMul", value, graph.weight(torch.cat(list(weights)).T))


def linear(graph: Graph, value: Value, layer: nn.Linear) -> Value:
    """A linear layer."""
    return graph.op("Add", product(graph, value, [layer.weight]), graph.weight(layer.bias))


def layers(graph: Graph, value: Value, stack: Iterable[nn.Module]) -> Value:
    """Layers one after the other."""
    for layer in stack:
        match layer:
            case nn.Linear():
                value = linear(graph, value, layer)
            case nn.LayerNorm():
                weights = graph.weight(layer.weight), graph.weight(layer.bias)
                value = graph.op("LayerNormalization", value, *weights, epsilon=layer.eps)
            case nn.GELU() | nn.ReLU() | nn.Sigmoid():
                value = graph.op(
                    {nn.GELU: "Gelu", nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid"}[type(layer)], value
                )
            case nn.Identity():
                pass
            case _:
                raise TypeError(type(layer))
    return value


def root_mean_square_norm(graph: Graph, value: Value, norm: RMSNorm) -> Value:
    """T5's norm, in the form that ONNX Runtime recognises and computes in one go."""
    square = graph.op("Pow", value, graph.weight(torch.tensor(2.0)))
    mean = graph.op("ReduceMean", square, graph.numbers(-1), keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.weight(torch.tensor(1e-6))))
    return graph.op("Mul", graph.op("Div", value, root), graph.weight(norm.weight))


def unit(graph: Graph, value: Value) -> Value:
    """Rows of length 1."""
    length = graph.op("ReduceL2", value, graph.numbers(-1), keepdims=1)
    return graph.op("Div", value, graph.op("Max", length, graph.weight(torch.tensor(1e-12))))


__all__ = ["quantize"]


def quantize(source: Path, target: Path) -> None:
    """Write the 8-bit version of a graph's file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415  optional and slow to import

    with _quiet():
        quantize_dynamic(
            source, target, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantizer's advice, on the root logger, to simplify graphs that are simple already."""
    root = logging.getLogger()

    def is_not_advice(record: logging.LogRecord) -> bool:
        return "pre-processing" not in record.getMessage()

    root.addFilter(is_not_advice)
    try:
        yield
    finally:
        root.removeFilter(is_not_advice)


__all__ = ["write_decoder"]


def write_decoder(generator: Generator, folder: Path) -> DecoderFacts:
    """Write the graphs of a generator into a folder that exists; what a reader must know of them."""
    config = generator.config
    facts = DecoderFacts(
        dim=generator.prefix_projection.in_features,
        sizes=generator.sizes,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        head_width=config.head_width,
    )
    _start(generator).save(folder / START)
    _step(generator).save(folder / STEP)
    special, *levels = _output_weights(generator).split([NUM_SPECIAL, *generator.sizes])
    _head(special).save(folder / SPECIAL)
    for level, weights in enumerate(levels):
        _head(weights).save(folder / head_file(level))
    return facts


def _start(generator: Generator) -> Graph:
    config = generator.config
    graph = Graph("start of the decoder")
    queries = graph.input("queries", ["queries", generator.prefix_projection.in_features])
    projection = generator.prefix_projection
    flat = graph.op("Add", product(graph, queries, [projection.weight]), graph.weight(projection.bias))
    prefixes = graph.op("Reshape", flat, graph.numbers(0, config.prefixes, config.width))
    prefixes = root_mean_square_norm(graph, prefixes, generator.prefix_norm)
    split = graph.numbers(0, 0, config.heads, config.head_width)
    for layer, block in enumerate(_blocks(generator)):
        attention = block.cross_attention
        both = product(graph, prefixes, [attention.k.weight, attention.v.weight])
        keys, values = (graph.op("Reshape", piece, split) for piece in graph.split(both, 2))
        keys = graph.op("Transpose", keys, perm=[0, 2, 3, 1])
        values = graph.op("Transpose", values, perm=[0, 2, 1, 3])
        graph.output(
            f"prefix_keys_{layer}", keys, ["queries", config.heads, config.head_width, config.prefixes]
        )
        graph.output(
            f"prefix_values_{layer}", values, ["queries", config.heads, config.prefixes, config.head_width]
        )
    return graph


def _step(generator: Generator) -> Graph:
    config = generator.config
    levels = len(generator.sizes)
    graph = Graph("step of the decoder")
    tokens = graph.input("tokens", ["queries", "beams"], kind="integer")
    prefixes = [
        _Memory(
            graph.input(
                f"prefix_keys_{layer}", ["queries", config.heads, config.head_width, config.prefixes]
            ),
            graph.input(
                f"prefix_values_{layer}", ["queries", config.heads, config.prefixes, config.head_width]
            ),
        )
        for layer in range(config.layers)
    ]
    shape: list[str | int] = ["rows", config.heads, "past", config.head_width]
    past = [
        _Memory(graph.input(f"past_keys_{layer}", shape), graph.input(f"past_values_{layer}", shape))
        for layer in range(config.layers)
    ]
    writer = _StepWriter(graph, config.heads, config.head_width)
    # What a token adds to the scores of those before it depends on the distance only: the farthest stand
    # first, and the last columns are those of the tokens that are there.
    farthest_first = graph.weight(generator.position_biases(levels)[0, :, -1])
    num_past = graph.op("Shape", past[0].keys, start=2, end=3)
    first = graph.op("Sub", graph.numbers(levels - 1), num_past)
    bias = graph.op("Slice", farthest_first, first, graph.numbers(levels), graph.numbers(1))
    bias = graph.op("Unsqueeze", bias, graph.numbers(1))
    num_rows = graph.op("Shape", tokens)
    writer.joined = graph.op("Concat", num_rows, graph.numbers(config.heads * config.head_width), axis=0)
    hidden = graph.op("Gather", graph.weight(generator.embedding.weight), tokens)
    for layer, block in enumerate(_blocks(generator)):
        own = writer.own(root_mean_square_norm(graph, hidden, block.self_norm), block.self_attention)
        attended = writer.attend_to_past(own, past[layer], bias)
        hidden = graph.op("Add", hidden, product(graph, attended, [block.self_attention.o.weight]))
        attended = writer.attend_to_prefixes(
            root_mean_square_norm(graph, hidden, block.cross_norm), block.cross_attention, prefixes[layer]
        )
        hidden = graph.op("Add", hidden, product(graph, attended, [block.cross_attention.o.weight]))
        inner = product(
            graph, root_mean_square_norm(graph, hidden, block.feedforward_norm), [block.wi.weight]
        )
        hidden = graph.op("Add", hidden, product(graph, graph.op("Relu", inner), [block.wo.weight]))
        for name, value in (("keys", own.keys), ("values", own.values)):
            graph.output(f"{name}_{layer}", value, ["rows", config.heads, 1, config.head_width])
    graph.output(
        "hidden",
        root_mean_square_norm(graph, hidden, generator.final_norm),
        ["queries", "beams", config.width],
    )
    return graph


def _output_weights(generator: Generator) -> Float[Tensor, "vocabulary width"]:
    """Rows of the special tokens, then of each level's codes, ready to multiply what a step gave."""
    tied = generator.embedding.weight * generator.config.width**-0.5
    return tied if generator.head is None else generator.head.weight


def _head(weights: Float[Tensor, "codes width"]) -> Graph:
    graph = Graph("head of the decoder")
    hidden = graph.input("hidden", ["rows", weights.shape[1]])
    graph.output("logits", product(graph, hidden, [weights]), ["rows", len(weights)])
    return graph


class _Memory(NamedTuple):
    """What attention looks at: prefixes, or the tokens before."""

    keys: Value
    values: Value


class _Own(NamedTuple):
    """What the token just read brings along, each as one row per beam."""

    queries: Value
    keys: Value
    values: Value


class _StepWriter:
    """Writes the attention of one token per beam."""

    joined: Value
    """Shape of the heads' results side by side: queries, beams, width."""

    def __init__(self, graph: Graph, heads: int, head_width: int) -> None:
        self.graph = graph
        self.by_row = graph.numbers(-1, heads, 1, head_width)
        self.by_query = graph.numbers(0, 0, heads, head_width)
        self.width = graph.numbers(0, 0, heads * head_width)

    def own(self, normed: Value, attention: Attention) -> _Own:
        """Query, key and value of the token in one product."""
        all_three = product(self.graph, normed, [attention.q.weight, attention.k.weight, attention.v.weight])
        return _Own(
            *(self.graph.op("Reshape", piece, self.by_row) for piece in self.graph.split(all_three, 3))
        )

    def attend_to_past(self, own: _Own, past: _Memory, bias: Value) -> Value:
        """Attention to the tokens before and to itself, which are never put together."""
        graph = self.graph
        upright = graph.op("Transpose", past.keys, perm=[0, 1, 3, 2])
        before = graph.op("MatMul", own.queries, upright)
        itself = graph.op("ReduceSum", graph.op("Mul", own.queries, own.keys), graph.numbers(-1), keepdims=1)
        scores = graph.op("Add", graph.op("Concat", before, itself, axis=-1), bias)
        shares = graph.op("Softmax", scores, axis=-1)
        last, axis = graph.numbers(-1), graph.numbers(3)
        of_past = graph.op("Slice", shares, graph.numbers(0), last, axis)
        of_itself = graph.op("Slice", shares, last, graph.numbers(2**62), axis)
        mixed = graph.op("MatMul", of_past, past.values)
        mixed = graph.op("Add", mixed, graph.op("Mul", of_itself, own.values))
        return graph.op("Reshape", mixed, self.joined)

    def attend_to_prefixes(self, normed: Value, attention: Attention, prefixes: _Memory) -> Value:
        """Attention of all beams of a query to its prefixes, which they share."""
        graph = self.graph
        queries = graph.op("Reshape", product(graph, normed, [attention.q.weight]), self.by_query)
        queries = graph.op("Transpose", queries, perm=[0, 2, 1, 3])
        shares = graph.op("Softmax", graph.op("MatMul", queries, prefixes.keys), axis=-1)
        mixed = graph.op("MatMul", shares, prefixes.values)
        return graph.op("Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.width)


def _blocks(generator: Generator) -> list[Block]:
    return [block for block in generator.blocks if isinstance(block, Block)]


__all__ = ["write_fusion", "write_small"]


def write_fusion(fusion: Fusion, dim: int, folder: Path) -> None:
    """Write the graph that makes one unit embedding of an image's and a text's features."""
    graph = Graph("fusion")
    image, text = (graph.input(name, ["items", dim]) for name in ("image", "text"))
    sides = [
        graph.op("Relu", linear(graph, value, layer))
        for value, layer in ((text, fusion.text_projection_layer), (image, fusion.image_projection_layer))
    ]
    joint = graph.op("Concat", *sides, axis=-1)
    mixed = graph.op("Relu", linear(graph, joint, fusion.combiner_layer))
    mixed = linear(graph, mixed, fusion.output_layer)
    share = layers(graph, joint, fusion.dynamic_scalar)
    # λ·text + (1−λ)·image = image + λ·(text − image)
    both = graph.op("Add", image, graph.op("Mul", share, graph.op("Sub", text, image)))
    graph.output("embedding", unit(graph, graph.op("Add", mixed, both)), ["items", dim])
    graph.save(folder / FUSION)


def write_small(network: SmallNetwork, dim: int, folder: Path) -> None:
    """Write both towers; numbering tokens and describing pictures stay outside."""
    graph = Graph("image tower")
    described = graph.input("descriptors", ["items", DESCRIPTOR_SIZE])
    graph.output("features", layers(graph, described, network.image_tower), ["items", dim])
    graph.save(folder / IMAGE)

    graph = Graph("text tower")
    read = []
    for name, table in (("tokens", network.words), ("pairs", network.pairs)):
        weights = table.weight.detach().clone()
        weights[PADDING] = 0
        numbers = graph.input(name, ["items", name], kind="integer")
        vectors = graph.op("Gather", graph.weight(weights), numbers)
        read.append(graph.op("ReduceSum", vectors, graph.numbers(1), keepdims=0))
    features = layers(graph, graph.op("Add", *read), network.text_tower)
    graph.output("features", features, ["items", dim])
    graph.save(folder / TEXT)


__all__ = ["copy_reader", "write_towers"]

_SETTINGS: Final = ("*.json", "*.txt", "*.model")
"""Of a folder in Hugging Face's layout: everything but weights."""
_TOKENS: Final = 9
"""Length of the text that is traced; any other does as well."""


def write_towers(encoder: ClipEncoder, folder: Path) -> None:
    """Write the image and the text tower of a CLIP or SigLIP.

    Raises
    ------
    MissingExtra
        onnxscript is not installed.
    UsageError
        a tower is too large for one file.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise MissingExtra(
            f"exporting {encoder.spec} needs onnxscript, which is not installed: "
            "pip install genius-retrieval[onnx]"
        )
    model = encoder._model  # noqa: SLF001
    config = model.config
    side = config.vision_config.image_size
    _trace(_Images(model), (torch.zeros(2, 3, side, side),), ({0: "items"},), folder / IMAGE)
    is_padded = config.model_type == "siglip"
    length = config.text_config.max_position_embeddings if is_padded else _TOKENS
    tokens = torch.full((2, length), config.text_config.eos_token_id)
    reads_mask = not is_padded and not isinstance(encoder, ClipScoreFusion)
    given = (tokens, torch.ones_like(tokens)) if reads_mask else (tokens,)
    varies = {0: "items"} if is_padded else {0: "items", 1: "tokens"}
    _trace(_Texts(model), given, (varies,) * len(given), folder / TEXT)


def copy_reader(encoder: ClipEncoder, folder: Path) -> None:
    """Copy what makes numbers of texts and pictures into an empty folder."""
    folder.mkdir(exist_ok=True)
    for pattern in _SETTINGS:
        for path in encoder._folder.glob(pattern):  # noqa: SLF001
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder / path.name)


class _Images(nn.Module):
    """Pixels to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features of pictures."""
        features: Tensor = self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return features


class _Texts(nn.Module):
    """Token numbers to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Features of texts."""
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        features: Tensor = self.model.get_text_features(input_ids=input_ids, **given).pooler_output
        return features


def _trace(
    tower: nn.Module, given: tuple[Tensor, ...], varies: tuple[dict[int, str], ...], path: Path
) -> None:
    size = sum(weight.nbytes for weight in tower.parameters())
    if size > MOST_BYTES:
        raise UsageError(f"{path.stem} tower: {size / 1e9:.1f} GB of weights, and an ONNX file holds 2.1 GB")
    names = ["pixel_values"] if path.name == IMAGE else ["input_ids", "attention_mask"][: len(given)]
    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in varies)
    with _traced_quiet():
        torch.onnx.export(
            tower.eval(),
            given,
            path,
            input_names=names,
            output_names=["features"],
            dynamic_shapes=shapes,
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    onnx.checker.check_model(path, full_check=True)


@contextmanager
def _traced_quiet() -> Iterator[None]:
    """Without the exporter's talk: deprecations inside PyTorch, and libraries it would also know."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


__all__ = ["export_onnx"]

_NEEDED: Final = ("onnx", "onnxruntime")


class _Encoder(NamedTuple):
    """What became of the model's encoder."""

    kind: str | None
    why_not: str | None


def export_onnx(model: Genius, folder: Path, *, int8: bool = False, progress: Progress) -> Manifest:
    """Write a model's encoder where that is possible, its fusion and its decoder; a finished folder stays.

    Parameters
    ----------
    int8
        write 8-bit versions of all graphs too.

    Raises
    ------
    MissingExtra
        the extra ``onnx`` is not installed.
    UsageError
        the folder holds something else.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"exporting needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install genius-retrieval[onnx]"
        )

    writer = ArtifactWriter(folder, kind=KIND, config={"int8": int8}, inputs={"model": model.fingerprint})
    finished = writer.finished()
    if finished is not None:
        return finished
    for part in writer.path.iterdir():  # of a killed run; writing it all again takes no longer than checking
        if part.is_dir():
            shutil.rmtree(part)
    plain = writer.path / "fp32"
    plain.mkdir()
    progress.say("writing the decoder and the fusion")
    decoder = write_decoder(model.generator, plain)
    write_fusion(model.quantizer.fusion, model.dim, plain)
    if model.generator.guide is not None:
        write_weights(writer.path / GUIDE, model.generator.guide.state_dict())
    encoder = _write_encoder(model.encoder, writer.path, progress)
    if int8:
        (writer.path / "int8").mkdir()
        paths = sorted(plain.iterdir())
        progress.begin("8 bits", len(paths))
        for done, path in enumerate(paths, start=1):
            quantize(path, writer.path / "int8" / path.name)
            progress.advance(done, {})
    return writer.finish(facts={"decoder": decoder.to_json(), "encoder": encoder._asdict()})


def _write_encoder(encoder: Encoder, folder: Path, progress: Progress) -> _Encoder:
    """Write an encoder's towers and what reads for them, or say why not."""
    from genius_search.onnx.run import READER  # noqa: PLC0415  as above


    match encoder:
        case SmallEncoder():
            write_small(encoder.network, encoder.dim, folder / "fp32")
            (folder / READER).mkdir()
            (folder / READER / TOKENIZER_FILE).write_text(encoder.tokenizer.to_str())
            write_json(folder / READER / CONFIG_FILE, asdict(encoder.config))
            return _Encoder("small", None)
        case ClipEncoder():

            progress.say(f"tracing {encoder.spec}, which takes a minute or more")
            write_towers(encoder, folder / "fp32")
            copy_reader(encoder, folder / READER)
            return _Encoder("clip-sf" if isinstance(encoder, ClipScoreFusion) else "clip", None)
        case _:
            reason = _why_not(encoder)
            progress.say(f"the encoder is not exported: {reason}")
            return _Encoder(None, reason)


def _why_not(encoder: Encoder) -> str:
    if not encoder.needs_pixels and encoder.spec.startswith("precomputed:"):
        return f"{encoder.spec} looks features up, and has no network"
    return (
        f"{encoder.spec} is of a kind that cannot be exported; small (but clip-ff and blip-ff), clip and "
        "uniir's CLIP-SF can"
    )
