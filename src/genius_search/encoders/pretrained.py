"""`clip:NAME-or-folder`: a pretrained CLIP or SigLIP, run by transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from genius_search.artifact import file_fingerprint
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.pixels import pixels_of
from genius_search.errors import ArtifactMismatch, ArtifactMissing, MissingExtra, NetworkNeeded, UsageError
from genius_search.hub.access import check_reachable, is_path, translate_hub_errors
from genius_search.hub.pull import ENCODER_FILES

__all__ = [
    "check_files",
    "contents_fingerprint",
    "find_checkpoint",
    "need_transformers",
    "quietly",
    "read_json",
]

_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


def need_transformers() -> None:
    """Raise :class:`MissingExtra` where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra(
            "this encoder needs transformers, which is not installed: pip install genius-retrieval[hf]"
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Load weights without transformers' own progress bar, which would stand among ours."""
    from transformers.utils import logging  # noqa: PLC0415  takes seconds to import

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def find_checkpoint(name: str, *, download: bool) -> Path:
    """Find a folder, or a model by its name in the local cache; fetch it only with ``download``.

    Raises
    ------
    ArtifactMissing
        the name can only be a folder, and there is none.
    NetworkNeeded
        it is not on this machine, and downloading was not asked for or is not possible.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if is_path(name):
        raise ArtifactMissing(
            f"there is no folder {name!r}; give a model's folder, or its name as owner/model"
        )
    return _in_cache(name, download=download)


def _in_cache(name: str, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow, and only needed here
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    patterns = list(ENCODER_FILES)
    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns))
        if not _lacking(cached) or not download:
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
    """Raise :class:`ArtifactMissing` naming the files that a model's folder lacks."""
    lacking = _lacking(folder)
    if image_processor and not _any(folder, ("preprocessor_config.json", "processor_config.json")):
        lacking.append("preprocessor_config.json")
    if lacking:
        raise ArtifactMissing(f"{folder} is not a complete model: it lacks {', '.join(lacking)}")


def _lacking(folder: Path) -> list[str]:
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    if not _any(folder, _WEIGHTS):
        lacking.append("model.safetensors")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: Iterable[str] = set(read_json(index).get("weight_map", {}).values())
        lacking += [name for name in sorted(shards) if not (folder / name).is_file()]
    if not _any(folder, _TOKENIZERS):
        lacking.append("tokenizer.json")
    return lacking


def _any(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def read_json(file: Path) -> Any:
    """Read a settings file."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ArtifactMismatch(f"{file} is not valid JSON: {error}") from None


def contents_fingerprint(folder: Path) -> str:
    """SHA-256 over the names and contents of a model's settings, tokenizer and weights."""
    files = sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern)})
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file_fingerprint(file)}\n".encode())
    return total.hexdigest()


__all__ = ["ClipEncoder"]

_KINDS: Final = ("clip", "siglip")
_BATCH: Final = 64


class ClipEncoder:
    """Image and text features of CLIP or SigLIP: the projected ones, not normalised.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    NetworkNeeded
        the model is not on this machine, and ``download`` is off or did not work.
    ArtifactMissing
        the folder lacks files.
    ArtifactMismatch
        the folder holds another kind of model.
    """

    def __init__(self, name: str, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self._name = name
        self._device = device
        self._folder = find_checkpoint(name, download=download)
        check_files(self._folder, image_processor=True)
        self._kind = _kind_of(self._folder)

        from transformers import AutoImageProcessor, AutoModel  # noqa: PLC0415  takes seconds to import

        with quietly():
            self._model = AutoModel.from_pretrained(self._folder, dtype=torch.float32, local_files_only=True)
        self._model.to(device).eval()
        self._pixels = AutoImageProcessor.from_pretrained(self._folder, backend="pil", local_files_only=True)
        self._tokenizer = load_tokenizer(self._folder)

    @property
    def spec(self) -> str:
        """``clip:`` and what a person gave."""
        return f"clip:{self._name}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        config = self._model.config
        width: int = config.projection_dim if self._kind == "clip" else config.text_config.projection_size
        return width

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(pictures), _BATCH):
            pixels = self._pixels(images=pictures[start : start + _BATCH], return_tensors="pt")
            found = self._model.get_image_features(pixel_values=pixels["pixel_values"].to(self._device))
            features.append(found.pooler_output.cpu())
        return torch.cat(features)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, cut at the model's longest."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(texts), _BATCH):
            tokens = self._tokenizer(
                [text.text for text in texts[start : start + _BATCH]],
                # SigLIP was trained on texts padded to its full length, and reads the padding.
                padding="max_length" if self._kind == "siglip" else "longest",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            )
            inputs = {"input_ids": tokens["input_ids"].to(self._device)}
            if self._kind == "clip":
                inputs["attention_mask"] = tokens["attention_mask"].to(self._device)
            features.append(self._model.get_text_features(**inputs).pooler_output.cpu())
        return torch.cat(features)


def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer, by ``tokenizer.json`` where it is there: that needs no other library."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  takes seconds to import

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True)


def _kind_of(folder: Path) -> str:
    kind = str(read_json(folder / "config.json").get("model_type"))
    if kind not in _KINDS:
        raise ArtifactMismatch(f"{folder} holds a {kind!r} model; clip: reads {' and '.join(_KINDS)}")
    return kind
