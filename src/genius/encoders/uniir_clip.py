"""UniIR's CLIP-SF and CLIP-FF: OpenAI's CLIP with QuickGELU and its tokens (specification, 2.4 to 2.7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genius.artifact import open_artifact
from genius.encoders.checkpoint import read_json
from genius.encoders.clip import ClipEncoder
from genius.encoders.protocol import TextInput
from genius.encoders.uniir import ARTIFACT
from genius.encoders.uniir_joint import FeatureFusion
from genius.encoders.uniir_tokens import END, token_rows
from genius.errors import ArtifactMismatch

__all__ = ["ClipScoreFusion", "clip_feature_fusion"]

ACTIVATION: Final = "quick_gelu"
_BATCH: Final = 64


class ClipScoreFusion(ClipEncoder):
    """Image and text features of CLIP-SF, to be summed; unnormalised, in full precision.

    Raises
    ------
    ArtifactMismatch
        its settings name another activation than QuickGELU, or a file has changed its size.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        check_activation(folder)
        open_artifact(folder, kind=ARTIFACT)
        super().__init__(str(folder), device=device)

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._name}"

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, taken at their first end token; longer ones than 77 tokens are cut."""
        longest: int = self._model.config.text_config.max_position_embeddings
        rows = token_rows([text.text for text in texts], context=longest)
        features = [torch.zeros(0, self.dim)]
        for part in torch.split(rows, _BATCH) if texts else ():
            found = self._model.get_text_features(input_ids=_until_end(part).to(self._device))
            features.append(found.pooler_output.cpu())
        return torch.cat(features)


def clip_feature_fusion(folder: Path, *, device: str = "cpu") -> FeatureFusion:
    """CLIP-FF: the tokens of both towers, mixed and averaged. Raises as :class:`ClipScoreFusion` does."""
    check_activation(folder)
    open_artifact(folder, kind=ARTIFACT)
    from genius.encoders.uniir_networks import ClipFusion, filled  # noqa: PLC0415  takes seconds to import

    network = filled(ClipFusion(read_json(folder / "config.json")), folder)

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        return {"input_ids": token_rows(texts, context=network.context)}

    return FeatureFusion(folder, network, read, device=device)


def check_activation(folder: Path) -> None:
    """Refuse settings with plain GELU: it loads without a complaint, and every feature is slightly wrong."""
    settings = read_json(folder / "config.json")
    for tower in ("text_config", "vision_config"):
        found = settings.get(tower, {}).get("hidden_act")
        if found != ACTIVATION:
            raise ArtifactMismatch(
                f"{folder / 'config.json'} says hidden_act {found!r} in {tower}, and UniIR's CLIP computes "
                f"with {ACTIVATION!r}: features would be wrong. Import the checkpoint again"
            )


def _until_end(rows: Int[Tensor, "items tokens"]) -> Int[Tensor, "items _"]:
    """Drop what follows every row's first end: no token looks ahead, so it changes nothing."""
    ends = (rows == END).int().argmax(dim=1)
    return rows[:, : int(ends.max()) + 1]
