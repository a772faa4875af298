"""Trained models as ONNX files: written by ``export``, run by ONNX Runtime in ``run``."""
