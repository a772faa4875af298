"""A trained model, and the folder it lies in."""

from genius_search.model.folder import (
    MODEL_FILE,
    KnownInstruction,
    check_model,
    read_model_file,
    save_model,
)
from genius_search.model.genius import Genius

__all__ = ["MODEL_FILE", "Genius", "KnownInstruction", "check_model", "read_model_file", "save_model"]
