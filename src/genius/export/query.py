"""The query's way to its embedding as graphs: the `small` encoder's two towers, and the fusion."""

from __future__ import annotations

from pathlib import Path

from genius.encoders.picture import DESCRIPTOR_SIZE
from genius.encoders.small_network import SmallNetwork
from genius.encoders.words import PADDING
from genius.export.graph import Graph
from genius.export.layers import layers, linear, unit
from genius.export.places import FUSION, IMAGE, TEXT
from genius.models.fusion import Fusion

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
