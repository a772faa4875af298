from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from genius_search.errors import UsageError
from genius_search.lab.onnx import export as graph_module
from genius_search.lab.onnx.export import Graph, apply_layers, normalize
from genius_search.lab.onnx.run import Session


def test_a_graph_keeps_its_weights_and_names_the_sizes_that_vary(tmp_path):
    graph = Graph("sum")
    given = graph.input("given", ["rows", 2])
    graph.output("sum", graph.op("Add", given, graph.weight(torch.tensor([1.0, 2.0]))), ["rows", 2])
    graph.save(tmp_path / "sum.onnx")
    shape = onnx.load(tmp_path / "sum.onnx").graph.input[0].type.tensor_type.shape
    assert [dim.dim_param or dim.dim_value for dim in shape.dim] == ["rows", 2]
    run = Session(tmp_path / "sum.onnx")
    for rows in (0, 1, 3):
        assert run(given=torch.zeros(rows, 2)).tolist() == [[1.0, 2.0]] * rows


def test_a_graph_that_cannot_be_right_is_not_written(tmp_path):
    graph = Graph("wrong")
    given = graph.input("given", ["rows", 2])
    graph.output("sum", graph.op("Add", given, graph.weight(torch.zeros(3))), ["rows", 2])
    with pytest.raises(onnx.shape_inference.InferenceError):
        graph.save(tmp_path / "wrong.onnx")
    assert not (tmp_path / "wrong.onnx").exists()


def test_too_many_weights_for_one_file_are_refused_with_their_size(monkeypatch, tmp_path):
    monkeypatch.setattr(graph_module, "MAX_BYTES", 10)
    graph = Graph("giant")
    given = graph.input("given", ["rows", 3])
    graph.output("sum", graph.op("Add", given, graph.weight(torch.zeros(3))), ["rows", 3])
    with pytest.raises(UsageError, match="giant"):
        graph.save(tmp_path / "giant.onnx")


def test_layers_compute_what_they_compute_in_pytorch(tmp_path):
    torch.manual_seed(0)
    stack = nn.Sequential(
        nn.LayerNorm(5), nn.Linear(5, 7), nn.GELU(), nn.Identity(), nn.Linear(7, 4), nn.ReLU(), nn.Sigmoid()
    )
    graph = Graph("stack")
    graph.output(
        "out", normalize(graph, apply_layers(graph, graph.input("given", ["rows", 5]), stack)), ["rows", 4]
    )
    graph.save(tmp_path / "stack.onnx")
    given = torch.randn(6, 5)
    found = Session(tmp_path / "stack.onnx")(given=given)
    with torch.no_grad():
        expected = nn.functional.normalize(stack(given), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_layer_without_a_translation_is_a_bug():
    graph = Graph("stack")
    with pytest.raises(TypeError, match="Tanh"):
        apply_layers(graph, graph.input("given", ["rows", 5]), [nn.Tanh()])
