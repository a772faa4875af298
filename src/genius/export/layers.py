"""Layers of PyTorch as nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from genius.export.graph import Graph, Value
from genius.models.generator import RMSNorm

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
