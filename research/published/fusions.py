"""`fusion:FOLDER`: UniIR's CLIP-FF and BLIP-FF, as :mod:`research.published.encoders` writes them.

They are alternatives to CLIP-SF, assembled from parts of transformers. These are imported when an
encoder is built, because that takes seconds.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from genius_search.artifact import open_artifact, read_json
from genius_search.encoders.base import Encoder, Keys, cut_texts, read_tokenizer
from genius_search.encoders.open import load_encoder
from genius_search.encoders.pretrained import clip_reader, middle_square
from genius_search.errors import need_packages
from genius_search.nn.weights import in_batches

ARTIFACT: Final = "uniir-fusion"
"""Kind of the folder in its manifest."""
MAX_BERT_TOKENS: Final = 100
"""Number of tokens to which BLIP truncates texts."""

Tokenize: TypeAlias = Callable[[Sequence[str]], dict[str, Tensor]]
"""Turns texts into the arguments of a text tower."""


def open_encoder(spec: str, *, download: bool = False, device: str = "cpu") -> Encoder:
    """Open ``fusion:FOLDER`` or any encoder of ``load_encoder``, with its errors."""
    prefix, _, folder = spec.partition(":")
    if prefix == "fusion":
        return FeatureFusion(Path(folder))
    return load_encoder(spec, download=download, device=device)


class ClipFusion(nn.Module):
    """CLIP-FF: the mean of text tokens and projected image tokens after two T5 layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            CLIPTextConfig,
            CLIPTextModel,
            CLIPVisionConfig,
            CLIPVisionModel,
            T5Config,
        )
        from transformers.models.t5.modeling_t5 import T5Stack

        super().__init__()
        vision_config = CLIPVisionConfig(**config["vision_config"])
        self.dim = int(config["mixer_config"]["d_model"])
        self.side = int(config["vision_config"]["image_size"])
        self.context = int(config["text_config"]["max_position_embeddings"])
        self.text_model = CLIPTextModel(CLIPTextConfig(**config["text_config"]))
        self.vision_model = CLIPVisionModel(vision_config)
        self.visual_projection = nn.Linear(vision_config.hidden_size, self.dim, bias=False)
        self.mixer = T5Stack(T5Config(**config["mixer_config"]))
        self.mixer.embed_tokens = nn.Identity()  # its inputs are vectors

    def patches(
        self, pixels: Float[Tensor, "items 3 side side"]
    ) -> Float[Tensor, "items patches width"]:
        """Return the vectors of class and patches in the space of the text tokens."""
        states = self.vision_model(pixel_values=pixels).last_hidden_state
        projected: Tensor = self.visual_projection(self.vision_model.post_layernorm(states))
        return projected

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """Return the mean over all tokens, including padding and blank images."""
        words = self.text_model(**texts).last_hidden_state
        tokens = torch.cat([words, patches], dim=1)
        mixed: Tensor = self.mixer(inputs_embeds=tokens).last_hidden_state
        return mixed.mean(dim=1)


class BlipFusion(nn.Module):
    """BLIP-FF: the pooled first token of BERT, which attends to the image's tokens."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        self.dim = int(config["text_config"]["hidden_size"])
        self.side = int(config["vision_config"]["image_size"])
        self.vision_model = BlipVisionModel(BlipVisionConfig(**config["vision_config"]))
        self.text_encoder = BlipTextModel(BlipTextConfig(**config["text_config"]))

    def patches(
        self, pixels: Float[Tensor, "items 3 side side"]
    ) -> Float[Tensor, "items patches width"]:
        """Return the vectors of class and patches."""
        states: Tensor = self.vision_model(pixel_values=pixels).last_hidden_state
        return states

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """Return the pooled vectors."""
        pooled: Tensor = self.text_encoder(**texts, encoder_hidden_states=patches).pooler_output
        return pooled


class FeatureFusion:
    """CLIP-FF or BLIP-FF: one unnormalised vector for an image and a text together."""

    needs_pixels: bool = True
    batch_size: int = 64

    def __init__(self, folder: Path) -> None:
        need_packages("pretrained encoders need", "transformers", "ftfy")
        manifest = open_artifact(folder, kind=ARTIFACT)
        build = ClipFusion if manifest.config["kind"] == "clip-ff" else BlipFusion
        config = read_json(folder / "config.json")
        network: ClipFusion | BlipFusion = build(config)
        network.load_state_dict(load_file(folder / "model.safetensors"))
        self.spec = f"fusion:{folder}"
        self.fingerprint = manifest.fingerprint
        self.dim = network.dim
        network.float().eval()
        self._network = network
        from transformers import AutoImageProcessor

        self._processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        self._tokenize = (
            _clip_tokenize(folder, network.context)
            if isinstance(network, ClipFusion)
            else _bert_tokenize(folder)
        )

    @torch.inference_mode()
    def joint_features(
        self, images: Sequence[Image.Image | None], texts: Sequence[str], _: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return one vector for each image and its text together."""
        items = list(zip(images, texts, strict=True))
        return in_batches(self._encode, items, size=self.batch_size, dim=self.dim)

    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return the vectors of images without texts."""
        return self.joint_features(images, [""] * len(images))

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float[Tensor, "items dim"]:
        """Return the vectors of texts without images."""
        return self.joint_features([None] * len(texts), texts)

    def _encode(
        self, items: Sequence[tuple[Image.Image | None, str]]
    ) -> Float[Tensor, "items dim"]:
        """Return the vectors of a batch; a blank image replaces a missing one."""
        images = [image for image, _ in items if image is not None]
        pixels = torch.zeros(1, 3, self._network.side, self._network.side)
        if images:
            pixels = torch.cat([pixels, self._prepare(images)])
        patches = self._network.patches(pixels)
        has_image = torch.tensor([image is not None for image, _ in items])
        # Row 0 belongs to the blank image, the next rows to the images in their order.
        rows = torch.where(has_image, has_image.cumsum(0), 0)
        return self._network.fuse(patches[rows], self._tokenize([text for _, text in items]))

    def _prepare(self, images: Sequence[Image.Image]) -> Float[Tensor, "items 3 side side"]:
        """Return the pixels of squares: the middle of images for CLIP, squashed images for BLIP."""
        if self._processor.do_center_crop:
            side = self._processor.crop_size["height"]
            images = [middle_square(image, side=side) for image in images]
        pixels: Tensor = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return pixels


def _clip_tokenize(folder: Path, context: int) -> Tokenize:
    read = clip_reader(folder, context)

    def tokenize(texts: Sequence[str]) -> dict[str, Tensor]:
        return {"input_ids": read(texts)}

    return tokenize


def _bert_tokenize(folder: Path) -> Tokenize:
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.enable_truncation(MAX_BERT_TOKENS)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")  # noqa: S106

    def tokenize(texts: Sequence[str]) -> dict[str, Tensor]:
        encodings = tokenizer.encode_batch(cut_texts(texts, max_tokens=MAX_BERT_TOKENS))
        return {
            "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
        }

    return tokenize
