"""`uniir:FOLDER`: UniIR's encoders, as `genius import` wrote them; CLIP-SF is the one GENIUS was trained on.

Texts arrive formatted and with their instruction (:mod:`genius_search.records`). A folder is in Hugging Face's
layout, and ``uniir.json`` says which of the four models it holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from genius_search.artifact import MANIFEST, Manifest, open_artifact
from genius_search.config import EncoderKind
from genius_search.encoders.base import Encoder, ImageInput, JointInput, TextInput
from genius_search.encoders.pixels import middle_square, pixels_of
from genius_search.encoders.pretrained import need_transformers, read_json
from genius_search.errors import ArtifactMismatch, ArtifactMissing

BATCH: Final = 64


class UniirFolder:
    """An imported encoder's folder, opened."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        self._manifest = manifest
        self._device = device

        from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

        self._pixels: Any = AutoImageProcessor.from_pretrained(
            manifest.folder, backend="pil", local_files_only=True
        )

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._manifest.folder}"

    @property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights, as they were when it was imported."""
        return self._manifest.fingerprint

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def prepare(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "items 3 side side"]:
        """Pictures as its image tower takes them: the middle square for CLIP, squashed for BLIP."""
        if self._pixels.do_center_crop:
            side = self._pixels.crop_size["height"]
            pictures = [middle_square(picture, side=side) for picture in pictures]
        pixels: Tensor = self._pixels(images=list(pictures), return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)


Reader = Callable[[Sequence[str]], dict[str, Tensor]]
"""Numbers the tokens of texts; gives what the network's ``fuse`` takes."""


class FusionNetwork(nn.Module):
    """Looks at images first, so that a blank one is looked at once a batch, then reads texts beside them."""

    dim: int
    """Width of its vectors."""
    side: int
    """Pixels along one side of a prepared picture."""

    @abstractmethod
    def look(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items patches width"]:
        """One vector per patch."""

    @abstractmethod
    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """One vector per image and text."""


class FeatureFusion(UniirFolder):
    """A joint encoder: one vector for image and text together, unnormalised, in full precision."""

    def __init__(self, manifest: Manifest, network: FusionNetwork, read: Reader, *, device: str) -> None:
        super().__init__(manifest, device=device)
        self._network = network.to(device).eval()
        self._read = read

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self._network.dim

    @torch.inference_mode()
    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """One vector for each image and text together."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(items), BATCH):
            part = items[start : start + BATCH]
            pictures = pixels_of([ImageInput(item.image, item.key) for item in part if item.has_image])
            blank = torch.zeros(1, 3, self._network.side, self._network.side, device=self._device)
            patches = self._network.look(torch.cat([blank, *([self.prepare(pictures)] if pictures else [])]))
            given = torch.tensor([item.has_image for item in part], device=self._device)
            # Row 0 is the blank picture's, the others are the pictures' in order.
            rows = torch.where(given, given.cumsum(0), 0)
            texts = {
                name: tensor.to(self._device)
                for name, tensor in self._read([item.text for item in part]).items()
            }
            features.append(self._network.fuse(patches[rows], texts).cpu())
        return torch.cat(features)

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Vectors of images with an empty text."""
        return self.joint_features(
            [JointInput(image.image, "", image.key, has_image=True) for image in images]
        )

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Vectors of texts with a blank image."""
        return self.joint_features([JointInput(None, text.text, text.key, has_image=False) for text in texts])


__all__ = ["ARTIFACT", "DESCRIPTION", "FORMAT", "load_uniir", "stored_kind"]

ARTIFACT: Final = "uniir"
"""Kind of the folder, in its manifest."""
DESCRIPTION: Final = "uniir.json"
FORMAT: Final = 1
"""Version of the folder's layout; a newer one is refused."""
ACTIVATION: Final = "quick_gelu"
"""What OpenAI's CLIP computes with."""


def load_uniir(folder: Path, *, device: str = "cpu") -> Encoder:
    """Open an imported encoder; CLIP-FF and BLIP-FF are joint encoders.

    Raises
    ------
    MissingExtra
        transformers or ftfy is not installed.
    ArtifactMissing
        there is no such folder, or it was never finished.
    ArtifactMismatch
        it is of another kind or version, damaged, or computes with another activation.
    """
    kind = stored_kind(folder)
    need_transformers()
    if kind in ("clip-sf", "clip-ff"):
        _check_activation(folder)
    manifest = open_artifact(folder, kind=ARTIFACT)
    match kind:
        case "clip-sf":
            from genius_search.encoders.uniir_clip import ClipScoreFusion  # noqa: PLC0415  only the chosen one

            return ClipScoreFusion(manifest, device=device)
        case "clip-ff":
            from genius_search.encoders.uniir_clip import clip_feature_fusion  # noqa: PLC0415

            return clip_feature_fusion(manifest, device=device)
        case "blip-sf":
            from genius_search.encoders.uniir_blip import BlipScoreFusion  # noqa: PLC0415

            return BlipScoreFusion(manifest, device=device)
        case "blip-ff":
            from genius_search.encoders.uniir_blip import blip_feature_fusion  # noqa: PLC0415

            return blip_feature_fusion(manifest, device=device)


def stored_kind(folder: Path) -> EncoderKind:
    """Which of UniIR's models a folder holds. Raises as :func:`load_uniir` does."""
    if not folder.is_dir():
        raise ArtifactMissing(
            f"uniir:{folder}: there is no such folder; make it with `genius import clip-sf`"
        )
    lacking = [name for name in (DESCRIPTION, MANIFEST) if not (folder / name).is_file()]
    if lacking:
        raise ArtifactMissing(
            f"{folder} is not an imported encoder: it lacks {' and '.join(lacking)}; make it with "
            "`genius import clip-sf`"
        )
    told = read_json(folder / DESCRIPTION)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        given = told.get("format") if isinstance(told, dict) else None
        raise ArtifactMismatch(
            f"{folder / DESCRIPTION} has format {given!r}, this version reads {FORMAT}: upgrade genius, or "
            "import the encoder again"
        )
    kinds: tuple[EncoderKind, ...] = get_args(EncoderKind)
    for kind in kinds:
        if told.get("kind") == kind:
            return kind
    raise ArtifactMismatch(
        f"{folder / DESCRIPTION} tells of kind {told.get('kind')!r}; uniir: knows {', '.join(kinds)}"
    )


def _check_activation(folder: Path) -> None:
    """Refuse settings with plain GELU: it loads without a complaint, and every feature is slightly wrong."""
    settings = read_json(folder / "config.json")
    for tower in ("text_config", "vision_config"):
        found = settings.get(tower, {}).get("hidden_act")
        if found != ACTIVATION:
            raise ArtifactMismatch(
                f"{folder / 'config.json'} says hidden_act {found!r} in {tower}, and UniIR's CLIP computes "
                f"with {ACTIVATION!r}: features would be wrong. Import the checkpoint again"
            )
