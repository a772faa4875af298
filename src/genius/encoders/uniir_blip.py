"""UniIR's BLIP-SF and BLIP-FF: pictures squashed to a square, texts in BERT's tokens (specification, 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from genius.artifact import Manifest
from genius.encoders.checkpoint import read_json
from genius.encoders.picture import pixels_of
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.uniir_bert import open_bert_tokenizer
from genius.encoders.uniir_folder import BATCH, UniirFolder
from genius.encoders.uniir_joint import FeatureFusion

__all__ = ["BlipScoreFusion", "blip_feature_fusion"]


class BlipScoreFusion(UniirFolder):
    """Image and text features of BLIP-SF, to be summed; unnormalised, in full precision."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        super().__init__(manifest, device=device)
        folder = manifest.folder
        from genius.encoders.uniir_networks import BlipTowers, filled  # noqa: PLC0415  takes seconds to import

        self._network = filled(BlipTowers(read_json(folder / "config.json")), folder).to(device).eval()
        self._read = _reader(open_bert_tokenizer(folder / "tokenizer.json"))

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self._network.dim

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        parts = [
            self._network.image(self.prepare(pictures[start : start + BATCH])).cpu()
            for start in range(0, len(pictures), BATCH)
        ]
        return torch.cat([torch.zeros(0, self.dim), *parts])

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts; longer ones than 100 tokens are cut."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(texts), BATCH):
            read = self._read([text.text for text in texts[start : start + BATCH]])
            features.append(
                self._network.text({name: rows.to(self._device) for name, rows in read.items()}).cpu()
            )
        return torch.cat(features)


def blip_feature_fusion(manifest: Manifest, *, device: str) -> FeatureFusion:
    """BLIP-FF: BERT looks at the image while it reads the text."""
    from genius.encoders.uniir_networks import BlipFusion, filled  # noqa: PLC0415  takes seconds to import

    folder = manifest.folder
    network = filled(BlipFusion(read_json(folder / "config.json")), folder)
    read = _reader(open_bert_tokenizer(folder / "tokenizer.json"))
    return FeatureFusion(manifest, network, read, device=device)


def _reader(tokenizer: Tokenizer) -> Callable[[Sequence[str]], dict[str, Tensor]]:
    """Token numbers and which of them are no padding, which BERT does not look at."""

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = tokenizer.encode_batch(list(texts))
        return {
            "input_ids": torch.tensor([encoding.ids for encoding in encoded]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encoded]),
        }

    return read
