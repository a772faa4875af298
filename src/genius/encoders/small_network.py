"""The towers of the `small` encoder: descriptors and token numbers in, features out."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from genius.data.features import FeatureBatch
from genius.encoders.picture import DESCRIPTOR_SIZE
from genius.encoders.small_config import SmallEncoderConfig
from genius.encoders.words import PADDING, pair_rows

__all__ = ["EmbeddingNetwork", "SmallNetwork", "used_tokens"]


class EmbeddingNetwork(nn.Module):
    """What is trained: described pictures and numbered texts in, one unnormalised vector for each item."""

    dim: int
    """Width of the vectors."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are."""

    @abstractmethod
    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """The vector of each item; ``image`` holds descriptors, ``text`` token numbers."""


class SmallNetwork(EmbeddingNetwork):
    """The two towers: descriptors and token numbers in, unnormalised features out."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.pair_buckets = config.pair_buckets
        self.dim = config.dim
        self.image_tower = _tower(DESCRIPTOR_SIZE, config.image_width, config.dim)
        self.words = nn.Embedding(vocabulary, config.text_width)
        self.pairs = nn.Embedding(config.pair_buckets + 1, config.text_width)
        self.text_tower = _tower(config.text_width, config.text_width, config.dim)
        for table in (self.words, self.pairs):
            nn.init.normal_(table.weight, std=0.5)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.words.weight.device

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        """Features of described pictures."""
        features: Tensor = self.image_tower(descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Features of numbered texts; padding does not count."""
        tokens = used_tokens(tokens)
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        read = F.embedding_bag(tokens, self.words.weight, mode="sum", padding_idx=PADDING)
        read = read + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        features: Tensor = self.text_tower(read)
        return features

    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """The sum of what is there of each item: score fusion."""
        total = torch.zeros(len(batch.image), self.dim, device=self.device)
        for present, read, content in (
            (batch.has_image, self.image, batch.image),
            (batch.has_text, self.text, batch.text.int()),
        ):
            places = present.nonzero().squeeze(1)
            if len(places):
                features = read(content[places].to(self.device)).float()
                total = total.index_add(0, places.to(self.device), features)
        return total


def used_tokens(tokens: Int[Tensor, "items tokens"]) -> Int[Tensor, "items used"]:
    """As many columns as the longest text fills, and at least two, so that there are pairs."""
    longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
    return tokens[:, : max(longest, 2)].long()


def _tower(inputs: int, width: int, dim: int) -> nn.Sequential:
    """Layers with the same scale at their end for either modality, since features are summed."""
    return nn.Sequential(
        nn.LayerNorm(inputs),
        nn.Linear(inputs, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, dim),
    )
