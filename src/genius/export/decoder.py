"""The generator as graphs for search: start, step and heads.

``start`` gives the prefixes' keys and values, once per query. ``step`` reads one code per beam: it is given
the keys and values of the codes before and gives those of its own, so that whoever keeps them copies each
only once a step. The heads give logits, one graph for each level.
:class:`genius.search.onnx_decoder.OnnxDecoder` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from genius.export.graph import Graph, Value
from genius.export.layers import product, root_mean_square_norm
from genius.models.generator import NUM_SPECIAL, Attention, Block, Generator
from genius.search.onnx_decoder import SPECIAL, START, STEP, DecoderFacts, head_file

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
