"""GENIUS: generative multimodal search."""

__version__ = "0.1.0"
