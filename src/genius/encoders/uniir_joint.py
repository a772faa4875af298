"""UniIR's encoders by feature fusion, CLIP-FF and BLIP-FF: one vector for image and text together.

Nothing is masked: a missing picture is a blank one, a missing text an empty one, and both count
(specification, section 3.5). The features of an image alone or of a text alone are such vectors too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from genius.artifact import Manifest
from genius.encoders.picture import pixels_of
from genius.encoders.protocol import ImageInput, JointInput, TextInput
from genius.encoders.uniir_folder import BATCH, UniirFolder

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
