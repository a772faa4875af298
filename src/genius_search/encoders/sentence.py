"""`text:NAME-or-folder`: a sentence embedder in sentence-transformers' layout, for data without images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.encoders.base import ImageInput, TextInput, in_batches, need_transformers
from genius_search.encoders.pretrained import (
    check_files,
    contents_fingerprint,
    find_checkpoint,
    load_model,
    load_tokenizer,
    read_json,
)
from genius_search.errors import ArtifactMismatch, UsageError

BATCH: Final = 64
MAX_TOKENS: Final = 512
"""Tokens that are read of a text when the folder does not say."""


class Pooling(NamedTuple):
    """Pooling of token vectors into one vector."""

    mean: bool
    """The mean of all tokens; otherwise the first token."""
    normalize: bool


class SentenceEncoder:
    """A transformer whose token vectors are averaged, or the first one taken, as its folder says.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    ArtifactMissing
        The folder does not exist or lacks files.
    NetworkNeeded
        The model is not on this machine, and ``download`` is off or fails.
    ArtifactMismatch
        The folder pools in a way that is not supported, or asks for code to be run.
    """

    needs_pixels: bool = False
    reads_images: bool = False

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self._name = name
        self._folder = find_checkpoint(str(name), download=download)
        check_files(self._folder, image_processor=False)
        self._device = device
        self._pooling = read_pooling(self._folder)
        self._model = load_model(self._folder, device=device)
        self._tokenizer = load_tokenizer(self._folder)
        self.dim = int(self._model.config.hidden_size)
        limits = self._folder / "sentence_bert_config.json"
        settings = read_json(limits) if limits.is_file() else {}
        self._max_tokens = int(settings.get("max_seq_length", MAX_TOKENS))

    @property
    def spec(self) -> str:
        """``text:`` and the name or folder."""
        return f"text:{self._name}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights."""
        return fingerprint_of([contents_fingerprint(self._folder), *self._pooling])

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Raise :class:`UsageError` for any image: this encoder reads texts only."""
        if images:
            key = images[0].key
            raise UsageError(
                f"{self.spec} reads texts only, and {key.role} {key.id} has an image; use small or clip"
            )
        return torch.zeros(0, self.dim)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Return the features of texts, cut at the model's maximum length."""
        return in_batches(self._encode, [text.text for text in texts], size=BATCH, dim=self.dim)

    def _encode(self, texts: Sequence[str]) -> Tensor:
        tokens = self._tokenizer(
            list(texts), padding="longest", truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        states: Tensor = self._model(**tokens).last_hidden_state
        if self._pooling.mean:
            mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        else:
            pooled = states[:, 0]
        return F.normalize(pooled) if self._pooling.normalize else pooled


def read_pooling(folder: Path) -> Pooling:
    """Read ``modules.json``; without one, take the mean and do not normalise."""
    if not (folder / "modules.json").is_file():
        return Pooling(mean=True, normalize=False)
    modules = {
        str(module["type"]).rsplit(".", 1)[-1]: folder / str(module["path"])
        for module in read_json(folder / "modules.json")
    }
    unknown = sorted(set(modules) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ArtifactMismatch(
            f"{folder} ends in {', '.join(unknown)}; text: knows Transformer, Pooling, Normalize"
        )
    settings = read_json(modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    modes = {name for name, chosen in settings.items() if name.startswith("pooling_mode_") and chosen}
    if modes not in (set(), {"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
        raise ArtifactMismatch(f"{folder} pools by {sorted(modes)}; text: knows mean_tokens or cls_token")
    return Pooling(mean=modes != {"pooling_mode_cls_token"}, normalize="Normalize" in modules)
