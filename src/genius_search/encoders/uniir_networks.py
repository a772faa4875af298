"""The networks of CLIP-FF, BLIP-SF and BLIP-FF, put together from transformers' parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    BlipTextConfig,
    BlipVisionConfig,
    BlipVisionModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Config,
)
from transformers.models.blip.modeling_blip_text import BlipTextModel
from transformers.models.t5.modeling_t5 import T5Stack

from genius_search.encoders.uniir import FusionNetwork
from genius_search.errors import ArtifactMismatch

__all__ = ["BlipFusion", "BlipTowers", "ClipFusion", "filled", "token_mixer"]

Network = TypeVar("Network", bound=nn.Module)


class ClipFusion(FusionNetwork):
    """CLIP-FF: text tokens and projected image tokens, texts first, through two T5 layers, averaged."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        text = CLIPTextConfig(**config["text_config"])
        vision = CLIPVisionConfig(**config["vision_config"])
        self.dim = int(config["mixer_config"]["d_model"])
        self.side = int(config["vision_config"]["image_size"])
        self.context = int(config["text_config"]["max_position_embeddings"])
        self.text_model = CLIPTextModel(text)
        self.vision_model = CLIPVisionModel(vision)
        self.visual_projection = nn.Linear(vision.hidden_size, self.dim, bias=False)
        self.mixer = token_mixer(config["mixer_config"])

    def look(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items patches width"]:
        """Every patch's vector in the space of the text tokens, the class's among them."""
        states = self.vision_model(pixel_values=pixels).last_hidden_state
        projected: Tensor = self.visual_projection(self.vision_model.post_layernorm(states))
        return projected

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """The mean over all tokens, padding and blank image included."""
        words = self.text_model(**texts).last_hidden_state
        mixed: Tensor = self.mixer(inputs_embeds=torch.cat([words, patches], dim=1)).last_hidden_state
        return mixed.mean(dim=1)


class BlipFusion(FusionNetwork):
    """BLIP-FF: BERT reads the text and looks at the image's tokens; its pooled first token."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.dim = int(config["text_config"]["hidden_size"])
        self.side = int(config["vision_config"]["image_size"])
        self.vision_model = BlipVisionModel(BlipVisionConfig(**config["vision_config"]))
        self.text_encoder = BlipTextModel(BlipTextConfig(**config["text_config"]))

    def look(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items patches width"]:
        """Every patch's vector, the class's among them."""
        states: Tensor = self.vision_model(pixel_values=pixels).last_hidden_state
        return states

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """The pooled vector."""
        pooled: Tensor = self.text_encoder(**texts, encoder_hidden_states=patches).pooler_output
        return pooled


class BlipTowers(nn.Module):
    """BLIP-SF: the first token of each tower, projected."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision, text = BlipVisionConfig(**config["vision_config"]), BlipTextConfig(**config["text_config"])
        self.dim = int(config["projection_dim"])
        self.vision_model = BlipVisionModel(vision)
        self.text_encoder = BlipTextModel(text, add_pooling_layer=False)
        self.vision_proj = nn.Linear(vision.hidden_size, self.dim)
        self.text_proj = nn.Linear(text.hidden_size, self.dim)

    def image(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items dim"]:
        """Features of prepared pictures."""
        features: Tensor = self.vision_proj(self.vision_model(pixel_values=pixels).last_hidden_state[:, 0])
        return features

    def text(self, texts: dict[str, Tensor]) -> Float[Tensor, "items dim"]:
        """Features of texts as token numbers."""
        features: Tensor = self.text_proj(self.text_encoder(**texts).last_hidden_state[:, 0])
        return features


def token_mixer(config: Mapping[str, Any]) -> T5Stack:
    """T5's encoder layers over vectors that are given, so without a table of tokens."""
    mixer = T5Stack(T5Config(**config))
    mixer.embed_tokens = nn.Identity()
    return mixer


def filled(network: Network, folder: Path) -> Network:
    """The network with the folder's weights, every one of them."""
    try:
        network.load_state_dict(load_file(folder / "model.safetensors"))
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactMismatch(
            f"{folder} does not hold what its settings say ({reason}); import the checkpoint again"
        ) from None
    return network.float()
