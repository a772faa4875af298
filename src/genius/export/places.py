"""Where the parts of an exported model lie in its folder."""

from __future__ import annotations

from typing import Final

IMAGE: Final = "image.onnx"
TEXT: Final = "text.onnx"
FUSION: Final = "fusion.onnx"
READER: Final = "reader"
"""Folder of what turns texts and pictures into the numbers that the towers read: tokenizer, settings."""
