"""`clip:NAME-or-folder`: a pretrained CLIP or SigLIP, run by transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius_search.artifact import file_fingerprint
from genius_search.encoders.base import BatchEncoder, need_transformers
from genius_search.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius_search.hub.access import ENCODER_FILES, check_reachable, is_path, translate_hub_errors

_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_SETTINGS: Final = ("config.json", "tokenizer_config.json", *_PROCESSORS)


def find_checkpoint(name: str, *, download: bool) -> Path:
    """Return a model's folder: a path, or a name in the hub's local cache.

    Raises
    ------
    ArtifactMissing
        The name can only be a folder, and there is none.
    UsageError
        The name is neither a folder nor a name on the hub.
    NetworkNeeded
        The model is not on this machine, and ``download`` is off or fails.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if is_path(name):
        raise ArtifactMissing(
            f"there is no folder {name!r}; give a model's folder, or its name as owner/model"
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow, and only needed here
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    patterns = list(ENCODER_FILES)
    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns))
        if not download or not _missing_files(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a folder nor a model's name: {error}") from None
    if not download:
        raise NetworkNeeded(
            f"{name} is not on this machine, and nothing is downloaded unless you ask. "
            f"Run again with --download, or `genius pull {name}`, or give the folder of a copy"
        )
    check_reachable(f"{name} is not on this machine")
    with translate_hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=patterns))


def check_files(folder: Path, *, image_processor: bool) -> None:
    """Check that a model's folder is complete and asks for no code of its own.

    Raises
    ------
    ArtifactMissing
        Files are missing; the message names them.
    ArtifactMismatch
        A settings file holds ``auto_map``, by which transformers would run programs from the folder.
    """
    missing = _missing_files(folder)
    if image_processor and not any((folder / name).is_file() for name in _PROCESSORS):
        missing.append(_PROCESSORS[0])
    if missing:
        raise ArtifactMissing(f"{folder} is not a complete model: it lacks {', '.join(missing)}")
    refuse_code(folder)


def refuse_code(folder: Path) -> None:
    """Raise :class:`ArtifactMismatch` where a settings file of a folder holds ``auto_map``."""
    for file in (folder / name for name in _SETTINGS):
        waiting = [read_json(file)] if file.is_file() else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                if "auto_map" in value:
                    raise ArtifactMismatch(
                        f"{file} holds auto_map, which asks for code from the model's folder to be run; "
                        "nothing was run. Use a model that transformers itself knows"
                    )
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value


def _missing_files(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _WEIGHTS):
        missing.append(_WEIGHTS[0])
    index = folder / _WEIGHTS[1]
    if index.is_file():
        shards = set(read_json(index).get("weight_map", {}).values())
        missing += [name for name in sorted(shards) if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(_TOKENIZERS[0])
    return missing


def read_json(file: Path) -> Any:
    """Read a settings file; raise :class:`ArtifactMismatch` where it is not JSON."""
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ArtifactMismatch(f"{file} is not valid JSON: {error}") from None


def contents_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's settings, tokenizer and weights."""
    total = hashlib.sha256()
    for file in sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)}):
        total.update(f"{file.name}\0{file_fingerprint(file)}\n".encode())
    return total.hexdigest()


def load_model(folder: Path, *, device: str) -> Any:
    """Load a folder's model in single precision, without transformers' own progress bar."""
    from transformers import AutoModel  # noqa: PLC0415  takes seconds to import
    from transformers.utils import logging  # noqa: PLC0415

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    finally:
        if was_enabled:
            logging.enable_progress_bar()
    return model.to(device).eval()


def load_image_processor(folder: Path) -> Any:
    """Open a folder's image processor."""
    from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False
    )


def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer, from ``tokenizer.json`` where there is one: that needs no other library."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  takes seconds to import

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class ClipEncoder(BatchEncoder):
    """CLIP or SigLIP: projected image and text features, not normalised.

    Parameters
    ----------
    name
        A folder, or a name on the Hugging Face hub.
    download
        Allow downloading a name that is not in the local cache.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    NetworkNeeded
        The model is not on this machine, and ``download`` is off or fails.
    ArtifactMissing
        The folder lacks files.
    ArtifactMismatch
        The folder holds another kind of model, or asks for code to be run.
    """

    def __init__(self, name: str, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self._name = name
        self._device = device
        self._folder = find_checkpoint(name, download=download)
        check_files(self._folder, image_processor=True)
        self._kind = str(read_json(self._folder / "config.json").get("model_type"))
        if self._kind not in ("clip", "siglip"):
            raise ArtifactMismatch(
                f"{self._folder} holds a {self._kind!r} model; clip: reads clip and siglip"
            )
        self._model = load_model(self._folder, device=device)
        self._pixels = load_image_processor(self._folder)
        self._tokenizer = load_tokenizer(self._folder)
        self.dim = self._width()

    @property
    def spec(self) -> str:
        """``clip:`` and the name or folder."""
        return f"clip:{self._name}"

    def _width(self) -> int:
        config = self._model.config
        width: int = config.projection_dim if self._kind == "clip" else config.text_config.projection_size
        return width

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images."""
        pixels = self._pixels(images=list(images), return_tensors="pt")["pixel_values"]
        features: Tensor = self._model.get_image_features(pixel_values=pixels.to(self._device)).pooler_output
        return features

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts, cut at the model's maximum length."""
        tokens = self._tokenizer(
            list(texts),
            # SigLIP was trained on texts padded to its full length, and reads the padding.
            padding="max_length" if self._kind == "siglip" else "longest",
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        inputs = {"input_ids": tokens["input_ids"].to(self._device)}
        if self._kind == "clip":
            inputs["attention_mask"] = tokens["attention_mask"].to(self._device)
        features: Tensor = self._model.get_text_features(**inputs).pooler_output
        return features
