"""UniIR's three models, written anew and small: their state dicts have the published files' names."""

# ruff: noqa: PLC0415  heavy libraries are imported where they are needed

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "kite",
    "##s",
    "anchor",
    "on",
    "the",
    ".",
]


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ClipBlock(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, 4 * width),
                gelu=activation(),
                c_proj=nn.Linear(4 * width, width),
            )
        )
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class ClipLayers(nn.Module):
    def __init__(self, width, layers, activation):
        super().__init__()
        self.resblocks = nn.ModuleList(ClipBlock(width, activation) for _ in range(layers))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class ClipVision(nn.Module):
    def __init__(self, width, layers, patch, dim, activation):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(0.3 * torch.randn((224 // patch) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = ClipLayers(width, layers, activation)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, dim))

    def tokens(self, pixels):
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = (
            torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
            + self.positional_embedding
        )
        return self.ln_post(self.transformer(self.ln_pre(x))) @ self.proj


class Clip(nn.Module):
    """OpenAI's CLIP with 24 image and 12 text layers, all of them narrow."""

    def __init__(
        self, *, patch=28, text=64, vision=128, dim=96, projected=True, activation=QuickGELU
    ):
        super().__init__()
        self.visual = ClipVision(vision, 24, patch, dim, activation)
        self.transformer = ClipLayers(text, 12, activation)
        self.token_embedding = nn.Embedding(49408, text)
        self.positional_embedding = nn.Parameter(0.3 * torch.randn(77, text))
        self.ln_final = nn.LayerNorm(text)
        if projected:
            self.text_projection = nn.Parameter(text**-0.5 * torch.randn(text, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(100)))

    def text_tokens(self, numbers):
        mask = torch.full((77, 77), -torch.inf).triu(1)
        return self.ln_final(
            self.transformer(self.token_embedding(numbers) + self.positional_embedding, mask)
        )

    def encode_text(self, numbers):
        first_end = [row.index(49407) for row in numbers.tolist()]
        return (
            self.text_tokens(numbers)[torch.arange(len(numbers)), first_end] @ self.text_projection
        )

    def encode_image(self, pixels):
        return self.visual.tokens(pixels)[:, 0]


class ClipSf(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.clip_model = Clip(**options)


class ClipFf(nn.Module):
    """Two T5 layers over the tokens of both towers; the layers themselves are transformers'."""

    def __init__(self):
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Stack

        super().__init__()
        self.clip_model = Clip(patch=56, dim=64, projected=False)
        self.t5_layers = T5Stack(
            T5Config(num_layers=2, num_heads=3, d_model=64, d_kv=16, d_ff=80, vocab_size=7)
        )
        for name, weight in self.t5_layers.named_parameters():
            nn.init.normal_(weight, std=1.0 if "bias" in name else 0.3)

    def encode(self, numbers, pixels):
        both = torch.cat(
            [self.clip_model.text_tokens(numbers), self.clip_model.visual.tokens(pixels)], dim=1
        )
        return self.t5_layers(inputs_embeds=both, use_cache=False).last_hidden_state.mean(dim=1)


def attend(query, key, value, heads, hidden=None):
    def split(x):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    mask = None if hidden is None else hidden[:, None, None, :]
    mixed = F.scaled_dot_product_attention(split(query), split(key), split(value), attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2)


class BlipImageBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, 2 * width), "fc2": nn.Linear(2 * width, width)}
        )

    def forward(self, x):
        query, key, value = self.attn["qkv"](self.norm1(x)).chunk(3, dim=-1)
        x = x + self.attn["proj"](attend(query, key, value, x.shape[-1] // 64))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class BlipImages(nn.Module):
    def __init__(self, width, patch):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.3 * torch.randn(1, (224 // patch) ** 2 + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.Sequential(*(BlipImageBlock(width) for _ in range(12)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, pixels):
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.blocks(x))


class BertAttention(nn.Module):
    def __init__(self, width, seen):
        super().__init__()
        sizes = {"query": width, "key": seen, "value": seen}
        self.self = nn.ModuleDict({name: nn.Linear(size, width) for name, size in sizes.items()})
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps=1e-12)}
        )

    def forward(self, x, seen, mask):
        parts = (self.self["query"](x), self.self["key"](seen), self.self["value"](seen))
        return self.output["LayerNorm"](
            x + self.output["dense"](attend(*parts, x.shape[-1] // 64, mask))
        )


class BertLayer(nn.Module):
    def __init__(self, width, seen):
        super().__init__()
        self.attention = BertAttention(width, width)
        self.crossattention = BertAttention(width, seen)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 3 * width)})
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(3 * width, width), "LayerNorm": nn.LayerNorm(width, eps=1e-12)}
        )

    def forward(self, x, mask, patches):
        x = self.attention(x, x, mask)
        if patches is not None:
            x = self.crossattention(x, patches, None)
        return self.output["LayerNorm"](
            x + self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        )


class BlipTexts(nn.Module):
    def __init__(self, width, seen):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(len(WORDS) + 2, width),
                "position_embeddings": nn.Embedding(120, width),
                "LayerNorm": nn.LayerNorm(width, eps=1e-12),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(120)[None])
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(BertLayer(width, seen) for _ in range(12))}
        )
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, numbers, patches=None):
        positions = self.embeddings["position_embeddings"].weight[: numbers.shape[1]]
        x = self.embeddings["LayerNorm"](self.embeddings["word_embeddings"](numbers) + positions)
        for layer in self.encoder["layer"]:
            x = layer(x, numbers != 0, patches)
        return x


class Blip(nn.Module):
    """BLIP with a momentum copy and queues, as UniIR trains it."""

    def __init__(self):
        super().__init__()
        for suffix in ("", "_m"):
            self.add_module(f"visual_encoder{suffix}", BlipImages(128, 56))
            self.add_module(f"text_encoder{suffix}", BlipTexts(64, 128))
        self.temp = nn.Parameter(torch.tensor(0.07))
        for name in ("query_queue", "cand_queue", "idx_queue"):
            self.register_buffer(name, torch.zeros(2, 3))
        self.register_buffer("new_ptr_queue", torch.zeros(1, dtype=torch.long))

    def encode(self, numbers, pixels):
        states = self.text_encoder(numbers, self.visual_encoder(pixels))
        return torch.tanh(self.text_encoder.pooler["dense"](states[:, 0]))


def normalised(picture):
    pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 255
    return (pixels - MEAN) / DEVIATION


def crop(picture):
    """CLIP's preparation: the shorter side to 224 (the other cut to whole pixels), the middle 224 x 224."""
    width, height = picture.size
    size = (224, 224 * height // width) if width <= height else (224 * width // height, 224)
    resized = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    return normalised(resized.crop((left, top, left + 224, top + 224)))


def squash(picture):
    """BLIP's preparation: both sides to 224."""
    return normalised(picture.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC))


@pytest.fixture(scope="session")
def pictures():
    random = np.random.default_rng(0)
    sizes = [(20, 30, 3), (41, 17, 3), (16, 16, 3)]
    return [Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


@pytest.fixture(scope="session")
def photographs():
    """Smooth pictures, upright, wide and square."""
    random = np.random.default_rng(0)
    found = []
    for size in ((300, 260), (227, 224), (240, 400)):
        coarse = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        found.append(coarse.resize(size, Image.Resampling.BICUBIC))
    return found
