"""`text:FOLDER`: a sentence embedder in sentence-transformers' layout, for data without pictures."""

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
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.pretrained import (
    check_files,
    contents_fingerprint,
    load_tokenizer,
    need_transformers,
    quietly,
    read_json,
)
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError

__all__ = ["SentenceEncoder"]

_BATCH: Final = 64
_LONGEST: Final = 512


class SentenceEncoder:
    """A transformer's token vectors, averaged or the first one's, as the folder says.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    ArtifactMissing
        the folder is not there or lacks files.
    ArtifactMismatch
        it pools in a way that is not supported.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        need_transformers()
        if not folder.is_dir():
            raise ArtifactMissing(f"text:{folder}: there is no such folder")
        check_files(folder, image_processor=False)
        self._folder = folder
        self._device = device
        self._recipe = _recipe(folder)

        from transformers import AutoModel  # noqa: PLC0415  takes seconds to import

        with quietly():
            self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.to(device).eval()
        self._tokenizer = load_tokenizer(folder)
        limits = folder / "sentence_bert_config.json"
        self._longest = (
            int(read_json(limits).get("max_seq_length", _LONGEST)) if limits.is_file() else _LONGEST
        )

    @property
    def spec(self) -> str:
        """``text:FOLDER``."""
        return f"text:{self._folder}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        return int(self._model.config.hidden_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights."""
        return fingerprint_of([contents_fingerprint(self._folder), *self._recipe])

    @property
    def needs_pixels(self) -> bool:
        """It reads texts only."""
        return False

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Refuse: it knows no pictures."""
        if images:
            key = images[0].key
            raise UsageError(
                f"{self.spec} reads texts only, and {key.role} {key.id} has an image; use small or clip"
            )
        return torch.zeros(0, self.dim)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, cut at the longest that the model reads."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(texts), _BATCH):
            tokens = self._tokenizer(
                [text.text for text in texts[start : start + _BATCH]],
                padding="longest",
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            ).to(self._device)
            states = self._model(**tokens).last_hidden_state
            if self._recipe.averages:
                counted = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
                pooled = (states * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
            else:
                pooled = states[:, 0]
            features.append((F.normalize(pooled) if self._recipe.normalizes else pooled).cpu())
        return torch.cat(features)


class _Recipe(NamedTuple):
    """What happens to the token vectors."""

    averages: bool
    normalizes: bool


def _recipe(folder: Path) -> _Recipe:
    """Read ``modules.json``; a folder without one averages and does not normalise."""
    if not (folder / "modules.json").is_file():
        return _Recipe(averages=True, normalizes=False)
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
    return _Recipe(averages=modes != {"pooling_mode_cls_token"}, normalizes="Normalize" in modules)
