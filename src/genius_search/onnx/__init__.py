"""Models written for other runtimes: ONNX graphs of the query's way through a model."""
