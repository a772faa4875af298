"""`uniir:FOLDER`: UniIR's CLIP-SF, CLIP-FF, BLIP-SF and BLIP-FF, as research/published writes them.

GENIUS was trained on CLIP-SF. Texts arrive formatted and with their instruction
(:mod:`genius_search.records`). The networks are assembled from transformers' parts, which are imported only
when one is built: that takes seconds.
"""

# ruff: noqa: PLC0415  as said above

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from genius_search.artifact import Manifest, open_artifact, read_json
from genius_search.encoders.base import Encoder, ImageInput, JointInput, TextInput, cut_texts
from genius_search.encoders.batches import BatchEncoder, decoded_images, in_batches, read_tokenizer
from genius_search.encoders.pretrained import ClipEncoder, load_image_processor
from genius_search.errors import need_packages
from genius_search.nn.weights import load_weights

EncoderKind = Literal["clip-sf", "clip-ff", "blip-sf", "blip-ff"]
"""CLIP or BLIP, fused by summing features (score) or by layers over both (feature)."""
ARTIFACT: Final = "uniir"
"""The folder's kind in its manifest, whose settings name the kind of encoder."""
CLIP_END: Final = 49407
"""The token behind a text, whose vector CLIP-SF takes."""
MAX_BERT_TOKENS: Final = 100
"""Tokens that BLIP reads of a text."""

Reader = Callable[[Sequence[str]], dict[str, Tensor]]
"""Turns texts into the token tensors that a network takes."""


def load_uniir(folder: Path, *, device: str = "cpu") -> Encoder:
    """Open an imported encoder; CLIP-FF and BLIP-FF are joint encoders.

    Raises
    ------
    MissingExtra
        transformers or ftfy is not installed.
    ArtifactMissing
        The folder does not exist or was never finished.
    ArtifactMismatch
        The folder is of another kind, or damaged.
    """
    need_packages("pretrained encoders need", "transformers", "ftfy")
    manifest = open_artifact(folder, kind=ARTIFACT)
    kind: EncoderKind = manifest.config["kind"]
    match kind:
        case "clip-sf":
            return ClipScoreFusion(manifest, device=device)
        case "clip-ff":
            return FeatureFusion(manifest, ClipFusion, device=device)
        case "blip-sf":
            return BlipScoreFusion(manifest, BlipTowers, device=device)
        case "blip-ff":
            return FeatureFusion(manifest, BlipFusion, device=device)


def clip_reader(folder: Path, context: int) -> Reader:
    """Number texts as OpenAI's code does: start, tokens, end, then zeros up to ``context`` tokens.

    The name of a start or end token within a text is read as that token.
    """
    import ftfy

    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.normalizer = None  # it does a part of what ``clean`` does
    tokenizer.enable_truncation(context)
    tokenizer.enable_padding(length=context)

    def clean(text: str) -> str:
        return " ".join(unescape(unescape(ftfy.fix_text(text))).split()).lower()

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = tokenizer.encode_batch([clean(text) for text in cut_texts(texts, max_tokens=context)])
        return {"input_ids": torch.tensor([encoding.ids for encoding in encoded])}

    return read


def _bert_reader(folder: Path) -> Reader:
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.enable_truncation(MAX_BERT_TOKENS)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")  # noqa: S106  no password

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = tokenizer.encode_batch(cut_texts(texts, max_tokens=MAX_BERT_TOKENS))
        return {
            "input_ids": torch.tensor([encoding.ids for encoding in encoded]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encoded]),
        }

    return read


def middle_square(image: Image.Image, *, side: int) -> Image.Image:
    """Resize the shorter side to ``side``, bicubic, and crop the middle.

    Where an odd number of pixels is cut, half of it is rounded to an even number, as torchvision does and so
    UniIR; transformers rounds down, which shifts a quarter of all images by one pixel.
    """
    width, height = image.size
    shorter = min(width, height)
    size = (side * width // shorter, side * height // shorter)
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return resized.crop((left, top, left + side, top + side))


class ClipScoreFusion(ClipEncoder):
    """CLIP-SF: image and text features, to be summed; unnormalised, in single precision."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        super().__init__(f"uniir:{manifest.folder}", manifest.folder, device=device)
        self.fingerprint = manifest.fingerprint
        self._read = clip_reader(manifest.folder, self._model.config.text_config.max_position_embeddings)

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images, of their middle squares."""
        side: int = self._model.config.vision_config.image_size
        return super().encode_images([middle_square(image, side=side) for image in images])

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts, taken at their first end token."""
        rows = self._read(texts)["input_ids"]
        # Nothing after the first end token counts: no token looks ahead.
        last = int((rows == CLIP_END).int().argmax(dim=1).max())
        features: Tensor = self._model.get_text_features(
            input_ids=rows[:, : last + 1].to(self._device)
        ).pooler_output
        return features


class ClipFusion(nn.Module):
    """CLIP-FF: text tokens and projected image tokens, texts first, through two T5 layers, averaged."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel, T5Config
        from transformers.models.t5.modeling_t5 import T5Stack

        super().__init__()
        text = CLIPTextConfig(**config["text_config"])
        vision = CLIPVisionConfig(**config["vision_config"])
        self.dim = int(config["mixer_config"]["d_model"])
        self.side = int(config["vision_config"]["image_size"])
        self.context = int(config["text_config"]["max_position_embeddings"])
        self.text_model = CLIPTextModel(text)
        self.vision_model = CLIPVisionModel(vision)
        self.visual_projection = nn.Linear(vision.hidden_size, self.dim, bias=False)
        self.mixer = T5Stack(T5Config(**config["mixer_config"]))
        self.mixer.embed_tokens = nn.Identity()  # it reads given vectors

    def patches(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items patches width"]:
        """Return the vectors of patches and class in the space of the text tokens."""
        states = self.vision_model(pixel_values=pixels).last_hidden_state
        projected: Tensor = self.visual_projection(self.vision_model.post_layernorm(states))
        return projected

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """Return the mean over all tokens, padding and blank image included."""
        words = self.text_model(**texts).last_hidden_state
        mixed: Tensor = self.mixer(inputs_embeds=torch.cat([words, patches], dim=1)).last_hidden_state
        return mixed.mean(dim=1)


class BlipFusion(nn.Module):
    """BLIP-FF: BERT reads the text and attends to the image's tokens; its pooled first token."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        self.dim = int(config["text_config"]["hidden_size"])
        self.side = int(config["vision_config"]["image_size"])
        self.vision_model = BlipVisionModel(BlipVisionConfig(**config["vision_config"]))
        self.text_encoder = BlipTextModel(BlipTextConfig(**config["text_config"]))

    def patches(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items patches width"]:
        """Return the vectors of patches and class."""
        states: Tensor = self.vision_model(pixel_values=pixels).last_hidden_state
        return states

    def fuse(
        self, patches: Float[Tensor, "items patches width"], texts: dict[str, Tensor]
    ) -> Float[Tensor, "items dim"]:
        """Return the pooled vectors."""
        pooled: Tensor = self.text_encoder(**texts, encoder_hidden_states=patches).pooler_output
        return pooled


class BlipTowers(nn.Module):
    """BLIP-SF: the first token of each tower, projected."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        vision, text = BlipVisionConfig(**config["vision_config"]), BlipTextConfig(**config["text_config"])
        self.dim = int(config["projection_dim"])
        self.side = int(config["vision_config"]["image_size"])
        self.vision_model = BlipVisionModel(vision)
        self.text_encoder = BlipTextModel(text, add_pooling_layer=False)
        self.vision_proj = nn.Linear(vision.hidden_size, self.dim)
        self.text_proj = nn.Linear(text.hidden_size, self.dim)

    def image(self, pixels: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items dim"]:
        """Return the features of prepared images."""
        features: Tensor = self.vision_proj(self.vision_model(pixel_values=pixels).last_hidden_state[:, 0])
        return features

    def text(self, texts: dict[str, Tensor]) -> Float[Tensor, "items dim"]:
        """Return the features of tokenized texts."""
        features: Tensor = self.text_proj(self.text_encoder(**texts).last_hidden_state[:, 0])
        return features


Network = TypeVar("Network", bound=BlipTowers | ClipFusion | BlipFusion)


class _UniirEncoder(Generic[Network]):
    """A network of an imported folder, with what reads images and texts for it."""

    def __init__(
        self, manifest: Manifest, kind: Callable[[Mapping[str, Any]], Network], *, device: str
    ) -> None:
        folder = manifest.folder
        config = read_json(folder / "config.json")
        network: Network = load_weights(folder / "model.safetensors", lambda: kind(config))
        self.spec = f"uniir:{folder}"
        self.fingerprint = manifest.fingerprint
        self.dim = network.dim
        self._device = device
        network.float().to(device).eval()
        self._network: Network = network
        self._processor = load_image_processor(folder)
        if isinstance(network, ClipFusion):
            self._read = clip_reader(folder, network.context)
        else:
            self._read = _bert_reader(folder)

    def _prepare(self, images: Sequence[Image.Image]) -> Float[Tensor, "items 3 side side"]:
        """Return the middle square of images for CLIP, images squashed to a square for BLIP."""
        if self._processor.do_center_crop:
            images = [middle_square(image, side=self._processor.crop_size["height"]) for image in images]
        pixels: Tensor = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)

    def _tokens(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._read(texts).items()}


class BlipScoreFusion(_UniirEncoder[BlipTowers], BatchEncoder):
    """BLIP-SF: image and text features, to be summed; unnormalised, in single precision."""

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images."""
        return self._network.image(self._prepare(images))

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts, cut at 100 tokens."""
        return self._network.text(self._tokens(texts))


class FeatureFusion(_UniirEncoder[ClipFusion | BlipFusion]):
    """CLIP-FF or BLIP-FF: one vector for image and text together, unnormalised, in single precision."""

    needs_pixels: bool = True
    batch_size: int = 64

    @torch.inference_mode()
    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """Return one vector for each image and text together."""
        return in_batches(self._encode, items, size=self.batch_size, dim=self.dim)

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Return the vectors of images without a text."""
        return self.joint_features([JointInput(image, "", key, has_image=True) for image, key in images])

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Return the vectors of texts without an image."""
        return self.joint_features([JointInput(None, text, key, has_image=False) for text, key in texts])

    def _encode(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """Return the vectors of a batch of items; a missing image is a blank one, a missing text empty."""
        images = decoded_images([ImageInput(item.image, item.key) for item in items if item.has_image])
        blank = torch.zeros(1, 3, self._network.side, self._network.side, device=self._device)
        patches = self._network.patches(torch.cat([blank, *([self._prepare(images)] if images else [])]))
        has_image = torch.tensor([item.has_image for item in items], device=self._device)
        # Row 0 is the blank image's, the others are the images' in order.
        rows = torch.where(has_image, has_image.cumsum(0), 0)
        return self._network.fuse(patches[rows], self._tokens([item.text for item in items]))
