"""Trained models and their folders."""

from genius_search.model.file import MODEL_FILE, KnownInstruction, read_model_file
from genius_search.model.genius import Genius

__all__ = ["MODEL_FILE", "Genius", "KnownInstruction", "read_model_file"]
