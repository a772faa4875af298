"""An exported graph with the weights and inputs of its matrix products in 8 bits: a quarter of the bytes.

Weights are scaled column by column; inputs as they come, by one scale for the whole batch (dynamic
quantization), so no calibration data is needed, and scores depend a little on what else is in the batch.
Everything else, and every table of embeddings, stays in full precision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
