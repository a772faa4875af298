"""An ONNX graph, written node by node.

The networks of a model are few and known, so their graphs are written down rather than traced: exporting
takes a second instead of minutes, sizes that vary are named, and nothing depends on the version of an
exporter. Only pretrained networks of other libraries are traced (:mod:`genius.export.traced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NewType

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from genius.errors import UsageError

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
