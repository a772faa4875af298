"""The names of UniIR's four encoders. Apart from their weights, so that reading settings needs no torch."""

from __future__ import annotations

from typing import Literal

EncoderKind = Literal["clip-sf", "clip-ff", "blip-sf", "blip-ff"]
"""CLIP or BLIP, fused by summing features (score) or by layers over both (feature)."""
